"""Where ComfyUI is on this machine, for tests that need one."""

from __future__ import annotations

from pathlib import Path

import pytest
from devicebridge import headless


def find_comfyui() -> Path:
    """ComfyUI's folder: COMFYUI_PATH, what `comfy which` says, or ~/comfy/ComfyUI; skips the test if there is none."""
    try:
        return headless.find_comfyui().folder
    except RuntimeError:
        pytest.skip("needs ComfyUI: set COMFYUI_PATH to its folder, or install it with comfy-cli")


def comfy_python(folder: Path) -> Path:
    """The Python that ComfyUI runs with: its own virtual environment's, else this one."""
    return headless.find_python(folder)
