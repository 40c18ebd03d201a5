"""What a training will need, in memory and time, before it begins."""
