"""A whole job, from a config to a LoRA file: check, cache captions, cache latents, load, train, save.

Everything that can be refused is refused by check_job, which reads headers and images but no weights. The text encoder
and the VAE are gone before the transformer is loaded. The same functions serve the command line and the nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..assembly import Assembled, assemble_for_training
from ..checkpoints.checkpoint import CheckpointInfo, make_empty_transformer, read_checkpoint
from ..checkpoints.lora_layouts import check_lora_layout
from ..config.job import DataConfig, FolderConfig, JobConfig
from ..data.samples import BatchOrder, Sample, dataset_fingerprint, scan_folders
from ..encoding.encode import Stopped, never
from ..encoding.key import file_fingerprint, folder_fingerprint, settings_fingerprint
from ..encoding.living import living_run
from ..encoding.text_place import check_text_device
from ..events import EventLog, Listener
from ..families.spec import LatentSpec, Variant
from ..parallel.devices import CPU, find_device, memory_in_use, own_random_states, reset_peaks
from ..parallel.local.data_parallel import Replica, Replicas
from ..parallel.local.pipeline import Pipeline, Runner
from ..parallel.placement import Placement, check_kept_blocks, check_swapped_blocks
from ..patches.compile_blocks import remove_compiled
from ..patches.lora import resolve_targets
from ..planning.calibration import Measuring
from ..planning.cards import Card
from ..planning.plan_training import TrainingPlan
from ..planning.report import Comparison, compare, describe_comparison, describe_pace
from ..planning.request import make_square
from ..quantization.quantize import check_packages, refusal
from ..training.adapter import LoraHandle, apply_lora
from ..training.batches import CachedSamples
from ..training.loop import Trainer, checkpoint_folder
from ..training.objective import make_noise_schedule
from ..training.optimizer import make_optimizer
from ..training.state import TrainingState, list_checkpoints
from .cautions import give_cautions
from .checked_job import JobPlan, component_folder, stock_reader
from .comfy_entries import EncodedSample, make_stock_reader, read_encoded_samples, refuse_condition, resolution_of
from .encode_job import cache_job, cache_store
from .encoder_check import check_job_vae, check_text_encoder_files
from .lora_output import lora_file_tensors, save_lora, warn_of_losses
from .places import check_places
from .resolve import Machine, Subject, find_machine, plan_on, refuse_block_settings, resolve, sizes_of
from .resume import as_decided, find_state, refuse_other_run
from .run_lock import run_lock

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """How a job ended.

    Args:
        status: "finished", or "stopped" before its last step.
        step: optimizer steps done.
        lora_path: the LoRA file, None if the job was stopped before training began.
        lora: its tensors as saved, on the CPU.
        losses: training loss of every step, resumed ones included.
        eval_before, eval_after: evaluation loss before the first and after the last step done, None without a folder.
        checkpoint: the newest full state, to resume from.
        resume_hint: how to continue; "" when finished.
        memory: a line per card, forecast against measured; () where nothing was forecast.
        pace: the same for the time of a step; "" where blocks were not timed.
    """

    status: str
    step: int
    lora_path: Path | None
    lora: dict[str, torch.Tensor]
    losses: list[float]
    eval_before: float | None
    eval_after: float | None
    checkpoint: Path | None
    resume_hint: str
    memory: tuple[str, ...] = ()
    pace: str = ""


def check_job(
    job: JobConfig, *, is_to_train: bool = True, host_share: int = 1, should_stop: Callable[[], bool] = never
) -> JobPlan:
    """Everything that can be refused before weights are loaded.

    Args:
        host_share: jobs that share the host's free memory.
        is_to_train: False for filling caches, while other processes may use the cards: nothing is forecast then.
    Raises: ValueError for a file that is no such model, a placement that does not fit, a dataset that cannot be read,
        or settings that contradict the model; Stopped when should_stop() became true while images are looked at.
    """
    return _settle(_read(job, should_stop=should_stop), None, is_to_train=is_to_train, host_share=host_share)


def _settle(
    read: _Read, earlier: Mapping[str, Any] | None, *, is_to_train: bool = True, host_share: int = 1
) -> JobPlan:
    """A job that was read, made into what will run; earlier: facts of the checkpoint that is resumed."""
    schedule = make_noise_schedule(read.job.objective, read.info.family, read.variant)
    _refuse_stills(read.variant, (*read.samples, *read.eval_samples), read.encoded)
    machine = find_machine(read.job.split.devices, host_share)
    resolved = resolve(read.job, read.subject, machine, earlier, is_to_train=is_to_train)
    plan = JobPlan(
        job=resolved.job,
        info=read.info,
        variant=read.variant,
        execution=resolved.execution,
        schedule=schedule,
        samples=read.samples,
        eval_samples=read.eval_samples,
        encoded=read.encoded,
        training=resolved.training,
        targets=read.targets,
    )
    check_kept_blocks(plan.job.split.kept_blocks, plan.placement)
    check_swapped_blocks(plan.job.split.swapped_blocks, plan.job.split.kept_blocks, plan.placement)
    _refuse_offload_of_host(plan)
    _check_tools(plan)
    if is_to_train:
        warn_of_losses(plan)
        check_places(plan.job)
        give_cautions(plan)
    return plan


@dataclass(frozen=True)
class _Read:
    """What plan and training both go by: a job, its model without weights, its data.

    Args:
        targets: fqns of the linears that LoRA adapts.
    """

    job: JobConfig
    info: CheckpointInfo
    variant: Variant
    model: nn.Module
    targets: tuple[str, ...]
    samples: tuple[Sample, ...]
    encoded: tuple[EncodedSample, ...] = ()
    eval_samples: tuple[Sample, ...] = ()

    @property
    def subject(self) -> Subject:
        latent = self.info.family.latent_of(self.variant)
        return Subject(
            self.info,
            self.variant,
            self.model,
            largest=_largest(self.samples, self.encoded, latent),
            is_encoded=bool(self.encoded),
            train=sizes_of(self.encoded or self.samples),
            alone=sizes_of(self.eval_samples),
        )


def _read(
    job: JobConfig,
    info: CheckpointInfo | None = None,
    *,
    has_data: bool = True,
    should_stop: Callable[[], bool] = never,
) -> _Read:
    """Headers and images of a job.

    Args:
        info: a model in place of the job's, whose files are not read then.
        has_data: False takes one square of the job's settings in place of its data.
    Raises: ValueError for settings that contradict each other or the model, or files that cannot be read.
    """
    refuse_block_settings(job)
    info = info or read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = info.variant or info.family.variants[0]
    if job.objective.guidance is not None and variant.training_guidance is None:
        raise ValueError(f"objective.guidance is set, but {variant.name} has no guidance input; remove the setting")
    model = make_empty_transformer(info)
    targets = tuple(resolve_targets(model, job.lora.targets or info.family.lora_targets))
    check_lora_layout(info.family, targets, job.output.lora_layout, job.lora.dora)
    latent = info.family.latent_of(variant)
    if not has_data:
        return _Read(job, info, variant, model, targets, (make_square(job.data, variant, latent),))
    encoded = _read_encoded(job, info, variant)
    samples = tuple(scan_folders(job.data, latent, should_stop)) if not encoded else ()
    evaluated = scan_folders(_evaluation_data(job), latent, should_stop) if job.evaluation.folder else ()
    return _Read(job, info, variant, model, targets, samples, encoded, tuple(evaluated))


def _refuse_offload_of_host(plan: JobPlan) -> None:
    """Raises: ValueError where what is to wait in host memory is there anyway."""
    if plan.execution.offloads and all(device == CPU for device in plan.placement.used_devices):
        raise ValueError(
            'train.offload_activations = "on" moves block inputs from GPUs to host memory, but the model is on the '
            'CPU, so they are there; set it to "off"'
        )


def _refuse_stills(variant: Variant, samples: Iterable[Sample], encoded: Sequence[EncodedSample]) -> None:
    """Raises: ValueError naming the single images, if the variant is given the first frame."""
    stills = dict.fromkeys(sample.path for sample in samples if sample.num_frames == 1)
    stills |= {f"sample {n}": None for n, sample in enumerate(encoded, start=1) if sample.num_frames == 1}
    if variant.condition != "none" and stills:
        names = ", ".join(list(stills)[:5]) + (f" and {len(stills) - 5} more" if len(stills) > 5 else "")
        raise ValueError(
            f"{variant.name} is given the first frame, so in a single image nothing is left to learn; take out these "
            f"{len(stills)}, or give clips and data.frames above 1: {names}"
        )


def plan_job(
    job: JobConfig,
    cards: Sequence[Card] = (),
    *,
    info: CheckpointInfo | None = None,
    has_data: bool = True,
    may_measure: bool = False,
    host_share: int = 1,
    should_stop: Callable[[], bool] = never,
) -> TrainingPlan:
    """How a job would use these cards, which need not exist; () takes this machine's. Reads headers and images only.

    Args:
        info, has_data: what need not be there either, see PlanRequest.
        may_measure: time blocks on this machine's cards, where an earlier job has not done so.
        host_share: jobs that share this machine's free memory.
    Raises: ValueError for a job that cannot be run as written, that does not fit, or a machine without cards.
    """
    if cards and may_measure:
        raise ValueError("cards that were named cannot be measured; leave out --calibrate, or --cards")
    read = _read(job, info, has_data=has_data, should_stop=should_stop)
    if cards:
        return plan_on(read.job, read.subject, Machine((), tuple(cards)), "never")
    try:
        machine = find_machine(read.job.split.devices, host_share)
    except ValueError as error:
        raise ValueError(f'{error}. For a plan of cards that are elsewhere, name them: --cards "2x24GB"') from error
    if machine.cards is None:
        raise ValueError(
            "a plan was asked for this machine's cards, but there is none whose memory torch can tell; name cards "
            'with --cards, such as "2x24GB"'
        )
    known: Measuring = "never" if read.job.split.calibrate == "off" else "known"
    return plan_on(read.job, read.subject, machine, "always" if may_measure else known)


def _largest(samples: Sequence[Sample], encoded: Sequence[EncodedSample], latent: LatentSpec) -> tuple[int, int, int]:
    """Height and width in pixels and frames of the samples that take the most."""
    if encoded:
        side = resolution_of(encoded, latent)
        return side, side, max(sample.num_frames for sample in encoded)
    return max(((*sample.bucket, sample.num_frames) for sample in samples), key=math.prod)


def _read_encoded(job: JobConfig, info: CheckpointInfo, variant: Variant) -> tuple[EncodedSample, ...]:
    if not job.data.encoded:
        return ()
    refuse_condition(variant)
    return read_encoded_samples(job.data.encoded, make_stock_reader(info.family, variant, info.config))


def _check_tools(plan: JobPlan) -> None:
    """What the later parts of a job will need: optimizer, devices, encoders, quantization.

    Raises: ValueError or RuntimeError as those parts would, hours later.
    """
    job = plan.job
    make_optimizer([nn.Parameter(torch.zeros(1))], job.optimizer)
    if job.cache.vae_device:
        find_device(job.cache.vae_device)
    if not plan.encoded:
        _check_encoders(plan)
    settings = job.model.quantize_settings
    if settings is not None:
        check_packages(settings)
        reason = refusal(settings, plan.placement.used_devices)
        if reason:
            raise ValueError(reason)


def _check_encoders(plan: JobPlan) -> None:
    """What captions and images will be encoded with, where that is the job's own matter."""
    cache = plan.job.cache
    if cache.text_source or cache.latent_source:
        stock_reader(plan)
    if cache.latent_source:
        refuse_condition(plan.variant)
    if not cache.text_source:
        encoders = component_folder(plan, cache.text_encoders, "text_encoders")
        dtype = getattr(torch, cache.dtype)
        for spec in plan.variant.text_encoders:
            check_text_encoder_files(encoders / spec.folder)
        check_text_device(cache.text_device, plan.variant.text_encoders, encoders, dtype, cache.text_quantize)
        for spec in plan.variant.text_encoders:
            folder_fingerprint(encoders / spec.folder)
            folder_fingerprint(encoders / spec.tokenizer_folder)
    if not cache.latent_source:
        check_job_vae(plan)


