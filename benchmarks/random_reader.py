"""Weights of a checkpoint that is a header alone: what a loader asks for is cut from random values in memory.

So a model of any size is loaded by the pack's own code without a disk that holds it. A tensor has the same values in
every process, however it is cut.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from devicebridge.checkpoints import weight_file
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.families.spec import ModelFamily
from devicebridge.parallel.devices import CPU
from devicebridge.parallel.ranks import sharded
from random_checkpoint import shapes_of, write_hollow

_LARGEST_BLOCK = 2**29  # values, 1 GiB in bf16; the largest tensor of FLUX.2-dev has 340 million


def write_header(folder: Path, family: ModelFamily, config: Mapping[str, Any]) -> None:
    """A transformer folder whose file has a header, and behind it a hole of the weights' size."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        getattr(diffusers, family.transformer_class)(**dict(config)).save_config(folder)
    write_hollow(folder / "diffusion_pytorch_model.safetensors", shapes_of(family, config))


@contextmanager
def random_weights(info: CheckpointInfo, device: torch.device = CPU) -> Iterator[None]:
    """Inside, loaders are given random weights where they open this checkpoint's file, as if it lay on this device."""
    reader = _RandomReader({record.key: record.shape for record in info.tensors.values()}, device)

    @contextmanager
    def open_weights(file: Path, remedy: str = "", *, is_model: bool = False) -> Iterator[_RandomReader]:
        yield reader

    with ExitStack() as stack:
        for module in (weight_file, sharded):
            stack.enter_context(patch.object(module, "open_weights", open_weights))
        yield


class _RandomReader:
    """See WeightReader. Tensors with one dimension, which scale, are ones."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], on: torch.device) -> None:
        self._shapes, self._on = shapes, on
        largest = max(prod(shape) for shape in shapes.values())
        count = max(largest, min(_LARGEST_BLOCK, sum(prod(shape) for shape in shapes.values())))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(7)
        made = torch.empty(count, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        self._values = made.to(on)

    def keys(self) -> list[str]:
        return list(self._shapes)

    def get_tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._on)
        start = zlib.crc32(name.encode()) % (len(self._values) - prod(shape) + 1)
        found = self._values[start : start + prod(shape)].view(shape)
        return found if self._on == CPU else found.clone()  # what is on its card already, the loader keeps
