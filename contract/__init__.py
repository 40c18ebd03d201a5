"""What of ComfyUI the pack relies on, and whether the ComfyUI at hand still has it. Imports nothing of ComfyUI's."""
