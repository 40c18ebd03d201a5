"""What was decided about a split MODEL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ...families.comfy.native import NativeModel
from ...parallel.placement import Placement


@dataclass(frozen=True)
class SplitPlan:
    """What was decided about a split, for any tree of the same architecture.

    Args:
        placement: block fqns inside the diffusion model, and their devices.
        layout: what the class is; for a class nobody described a row made from its block lists.
        transport: how activations travel.
        limit_bytes: weights each device may hold resident; absent is unlimited.
        overlap: whether micro-batches of a batch may use the cards at the same time.
        is_described: whether the class is in families/comfy/registry.py; else its first forward is watched.
        verify: compute the first step of every run a second time in the plainest way, and compare.
    """

    placement: Placement
    layout: NativeModel
    transport: Literal["stream", "relay"]
    limit_bytes: Mapping[torch.device, int] = field(default_factory=dict)
    overlap: bool = True
    is_described: bool = True
    verify: bool = False

    @property
    def home(self) -> torch.device:
        return self.placement.home

    @property
    def foreign_devices(self) -> tuple[torch.device, ...]:
        return tuple(device for device in self.placement.used_devices if device != self.home)

    def blocks_on(self, device: torch.device) -> list[str]:
        placement = self.placement
        return [name for name, place in zip(placement.blocks, placement.devices, strict=True) if place == device]
