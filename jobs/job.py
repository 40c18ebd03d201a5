"""A whole job, from its config to a LoRA file: run_job is the way from top to bottom. What can be refused is refused
before weights are loaded. Text encoders and VAE are gone before the transformer comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..assembly import Assembled, assemble_for_training, assemble_sharded
from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import weight_types
from ..config.job import JobConfig, Resume
from ..config.model import Strategy, shards_weights
from ..data.samples import BatchOrder
from ..events import EventLog, Listener
from ..parallel.devices import CPU, find_device, memory_in_use, own_random_states, reset_peaks
from ..parallel.local.data_parallel import DataParallel, Replica
from ..parallel.local.pipeline import Pipeline
from ..parallel.local.token_training import TokenModel, TokenTraining
from ..parallel.ranks.group import ALONE, AcrossRanks, Ranks
from ..parallel.runner import Runner
from ..patches.compile_blocks import remove_compiled
from ..planning.cards import Card
from ..planning.costs import latent_shape_of
from ..planning.plan import TrainingPlan, compare, describe_comparison, describe_pace, describe_time, parts_of
from ..quantization.quantize import describe_quantized
from ..runs.record import Recording, recorded_run
from ..sampling.draw import Decoder, make_drawing
from ..sampling.sampler import Sampler
from ..system.stopping import Requests, Stopped, never
from ..training.adapter import LoraHandle, apply_lora
from ..training.batches import CachedSamples
from ..training.compile_check import check_compiled
from ..training.loop import Trainer, checkpoint_folder
from ..training.objective import Objective, make_noise_schedule
from ..training.state import TrainingState, list_checkpoints
from .checked_job import JobPlan, ReadJob
from .checks import check_places, check_tools, give_cautions, refuse_overlaps, refuse_repeats, refuse_stills
from .encode_job import cache_job, cache_store
from .lora_output import lora_file_tensors, save_lora, warn_of_losses
from .ranks import (
    cached_once,
    facts_for_all,
    is_placed_anew,
    locked_folder,
    refuse_other_jobs,
    resolve_here,
    state_for_all,
    unless_stopped,
)
from .read_job import find_start, read_job, subject_of
from .resolve import Machine, find_machine, in_type_of_cards, plan_on
from .resume import TrainingResult, as_decided, find_identity, placement_facts


def plan_job(
    job: JobConfig,
    cards: Sequence[Card] = (),
    *,
    info: CheckpointInfo | None = None,
    has_data: bool = True,
    host_share: int = 1,
    should_stop: Callable[[], bool] = never,
) -> TrainingPlan:
    """How a job would use these cards, which need not exist; () takes this machine's. Reads headers and images only.
    info, has_data: see read_job. host_share: jobs that share this machine's free memory.
    Raises: ValueError for a job that cannot be run as written, that does not fit, or a machine without cards."""
    if shards_weights(strategy := job.parallel.requested):
        helps = 'plan with "auto", or start the job: what fits is said before the first step'
        raise ValueError(f'parallel.strategy = "{strategy}" is of several processes, and this plan of one; {helps}')
    read = read_job(job, info, has_data=has_data, should_stop=should_stop)
    if cards:
        return plan_on(read.job, subject_of(read), Machine((), tuple(cards)))
    try:
        machine = find_machine(read.job.split.devices, host_share)
    except ValueError as error:
        raise ValueError(f'{error}. For a plan of cards that are elsewhere, name them: --cards "2x24GB"') from error
    if machine.cards is None:
        raise ValueError('this machine has no card whose memory torch can tell; name some with --cards, as "2x24GB"')
    return plan_on(read.job, subject_of(read), machine)


def check_job(
    job: JobConfig,
    *,
    info: CheckpointInfo | None = None,
    is_to_train: bool = True,
    host_share: int = 1,
    should_stop: Callable[[], bool] = never,
    ranks: Ranks = ALONE,
) -> JobPlan:
    """Everything that can be refused before weights are loaded. info, host_share, ranks: see run_job. is_to_train:
    False for filling caches, while other processes may use the cards: nothing is forecast then.
    Raises: ValueError; Stopped when should_stop() became true while images are looked at."""
    read = read_job(job, info, should_stop=should_stop)
    return _resolve_and_check(read, None, host_share, is_to_train=is_to_train, ranks=ranks)


def _resolve_and_check(
    read: ReadJob,
    earlier: Mapping[str, Any] | None,
    host_share: int,
    *,
    is_to_train: bool = True,
    is_new: bool = True,
    is_changed: bool = False,
    ranks: Ranks = ALONE,
) -> JobPlan:
    """What will run. earlier: facts of the checkpoint that is resumed where it was. is_new: nothing is resumed.
    is_changed: what is resumed has other settings or data now."""
    if is_to_train and (is_new or is_changed):  # a run that was begun goes on as it is
        refuse_repeats(read.job)
        refuse_overlaps(read.job)
    schedule = make_noise_schedule(read.job.objective, read.info.family, read.variant)
    refuse_stills(read)
    resolved = resolve_here(read.job, subject_of(read), ranks, host_share, earlier, is_to_train=is_to_train)
    info, execution = read.info, resolved.execution
    if is_to_train:
        info, execution = in_type_of_cards(resolved, info, ranks)
    plan = JobPlan(
        **{**vars(read), "job": resolved.job, "info": info},
        execution=execution,
        schedule=schedule,
        training=resolved.training,
        start=find_start(read) if is_to_train and is_new else {},
    )
    check_tools(plan)
    if is_to_train:
        warn_of_losses(plan)
        check_places(plan.job)
        give_cautions(plan)
    return plan


def run_job(
    job: JobConfig,
    *,
    info: CheckpointInfo | None = None,
    resume: Resume = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
    host_share: int = 1,
    ranks: Ranks = ALONE,
) -> TrainingResult:
    """Run a job to its end, or until should_stop() is true between two steps, and save its state, also where it breaks.
    info: the job's model, if it was read already, as only ComfyUI can read its own. resume: see go_on. host_share: jobs
    that share the host's free memory. ranks: the processes that run this job, each calling this; the first one writes,
    tells and stops for all. Raises: ValueError for a job that cannot be run as written, before weights are loaded;
    RuntimeError where another process runs in its output folder, or for what broke on the way, with what is saved."""
    folder, given = Path(job.output.folder), job
    requests = Requests(folder)

    def own_stop() -> bool:
        return should_stop() or requests.is_asked("stop")

    ranks = ranks.stopped_by(own_stop)
    with locked_folder(folder, ranks):
        with ranks.doing(is_long=True):  # encoding has no limit: nobody knows how long a pass of captions takes
            state = state_for_all(job, ranks, resume=resume)
            if state is not None:
                job = as_decided(job, state)
            try:
                read = unless_stopped(ranks, lambda: read_job(job, info, should_stop=own_stop))
            except Stopped as stopped:
                return TrainingResult("stopped", resume_hint=f"{stopped}; start the job again")
            identity = ranks.on_all(lambda: find_identity(read))
            refuse_other_jobs(given, identity, ranks, is_new=state is None)
            begun = {} if state is None else facts_for_all(read, identity, state, ranks, resume=resume)
            state = state and replace(state, facts=begun)
            facts = None if state is None or is_placed_anew(state, ranks) else begun
            new = {"is_new": state is None, "is_changed": "keeps_optimizer" in begun}
            plan = ranks.on_all(lambda: _resolve_and_check(read, facts, host_share, ranks=ranks, **new))
        identity |= placement_facts(plan.placement) | ({"ranks": ranks.count} if ranks.is_launched else {})
        own_devices = list(used_devices(plan.job, plan.placement.used_devices))
        devices = tuple(dict.fromkeys(name for each in ranks.gather(own_devices) for name in each))
        with (
            EventLog(folder if ranks.is_first else None, on_event, tensorboard=job.output.tensorboard) as events,
            recorded_run(folder, given, devices) if ranks.is_first else nullcontext(Recording()) as recording,
        ):
            if what := begun.get("what"):
                events.emit("continued", state.step if state else 0, job.train.steps, what=what)
            result = _train(plan, identity, state, events, ranks)
            recording.status = "finished" if result.status == "finished" else "stopped"
            return result


def used_devices(job: JobConfig, of_blocks: Iterable[torch.device]) -> tuple[str, ...]:
    """Every device that a job was given or names by number: those of its blocks first, then those of its encoders."""
    named = (job.cache.text_device, job.cache.vae_device)
    encoders = (name for name in named if ":" in name)
    return tuple(dict.fromkeys([*map(str, of_blocks), *encoders]))


def _train(
    plan: JobPlan, identity: dict[str, Any], state: TrainingState | None, events: EventLog, ranks: Ranks
) -> TrainingResult:
    """Encode, assemble, train, and write the LoRA file."""
    with cache_store(plan.job).living_run(), ExitStack() as cleanup:
        try:
            data = cached_once(bool(plan.encoded), ranks, lambda: cache_job(plan, events, ranks.is_stop_asked))
        except Stopped:
            hint = "captions and latents done so far are kept; start the job again to continue"
            events.emit("stopped", hint=hint)
            return TrainingResult("stopped", resume_hint=hint)
        cleanup.enter_context(ranks.doing(is_long=True))  # around steps, pictures and saves, which have other limits
        trainer = build_trainer(plan, identity, data, events, cleanup, ranks)
        with own_random_states(trainer.devices, plan.job.train.seed):  # dropout draws from them
            if state is not None:
                trainer.restore(state)
            events.emit("phase", name="training")
            is_finished = trainer.run(ranks.should_stop, check_compiled)
        return _conclude(plan, trainer, is_finished)


def _conclude(plan: JobPlan, trainer: Trainer, is_finished: bool) -> TrainingResult:
    memory, pace, hint, total = list[str](), "", "", plan.job.train.steps
    if plan.training is not None:
        compared = compare(plan.training.devices, memory_in_use(trainer.devices))
        memory, pace = describe_comparison(compared), describe_pace(plan.training, trainer.step_times_s)
        trainer.events.emit("forecast", trainer.step, total, devices=compared, pace=pace)
    path = Path(plan.job.output.folder)
    with trainer.as_written():
        if trainer.ranks.is_first:
            path = save_lora(plan, trainer.lora, path, must_change=is_finished)
        lora = lora_file_tensors(plan, trainer.lora)
    warn_of_losses(plan)
    trainer.events.emit("saved", trainer.step, total, path=str(path))
    if not is_finished:
        hint = f"stopped after step {trainer.step} of {total}; start the same job with resume to continue"
        trainer.events.emit("stopped", trainer.step, total, hint=hint)
    steps = sorted(trainer.evaluations)
    return TrainingResult(
        status="finished" if is_finished else "stopped",
        step=trainer.step,
        lora_path=path,
        lora=lora,
        losses=list(trainer.losses),
        eval_before=trainer.evaluations[steps[0]] if steps else None,
        eval_after=trainer.evaluations.get(trainer.step),
        checkpoint=next(reversed(list_checkpoints(checkpoint_folder(plan.job))), None),
        resume_hint=hint,
        memory=tuple(memory),
        pace=pace,
    )


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
    if (settings := plan.execution.quantize) is not None:
        text, _ = describe_quantized(plan.model, plan.family, settings, weight_types(plan.model, plan.execution.dtype))
        events.emit("quantized", summary=text)
    assembled = _assemble(plan, ranks, cleanup)
    lora = assembled.adapter
    for each in assembled.parts if plan.start else ():
        each.adapter.start_from(plan.start, job.lora.strength)
    compiled = assembled.all_compiled  # on all ranks or on none: all compare their blocks before the first step
    if ranks.any(not compiled):
        remove_compiled(compiled)
        compiled = ()
    runner = make_runner(plan.execution.strategy, assembled, plan.execution.ahead)
    if ranks.is_launched:
        shares = shards_weights(plan.execution.strategy)
        runner = AcrossRanks(runner, list(lora.parameters().values()), ranks, job.train.seed, in_lockstep=shares)
    pins = plan.placement.main_device.type == "cuda"
    trainer = Trainer(
        job=job,
        objective=Objective(job.objective, plan.family, plan.variant, plan.schedule, plan.execution.dtype, pins),
        runner=runner,
        lora=lora,
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
        ranks=ranks,
    )
    trainer.samples = make_sampler(plan, trainer)
    cleanup.callback(setattr, trainer, "samples", None)  # which holds the trainer
    return trainer


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


def make_sampler(plan: JobPlan, trainer: Trainer) -> Sampler | None:
    """What draws a job's pictures by the model that trains; None if it has none."""
    job, family, variant = plan.job, plan.family, plan.variant
    if not job.samples.prompts:
        return None
    size = plan.picture_size
    wanted = find_device(job.cache.vae_device) if job.cache.vae_device else plan.placement.main_device
    limits: dict[torch.device, int] = {}  # where nobody forecasts, or the CPU is to decode
    if plan.training is not None and wanted != CPU:
        reserved = {find_device(each.device): each.reserved for each in plan.training.devices}
        limits = {device: reserved[device] for device in sorted(reserved, key=lambda device: device != wanted)}
    shape = () if size is None else latent_shape_of(plan.info, variant, size[:2], size[2])
    decoder = Decoder(family, variant, plan.samples_vae, getattr(torch, job.cache.dtype), limits)
    return Sampler(trainer, make_drawing(job, family, variant), shape, decoder)


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
        Replica(each.model, each.split.main_device, tuple(each.adapter.parameters().values()))
        for each in assembled.parts
    ]
