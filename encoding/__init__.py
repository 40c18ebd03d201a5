"""Captions and latents, computed once."""
