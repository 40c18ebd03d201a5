"""What quantizing did to a model: which layers, how many bytes, and how much noise rounding their weights made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .rotation import make_rotation, rotate

QUANTIZED = "quantized"
LORA = "LoRA"
KEPT = "kept in full precision by the family"
NOT_LINEAR = "not a linear layer"
_NUM_SAMPLED_ROWS = 256  # of a weight, to measure its noise by


@dataclass(frozen=True)
class LayerGroup:
    """Modules treated alike: fqns of those that hold weights of their own, and the bytes of these weights."""

    names: tuple[str, ...]
    bytes_before: int
    bytes_after: int


class GroupTotals:
    """Totals of what holds layers by the reason for their treatment."""

    groups: Mapping[str, LayerGroup]

    @property
    def bytes_before(self) -> int:
        return sum(group.bytes_before for group in self.groups.values())

    @property
    def bytes_after(self) -> int:
        return sum(group.bytes_after for group in self.groups.values())


@dataclass(frozen=True)
class QuantizeReport(GroupTotals):
    """What was done, by reason: QUANTIZED, LORA, KEPT and NOT_LINEAR, each present even when empty.

    Args:
        scheme: one of quantize.SCHEMES.
        weight_snr_db: signal to noise of the rounded weights by layer class, in dB, over evenly spaced rows of every
            layer. A class whose layers all came in 8 bits from a file is absent: nobody knows what was lost there.
        num_taken: quantized layers that a file, or the cache of an earlier run, held in 8 bits already.
        num_unrotated: those of them that are not rotated although the scheme would have, had it rounded them.
    """

    scheme: str
    groups: Mapping[str, LayerGroup]
    weight_snr_db: Mapping[str, float] = field(default_factory=dict)
    num_taken: int = 0
    num_unrotated: int = 0

    @property
    def num_quantized(self) -> int:
        return len(self.groups[QUANTIZED].names)

    def summary(self) -> str:
        """One line for a log or a node, sizes in decimal GB."""
        skipped = ", ".join(f"{len(g.names)} {reason}" for reason, g in self.groups.items() if reason != QUANTIZED)
        taken = f" ({self.num_taken} as they were stored)" if self.num_taken else ""
        unrotated = f"; {self.num_unrotated} are not rotated, as their file has them" if self.num_unrotated else ""
        return (
            f"{self.num_quantized} linears to {self.scheme}{taken}, {self.bytes_before / 1e9:.2f} -> "
            f"{self.bytes_after / 1e9:.2f} GB; left alone: {skipped}{unrotated}"
        )


def layer_class(fqn: str) -> str:
    """The name that layers alike share: "blocks.3.attn.to_q.base_layer" -> "blocks.*.attn.to_q"."""
    parts = fqn.removesuffix(".base_layer").split(".")
    return ".".join("*" if part.isdecimal() else part for part in parts)


@torch.no_grad()
def sampled_noise(exact: Tensor, values: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """Energy of a weight and of its rounding error, over evenly spaced rows; on the weight's device. [2]"""
    step = math.ceil(exact.shape[0] / _NUM_SAMPLED_ROWS)
    wanted = exact[::step].float()
    found = values[::step].float() * scale[::step]
    if rotation:
        found = rotate(found, make_rotation(rotation).to(found.device).t())
    return torch.stack([wanted.square().sum(dtype=torch.float64), (found - wanted).square().sum(dtype=torch.float64)])


def decibels(noise: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """Signal to noise by layer class, of each layer's sampled_noise."""
    found = {}
    for name, pairs in noise.items():
        signal, error = torch.stack([pair.cpu() for pair in pairs]).sum(0).tolist()
        if signal and error:  # weights of zeros, or of few values, round to themselves
            found[name] = round(10 * math.log10(signal / error), 2)
    return found
