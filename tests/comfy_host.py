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


def skipped_here() -> list[tuple[str, str]]:
    """Which tests this machine skips for what it lacks, and the command that brings it."""
    folder = find_comfyui()
    install = "pip install comfy-cli && comfy --skip-prompt --workspace ~/comfy/ComfyUI install"
    found = []
    if folder is None:
        found.append(("all tests in a ComfyUI, most of tests/comfy: there is none", install))
    elif comfy_python(folder) is None:
        venv = folder / ".venv"
        commands = f"python3 -m venv {venv} && {venv}/bin/pip install -r {folder}/requirements.txt"
        found.append((f"all tests in a ComfyUI, most of tests/comfy: no Python can run {folder}", commands))
    if folder is None or find_gguf_pack(folder) is None:
        found.append(("tests of GGUF files: ComfyUI-GGUF is not there", "comfy node install ComfyUI-GGUF"))
    if shutil.which("comfy") is None:
        found.append(("tests of the registry's rules: comfy-cli is not there", "pip install comfy-cli"))
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        found.append(("tests of the page: there is no Chromium", "sudo apt-get install chromium"))
    if not os.environ.get("LONG_TESTS"):
        found.append(("tests that take long", "LONG_TESTS=1 bash scripts/test.sh"))
    return found


def tell_skipped() -> None:
    """For test.sh, before anything long begins."""
    import torch

    for what, command in skipped_here():
        print(f"will skip {what}. To have them: {command}", flush=True)
    if torch.cuda.device_count() < 2:
        print(f"will skip tests/gpu: {torch.cuda.device_count()} of two GPUs are there", flush=True)
