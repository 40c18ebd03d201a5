"""Weights and activations that wait in host memory."""
