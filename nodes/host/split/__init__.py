"""One MODEL of ComfyUI over several cards: planned, copied, loaded part by part, run as one. Start with model.py."""
