"""`devicebridge examine FILE`: where the blocks and tokens of a model's class are, as rows to be written down."""

from __future__ import annotations

import argparse

from ..system.telling import say
from .native import need_comfyui


def examine(options: argparse.Namespace) -> int:
    """Goes on in a process that has ComfyUI in it. Raises: ValueError where there is none, or for another file."""
    arguments = ["examine", str(options.file.absolute())]
    need_comfyui("ComfyUI has the code of such a model", arguments, options.python)
    from ..nodes.host.split.examine import examine as rows_of

    if not options.file.is_file():
        raise ValueError(f"{options.file} is no file; name a .safetensors file of a diffusion model")
    say(rows_of(options.file))
    return 0
