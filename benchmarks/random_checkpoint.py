"""A checkpoint of any depth with random weights, written about as fast as the disk takes it.

A gigabyte of normal values is drawn once and written again and again, each tensor from where the last one ended;
weights of norms are ones. Full depth is a single file in the makers' names, as published; another depth is a diffusers
folder, whose config says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import diffusers
import torch
from devicebridge.families.naming import originals_of
from devicebridge.families.spec import ModelFamily, Variant

_BLOCK_BYTES = 2**30


def write_single_file(path: Path, family: ModelFamily, variant: Variant) -> int:
    """One safetensors file of a published size under the makers' names; returns the bytes of its weights."""
    shapes = shapes_of(family, variant.transformer_config)
    sizes = {}
    for original, stack in originals_of(shapes, family.renames).items():
        members = [shapes[member] for member in stack.members]
        sizes[original] = (sum(shape[0] for shape in members), *members[0][1:])
    return write_tensors(path, sizes)


def write_diffusers_folder(folder: Path, family: ModelFamily, config: Mapping[str, Any]) -> int:
    """A transformer folder of any size; returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**dict(config))
    model.save_config(folder)
    return write_tensors(folder / "diffusion_pytorch_model.safetensors", shapes_of(family, config))


def shapes_of(family: ModelFamily, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a transformer by its diffusers name."""
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**dict(config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def bytes_of(family: ModelFamily, config: Mapping[str, Any]) -> int:
    """Bytes of a transformer's weights in bf16."""
    return sum(2 * torch.Size(shape).numel() for shape in shapes_of(family, config).values())


def write_tensors(path: Path, sizes: Mapping[str, tuple[int, ...]]) -> int:
    """One safetensors file of bf16 tensors, by name and shape; returns the bytes of its weights."""
    text, end = header_of(sizes)
    values, position = _random_bytes(min(_BLOCK_BYTES, end)), 0
    with path.open("wb") as file:
        file.write(text)
        for shape in sizes.values():
            num_bytes = 2 * torch.Size(shape).numel()
            if len(shape) == 1:
                file.write(_as_bytes(torch.ones(shape, dtype=torch.bfloat16)))
            else:
                position = _write_values(file, values, position, num_bytes)
    return end


def header_of(sizes: Mapping[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """What a safetensors file of these tensors in bf16 begins with, and the bytes of its weights."""
    header, end = {}, 0
    for name, shape in sizes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def write_hollow(path: Path, sizes: Mapping[str, tuple[int, ...]]) -> int:
    """A file of these tensors in bf16 that has a header, and behind it a hole. Returns the bytes of its weights."""
    text, num_bytes = header_of(sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(text)
        file.truncate(len(text) + num_bytes)
    return num_bytes


def _write_values(file: BinaryIO, values: memoryview, position: int, num_bytes: int) -> int:
    while num_bytes:
        piece = values[position : position + num_bytes]
        file.write(piece)
        num_bytes -= len(piece)
        position = (position + len(piece)) % len(values)
    return position


def _random_bytes(num_bytes: int) -> memoryview:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
    return _as_bytes(values.cpu())


def _as_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.view(torch.uint8).numpy())
