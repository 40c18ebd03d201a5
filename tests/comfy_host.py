"""Where a ComfyUI checkout and its Python are, for the tests that ask ComfyUI itself."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

# What the tests import from a checkout needs these; a full install has more.
_NEEDED = ("torch", "safetensors", "transformers", "einops", "comfy_kitchen", "aiohttp", "av")


@functools.lru_cache(maxsize=1)
def find_comfyui() -> Path | None:
    """COMFYUI_PATH, else what comfy-cli calls the workspace, else ~/comfy/ComfyUI; None if none is a checkout."""
    named = os.environ.get("COMFYUI_PATH")
    if named:
        return _checkout(Path(named))
    return _checkout(_from_comfy_cli()) or _checkout(Path.home() / "comfy" / "ComfyUI")


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
    """The Python that runs this checkout: its own environment's, else ours if it has what ComfyUI needs."""
    for name in (".venv", "venv"):
        for python in (checkout / name / "bin" / "python", checkout / name / "Scripts" / "python.exe"):
            if python.is_file():
                return python
    found = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(_NEEDED)}"], capture_output=True, timeout=120, check=False
    )
    return Path(sys.executable) if found.returncode == 0 else None


def _checkout(path: Path | None) -> Path | None:
    return path if path is not None and (path / "comfy" / "lora.py").is_file() else None


def _from_comfy_cli() -> Path | None:
    program = shutil.which("comfy")
    if program is None:
        return None
    found = subprocess.run(
        [program, "--json", "which"], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    for line in found.stdout.splitlines():
        if line.startswith("{"):
            path = json.loads(line).get("data", {}).get("workspace_path")
            return Path(path) if path else None
    return None
