"""How long blocks take on a card: what the planner weighs its choices by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .cards import Card

# A step with this scheme over one in bf16: FLUX.2-dev on two H200 at 1024², docs/guides/quantization.md.
SCHEME_TIMES: Mapping[str, float] = {"none": 1.0, "fp8-compute": 0.78, "int8-compute": 0.81, "int8": 1.16, "fp8": 1.26}

# What a card of speed 1 is taken to sustain in bf16, and what reaches it over half a PCIe 4.0 slot.
ASSUMED_FLOPS_PER_S = 50e12
ASSUMED_LINK_BYTES_PER_S = 12e9


class BlockTimes(Protocol):
    """How long blocks take."""

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        """Forward and backward (without recomputation) of a micro-batch, in seconds."""
        ...


@dataclass(frozen=True)
class FlopTimes:
    """By operations: a frozen block's backward computes as much as its forward, for there are no weight gradients.

    What is outside the blocks counts nothing. flops: of each block's forward.
    """

    flops: Sequence[float]

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        time = self.flops[block] * SCHEME_TIMES[scheme] / (card.speed * ASSUMED_FLOPS_PER_S)
        return time, time
