"""Where a ComfyUI checkout and its Python are, for the tests that ask ComfyUI itself."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from devicebridge.headless import run as server

# What the tests import from a checkout needs these; a full install has more.
_NEEDED = ("torch", "safetensors", "transformers", "einops", "comfy_kitchen", "aiohttp", "av")


@functools.lru_cache(maxsize=1)
def find_comfyui() -> Path | None:
    """As `devicebridge run` finds it; None if there is none, or COMFYUI_PATH names something else."""
    named = os.environ.get("COMFYUI_PATH")
    try:
        return server.find_comfyui(Path(named) if named else None).folder
    except RuntimeError:
        return None


def allow_folders(user: Path, *folders: Path) -> None:
    """Let nodes read there; user: ComfyUI's user folder."""
    user.mkdir(parents=True, exist_ok=True)
    (user / "devicebridge.toml").write_text(f"allowed_folders = {json.dumps([str(folder) for folder in folders])}\n")


def find_gguf_pack(checkout: Path) -> Path | None:
    """ComfyUI-GGUF: COMFYUI_GGUF_PATH, else among the checkout's custom nodes; None if it is not there."""
    named, packs = os.environ.get("COMFYUI_GGUF_PATH"), checkout / "custom_nodes"
    folders = [Path(named)] if named else [packs / "ComfyUI-GGUF", packs / "comfyui-gguf"]
    return next((folder for folder in folders if (folder / "dequant.py").is_file()), None)


def can_import(python: Path, module: str) -> bool:
    return subprocess.run([str(python), "-c", f"import {module}"], capture_output=True, timeout=120).returncode == 0


@functools.lru_cache(maxsize=4)
def comfy_python(checkout: Path) -> Path | None:
    """The Python that runs this checkout; None for ours if it lacks what ComfyUI needs."""
    python = server.find_python(checkout)
    return python if python != Path(sys.executable) or can_import(python, ", ".join(_NEEDED)) else None
