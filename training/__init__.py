"""The training job: runs from a plain config, without the host."""
