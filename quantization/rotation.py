"""Rotation of int8 weights and inputs: it spreads the outliers of a row before the row is rounded.

With an orthogonal R, x W^T = (x R) (W R)^T. R is block-diagonal with blocks of B = 16, 64 or 256: Hadamard matrices
times 1 / sqrt(B), whose entries are exact in every format. Their rows carry the signs of the Rudin-Shapiro sequence, or
a mean would become an outlier. Weights are rotated once, and x whenever it is rounded; grad_input is rotated back. The
N dim of gy is not rotated. float8 has nothing to gain (docs/decisions/0005-eight-bit-linears.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROTATIONS = (16, 64, 256)


def make_rotation(block: int) -> Tensor:
    """Orthogonal matrix of Hadamard entries +-1 / sqrt(block), its rows signed by the Rudin-Shapiro sequence. [B, B]

    Raises: ValueError for a block that is none of ROTATIONS.
    """
    if block not in ROTATIONS:
        raise ValueError(f"rotation in blocks of {block} was asked for; use one of {ROTATIONS}, or 0 for none")
    index = range(block)
    entries = [[(-1.0) ** (((i & j).bit_count()) + (i & (i >> 1)).bit_count()) for j in index] for i in index]
    return torch.tensor(entries) / math.sqrt(block)


def rotation_for(weight: Tensor, dtype: torch.dtype, block: int) -> Tensor | None:
    """make_rotation on a weight's device; None for block 0.

    Args:
        weight: [N, K]    dtype: that it is, or will be, stored in.
    Raises: ValueError for float8, and for blocks that do not divide K.
    """
    if not block:
        return None
    if dtype is not torch.int8:
        raise ValueError("rotation was asked for float8, which gains nothing by it; use rotation 0, or int8-compute")
    in_features = weight.shape[1]
    if in_features % block:
        fitting = [other for other in ROTATIONS if in_features % other == 0]
        raise ValueError(
            f"rotation in blocks of {block} does not divide {in_features} input features; use one of {[0, *fitting]}"
        )
    return make_rotation(block).to(weight.device)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Multiply every block of B values of the last dim by rotation; in x's dtype. Its transpose rotates back."""
    return (x.reshape(-1, rotation.shape[0]) @ rotation.to(x.dtype)).reshape(x.shape)
