"""How someone else's module is changed and restored."""
