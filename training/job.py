"""A whole job, from a config to a LoRA file: check, cache captions, cache latents, load, train, save.

Everything that can be refused is refused by check_job, which reads headers and images but no weights. The text encoder
and the VAE are gone before the transformer is loaded. The same functions serve the command line and the nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..assembly import Assembled, assemble_for_training
from ..caching.encode import Stopped, never
from ..caching.key import file_fingerprint, folder_fingerprint, settings_fingerprint
from ..caching.living import living_run
from ..caching.text_place import check_text_device
from ..families.spec import LatentSpec, Variant
from ..loading.checkpoint import CheckpointInfo, make_empty_transformer, read_checkpoint
from ..loading.lora_layouts import check_lora_layout
from ..parallel.devices import CPU, find_device, find_devices, free_bytes, memory_in_use, own_random_states, reset_peaks
from ..parallel.pipeline import Pipeline, Runner
from ..parallel.placement import (
    Placement,
    block_names,
    check_budgets,
    check_kept_blocks,
    check_swapped_blocks,
    estimate_block_flops,
    parameter_bytes,
    plan_manual,
    plan_placement,
    plan_replicas,
)
from ..parallel.replicas import Replica, Replicas
from ..patches.compile_blocks import remove_compiled
from ..patches.lora import resolve_targets
from ..patches.quantize import check_packages, refusal, stored_bytes
from .adapter import LoraHandle, apply_lora
from .batches import CachedSamples
from .calibration import CalibratedPlanner
from .cards import Card, cards_of
from .cautions import give_cautions
from .checkpoint import TrainingState, list_checkpoints
from .config import DataConfig, FolderConfig, JobConfig
from .data import BatchOrder, Sample, TrainingSample, dataset_fingerprint, scan_folders
from .encode_job import cache_job, cache_store
from .encoder_check import check_job_vae, check_text_encoder_files
from .events import EventLog, Listener
from .job_plan import JobPlan, component_folder, stock_reader, why_no_graphs
from .loop import Trainer, checkpoint_folder
from .lora_output import lora_file_tensors, save_lora, warn_of_losses
from .objective import make_noise_schedule
from .optimizer import make_optimizer
from .places import check_places
from .plan_request import make_square
from .plan_training import plan_training
from .plan_view import Comparison, compare, describe_comparison, describe_pace
from .planner import Planner, TrainingPlan, asked_schedule, largest_bucket
from .resume import as_decided, find_state, refuse_other_run
from .run_lock import run_lock
from .stock import EncodedSample, make_stock_reader, read_encoded_samples, refuse_condition, resolution_of

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
    read = _read(job, should_stop=should_stop)
    job, info, variant = read.job, read.info, read.variant
    schedule = make_noise_schedule(job.objective, info.family, variant)
    eval_samples: tuple[Sample, ...] = ()
    if job.evaluation.folder:
        latent = info.family.latent_of(variant)
        eval_samples = tuple(scan_folders(_evaluation_data(job), latent, should_stop))
    samples, encoded, model = read.samples, read.encoded, read.model
    _refuse_stills(variant, (*samples, *eval_samples), encoded)
    largest = read.largest
    training = None
    if is_to_train:
        training = _plan_on_cards(job, info, variant, largest, read.num_sizes, host_share=host_share)
    if training is None:
        job = _without_auto(job)
        sizes = (resolution_of(encoded, info.family.latent_of(variant)), largest[2]) if encoded else ()
        placement = plan_job_placement(job, info, variant, model, *sizes)
    else:
        job, placement = training.job, training.placement
    checked = JobPlan(job, info, variant, placement, schedule, samples, eval_samples, encoded, training, read.targets)
    plan = _with_tail(checked)
    check_kept_blocks(plan.job.split.kept_blocks, plan.placement)
    check_swapped_blocks(plan.job.split.swapped_blocks, plan.job.split.kept_blocks, plan.placement)
    _refuse_offload_of_host(plan)
    _check_tools(plan)
    if is_to_train:
        warn_of_losses(plan)
        check_places(job)
        give_cautions(plan)
    return plan


@dataclass(frozen=True)
class _Read:
    """What plan and training both go by: a job, its model without weights, its data.

    Args:
        targets: fqns of the linears that LoRA adapts.
        largest: height and width in pixels and frames of the samples that take the most.
    """

    job: JobConfig
    info: CheckpointInfo
    variant: Variant
    model: nn.Module
    targets: tuple[str, ...]
    samples: tuple[Sample, ...]
    encoded: tuple[EncodedSample, ...]

    @property
    def num_sizes(self) -> int:
        return len(_sizes_of(self.encoded or self.samples))

    @property
    def largest(self) -> tuple[int, int, int]:
        return _largest(self.samples, self.encoded, self.info.family.latent_of(self.variant))


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
    _refuse_block_settings(job)
    info = info or read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = info.variant or info.family.variants[0]
    if job.objective.guidance is not None and variant.training_guidance is None:
        raise ValueError(f"objective.guidance is set, but {variant.name} has no guidance input; remove the setting")
    model = make_empty_transformer(info)
    targets = tuple(resolve_targets(model, job.lora.targets or info.family.lora_targets))
    check_lora_layout(info.family, targets, job.output.lora_layout, job.lora.dora)
    latent = info.family.latent_of(variant)
    if not has_data:
        return _Read(job, info, variant, model, targets, (make_square(job.data, variant, latent),), ())
    encoded = _read_encoded(job, info, variant)
    samples = tuple(scan_folders(job.data, latent, should_stop)) if not encoded else ()
    return _Read(job, info, variant, model, targets, samples, encoded)


def _with_tail(plan: JobPlan) -> JobPlan:
    """The plan with the model's tail where its schedule needs it."""
    tail = () if plan.ahead is None else tuple(plan.family.tail)
    is_left_out = plan.ahead is None and not plan.placement.replicas
    if is_left_out and plan.job.pipeline.schedule in ("1f1b", "replicas"):
        _log.warning(
            "pipeline.schedule %s needs train.accumulation above 1 and several GPUs of one kind; left out",
            plan.job.pipeline.schedule,
        )
    return replace(plan, placement=replace(plan.placement, tail=tail))


