"""How one rank of a job trains its share: the devices, the microbatches, and the share of the weights that are its own.

Each rank resolves the job for its own devices, as if it were alone with its share of the microbatches. The first one
decides the strategy between ranks, the scheme and the optimizer.

Where ranks share the weights (fsdp, hsdp), the planner is asked for one card with the whole model, larger by what the
other cards hold of it. It leaves the usual headroom of the card that there is, and the weights of one block: FSDP has a
third one gathered for a moment, and NCCL's buffers are in no forecast. On two H200 peaks with every block recomputed
were 0.5 and 0.9 GB above it (docs/internals/experiments.md, 2026-11-27).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config.job import JobConfig
from ..config.model import Strategy, shards_weights, shares_rows
from ..config.setting import requested
from ..parallel.devices import free_bytes
from ..parallel.ranks.group import Ranks
from ..planning.cards import Card, cards_of
from ..planning.dry_run import NoForecast
from ..planning.plan import TrainingPlan
from ..planning.search import HEADROOM
from .place_by_size import Subject, held_bytes
from .resolve import Machine, Resolution, find_machine, plan_on, resolve

_log = logging.getLogger(__name__)
_FREE_SHARE = 0.9  # as for one process: the rest is a first guess at activations, LoRA and optimizer
UNLIMITED_GB = (100_000.0,)  # for what is not checked by its size


@dataclass(frozen=True)
class Weights:
    """Bytes of the frozen weights, as held_bytes gives them: each block, and all else."""

    blocks: Sequence[int]
    rest: int

    def per_card(self, degree: int) -> int:
        """Of a card, where so many share them: its share, what stays whole, and the block at work
        beside the next one, which is gathered ahead."""
        return (sum(self.blocks) + self.rest) // degree + self.rest + 2 * max(self.blocks)

    def elsewhere(self, degree: int) -> int:
        """By how much that is less than all of them; negative for a model of few blocks."""
        return sum(self.blocks) + self.rest - self.per_card(degree)


def plan_shared(job: JobConfig, subject: Subject, card: Card, degree: int) -> TrainingPlan:
    """The plan of one card; all processes do the same. What does not fit is planned all the same, with a warning.

    Args:
        job: with scheme and optimizer decided, and the microbatches of one process. card: the smallest.
        degree: how many processes share one copy of the weights.
    Raises: ValueError for a count of blocks that the model does not have; NoForecast.
    """
    weights = Weights(*held_bytes(job.model, subject))
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


def resolve_here(
    job: JobConfig,
    subject: Subject,
    ranks: Ranks,
    host_share: int,
    earlier: Mapping[str, Any] | None,
    *,
    is_to_train: bool = True,
) -> Resolution:
    """See resolve; of several ranks for this one's devices, and then the strategy may be fsdp or hsdp, too.

    Args:
        earlier: facts of the checkpoint that is resumed, where its placement stays.
    """
    strategy = job.parallel.requested
    if not ranks.is_launched:
        if shards_weights(strategy) and not is_to_train:  # nothing is placed
            job = replace(job, parallel=replace(job.parallel, strategy="auto"))
        elif shards_weights(strategy) and (count := job.parallel.processes) > 1:
            raise ValueError(
                f'parallel.strategy = "{strategy}" shares the weights among parallel.processes = {count} processes, '
                'and this is one by itself; start the job with "devicebridge train", which starts them'
            )
        elif shards_weights(strategy):
            raise ValueError(
                f'parallel.strategy = "{strategy}" needs several processes; set parallel.processes to 2 or more, start '
                'the job with --nproc or torchrun, or set it to "auto"'
            )
        return resolve(job, subject, find_machine(job.split.devices, host_share), earlier, is_to_train=is_to_train)
    if strategy and shares_rows(strategy):
        raise ValueError(
            f'parallel.strategy = "{strategy}" is for the devices of one process, and {ranks.count} were started; '
            'start the job without --nproc and torchrun, or set it to "data"'
        )
    count = job.train.gradient_accumulation_steps
    if ranks.is_first and count % ranks.count:
        _log.warning(
            "train.gradient_accumulation_steps = %d is no multiple of %d processes, so some wait for others in every "
            "step",
            count,
            ranks.count,
        )
    decided = ranks.together(lambda: _decide(job, subject, ranks, host_share) if ranks.is_first else None)
    chosen = ranks.from_first(lambda: decided)
    assert chosen is not None
    pinned = replace(
        job,
        model=replace(job.model, quantize=chosen["quantize"]),
        optimizer=replace(job.optimizer, name=chosen["optimizer"]),
    )
    resolved = ranks.together(lambda: _resolve_as(chosen["strategy"], pinned, subject, ranks, host_share))
    if not is_to_train or not shards_weights(chosen["strategy"]):
        return resolved
    return _with_kept_blocks(resolved, subject, ranks, chosen["strategy"])


def _with_kept_blocks(resolved: Resolution, subject: Subject, ranks: Ranks, strategy: Strategy) -> Resolution:
    """With the forecast of the first rank, which also says how many blocks keep their activations where that is left
    open: on all ranks as many as on the smallest card; all ranks."""
    cards = ranks.together(lambda: cards_of(ranks.devices))
    usable_bytes = ranks.gather(None if cards is None else cards[0].usable_bytes)
    if None in usable_bytes:
        return resolved
    own = _of_one_rank(resolved.job, ranks, strategy)

    def plan() -> TrainingPlan | None:
        assert cards is not None
        smallest = replace(cards[0], usable_bytes=min(usable_bytes))
        try:
            found = plan_shared(own, subject, smallest, shard_degree(own, strategy, ranks))
        except NoForecast as error:
            _log.warning(
                "every block is recomputed unless the job says otherwise, without a forecast: %s", error.reason
            )
            return None
        if found.warning:
            _log.warning("%s", found.warning)
        _log.info("the last %d blocks keep their activations", *found.uncheckpointed)
        return found

    training = ranks.together(lambda: plan() if ranks.is_first else None)
    kept = ranks.from_first(lambda: [] if training is None else list(training.uncheckpointed))
    execution = resolved.execution
    if execution.gradient_checkpointing and not execution.kept_blocks:
        execution = replace(execution, kept_blocks=tuple(kept))
    return replace(resolved, execution=execution, training=training)


def _decide(job: JobConfig, subject: Subject, ranks: Ranks, host_share: int) -> dict[str, Any]:
    """What has to be alike on all ranks: the strategy between them, scheme and optimizer."""
    strategy = job.parallel.requested
    try:
        resolved = _resolve_as(strategy, job, subject, ranks, host_share)
    except ValueError as error:
        if strategy is not None or ranks.count == 1 or _why_not_sharded(job, ranks):
            raise
        _log.warning("the weights are shared out among the processes (fsdp), for one device is not enough: %s", error)
        strategy = "fsdp"
        resolved = _resolve_as(strategy, job, subject, ranks, host_share)
    return {
        "strategy": strategy,
        "quantize": resolved.job.model.quantize,
        "optimizer": resolved.job.optimizer.name,
    }


def _resolve_as(
    strategy: Strategy | None, job: JobConfig, subject: Subject, ranks: Ranks, host_share: int
) -> Resolution:
    """The job of one rank, with the settings of the whole job put back."""
    share = host_share * ranks.place.num_local
    is_sharded = shards_weights(strategy)
    machine = Machine(ranks.devices, host_share=share, is_planned=not is_sharded, is_alone=False)
    own = _of_one_rank(job, ranks, strategy)
    if is_sharded:
        if fault := _why_not_sharded(job, ranks):
            raise ValueError(f'parallel.strategy = "{strategy}" was asked for, but {fault}')
        degree, scheme = shard_degree(job, strategy, ranks), requested(own.model.quantize) or "none"
        weights = Weights(*held_bytes(replace(own.model, quantize=scheme), subject))
        needed, free = weights.per_card(degree), free_bytes(ranks.devices[0])
        if free is not None and needed > _FREE_SHARE * free:
            raise ValueError(
                f"the weights take {needed / 1e9:.1f} GB of {ranks.devices[0]} where {degree} processes share them, "
                f"and {free / 1e9:.1f} GB are free; start more processes, or use "
                'model.quantize = "int8-compute"'
            )
    found = resolve(own, subject, machine)
    execution = found.execution
    if is_sharded:
        assert strategy is not None
        execution = replace(execution, strategy=strategy)
    whole = replace(found.job, split=job.split, train=job.train, parallel=job.parallel)
    return replace(found, job=whole, execution=execution)


def _of_one_rank(job: JobConfig, ranks: Ranks, strategy: Strategy | None) -> JobConfig:
    """The job as one rank with its devices would do it alone."""
    is_sharded, is_alone = shards_weights(strategy), len(ranks.devices) == 1
    count, place = len(ranks.devices), ranks.place
    mine = slice(place.local_rank * count, (place.local_rank + 1) * count)
    names = ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks")
    values = {name: getattr(job.split, name) for name in names}  # of those for all devices of the machine, its own
    of_all = {name: each[mine] for name, each in values.items() if len(each) == count * place.num_local}
    split = replace(job.split, devices=tuple(map(str, ranks.devices)), **of_all)
    if is_sharded:
        split = replace(split, memory_limit_gb=UNLIMITED_GB)
    inside: Any = job.parallel.strategy if strategy is None else strategy
    if is_sharded or (is_alone and strategy is not None):
        inside = "none"  # what one device does
    accumulation = -(-job.train.gradient_accumulation_steps // ranks.count)
    return replace(
        job,
        split=split,
        train=replace(job.train, gradient_accumulation_steps=accumulation),
        parallel=replace(job.parallel, strategy=inside),
    )


def _why_not_sharded(job: JobConfig, ranks: Ranks) -> str:
    """What keeps processes from sharing the weights, and what would work; "" if nothing does."""
    scheme = requested(job.model.quantize)
    faults = {
        f"each process has {len(ranks.devices)} devices; start one process per device": len(ranks.devices) != 1,
        f'model.quantize = "{scheme}" keeps rows that are not cut; use "int8-compute" or "none"': (
            scheme in ("fp8", "int8", "stored")
        ),
        "lora.dora = true asks for norms of whole weights; set it to false": job.lora.dora,
        'train.offload_activations = "on" is for blocks that stay on their device; set it to "off"': (
            requested(job.train.offload_activations) == "on"
        ),
        "split.offloaded_blocks asks for blocks that stream from host memory; remove it": any(
            job.split.offloaded_blocks
        ),
        **{f"{asked} is not trained so; remove it": "fsdp" not in known for asked, known in job.limits},
    }
    return next((text for text, is_so in faults.items() if is_so), "")


def shard_degree(job: JobConfig, strategy: Strategy | None, ranks: Ranks) -> int:
    """How many ranks share one copy of the weights.

    Raises: ValueError for a number that does not divide theirs.
    """
    if strategy != "hsdp":
        return ranks.count
    degree = job.parallel.shard_degree or ranks.place.num_local
    if ranks.count % degree:
        raise ValueError(
            f"parallel.shard_degree = {degree} does not divide the {ranks.count} processes of this job; give a "
            "divisor, or leave it out for those of a machine"
        )
    return degree


def mesh_of(job: JobConfig, strategy: Strategy, ranks: Ranks) -> Any:
    """The DeviceMesh over which weights are sharded, and for hsdp copied."""
    from torch.distributed.device_mesh import init_device_mesh

    degree = shard_degree(job, strategy, ranks)
    kind = torch.device(ranks.devices[0]).type
    if degree == ranks.count:
        return init_device_mesh(kind, (ranks.count,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks.count // degree, degree), mesh_dim_names=("replicate", "shard"))
