"""The pack's version; pyproject.toml repeats it because the registry reads that file as text."""

VERSION = "0.1.0"
