"""The pictures and clips a LoRA is trained on: found, cut and ordered."""
