"""A plan in which every card holds a copy of the model: each card is planned as if it were alone, with its share.

A card of its own has the whole model, one micro-batch at a time, and as many blocks that keep their activations as fit.
LoRA and gradients are on each, the optimizer's state on the first only; adding up gradients takes a flat copy of them
beside. A step lasts as long as the slowest card takes for what it is dealt. parallel/local/data_parallel.py says how
they train.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config.job import JobConfig
from ..parallel.local.data_parallel import num_dealt
from .forecast import Optimizer


def job_of_replica(job: JobConfig, index: int, num_replicas: int) -> JobConfig:
    """What one card alone would do: its share of the micro-batches, what the user says of it, and nothing to cut."""
    split = job.split
    own = {
        name: getattr(split, name)[index : index + 1]
        for name in ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks")
    }
    share = max(
        1, num_dealt(job.train.gradient_accumulation_steps, num_replicas)[index]
    )  # an idle one is planned all the same
    return replace(
        job,
        split=replace(split, devices=(), balance="memory", split_at=(), **own),
        parallel=replace(job.parallel, strategy="none"),
        train=replace(job.train, gradient_accumulation_steps=share),
    )


def optimizer_of_replica(optimizer: Optimizer, index: int, lora_dtype: str) -> Optimizer:
    """Its state is on the first card; all hold a flat copy of the gradients for a moment, when no activations are
    left."""
    flat = float(getattr(torch, lora_dtype).itemsize)
    return Optimizer(optimizer.state, max(optimizer.step, flat)) if index == 0 else Optimizer(0.0, flat)
