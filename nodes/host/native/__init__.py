"""ComfyUI's own models made fit for the trainer: read by header, built with plain linears, called as sampling calls."""
