"""The `devicebridge` command."""
