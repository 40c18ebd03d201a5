"""One MODEL of ComfyUI over several cards: planned, copied, loaded part by part, run as one. Start with model.py.

Nodes import this folder while they run. ComfyUI has set up its devices by then, so modules here import it at the top.
"""
