"""8-bit weights and 8-bit compute."""
