"""A job, a machine and what an earlier run decided, made into an ExecutionPlan: the one place where "auto" ends.

Nothing after this asks which devices there are, and nothing reads a setting that may be "auto". Where the cards' memory
is known, the planner chooses within what the job leaves open. Elsewhere "auto" is what every machine can do. A run that
is resumed keeps the placement it began with, whatever memory is free today: another one would draw dropout elsewhere
and sum gradients in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import JobConfig
from ..data.samples import TrainingSample
from ..execution import ExecutionPlan
from ..families.spec import Variant
from ..parallel.devices import CPU, find_device, find_devices, free_bytes
from ..parallel.placement import (
    Placement,
    block_names,
    check_budgets,
    estimate_block_flops,
    parameter_bytes,
    plan_manual,
    plan_placement,
    plan_replicas,
)
from ..planning.calibration import CalibratedPlanner
from ..planning.cards import Card, cards_of
from ..planning.planner import Planner, TrainingPlan, asked_schedule
from ..quantization.quantize import stored_bytes
from .checked_job import why_no_graphs

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What a job may use.

    Args:
        devices: as the job names them, or all there are; in order.
        cards: the same with their memory; None where a device's memory is not known, as on a CPU.
        host_bytes: free host memory that this job may take; None if unknown.
    """

    devices: tuple[torch.device, ...]
    cards: tuple[Card, ...] | None
    host_bytes: int | None

    def only(self, devices: Sequence[torch.device]) -> Machine:
        """The machine with these devices."""
        found = cards_of(list(devices))
        return Machine(tuple(devices), None if found is None else tuple(found), self.host_bytes)


def find_machine(names: Sequence[str] = (), host_share: int = 1) -> Machine:
    """This machine's devices; () takes every GPU, else the CPU.

    Args:
        host_share: jobs that share the host's free memory.
    Raises: ValueError for a name that is no device of this machine.
    """
    devices = find_devices(names)
    cards, free = cards_of(devices), free_bytes(CPU)
    return Machine(
        tuple(devices), None if cards is None else tuple(cards), None if free is None else free // host_share
    )


@dataclass(frozen=True)
class Subject:
    """What is trained, as far as it decides how: a model without weights, and the sizes of its data.

    Args:
        largest: height and width in pixels and frames of the samples that take the most; (0, 0, 0) takes the config's.
        train, alone: of all samples that are trained on, and that are evaluated: what tells their batches apart.
    """

    info: CheckpointInfo
    variant: Variant
    model: nn.Module
    largest: tuple[int, int, int]
    is_encoded: bool
    train: frozenset[tuple[int, ...]]
    alone: frozenset[tuple[int, ...]] = frozenset()


@dataclass(frozen=True)
class Resolution:
    """A job with every "auto" answered, and what follows.

    Args:
        training: what the planner chose, and its forecast; None on machines it knows nothing of.
    """

    job: JobConfig
    execution: ExecutionPlan
    training: TrainingPlan | None


@dataclass(frozen=True)
class _Earlier:
    """Where the run that is resumed has its blocks, and its replicas."""

    devices: tuple[torch.device, ...]
    replicas: tuple[torch.device, ...]


def resolve(
    job: JobConfig,
    subject: Subject,
    machine: Machine,
    earlier: Mapping[str, Any] | None = None,
    *,
    is_to_train: bool = True,
) -> Resolution:
    """Settle everything that a job leaves open.

    Args:
        earlier: facts of the checkpoint that is resumed; None for a new run.
        is_to_train: False for filling caches, while other processes may use the cards: nothing is forecast then.
    Raises: ValueError if nothing fits, the cuts are impossible, or the run to resume was of another strategy.
    """
    before = None
    if earlier is not None:
        before = _Earlier(*(tuple(map(find_device, earlier.get(key, ()))) for key in ("placement", "replicas")))
        _refuse_other_strategy(job, machine, before)
    training = _plan_on_cards(job, subject, machine, before) if is_to_train else None
    if training is None:
        job = _without_auto(job)
        sizes = (subject.largest[0], subject.largest[2]) if subject.is_encoded else ()
        placement = place_by_size(job, subject.info, subject.variant, subject.model, machine.devices, *sizes)
    else:
        job, placement = _with(job, training.setting.scheme, training.setting.optimizer), training.placement
    if before is not None:
        home = before.devices[0]
        placement = replace(placement, devices=before.devices, home=home, tail=(), replicas=before.replicas)
    ahead = _ahead(job, placement, training)
    if ahead is None and not placement.replicas and job.parallel.strategy in ("pipeline", "data"):
        _log.warning(
            'parallel.strategy = "%s" needs train.gradient_accumulation_steps above 1 and several GPUs of one kind; '
            "left out",
            job.parallel.strategy,
        )
    tail = () if ahead is None else tuple(subject.info.family.tail)
    execution = ExecutionPlan(
        placement=replace(placement, tail=tail),
        dtype=getattr(torch, job.model.dtype),
        quantize=job.model.quantize_settings,
        quantized_cache=Path(job.model.quantized_cache) if job.model.quantized_cache else None,
        ahead=ahead,
        gradient_checkpointing=job.train.gradient_checkpointing,
        kept_blocks=job.split.blocks_without_checkpointing if training is None else training.kept_blocks,
        swapped_blocks=job.split.offloaded_blocks if training is None else training.swapped_blocks,
        offloads=job.train.offload_activations == "on" if training is None else training.setting.offloads,
        compiled_shapes=_shapes_to_compile(job, subject) if is_to_train else None,
        has_graphs=is_to_train and _has_graphs(job, subject, placement.used_devices),
    )
    return Resolution(job, execution, training)


