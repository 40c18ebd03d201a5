"""A checked job made into a Trainer: its model on its devices, with LoRA, runner and data."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..assembly import Assembled, assemble_for_training, assemble_sharded
from ..config.model import Strategy, shards_weights
from ..data.samples import BatchOrder
from ..events import EventLog
from ..parallel.devices import reset_peaks
from ..parallel.local.data_parallel import DataParallel, Replica
from ..parallel.local.pipeline import Pipeline
from ..parallel.local.token_training import TokenModel, TokenTraining
from ..parallel.ranks.across import AcrossRanks
from ..parallel.ranks.group import ALONE, Ranks
from ..parallel.runner import Runner
from ..patches.compile_blocks import remove_compiled
from ..planning.plan import compare, describe_time, parts_of
from ..system.stopping import Requests
from ..training.adapter import LoraHandle, apply_lora
from ..training.batches import CachedSamples
from ..training.loop import Trainer
from .checked_job import JobPlan
from .lora_output import save_lora
from .samples import make_sampler


def build_trainer(
    plan: JobPlan,
    identity: dict[str, Any],
    data: tuple[CachedSamples, CachedSamples | None],
    events: EventLog,
    cleanup: ExitStack,
    ranks: Ranks = ALONE,
) -> Trainer:
    """Load the model and put around it what a training needs. identity: facts that a resumed run must share. data: to
    train on and to evaluate with. cleanup: is given what must be undone before the model is dropped."""
    job = plan.job
    events.emit("phase", name="loading", placement=plan.placement.describe(), blocks=plan.placement.runs())
    if plan.training is not None:
        parts = {device.device: parts_of(device) for device in plan.training.devices}
        pace = (time := describe_time(plan.training, job.train.steps)) and f"step: {time}"
        events.emit("forecast", devices=compare(plan.training.devices), parts=parts, pace=pace)
    reset_peaks(plan.placement.used_devices)  # of the encoders
    assembled = _assemble(plan, ranks, cleanup)
    if (report := assembled.quantized) is not None:
        events.emit("quantized", summary=report.summary())
    lora = _lora_of(assembled)
    for each in assembled.parts if plan.start else ():
        _lora_of(each).start_from(plan.start, job.lora.strength)
    compiled = assembled.all_compiled  # on all ranks or on none: all compare their blocks before the first step
    if ranks.any(not compiled):
        remove_compiled(compiled)
        compiled = ()
    runner = make_runner(plan.execution.strategy, assembled, plan.execution.ahead)
    if ranks.is_launched:
        shares = shards_weights(plan.execution.strategy)
        runner = AcrossRanks(runner, list(lora.parameters().values()), ranks, job.train.seed, in_lockstep=shares)
    return Trainer(
        job=job,
        family=plan.family,
        variant=plan.variant,
        runner=runner,
        lora=lora,
        schedule=plan.schedule,
        train_data=data[0],
        eval_data=data[1],
        order=BatchOrder(
            plan.training_samples,
            batch_size=job.train.batch_size,
            seed=job.train.seed,
            caption_dropout=job.data.caption_dropout,
        ),
        identity=identity,
        devices=plan.placement.used_devices,
        events=events,
        save_lora=partial(save_lora, plan, lora),
        compiled=compiled,
        is_asked=lambda what: ranks.from_first(lambda: Requests(Path(job.output.folder)).take(what)),
        samples=make_sampler(plan, assembled, runner, data[0], events, ranks),
        ranks=ranks,
        dtype=plan.execution.dtype,
    )


def _assemble(plan: JobPlan, ranks: Ranks, cleanup: ExitStack) -> Assembled:
    """The model on its devices, with LoRA."""
    job, execution = plan.job, plan.execution

    def attach(model: nn.Module) -> LoraHandle:
        if job.lora.text_encoder:
            host, cache = plan.family.host, job.cache
            assert host is not None
            files, kind, name = cache.stock_clip, cache.stock_clip_type, cache.text_source
            host.attach_text_encoders(model, files, kind, job.model.path, name, plan.placement.main_device)
        return apply_lora(model, plan.family, job.lora, seed=job.train.seed)

    if ranks.place.local_rank and execution.quantized_cache is not None:  # the first one of the machine fills it
        execution = replace(execution, quantized_cache=None)
    if shards_weights(execution.strategy):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(ranks.devices[0].type, (ranks.count,), mesh_dim_names=("shard",))
        assembled = assemble_sharded(plan.info, execution, attach, mesh)
    else:
        assembled = assemble_for_training(plan.info, execution, attach)
    for each in assembled.parts:  # what is registered last is undone first
        cleanup.callback(each.split.stop_offload)
    cleanup.callback(remove_compiled, assembled.all_compiled)
    for each in assembled.parts:
        if each.weight_offload is not None:
            cleanup.callback(each.weight_offload.remove)  # the first one's, which is last, holds pinned memory
    return assembled


def make_runner(strategy: Strategy, assembled: Assembled, ahead: int | None = None) -> Runner:
    """What computes the microbatches. ahead: of a pipeline."""
    match strategy:
        case "none" | "fsdp":
            return Runner(assembled.model, assembled.split.main_device)
        case "pipeline":
            assert ahead is not None
            return Pipeline(assembled.model, assembled.split.bridge, ahead=ahead)
        case "data":
            return DataParallel(_replicas_of(assembled))
        case "tokens":
            assert isinstance(assembled.model, TokenModel)
            return TokenTraining(assembled.model, _replicas_of(assembled))


def _replicas_of(assembled: Assembled) -> list[Replica]:
    return [
        Replica(each.model, each.split.main_device, tuple(_lora_of(each).parameters().values()))
        for each in assembled.parts
    ]


def _lora_of(assembled: Assembled) -> LoraHandle:
    assert isinstance(assembled.adapter, LoraHandle)
    return assembled.adapter
