"""What one card does where several processes share the weights (fsdp, hsdp): how many of its last blocks keep their
activations, and what it then needs.

Beside the weights such a card holds what it would hold alone. So the planner is asked for one card with the whole
model, larger by what the other cards hold of it. It leaves the usual headroom of the card that there is, and the
weights of one block: FSDP has a third one gathered for a moment, and NCCL's buffers are in no forecast. On two H200
peaks with every block recomputed were 0.5 and 0.9 GB above it (docs/internals/experiments.md, 2026-11-27).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config.job import JobConfig
from ..planning.cards import Card
from ..planning.plan import TrainingPlan
from ..planning.search import HEADROOM
from .place_by_size import Subject, held_bytes
from .resolve import Machine, plan_on

UNLIMITED_GB = (100_000.0,)  # for what is not checked by its size


@dataclass(frozen=True)
class Weights:
    """Bytes of the base as it is held: each block, and all else."""

    blocks: Sequence[int]
    home: int

    def held(self, degree: int) -> int:
        """Of a card, where so many share them: its share, what stays whole, and the block at work
        beside the next one, which is gathered ahead."""
        return (sum(self.blocks) + self.home) // degree + self.home + 2 * max(self.blocks)

    def elsewhere(self, degree: int) -> int:
        """By how much that is less than all of them; negative for a model of few blocks."""
        return sum(self.blocks) + self.home - self.held(degree)


def shared_weights(job: JobConfig, subject: Subject) -> Weights:
    """What processes share of a job whose scheme is decided."""
    return Weights(*held_bytes(job.model, subject))


def plan_shared(job: JobConfig, subject: Subject, card: Card, degree: int) -> TrainingPlan:
    """The plan of one card; all processes do the same. What does not fit is planned all the same, with a warning.

    Args:
        job: with scheme and optimizer decided, and the microbatches of one process. card: the smallest.
        degree: how many processes share one copy of the weights.
    Raises: ValueError for a count of blocks that the model does not have; NoForecast.
    """
    weights = shared_weights(job, subject)
    elsewhere = weights.elsewhere(degree)
    split = replace(job.split, devices=(), split_at=(), balance="memory", memory_limit_gb=UNLIMITED_GB)
    train = replace(job.train, offload_activations="off")  # which these strategies do without
    alone = replace(
        job,
        split=replace(split, offloaded_blocks=(0,)),
        train=train,
        parallel=replace(job.parallel, strategy="none"),
    )
    more = (elsewhere - max(weights.blocks)) / (1 - HEADROOM)
    larger = replace(card, usable_bytes=int(card.usable_bytes + more))
    found = plan_on(alone, subject, Machine((), (larger,)))
    (device,) = found.devices
    device = replace(device, weights=device.weights - elsewhere)
    warning = ""
    if device.needed > card.usable_bytes:
        warning = f"{card.name} needs {device.needed / 1e9:.1f} GB by the forecast, of {card.usable_bytes / 1e9:.1f} GB"
    return replace(found, cards=(card,), devices=(device,), warning=warning)
