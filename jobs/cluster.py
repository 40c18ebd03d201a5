"""`devicebridge plan --nodes`: a job on several machines that are alike, by calculation (planning/cluster.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import JobConfig
from ..config.model import Strategy
from ..config.open import asked
from ..planning.cards import Card
from ..planning.cluster import Cluster, Option, Part, with_copies, with_shares
from ..planning.plan_training import TrainingPlan
from ..planning.report import step_seconds
from ..planning.space import OPTIMIZERS
from .read_job import ReadJob, read_job
from .resolve import Machine, plan_on
from .shared_weights import plan_shared, shared_weights

_COMPUTING = ("none", "fp8-compute", "int8-compute")  # schemes whose tensors FSDP can cut


def plan_cluster(
    job: JobConfig, cluster: Cluster, *, info: CheckpointInfo | None = None, has_data: bool = True
) -> list[Option]:
    """Every way to use a cluster; see read_job.

    Raises: ValueError for a job that cannot be run as written.
    """
    read = read_job(job, info, has_data=has_data)
    options = [_copies(read, cluster)]
    if len(cluster.cards) > 1:
        options.append(_inside_machines(read, cluster))
    if cluster.num_cards > 1:
        options.append(_shares(read, cluster, "fsdp"))
    if cluster.nodes > 1 and len(cluster.cards) > 1:
        options.append(_shares(read, cluster, "hsdp"))
    return options


def microbatches_of(job: JobConfig, processes: int) -> int:
    """Of the process that has most of them."""
    return -(-job.train.gradient_accumulation_steps // processes)


def _copies(read: ReadJob, cluster: Cluster) -> Option:
    try:
        plan = _plan(read, cluster.cards[:1], cluster.num_cards, "none")
    except ValueError as error:
        return _unfit("data", cluster.num_cards, error)
    return with_copies(cluster, "data", cluster.num_cards, _part(read, plan))


def _inside_machines(read: ReadJob, cluster: Cluster) -> Option:
    asked_for = read.job.parallel.asked
    inside: Strategy | None = asked_for if asked_for in ("pipeline", "tensor") else None
    try:
        plan = _plan(read, cluster.cards, cluster.nodes, inside)
    except ValueError as error:
        return _unfit("one process per machine", cluster.nodes, error)
    return with_copies(cluster, f"{plan.setting.strategy} in each machine", cluster.nodes, _part(read, plan))


def _shares(read: ReadJob, cluster: Cluster, strategy: str) -> Option:
    """With the fastest scheme that fits."""
    scheme = asked(read.job.model.quantize)
    if scheme is not None and scheme not in _COMPUTING:
        why = f"{scheme} makes tensors of torchao, which FSDP cannot cut; {scheme}-compute works"
        return Option(strategy, cluster.num_cards, scheme, why=why)
    kept = read.job.split.blocks_without_checkpointing
    if len({*kept}) > 1:
        why = f"split.blocks_without_checkpointing = {list(kept)} differs between cards, and this plan takes them for "
        return Option(strategy, cluster.num_cards, "", why=f"{why}alike; give each the same number, or leave it out")
    card = min(cluster.cards, key=lambda card: card.usable_bytes)  # all keep as many blocks as it can
    able = [each for each in _COMPUTING if not any(each in card.refuses for card in cluster.cards)]
    degree, found = cluster.degree(strategy), []
    for each in able if scheme is None else [scheme]:
        config = replace(read.job.model, quantize=each)  # type: ignore[arg-type]
        job = _of_one_card(replace(read.job, model=config), cluster)
        part, weights = _part(read, plan_shared(job, read.subject, card, degree)), shared_weights(job, read.subject)
        part = replace(part, needed=part.needed + weights.elsewhere(degree))
        found.append(with_shares(cluster, strategy, part, weights, job.train.gradient_accumulation_steps))
    return min(found, key=lambda option: (option.step_s is None, option.step_s or option.needed))


def _of_one_card(job: JobConfig, cluster: Cluster) -> JobConfig:
    """What every card does of a job whose weights are shared."""
    split = replace(job.split, blocks_without_checkpointing=job.split.blocks_without_checkpointing[:1])
    train = replace(job.train, gradient_accumulation_steps=microbatches_of(job, cluster.num_cards))
    optimizer = replace(job.optimizer, name=asked(job.optimizer.name) or OPTIMIZERS[0])  # as the ranks take it
    return replace(job, split=split, train=train, optimizer=optimizer)


def _plan(read: ReadJob, cards: Sequence[Card], processes: int, strategy: Strategy | None) -> TrainingPlan:
    """What the planner says of one process."""
    job = read.job
    split = replace(job.split, devices=(), split_at=(), balance="memory")
    accumulation = microbatches_of(job, processes)
    job = replace(
        job,
        split=split,
        train=replace(job.train, gradient_accumulation_steps=accumulation),
        parallel=replace(job.parallel, strategy=strategy or "auto"),
    )
    return plan_on(job, read.subject, Machine((), tuple(cards)), "never")


def _part(read: ReadJob, plan: TrainingPlan) -> Part:
    card, device = max(zip(plan.cards, plan.devices, strict=True), key=lambda both: both[1].needed)
    lora = sum(each.lora for each in plan.devices) * (1 if read.job.lora.dtype == "float32" else 2)
    seconds, _ = step_seconds(plan)
    return Part(
        device.needed, card.usable_bytes, seconds or plan.step_s, lora, plan.setting.describe(), plan.uncheckpointed
    )


def _unfit(strategy: str, processes: int, error: ValueError) -> Option:
    lines = str(error).splitlines()
    return Option(strategy, processes, "", why=" ".join(line.strip() for line in lines[:2]))
