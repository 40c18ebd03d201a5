"""What a LoRA file has of each layer, and whether it is all of a LoRA, DoRA or LoKr of a linear layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

A, B, DORA, MAGNITUDE = "lora_A.weight", "lora_B.weight", "dora_scale", "lora_magnitude_vector"
LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
EXTRAS = {"alpha", DORA, MAGNITUDE}  # what comes with the matrices
_PAIRS = ((A, B), ("lokr_w1_b", "lokr_w1_a"), ("lokr_w2_b", "lokr_w2_a"))  # [R, in] and [out, R]
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_SPELLINGS = {
    A: r"\.lora_A(\.default)?(\.weight)?|\.lora_down\.weight|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight",
    B: r"\.lora_B(\.default)?(\.weight)?|\.lora_up\.weight|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight",
    "alpha": r"\.alpha",
    DORA: r"\.dora_scale",
    MAGNITUDE: r"\.lora_magnitude_vector(\.default)?(\.weight)?",
    **{kind: rf"\.{kind}" for kind in LOKR},
}
_SUFFIXES = {kind: re.compile(rf"^(.+?)({spelling})$") for kind, spelling in _SPELLINGS.items()}

Names = dict[str, str]  # of one layer's tensors in the file, by kind


class Part(NamedTuple):
    """What a tensor's name says: the layer, as the file calls it, and which of its tensors it is."""

    layer: str
    kind: str


def find_part(name: str) -> Part | None:
    """None for a tensor that is no part of a LoRA, DoRA or LoKr."""
    found = ((kind, end.match(name)) for kind, end in _SUFFIXES.items())
    return next((Part(match[1], kind) for kind, match in found if match), None)


def refuse_unsound(path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, Names]) -> None:
    """Whether these are whole layers that change something.

    Args:
        tensors: a LoRA file's, by their names in it.
        names: of each layer's tensors.
    Raises: ValueError naming the tensor, and what is wrong with it.
    """
    for layer, own in names.items():
        parts = {kind: tensors[name] for kind, name in own.items()}
        fault = _fault_of_kinds(parts) or next(filter(None, map(_fault_of_numbers, parts, parts.values())), "")
        if fault := fault or _fault_of_shapes(parts):
            raise ValueError(f"{path}: {layer} {fault}; give another file")
    if names and not any(_changes(tensors, own) for own in names.values()):
        raise ValueError(
            f"{path} changes nothing: of each of its {len(names)} layers one matrix is all zero, as in a LoRA that was "
            "never trained; leave lora.start_from out to begin afresh, or give another file"
        )


def _fault_of_kinds(parts: Mapping[str, Tensor]) -> str:
    is_lokr = any(kind in parts for kind in LOKR)
    if is_lokr and (DORA in parts or MAGNITUDE in parts):
        return (
            "has the DoRA of a LoKr (DoKr), which is not trained here; a LoKr without dora_scale, a DoRA of a plain "
            "LoRA and a plain LoRA are"
        )
    if is_lokr and (A in parts or B in parts):
        return "has both a LoRA and a LoKr"
    missing = [other for pair in _PAIRS for one, other in (pair, pair[::-1]) if one in parts and other not in parts]
    if missing:
        return f"lacks {missing[0]}, the other half of a pair"
    for each in ("lokr_w1", "lokr_w2") if is_lokr else (A,):
        if (each in parts) == (f"{each}_a" in parts):
            both = f"both {each} and {each}_a" if each in parts else f"no {each if is_lokr else 'lora_A and lora_B'}"
            return f"has {', '.join(sorted(parts))}, and {both}"
    return ""


def _fault_of_numbers(kind: str, tensor: Tensor) -> str:
    what = f"has {kind} of type {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    is_number = kind == "alpha" and not tensor.is_complex() and tensor.dtype is not torch.bool
    if tensor.dtype not in _FLOATS and not is_number:
        return f"{what}, and a LoRA's are floating-point numbers"
    if not tensor.numel():
        return f"{what}, which is empty"
    if kind == "alpha" and tensor.numel() > 1:
        return f"{what}, which is not one number"
    if not torch.isfinite(tensor.float()).all():
        return f"{what}, which is not finite"
    return f"{what}, which is 0 and takes the layer away" if kind == "alpha" and not float(tensor) else ""


def _fault_of_shapes(parts: Mapping[str, Tensor]) -> str:
    shapes = {kind: list(tensor.shape) for kind, tensor in parts.items() if kind in (A, B, *LOKR)}
    for kind, shape in shapes.items():
        if len(shape) < 2 or len(shape) > 2 and (kind in LOKR or any(side > 1 for side in shape[2:])):
            what = "a convolution's" if len(shape) > 2 else "no matrix"
            return f"has {kind} {shape}, which is {what}; linear layers are trained here"
    for down, up in _PAIRS:
        if down in shapes and shapes[down][0] != shapes[up][1]:
            return f"has {down} of rank {shapes[down][0]} and {up} of rank {shapes[up][1]}"
    for kind in (DORA, MAGNITUDE):
        shape = list(parts[kind].shape) if kind in parts else []
        if shape and not shape[0] == len(parts[B]) == parts[kind].numel():
            return f"has {kind} {shape}, and not one number for each of its {len(parts[B])} rows"
    return ""


def _changes(tensors: Mapping[str, Tensor], names: Names) -> bool:
    """A trained magnitude may change a layer alone."""
    is_dora = DORA in names or MAGNITUDE in names
    return is_dora or all(bool(tensors[name].float().any()) for kind, name in names.items() if kind != "alpha")