def _identity(read: _Read) -> dict[str, Any]:
    """Plain facts that a resumed run must share with the one it continues, beyond the config. Reads every image and
    samples of the weights."""
    return {
        "dataset": _dataset_identity(read),
        "evaluation": dataset_fingerprint(read.eval_samples) if read.eval_samples else "",
        "model": [file_fingerprint(file) for file in read.info.files],
    }


def _where(placement: Placement) -> dict[str, list[str]]:
    """Of a run's identity: the device of every block, and of every replica."""
    return {
        "placement": [str(device) for device in placement.devices],
        "replicas": [str(device) for device in placement.replicas],
    }


def _dataset_identity(read: _Read) -> str:
    if read.encoded:
        return settings_fingerprint([[sample.latents, sample.caption] for sample in read.encoded])
    return dataset_fingerprint(read.samples)


def _evaluation_data(job: JobConfig) -> DataConfig:
    return replace(job.data, folders=(FolderConfig(job.evaluation.folder),), caption_dropout=0.0)


def run_job(
    job: JobConfig,
    *,
    resume: bool = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
    host_share: int = 1,
) -> TrainingResult:
    """Run a job to its end, or until should_stop() is true between two steps; the state is saved in both cases, and
    where something breaks between two saves.

    Args:
        host_share: jobs that share the host's free memory.
    Raises: ValueError for a job that cannot be run as written, before weights are loaded; RuntimeError where another
        process runs in its output folder, or for what broke on the way, with what is saved.
    """
    with run_lock(Path(job.output.folder)):
        state = find_state(job, resume=resume)
        if state is not None:
            job = as_decided(job, state)
        try:
            read = _read(job, should_stop=should_stop)
        except Stopped as stopped:
            return TrainingResult("stopped", 0, None, {}, [], None, None, None, f"{stopped}; start the job again")
        identity = _identity(read)
        if state is not None:
            refuse_other_run(job, identity, state)
        plan = _settle(read, None if state is None else state.facts, host_share=host_share)
        return _run(plan, {**identity, **_where(plan.placement)}, state, on_event, should_stop)