def _ahead(job: JobConfig, placement: Placement, training: TrainingPlan | None) -> int | None:
    if placement.replicas:
        return None
    if training is None:
        return job.parallel.microbatches_ahead if asked_schedule(job, placement.used_devices) == "1f1b" else None
    return training.setting.ahead if training.setting.schedule == "1f1b" else None


def _refuse_other_strategy(job: JobConfig, machine: Machine, before: _Earlier) -> None:
    """Raises: ValueError if the job now asks for replicas by name and the run had none, or the other way round."""
    is_copied = asked_schedule(job, machine.devices) == "replicas"
    if job.parallel.strategy != "auto" and bool(before.replicas) != is_copied:
        had, asked = "data parallelism", "one model over all cards"
        if is_copied:
            had, asked = asked, had
        raise ValueError(
            f'the run in {job.output.folder} was trained with {had}, and parallel.strategy = "{job.parallel.strategy}" '
            f'now asks for {asked}, which would not be the same run; set it to "auto" to resume, or start anew in '
            "another output folder"
        )


def _plan_on_cards(job: JobConfig, subject: Subject, machine: Machine, before: _Earlier | None) -> TrainingPlan | None:
    """What the planner chooses on this machine; None where it does not know a device's memory.

    Raises: ValueError if nothing fits.
    """
    cuts = None
    if before is not None:
        machine = machine.only(list(dict.fromkeys(before.replicas or before.devices)))
        if before.replicas:  # which a cut of today's would contradict
            split = replace(job.split, balance="memory", split_at=())
            job = replace(job, parallel=replace(job.parallel, strategy="data"), split=split)
            refuse_block_settings(job)
        else:
            cuts = [i for i in range(1, len(before.devices)) if before.devices[i] != before.devices[i - 1]]
    if machine.cards is None:
        return None
    training = CalibratedPlanner(make_planner(job, subject, machine, cuts)).plan()
    if training.warning:
        _log.warning("%s", training.warning)
    return training


def make_planner(job: JobConfig, subject: Subject, machine: Machine, cuts: Sequence[int] | None = None) -> Planner:
    """The planner of a job on cards that may be elsewhere: then machine.devices is ()."""
    assert machine.cards is not None
    return Planner(
        job,
        subject.info,
        subject.variant,
        machine.cards,
        subject.largest[:2],
        frames=subject.largest[2],
        cuts=cuts,
        host_bytes=machine.host_bytes,
        graphs_fault=why_no_graphs(job, len(subject.train), machine.devices),
    )


def _without_auto(job: JobConfig) -> JobConfig:
    """Where no planner decides, "auto" is what every machine can do."""
    quantize = "none" if job.model.quantize == "auto" else job.model.quantize
    optimizer = "adamw" if job.optimizer.name == "auto" else job.optimizer.name
    return _with(job, quantize, optimizer)


def _with(job: JobConfig, quantize: str, optimizer: str) -> JobConfig:
    model = replace(job.model, quantize=quantize)  # type: ignore[arg-type]
    return replace(job, model=model, optimizer=replace(job.optimizer, name=optimizer))