def _refuse_block_settings(job: JobConfig) -> None:
    """Raises: ValueError for what is asked of blocks and cannot be done, and for two models in one."""
    if job.model.second_expert:
        raise ValueError(
            f"model.second_expert names {job.model.second_expert}, and one model is trained here; remove it, or give "
            "the job file to `devicebridge train`, which trains both experts"
        )
    if any(job.split.swapped_blocks) and job.pipeline.schedule == "replicas":
        raise ValueError(
            "split.swapped_blocks asks for blocks that stream from host memory, and replicas hold the whole model on "
            "every card; remove one of the two"
        )
    if any(job.split.swapped_blocks) and not job.train.gradient_checkpointing:
        raise ValueError(
            "split.swapped_blocks asks for blocks that stream from host memory, which must be computed again for the "
            "backward, but train.gradient_checkpointing is false; remove one of the two"
        )
    if job.split.kept_blocks and not job.train.gradient_checkpointing:
        raise ValueError(
            "split.kept_blocks says which blocks gradient checkpointing passes over, but train.gradient_checkpointing "
            "is false, so all keep their activations; remove one of the two"
        )


def _refuse_offload_of_host(plan: JobPlan) -> None:
    """Raises: ValueError where what is to wait in host memory is there anyway."""
    if plan.offloads and all(device == CPU for device in plan.placement.used_devices):
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


def _plan_on_cards(
    job: JobConfig,
    info: CheckpointInfo,
    variant: Variant,
    largest: tuple[int, int, int],
    num_sizes: int,
    devices: Sequence[torch.device] = (),
    is_cut: bool = True,
    host_share: int = 1,
) -> TrainingPlan | None:
    """What the planner chooses on this machine; None where it does not know a device's memory, as on a CPU.

    Args:
        largest: height and width in pixels and frames of the samples that take the most. num_sizes: of all.
        devices: of every block, where a run that is resumed must have them, or with is_cut False of every replica; ()
            leaves the choice to the planner.
        host_share: jobs that share the host's free memory.
    Raises: ValueError if nothing fits.
    """
    cards = cards_of(list(dict.fromkeys(devices)) or find_devices(job.split.devices))
    if cards is None:
        return None
    cuts = None
    if devices and is_cut:
        cuts = [index for index in range(1, len(devices)) if devices[index] != devices[index - 1]]
    host = _free_host_bytes(host_share)
    fault = why_no_graphs(job, num_sizes, [card.device for card in cards])
    planner = Planner(
        job, info, variant, cards, largest[:2], frames=largest[2], cuts=cuts, host_bytes=host, graphs_fault=fault
    )
    training = CalibratedPlanner(planner).plan()
    if training.warning:
        _log.warning("%s", training.warning)
    return training