def _run(
    plan: JobPlan,
    identity: dict[str, Any],
    state: TrainingState | None,
    on_event: Listener | None,
    should_stop: Callable[[], bool],
) -> TrainingResult:
    job = plan.job
    with (
        EventLog(Path(job.output.folder), on_event, tensorboard=job.output.tensorboard) as events,
        living_run(cache_store(job)) as living,
        ExitStack() as cleanup,
    ):
        try:
            train_data, eval_data = cache_job(plan, events, should_stop)
        except Stopped:
            hint = "captions and latents done so far are kept; start the job again to continue"
            events.emit("stopped", hint=hint)
            return TrainingResult("stopped", 0, None, {}, [], None, None, None, hint)
        living.needs(train_data.keys() | (eval_data.keys() if eval_data else set()))
        trainer = _make_trainer(plan, identity, train_data, eval_data, events, cleanup)
        with own_random_states(trainer.devices, job.train.seed):  # dropout draws from them
            if state is not None:
                trainer.restore(state)
            events.emit("phase", name="training")
            is_finished = trainer.run(should_stop)
        return _conclude(plan, trainer, is_finished)


def _make_trainer(
    plan: JobPlan,
    identity: dict[str, Any],
    train_data: CachedSamples,
    eval_data: CachedSamples | None,
    events: EventLog,
    cleanup: ExitStack,
) -> Trainer:
    job = plan.job
    events.emit("phase", name="loading", placement=plan.placement.describe())
    if plan.training is not None:
        events.emit("forecast", devices=compare(plan.training.devices))
    reset_peaks(plan.placement.used_devices)  # of the encoders
    assembled = assemble(plan)
    assert isinstance(assembled.adapter, LoraHandle)
    lora = assembled.adapter
    for each in (assembled, *assembled.replicas):
        cleanup.callback(each.split.stop_offload)
    cleanup.callback(remove_compiled, assembled.all_compiled)
    for graphs in assembled.all_graphs:
        cleanup.callback(graphs.remove)  # before what they are of
    if assembled.swap is not None:
        cleanup.callback(assembled.swap.remove)  # it holds pinned memory
    if assembled.quantized is not None:
        report = assembled.quantized
        events.emit("quantized", summary=report.summary(), weight_snr_db=dict(report.weight_snr_db))
    return Trainer(
        job=job,
        family=plan.family,
        variant=plan.variant,
        model=assembled.model,
        lora=lora,
        schedule=plan.schedule,
        train_data=train_data,
        eval_data=eval_data,
        order=BatchOrder(
            plan.training_samples,
            batch_size=job.train.batch_size,
            seed=job.train.seed,
            caption_dropout=job.data.caption_dropout,
        ),
        identity=identity,
        devices=plan.placement.used_devices,
        events=events,
        save_lora=lambda path: save_lora(plan, lora, path),
        runner=_make_runner(plan, assembled),
        compiled=assembled.all_compiled,
        graphs=assembled.all_graphs,
    )


