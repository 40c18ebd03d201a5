"""Several devices in one process."""
