"""`devicebridge examine FILE`: where the blocks and tokens of a model's class are, as rows to be written down."""

from __future__ import annotations

import argparse

from ..headless.server import find_comfyui, python_fault
from ..runs.queue import is_native_process, native_command
from ..system.processes import go_on_as
from ..system.telling import say


def examine(options: argparse.Namespace) -> int:
    """Goes on in a process that has ComfyUI in it. Raises: ValueError where there is none, or for another file."""
    if not is_native_process():
        try:
            found = find_comfyui(python=options.python)
            if fault := python_fault(found.folder, found.python):
                raise RuntimeError(fault)
        except RuntimeError as error:
            raise ValueError(f"ComfyUI has the code of such a model, but {error}") from error
        command = native_command(found.python, found.folder, found.base)
        raise SystemExit(go_on_as([*command, "examine", str(options.file.absolute())]))
    from ..nodes.host.split.examine import examine as rows_of

    if not options.file.is_file():
        raise ValueError(f"{options.file} is no file; name a .safetensors file of a diffusion model")
    say(rows_of(options.file))
    return 0
