"""Checkpoint files: recognised from their header, loaded block by block onto the devices a placement names."""