def _without_auto(job: JobConfig) -> JobConfig:
    """Where no planner decides, "auto" is what every machine can do."""
    quantize = "none" if job.model.quantize == "auto" else job.model.quantize
    optimizer = "adamw" if job.optimizer.name == "auto" else job.optimizer.name
    return replace(job, model=replace(job.model, quantize=quantize), optimizer=replace(job.optimizer, name=optimizer))


def _free_host_bytes(host_share: int) -> int | None:
    free = free_bytes(CPU)
    return None if free is None else free // host_share


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
    known = list(cards) or _cards_here(read.job)
    if known is None:
        raise ValueError(
            "a plan was asked for this machine's cards, but there is none whose memory torch can tell; name cards "
            'with --cards, such as "2x24GB"'
        )
    height, width, frames = read.largest
    host = None if cards else _free_host_bytes(host_share)
    fault = why_no_graphs(read.job, read.num_sizes, () if cards else [card.device for card in known])
    planner = Planner(
        read.job,
        read.info,
        read.variant,
        known,
        (height, width),
        frames=frames,
        host_bytes=host,
        graphs_fault=fault,
    )
    return plan_training(planner) if cards else CalibratedPlanner(planner).plan("always" if may_measure else "never")


def _cards_here(job: JobConfig) -> list[Card] | None:
    try:
        return cards_of(find_devices(job.split.devices))
    except ValueError as error:
        raise ValueError(f'{error}. For a plan of cards that are elsewhere, name them: --cards "2x24GB"') from error


def _largest(samples: Sequence[Sample], encoded: Sequence[EncodedSample], latent: LatentSpec) -> tuple[int, int, int]:
    """Height and width in pixels and frames of the samples that take the most."""
    if encoded:
        side = resolution_of(encoded, latent)
        return side, side, max(sample.num_frames for sample in encoded)
    return largest_bucket(samples)


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


def run_identity(plan: JobPlan) -> dict[str, Any]:
    """Plain facts that a resumed run must share with the one it continues, beyond the config. Reads every image and
    samples of the weights."""
    return {
        "dataset": _dataset_identity(plan),
        "evaluation": dataset_fingerprint(plan.eval_samples) if plan.eval_samples else "",
        "model": [file_fingerprint(file) for file in plan.info.files],
        **_where(plan.placement),
    }


def _where(placement: Placement) -> dict[str, list[str]]:
    """Of a run's identity: the device of every block, and of every replica."""
    return {
        "placement": [str(device) for device in placement.devices],
        "replicas": [str(device) for device in placement.replicas],
    }


def _dataset_identity(plan: JobPlan) -> str:
    if plan.encoded:
        return settings_fingerprint([[sample.latents, sample.caption] for sample in plan.encoded])
    return dataset_fingerprint(plan.samples)


def _evaluation_data(job: JobConfig) -> DataConfig:
    return replace(job.data, folders=(FolderConfig(job.evaluation.folder),), caption_dropout=0.0)


def plan_job_placement(
    job: JobConfig, info: CheckpointInfo, variant: Variant, model: nn.Module, resolution: int = 0, num_frames: int = 0
) -> Placement:
    """Which block goes where, from sizes alone; model may be empty.

    Args:
        resolution, num_frames: of the largest samples in pixels, and of the longest, where the job's config does not
            say them.
    Raises: ValueError if it does not fit or the cuts are impossible.
    """
    devices = find_devices(job.split.devices)
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
        manual = plan_manual(blocks, devices, job.split.split_at)
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


def _budgets(job: JobConfig, devices: list[torch.device]) -> dict[torch.device, int | None]:
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


