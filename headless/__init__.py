"""Running a workflow file without a browser."""
