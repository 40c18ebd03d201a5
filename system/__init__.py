"""Files, processes and signals: what the pack needs of the operating system."""