def refuse_block_settings(job: JobConfig) -> None:
    """Raises: ValueError for what is asked of blocks and cannot be done, and for two models in one."""
    if job.model.second_expert:
        raise ValueError(
            f"model.second_expert names {job.model.second_expert}, and one model is trained here; remove it, or give "
            "the job file to `devicebridge train`, which trains both experts"
        )
    if any(job.split.offloaded_blocks) and job.parallel.strategy == "data":
        raise ValueError(
            "split.offloaded_blocks asks for blocks that stream from host memory, and replicas hold the whole model on "
            "every card; remove one of the two"
        )
    if any(job.split.offloaded_blocks) and not job.train.gradient_checkpointing:
        raise ValueError(
            "split.offloaded_blocks asks for blocks that stream from host memory, which must be computed again for the "
            "backward, but train.gradient_checkpointing is false; remove one of the two"
        )
    if job.split.blocks_without_checkpointing and not job.train.gradient_checkpointing:
        raise ValueError(
            "split.blocks_without_checkpointing says which blocks gradient checkpointing passes over, but "
            "train.gradient_checkpointing is false, so all keep their activations; remove one of the two"
        )


def place_by_size(
    job: JobConfig,
    info: CheckpointInfo,
    variant: Variant,
    model: nn.Module,
    devices: Sequence[torch.device],
    resolution: int = 0,
    num_frames: int = 0,
) -> Placement:
    """Which block goes where, from sizes alone; model may be empty.

    Args:
        resolution, num_frames: of the largest samples in pixels, and of the longest, where the job's config does not
            say them.
    Raises: ValueError if it does not fit or the cuts are impossible.
    """
    blocks = block_names(model, info.family)
    element_size = getattr(torch, job.model.dtype).itemsize
    settings = job.model.quantize_settings
    if settings is not None:
        block_bytes, home_bytes = stored_bytes(model, info.family, blocks, element_size, settings)
    else:
        block_bytes, home_bytes = parameter_bytes(model, blocks, element_size)
    budgets = _budgets(job, devices)
    if asked_schedule(job, devices) == "replicas":
        return plan_replicas(blocks, devices, sum(block_bytes) + home_bytes, budgets)
    if job.split.balance == "manual":
        manual = plan_manual(blocks, list(devices), job.split.split_at)
        check_budgets(manual, block_bytes, home_bytes, budgets)
        return manual
    capacity = [budgets[device] for device in devices]
    cost: list[float] = list(map(float, block_bytes))
    home_cost = float(home_bytes)
    if job.split.balance == "time":
        latent = info.family.latent_of(variant)
        resolution = resolution or max(job.data.resolutions)
        num_frames = num_frames or max(job.data.frames or latent.frame_lengths)
        num_image_tokens = latent.num_tokens(resolution, resolution, num_frames)
        num_text_tokens = max(encoder.max_length for encoder in variant.text_encoders)
        cost = estimate_block_flops(model, info.family, num_image_tokens, num_text_tokens)
        home_cost = 0.0
        capacity = []  # every device is taken for equally fast
    return plan_placement(
        blocks,
        devices,
        block_cost=cost,
        home_cost=home_cost,
        block_bytes=block_bytes,
        home_bytes=home_bytes,
        budget_bytes=budgets,
        capacity=capacity if all(capacity) else (),
    )


def _budgets(job: JobConfig, devices: Sequence[torch.device]) -> dict[torch.device, int | None]:
    if job.split.memory_limit_gb:
        if len(job.split.memory_limit_gb) != len(devices):
            raise ValueError(
                f"memory_limit_gb has {len(job.split.memory_limit_gb)} values, but the devices are "
                f"{', '.join(map(str, devices))}; give one each"
            )
        return {device: int(gb * 1e9) for device, gb in zip(devices, job.split.memory_limit_gb, strict=True)}
    return {device: _usable_bytes(device) for device in devices}


def _usable_bytes(device: torch.device) -> int | None:
    """What is free, less a tenth on accelerators: a first guess at activations, LoRA and optimizer."""
    free = free_bytes(device)
    return free if free is None or device.type == "cpu" else int(0.9 * free)


def sizes_of(samples: Iterable[TrainingSample]) -> frozenset[tuple[int, ...]]:
    """Everything that tells the shapes of their batches apart."""
    return frozenset((*sample.bucket, sample.num_frames) for sample in samples)


def _shapes_to_compile(job: JobConfig, subject: Subject) -> int | None:
    """Of all batches of a job, at most; None if nothing is compiled."""
    if job.train.compile == "off":
        return None
    if job.lora.dora:
        _log.warning("blocks are not compiled: torch cannot trace PEFT's DoRA")
        return None
    sizes = min(job.train.batch_size, 2)  # the last batch of a bucket may be smaller
    alone = subject.alone - subject.train if sizes == 1 else subject.alone
    return len(subject.train) * sizes + len(alone)


def _has_graphs(job: JobConfig, subject: Subject, devices: Sequence[torch.device]) -> bool:
    if job.train.cuda_graphs == "off":
        return False
    fault = why_no_graphs(job, len(subject.train), devices)
    if fault:
        _log.warning("blocks are not replayed as CUDA graphs: %s", fault)
    return not fault
