"""ComfyUI's own model classes, as data."""