def _placed_as_before(plan: JobPlan, facts: Mapping[str, Any], host_share: int) -> JobPlan:
    """The plan with the cut, or the replicas, that the run to resume began with.

    Memory that is free today must not change it: dropout would be drawn elsewhere, and gradients summed in another
    order.

    Raises: ValueError if the job now asks for replicas by name and the run had none, or the other way round.
    """
    devices = tuple(map(find_device, facts["placement"]))
    replicas = tuple(map(find_device, facts.get("replicas", ())))
    job, now = plan.job, plan.placement
    if job.pipeline.schedule != "auto" and bool(replicas) != bool(now.replicas):
        had, asked = ("replicas", "one model over all cards") if replicas else ("one model over all cards", "replicas")
        raise ValueError(
            f'the run in {job.output.folder} was trained with {had}, and pipeline.schedule = "{job.pipeline.schedule}" '
            f'now asks for {asked}, which would not be the same run; set it to "auto" to resume, or start anew in '
            "another output folder"
        )
    if (devices, replicas) == (now.devices, now.replicas):
        return plan
    largest = _largest(plan.samples, plan.encoded, plan.family.latent_of(plan.variant))
    before = job
    if replicas:  # which a cut of today's would contradict
        split = replace(job.split, balance="bytes", split_at=())
        before = replace(job, pipeline=replace(job.pipeline, schedule="replicas"), split=split)
        _refuse_block_settings(before)
    training = _plan_on_cards(
        before,
        plan.info,
        plan.variant,
        largest,
        len(_sizes_of(plan.training_samples)),
        replicas or devices,
        is_cut=not replicas,
        host_share=host_share,
    )
    placement = replace(now, devices=devices, home=devices[0], tail=(), replicas=replicas)
    return _with_tail(replace(plan, placement=placement, training=training))


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
            plan = check_job(job, host_share=host_share, should_stop=should_stop)
        except Stopped as stopped:
            return TrainingResult("stopped", 0, None, {}, [], None, None, None, f"{stopped}; start the job again")
        identity = run_identity(plan)
        if state is not None:
            refuse_other_run(plan.job, identity, state)
            plan = _placed_as_before(plan, state.facts, host_share)
            identity |= _where(plan.placement)
        return _run(plan, identity, state, on_event, should_stop)


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
        events.emit("forecast", devices=compare(plan.training.forecast))
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
    if plan.ahead is None:
        return None
    return Pipeline(assembled.split.bridge, ahead=plan.ahead)


def _replica_of(assembled: Assembled) -> Replica:
    assert isinstance(assembled.adapter, LoraHandle)
    return Replica(assembled.model, assembled.split.home, tuple(assembled.adapter.parameters().values()))


def _shapes_to_compile(plan: JobPlan) -> int | None:
    if plan.job.train.compile == "off":
        return None
    if plan.job.lora.dora:
        _log.warning("blocks are not compiled: torch cannot trace PEFT's DoRA")
        return None
    return _num_shapes(plan)


def _has_graphs(plan: JobPlan) -> bool:
    if plan.job.train.cuda_graphs == "off":
        return False
    sizes = _sizes_of(plan.training_samples)
    fault = why_no_graphs(plan.job, len(sizes), plan.placement.used_devices)
    if fault:
        _log.warning("blocks are not replayed as CUDA graphs: %s", fault)
    return not fault


def _num_shapes(plan: JobPlan) -> int:
    """Of all batches of a job, at most."""
    train, alone = _sizes_of(plan.training_samples), _sizes_of(plan.eval_samples)
    sizes = min(plan.job.train.batch_size, 2)  # the last batch of a bucket may be smaller
    return len(train) * sizes + len(alone - train if sizes == 1 else alone)


def _sizes_of(samples: Iterable[TrainingSample]) -> set[tuple[int, ...]]:
    """Everything that tells the shapes of their batches apart."""
    return {(*sample.bucket, sample.num_frames) for sample in samples}


def assemble(plan: JobPlan) -> Assembled:
    """Load the model of a checked job onto its devices, with its LoRA."""
    job = plan.job
    return assemble_for_training(
        plan.info,
        plan.family,
        plan.placement,
        dtype=getattr(torch, job.model.dtype),
        quantize=job.model.quantize_settings,
        attach_adapter=lambda model: apply_lora(model, plan.family, job.lora, seed=job.train.seed),
        gradient_checkpointing=job.train.gradient_checkpointing,
        kept_blocks=plan.kept_blocks,
        swapped_blocks=plan.swapped_blocks,
        offloads=plan.offloads,
        compiled_shapes=_shapes_to_compile(plan),
        has_graphs=_has_graphs(plan),
        quantized_cache=Path(job.model.quantized_cache) if job.model.quantized_cache else None,
    )


def _conclude(plan: JobPlan, trainer: Trainer, is_finished: bool) -> TrainingResult:
    compared: Comparison = {}
    pace = ""
    if plan.training is not None:
        compared = compare(plan.training.forecast, memory_in_use(trainer.devices))
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
