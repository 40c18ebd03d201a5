"""What a training does on this machine, with nothing left open: what assembly, trainer and reports go by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .config.model import Strategy, has_stages, holds_copies, shares_rows
from .parallel.placement import Placement
from .quantization.quantize import QuantizeSettings


@dataclass(frozen=True)
class ExecutionPlan:
    """How a model is loaded, placed and trained. There is no "auto" in it; devices are found, and None means no.

    Args:
        placement: of every block and of the tail; with replicas, a copy of the model goes onto each of their devices.
        dtype: of what is not quantized, and of activations.
        quantized_cache: folder that keeps quantized weights for the next time.
        ahead: how many microbatches a pipeline runs ahead.
        gradient_checkpointing: whether blocks are computed again for their backward.
        kept_blocks: then, per device, how many of its last blocks keep their activations; () none.
        offloaded_blocks: then, per device, how many of its blocks stream from host memory; () none.
        offloads: then, whether inputs of blocks wait in host memory.
        compiled_shapes: shapes of batches that blocks are compiled for, 0 if their number is unknown.
    """

    placement: Placement
    dtype: torch.dtype
    quantize: QuantizeSettings | None = None
    quantized_cache: Path | None = None
    strategy: Strategy = "none"
    ahead: int | None = None
    gradient_checkpointing: bool = True
    kept_blocks: tuple[int, ...] = ()
    offloaded_blocks: tuple[int, ...] = ()
    offloads: bool = False
    compiled_shapes: int | None = None

    def __post_init__(self) -> None:
        needs_recompute = any(self.offloaded_blocks) or self.offloads
        assert self.gradient_checkpointing or not needs_recompute, "only blocks that are computed again leave a device"
        assert not (self.placement.replicas and any(self.offloaded_blocks)) or self.placement.row_shares, (
            "these blocks are all on their cards"
        )
        assert not self.placement.replicas or holds_copies(self.strategy), "only data and tokens train replicas"
        assert bool(self.placement.row_shares) == shares_rows(self.strategy), "only tokens shares out rows"
        assert not shares_rows(self.strategy) or len({*self.kept_blocks}) < 2 > len({*self.offloaded_blocks}), (
            "devices meet in blocks that are alike"
        )
        assert (self.ahead is None) != has_stages(self.strategy), "only a pipeline runs ahead"
