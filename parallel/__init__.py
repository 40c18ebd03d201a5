"""Where tensors live and how they travel."""
