"""A program: our command line in a process that has ComfyUI in it, without a server and without other packs.
`python start.py COMFYUI BASE train job.toml`, with ComfyUI's Python, the folder of its code, and that of its models."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def prepare(folder: str, base: str) -> None:
    """Make ComfyUI importable, with the folders that it would look into itself."""
    sys.path[0] = folder  # in place of this file's own folder, whose names would hide others
    import torch
    from comfy.cli_args import args

    is_elsewhere = Path(base).resolve() != Path(folder).resolve()
    given = {"cpu": not torch.accelerator.is_available(), "base_directory": base if is_elsewhere else None}
    vars(args).update(given)  # as --cpu and --base-directory do
    import folder_paths

    extra: Any = importlib.import_module("utils.extra_config")
    if (config := Path(folder) / "extra_model_paths.yaml").is_file():
        extra.load_extra_path_config(str(config))
    for kind in ("checkpoints", "clip", "vae", "diffusion_models"):
        folder_paths.add_model_folder_path(kind, str(Path(folder_paths.get_output_directory()) / kind))


def main(arguments: Sequence[str]) -> int:
    folder, base, *command = arguments
    try:
        prepare(folder, base)
        runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
        run = importlib.import_module("devicebridge.cli.main").main
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"devicebridge: {sys.executable}, with which ComfyUI runs, lacks the package {error.name}; name ComfyUI's "
            "own Python with COMFYUI_PYTHON, or install what DeviceBridge needs there: "
            f'"{sys.executable}" -m pip install -r "{ROOT / "requirements.txt"}"\n'
        )
        return 2
    except KeyboardInterrupt:  # as our command line does, which is not here yet; ComfyUI's imports take seconds
        sys.stderr.write("devicebridge: interrupted\n")
        return 130
    return int(run(command))


if __name__ == "__main__":
    given, sys.argv = sys.argv[1:], sys.argv[:1]
    sys.exit(main(given))
