"""What is installed: the user's ComfyUI, its Python, the `comfy` command, and copies of this pack."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..system import processes

ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "devicebridge"
QUIET = {"DO_NOT_TRACK": "1", "COMFY_NO_TELEMETRY": "1"}


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI checkout and the Python it runs with; base is where its models, inputs and outputs lie."""

    folder: Path
    python: Path
    base: Path


def find_comfyui(given: Path | None = None, base: Path | None = None) -> ComfyUI:
    """The user's ComfyUI: as given, from COMFYUI_PATH, around this pack, as `comfy which` says, or ~/comfy/ComfyUI.

    Raises: RuntimeError that says where it was looked for and how to get one.
    """
    places = [given] if given else list(_places())
    for place in places:
        if (place / "main.py").is_file() and (place / "comfy").is_dir():
            folder = place.resolve()
            return ComfyUI(folder, find_python(folder), (base or folder).resolve())
    raise RuntimeError(
        f"no ComfyUI was found (looked in {', '.join(map(str, places))}); name its folder with --comfyui or "
        "COMFYUI_PATH, or get one with `pip install comfy-cli` and `comfy install`, or by cloning "
        "https://github.com/comfyanonymous/ComfyUI"
    )


def _places() -> Iterator[Path]:
    if os.environ.get("COMFYUI_PATH"):
        yield Path(os.environ["COMFYUI_PATH"]).expanduser()
    if ROOT.parent.name == "custom_nodes":
        yield ROOT.parent.parent
    told = _ask_comfy_cli()
    if told:
        yield told
    yield Path.home() / "comfy" / "ComfyUI"


def _ask_comfy_cli() -> Path | None:
    try:
        command = [str(find_comfy_cli()), "--skip-prompt", "--json", "which"]
        answer = processes.run(command, timeout_s=60, environment=QUIET)
        path = json.loads(answer or "")["data"]["workspace_path"]
    except (RuntimeError, ValueError, LookupError, TypeError):
        return None
    return Path(path) if path else None


def find_python(folder: Path) -> Path:
    """The Python a ComfyUI folder brings: its virtual environment, the portable build's, else the one running now."""
    candidates = [folder / name / place for name in (".venv", "venv") for place in ("bin/python", "Scripts/python.exe")]
    candidates.append(folder.parent / "python_embeded" / "python.exe")
    return next((path for path in candidates if path.is_file()), Path(sys.executable))


def has_accelerator(python: Path) -> bool:
    """Whether that Python's torch can use a GPU; without one ComfyUI starts with --cpu only."""
    question = processes.python_command("import torch; print(torch.accelerator.is_available())", python=python)
    return (processes.run(question, timeout_s=120) or "").strip().endswith("True")


def find_comfy_cli() -> Path:
    """The `comfy` command beside this Python, else the one on the path.

    Raises: RuntimeError that says how to install it.
    """
    found = shutil.which("comfy", path=str(Path(sys.executable).parent)) or shutil.which("comfy")
    if found is None:
        raise RuntimeError("workflows are run through comfy-cli, which is not installed: pip install comfy-cli")
    return Path(found)


def find_pack(custom_nodes: Path) -> Path | None:
    """The folder among these custom nodes that holds a copy of this pack; then that copy is the one that runs."""
    for folder in sorted(custom_nodes.iterdir()) if custom_nodes.is_dir() else ():
        project = folder / "pyproject.toml"
        if folder.name.endswith(".disabled"):  # ComfyUI does not load these
            continue
        if folder.resolve() == ROOT:
            return folder
        if project.is_file() and f'name = "{PACK_NAME}"' in project.read_text(encoding="utf-8", errors="replace"):
            return folder
    return None
