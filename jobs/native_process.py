"""A process in which ComfyUI's own models can be built: ComfyUI's Python, its folder on the path, our command line."""

from __future__ import annotations

import sys
from pathlib import Path

_START = Path(__file__).resolve().parent.parent / "nodes" / "host" / "native" / "start.py"


def native_command(python: str | Path, folder: str | Path, base: str | Path) -> list[str]:
    """The beginning of a command; what `devicebridge` takes comes behind it.

    Args:
        folder: of ComfyUI's code. base: where its models lie.
    """
    return [str(python), str(_START), str(folder), str(base)]


def is_native_process() -> bool:
    """Whether this process has ComfyUI in it."""
    return "folder_paths" in sys.modules and "comfy.cli_args" in sys.modules
