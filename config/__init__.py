"""The job a user describes."""
