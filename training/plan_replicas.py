"""A plan in which every card holds a copy of the model: each card is planned as if it were alone, with its share.

A card of its own has the whole model, one micro-batch at a time, and as many blocks that keep their activations as fit.
LoRA and gradients are on each, the optimizer's state on the first only; adding up gradients takes a flat copy of them
beside. A step lasts as long as the slowest card takes for what it is dealt. parallel/replicas.py says how they train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..parallel.placement import Placement
from ..parallel.replicas import num_dealt
from .config import JobConfig
from .forecast import Optimizer

if TYPE_CHECKING:
    from .planner import Planner, Setting, _Found

# Finds how a planner's only card would run a setting.
Find = Callable[["Planner", "Setting"], "_Found | None"]


def plan_each_alone(planner: Planner, setting: Setting, find: Find) -> _Found | None:
    """What find finds for every card alone, together; None if one of them cannot hold the model."""
    alone = replace(setting, schedule="none", ahead=0)
    found = []
    for index in range(len(planner.cards)):
        one = find(planner.alone(index), alone)
        if one is None:
            return None
        found.append(one)
    dealt = num_dealt(planner.job.train.accumulation, len(planner.cards))
    time = max(one.time for one, count in zip(found, dealt, strict=True) if count)
    offloaded = sum(one.offloaded_bytes for one in found)
    stages = tuple(one.stages[0] for one in found)
    return replace(found[0], setting=setting, stages=stages, time=time, offloaded_bytes=offloaded)


def job_of_replica(job: JobConfig, index: int, num_replicas: int) -> JobConfig:
    """What one card alone would do: its share of the micro-batches, what the user says of it, and nothing to cut."""
    split = job.split
    own = {
        name: getattr(split, name)[index : index + 1] for name in ("memory_limit_gb", "kept_blocks", "swapped_blocks")
    }
    share = max(1, num_dealt(job.train.accumulation, num_replicas)[index])  # an idle one is planned all the same
    return replace(
        job,
        split=replace(split, devices=(), balance="bytes", split_at=(), **own),
        pipeline=replace(job.pipeline, schedule="none"),
        train=replace(job.train, accumulation=share),
    )


def optimizer_of_replica(optimizer: Optimizer, index: int, lora_dtype: str) -> Optimizer:
    """Its state is on the first card; all hold a flat copy of the gradients for a moment, when no activations are
    left."""
    flat = float(getattr(torch, lora_dtype).itemsize)
    return Optimizer(optimizer.state, max(optimizer.step, flat)) if index == 0 else Optimizer(0.0, flat)


def place_replicas(planner: Planner) -> Placement:
    """All blocks on every card."""
    devices = tuple(card.device for card in planner.cards)
    return Placement(planner.names, (devices[0],) * len(planner.names), devices[0], replicas=devices)


def describe_replicas(found: _Found, cards: Sequence[str]) -> str:
    """The reason in place of the cut's."""
    shares = ", ".join(f"{stage.share:.0%} of {card}" for stage, card in zip(found.stages, cards, strict=True))
    return f"replicas: each card holds the whole model and needs no other's activations; it needs {shares}"


def hint_of_replicas(planner: Planner, found: _Found) -> str:
    """What replicas would gain where the job rules them out and each card could hold the model; "" otherwise."""
    num = len(planner.cards)
    kinds = {card.device.type for card in planner.cards}
    if num < 2 or len(kinds) > 1 or found.setting.schedule == "replicas":
        return ""
    job = planner.job
    is_short = job.train.accumulation < 2
    is_weighed = not planner.bounds and job.pipeline.schedule == "auto"  # where there are several micro-batches
    if not is_short and is_weighed:
        return ""
    setting = replace(found.setting, schedule="replicas", ahead=0)
    whole = plan_each_alone(planner, setting, lambda alone, each: alone.fit(each))
    if whole is None or (not is_short and whole.time >= found.time):
        return ""
    fits = f"the whole model with everything needs {whole.stages[0].forecast.needed / 1e9:.1f} GB and fits on each card"
    changes = [f"train.accumulation = {num}"] if is_short else []
    if not is_weighed and job.pipeline.schedule != "replicas":
        changes.append('pipeline.schedule = "replicas"')
    if not is_weighed and (planner.bounds or job.split.balance != "bytes"):
        changes.append('split.balance = "bytes"')
    needed = " and ".join(changes)
    if is_short:
        return (
            f"replicas would be faster: {fits}, but a step of one micro-batch keeps one card busy; with {needed} "
            f"every card trains a copy, {num} batches in about the time of one"
        )
    return (
        f"replicas would be faster: {fits}; with {needed} a step would take {whole.time / found.time:.0%} of the time"
    )
