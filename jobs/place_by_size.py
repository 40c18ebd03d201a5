"""Which block goes where by the sizes of weights alone, for where no plan was made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import ModelConfig, SplitConfig
from ..config.model import Strategy, holds_copies
from ..families.spec import Variant
from ..parallel.devices import free_bytes
from ..parallel.placement import (
    Placement,
    block_names,
    check_budgets,
    check_one_each,
    parameter_bytes,
    plan_manual,
    plan_placement,
    plan_replicas,
)
from ..planning.dry_run import SampleText
from ..quantization.quantize import stored_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """What is trained, as far as it decides how: a model without weights, and the sizes of its data.

    Args:
        largest: height and width in pixels and frames of the samples that take the most; (0, 0, 0) takes the config's.
        train, alone: of all samples that are trained on, and that are evaluated: what tells their batches apart.
        text: of one of ComfyUI's own models, what it is given of the longest caption, as far as that is known.
        beside_bytes: of weights that the first device holds beside the model.
        has_empty_caption: whether a sample has one, or may be given one.
        disk_note: how much of the disk its texts take, where that is much.
    """

    info: CheckpointInfo
    variant: Variant
    model: nn.Module
    largest: tuple[int, int, int]
    train: frozenset[tuple[int, ...]]
    alone: frozenset[tuple[int, ...]] = frozenset()
    text: SampleText | None = None
    beside_bytes: int = 0
    has_empty_caption: bool = False
    disk_note: str = ""


def place_by_size(
    config: ModelConfig,
    split: SplitConfig,
    subject: Subject,
    devices: Sequence[torch.device],
    *,
    strategy: Strategy = "none",
) -> Placement:
    """Which block goes where, from the sizes of weights alone.

    Args:
        strategy: whether each device gets a copy of the model.
    Raises: ValueError if it does not fit or the cuts are impossible.
    """
    model, family = subject.model, subject.info.family
    blocks = block_names(model, family)
    block_bytes, main_bytes = held_bytes(config, subject)
    main_bytes += subject.beside_bytes
    check_one_each("split.memory_limit_gb", split.memory_limit_gb, devices)
    budgets: dict[torch.device, int | None] = {}
    for number, device in enumerate(devices):
        # the user's limits, else what is free, less a tenth on accelerators: a guess at activations, LoRA and optimizer
        limit = int(split.memory_limit_gb[number] * 1e9) if split.memory_limit_gb else free_bytes(device)
        if limit is not None and device.type != "cpu" and not split.memory_limit_gb:
            limit = int(0.9 * limit)
        budgets[device] = limit
    if holds_copies(strategy):
        return plan_replicas(blocks, devices, sum(block_bytes) + main_bytes, budgets, strategy)
    if split.balance == "manual":
        manual = plan_manual(blocks, list(devices), split.split_at)
        check_budgets(manual, block_bytes, main_bytes, budgets)
        return manual
    if split.balance == "time":
        _log.warning('split.balance = "time" needs a forecast, which there is none of here; blocks are cut by memory')
    capacity = [budgets[device] for device in devices]
    return plan_placement(
        blocks,
        devices,
        block_cost=list(map(float, block_bytes)),
        main_cost=float(main_bytes),
        block_bytes=block_bytes,
        main_bytes=main_bytes,
        budget_bytes=budgets,
        capacity=capacity if all(capacity) else (),
    )


def held_bytes(config: ModelConfig, subject: Subject) -> tuple[list[int], int]:
    """Weights of each block as they will be held, and of all else."""
    model, family, settings = subject.model, subject.info.family, config.quantize_settings
    blocks, element_size = block_names(model, family), getattr(torch, config.dtype).itemsize
    if settings is None:
        return parameter_bytes(model, blocks, element_size)
    return stored_bytes(model, family, blocks, element_size, settings)