def _make_runner(plan: JobPlan, assembled: Assembled) -> Runner | None:
    if assembled.replicas:
        return Replicas([_replica_of(each) for each in (assembled, *assembled.replicas)])
    if plan.execution.ahead is None:
        return None
    return Pipeline(assembled.split.bridge, ahead=plan.execution.ahead)


def _replica_of(assembled: Assembled) -> Replica:
    assert isinstance(assembled.adapter, LoraHandle)
    return Replica(assembled.model, assembled.split.home, tuple(assembled.adapter.parameters().values()))


def assemble(plan: JobPlan) -> Assembled:
    """Load the model of a checked job onto its devices, with its LoRA."""
    job = plan.job
    return assemble_for_training(
        plan.info, plan.execution, lambda model: apply_lora(model, plan.family, job.lora, seed=job.train.seed)
    )


def _conclude(plan: JobPlan, trainer: Trainer, is_finished: bool) -> TrainingResult:
    compared: Comparison = {}
    pace = ""
    if plan.training is not None:
        compared = compare(plan.training.devices, memory_in_use(trainer.devices))
        pace = describe_pace(plan.training, trainer.step_times_s)
        trainer.events.emit("forecast", trainer.step, plan.job.train.steps, devices=compared, pace=pace)
    path = save_lora(plan, trainer.lora, Path(plan.job.output.folder), must_change=is_finished)
    warn_of_losses(plan)
    trainer.events.emit("saved", trainer.step, plan.job.train.steps, path=str(path))
    hint = ""
    if not is_finished:
        hint = (
            f"stopped after step {trainer.step} of {plan.job.train.steps}; start the same job with resume to continue"
        )
        trainer.events.emit("stopped", trainer.step, plan.job.train.steps, hint=hint)
    steps = sorted(trainer.evaluations)
    return TrainingResult(
        status="finished" if is_finished else "stopped",
        step=trainer.step,
        lora_path=path,
        lora=lora_file_tensors(plan, trainer.lora),
        losses=list(trainer.losses),
        eval_before=trainer.evaluations[steps[0]] if steps else None,
        eval_after=trainer.evaluations.get(trainer.step),
        checkpoint=next(reversed(list_checkpoints(checkpoint_folder(plan.job))), None),
        resume_hint=hint,
        memory=tuple(describe_comparison(compared)),
        pace=pace,
    )
