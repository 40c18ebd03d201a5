"""Whether gradients are those that they should be, tensor by tensor: of compiled blocks against uncompiled ones.

Equal they are not: a compiler rounds at other places, and what is then rounded to 8 bits may fall to another side.
FLUX.2 at full depth with random weights: compiled blocks' gradients differ from uncompiled ones by 0.12 in bf16, 0.33
in int8-compute and 0.67 in fp8-compute (a cosine of 0.8), and both as much from bf16's; trained weights by 0.02
(docs/experiments.md). So no difference is too large by itself. What faults look like: tensors that have no gradient at
all, or many that point elsewhere. Not whole blocks: what a block passes around its layers hides what they lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LEAST_COSINE, _MOST_TIMES = 0.5, 2.0  # of a tensor that points elsewhere, or is too long or too short
_MOST_ODD = 0.25  # share of such tensors that rounding explains

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Comparison:
    """Of gradients with what they should be.

    Args:
        difference: of the tensor with the largest, |found - expected| / |expected|.
        num_odd: tensors whose gradient points elsewhere or is too long or too short.
        fault: what is wrong; "" for nothing.
    """

    difference: float
    num_odd: int
    fault: str = ""


def compare_gradients(names: Sequence[str], found: Gradients, expected: Gradients) -> Comparison | None:
    """None where none is expected: all are zeros or missing, or one is not finite."""
    differences: list[float] = []
    lost, odd = [], []
    for name, one, other in zip(names, found, expected, strict=True):
        one, other = (torch.zeros(1) if each is None else each.double().flatten() for each in (one, other))
        length, other_length = one.norm().item(), other.norm().item()
        if not math.isfinite(other_length):
            return None
        if not length or not other_length or not math.isfinite(length):
            if length != other_length:
                lost.append(name)
            continue
        differences.append((one - other).norm().item() / other_length)
        cosine, times = (one @ other).item() / (length * other_length), length / other_length
        if cosine < _LEAST_COSINE or not 1 / _MOST_TIMES <= times <= _MOST_TIMES:
            odd.append(name)
    if not differences and not lost:
        return None
    if lost:
        fault = f"{len(lost)} of {len(names)} tensors have none, or one that they should not have, {lost[0]} the first"
        return Comparison(math.inf, len(odd), fault)
    fault = ""
    if len(odd) > _MOST_ODD * len(differences):
        fault = f"{len(odd)} of {len(differences)} tensors are far off, {odd[0]} the first"
    return Comparison(max(differences), len(odd), fault)
