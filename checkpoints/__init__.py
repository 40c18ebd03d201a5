"""Checkpoint files: recognised from their header, read tensor by tensor, written."""
