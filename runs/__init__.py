"""Runs as they lie on the disk: what each has written, which are alive, and the queue of those in the background."""
