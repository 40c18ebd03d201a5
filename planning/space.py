"""What a job leaves open, as the planner sees it: every setting that may be chosen is a tuple of candidates.

jobs/resolve.py makes the space of a job. One candidate is the user's choice, several are open; nothing behind it asks
how a job file spells that. What cards cannot do is left out later, in question.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..config.job import LoraSettings
from ..config.model import Strategy, divides_blocks, has_stages, holds_copies
from ..quantization.quantize import BEST_FIRST, Scheme

# All candidates, in the order in which they are looked at; where nobody plans, the first is taken.
SCHEMES: tuple[Scheme | Literal["none"], ...] = ("none", *BEST_FIRST)
OPTIMIZERS = ("adamw", "adamw8bit")
STRATEGIES: tuple[Strategy, ...] = ("pipeline", "none", "data")
OFFLOADS = (False, True)


@dataclass(frozen=True)
class SearchSpace:
    """How a job may be run.

    Args:
        schemes, optimizers, strategies: candidates.
        offloads: candidates: whether inputs of recomputed blocks wait in host memory.
        ahead: micro-batches that a pipeline may run ahead; with open strategies also none.
        split_at: where the user cuts; () leaves it open.
        uncheckpointed, offloaded: per card, blocks without activation checkpointing, and blocks that stream from host
            memory; () leaves them open.
        memory_limit_gb: per card, of weights; () for none.
        is_cut_by_time: whether the slowest stage decides the cut, whatever the strategy.
        resolution: the largest of the job, in pixels along a square's side.
        kahan, has_ema: what an optimizer keeps besides; see optimizer_bytes.
    """

    schemes: tuple[str, ...]
    optimizers: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    offloads: tuple[bool, ...]
    ahead: int
    split_at: tuple[int, ...]
    uncheckpointed: tuple[int, ...]
    offloaded: tuple[int, ...]
    memory_limit_gb: tuple[float, ...]
    is_cut_by_time: bool
    is_checkpointing: bool
    accumulation: int
    batch_size: int
    dtype: torch.dtype
    rotation: int
    lora: LoraSettings
    resolution: int
    kahan: bool = False
    has_ema: bool = False


@dataclass(frozen=True)
class Setting:
    """One way to run a job; see StepSettings."""

    scheme: str
    optimizer: str
    strategy: Strategy
    ahead: int
    offloads: bool = False  # inputs of recomputed blocks wait in host memory

    @property
    def holds_copies(self) -> bool:
        return holds_copies(self.strategy)

    @property
    def divides_blocks(self) -> bool:
        return divides_blocks(self.strategy)

    @property
    def has_stages(self) -> bool:
        return has_stages(self.strategy)

    def describe(self) -> str:
        """ "fp8-compute, pipeline, 1 ahead"."""
        parts = ["weights in full precision" if self.scheme == "none" else self.scheme]
        if self.strategy != "none":
            parts.append(self.strategy + (f", {self.ahead} ahead" if self.ahead else ""))
        if self.optimizer == "adamw8bit":
            parts.append("adamw8bit")
        if self.offloads:
            parts.append("block inputs in host memory")
        return ", ".join(parts)


def is_open(candidates: Sequence[object]) -> bool:
    """Whether the choice is the planner's."""
    return len(candidates) > 1


def why_not_shared(strategy: Strategy, accumulation: int, devices: Sequence[torch.device]) -> str:
    """What is missing for several devices to share a step in this way; "" if nothing is.

    The CPU is left out: its random numbers are drawn from one generator by all threads.
    """
    kinds = {device.type for device in devices}
    if len(devices) < 2:
        return "there is one card"
    if accumulation < 2 and not divides_blocks(strategy):
        return "there is one micro-batch in a step (train.gradient_accumulation_steps)"
    return "the devices are not cards of one kind" if len(kinds) > 1 or "cpu" in kinds else ""


def strategies_on(space: SearchSpace, devices: Sequence[torch.device]) -> tuple[Strategy, ...]:
    """The candidates that these devices can do; "none" where there is no other."""
    count = space.accumulation
    able = tuple(each for each in space.strategies if each == "none" or not why_not_shared(each, count, devices))
    return able or ("none",)
