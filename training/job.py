"""A whole job, from a config to a LoRA file: check, cache captions, cache latents, load, train, save.

Everything that can be refused is refused by check_job, which reads headers and images but no weights. The text encoder
and the VAE are gone before the transformer is loaded. The same functions serve the command line and the nodes.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..assembly import Assembled, assemble_for_training
from ..caching.encode import (
    FolderLatents,
    ImageRequest,
    Stopped,
    fill_images,
    fill_texts,
    folder_texts,
    image_keys,
    never,
    text_entries,
)
from ..caching.encoded import store_of_encoded
from ..caching.key import file_fingerprint, folder_fingerprint, settings_fingerprint
from ..caching.sources import LatentSource, TextSource
from ..caching.store import CacheStore
from ..caching.text_place import check_text_device
from ..caching.vae import find_vae
from ..families.spec import LatentSpec, ModelFamily, Variant
from ..files import save_tensors_atomically
from ..loading.checkpoint import CheckpointInfo, make_empty_transformer, read_checkpoint
from ..loading.lora_file import check_original_layout, lora_to_diffusers, lora_to_original
from ..parallel.block_split import BlockSplit
from ..parallel.devices import (
    find_device,
    find_devices,
    free_bytes,
    memory_in_use,
    own_random_states,
    release_cached_memory,
    reset_peaks,
)
from ..parallel.pipeline import Pipeline
from ..parallel.placement import (
    Placement,
    block_names,
    check_budgets,
    estimate_block_flops,
    parameter_bytes,
    plan_manual,
    plan_placement,
)
from ..parallel.schedule import Kind
from ..patches.lora import resolve_targets
from ..patches.quantize import check_packages, refusal, stored_bytes
from ..version import VERSION
from .adapter import LoraHandle, apply_lora
from .batches import CachedSamples
from .cards import Card, cards_of
from .checkpoint import TrainingState, list_checkpoints, load_checkpoint
from .config import DataConfig, FolderConfig, JobConfig, differing_keys, job_to_dict, make_job
from .data import BatchOrder, Sample, TrainingSample, dataset_fingerprint, scan_folders
from .events import EventLog, Listener
from .loop import Trainer, checkpoint_folder
from .objective import NoiseSchedule, make_noise_schedule
from .optimizer import make_optimizer
from .pace import Pace
from .plan_view import Comparison, compare, describe_comparison
from .planner import Planner, TrainingPlan, asked_schedule, largest_bucket, plan_training
from .stock import (
    NO_ENCODERS,
    EncodedSample,
    StockEncoders,
    StockReader,
    make_stock_reader,
    read_encoded_samples,
    refuse_condition,
    refuse_missing,
    refuse_unfit_latents,
    refuse_unfit_texts,
    resolution_of,
    stock_latents,
    stock_texts,
)

_log = logging.getLogger(__name__)

CachePart = Literal["captions", "latents"]
CACHE_PARTS: tuple[CachePart, ...] = ("captions", "latents")


@dataclass(frozen=True)
class JobPlan:
    """A checked job: what will be loaded where, and what it will be trained on.

    Args:
        job: without "auto" for what the planner decides.
        samples: images and clips; () where the dataset arrived encoded.
        encoded: then, its samples.
        training: what the planner chose; None on machines it knows nothing of.
    """

    job: JobConfig
    info: CheckpointInfo
    variant: Variant
    placement: Placement
    schedule: NoiseSchedule
    samples: tuple[Sample, ...]
    eval_samples: tuple[Sample, ...]
    encoded: tuple[EncodedSample, ...] = ()
    training: TrainingPlan | None = None

    @property
    def kept_blocks(self) -> tuple[int, ...]:
        """Per device, how many of its last blocks keep their activations."""
        return self.job.split.kept_blocks if self.training is None else self.training.kept_blocks

    @property
    def pipeline(self) -> tuple[Kind, int] | None:
        """Schedule and how far ahead; None for one micro-batch at a time."""
        if self.training is None:
            kind = asked_schedule(self.job, len(self.placement.used_devices))
            return None if kind is None else (kind, self.job.pipeline.ahead)
        setting = self.training.setting
        return None if setting.schedule == "none" else (setting.schedule, setting.ahead)

    @property
    def family(self) -> ModelFamily:
        return self.info.family

    @property
    def training_samples(self) -> tuple[TrainingSample, ...]:
        """Either kind."""
        return self.encoded or self.samples

    @property
    def resolution(self) -> int:
        """Of the largest images, in pixels along a square's side."""
        if self.encoded:
            return resolution_of(self.encoded, self.family.latent_of(self.variant))
        return max(self.job.data.resolutions)


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


def check_job(job: JobConfig, *, is_to_train: bool = True) -> JobPlan:
    """Everything that can be refused before weights are loaded.

    Args:
        is_to_train: False for filling caches, while other processes may use the cards: nothing is forecast then.
    Raises: ValueError for a file that is no such model, a placement that does not fit, a dataset that cannot be read,
        or settings that contradict the model.
    """
    info = read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = info.variant or info.family.variants[0]
    if job.objective.guidance is not None and variant.training_guidance is None:
        raise ValueError(f"objective.guidance is set, but {variant.name} has no guidance input; remove the setting")
    schedule = make_noise_schedule(job.objective, info.family, variant)
    model = make_empty_transformer(info)
    targets = resolve_targets(model, job.lora.targets or info.family.lora_targets)
    if job.output.lora_layout == "original":
        check_original_layout(info.family, targets, job.lora.dora)
    latent = info.family.latent_of(variant)
    encoded = _read_encoded(job, info, variant)
    samples = tuple(scan_folders(job.data, latent)) if not encoded else ()
    eval_samples: tuple[Sample, ...] = ()
    if job.evaluation.folder:
        eval_samples = tuple(scan_folders(_evaluation_data(job), latent))
    _refuse_stills(variant, (*samples, *eval_samples), encoded)
    largest = _largest(samples, encoded, latent)
    training = _plan_on_cards(job, info, variant, largest) if is_to_train else None
    if training is None:
        job = _without_auto(job)
        sizes = (resolution_of(encoded, latent), largest[2]) if encoded else ()
        placement = plan_job_placement(job, info, variant, model, *sizes)
    else:
        job, placement = training.job, training.placement
    plan = JobPlan(job, info, variant, placement, schedule, samples, eval_samples, encoded, training)
    if plan.pipeline is not None:
        plan = replace(plan, placement=replace(placement, tail=tuple(info.family.tail)))
    _check_tools(plan)
    return plan


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
    devices: Sequence[torch.device] = (),
) -> TrainingPlan | None:
    """What the planner chooses on this machine; None where it does not know a device's memory, as on a CPU.

    Args:
        largest: height and width in pixels and frames of the samples that take the most.
        devices: of every block, where a run that is resumed must have them; () leaves the cut to the planner.
    Raises: ValueError if nothing fits.
    """
    cards = cards_of(list(dict.fromkeys(devices)) or find_devices(job.split.devices))
    if cards is None:
        return None
    cuts = [index for index in range(1, len(devices)) if devices[index] != devices[index - 1]] if devices else None
    training = plan_training(Planner(job, info, variant, cards, largest[:2], frames=largest[2], cuts=cuts))
    if training.warning:
        _log.warning("%s", training.warning)
    return training


def _without_auto(job: JobConfig) -> JobConfig:
    """Where no planner decides, "auto" is what every machine can do."""
    quantize = "none" if job.model.quantize == "auto" else job.model.quantize
    optimizer = "adamw" if job.optimizer.name == "auto" else job.optimizer.name
    return replace(job, model=replace(job.model, quantize=quantize), optimizer=replace(job.optimizer, name=optimizer))


def plan_job(job: JobConfig, cards: Sequence[Card] = ()) -> TrainingPlan:
    """How a job would use these cards, which need not exist; () takes this machine's. Reads headers and images only.

    Raises: ValueError for a job that cannot be run as written, that does not fit, or a machine without cards.
    """
    info = read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = info.variant or info.family.variants[0]
    latent, encoded = info.family.latent_of(variant), _read_encoded(job, info, variant)
    samples = () if encoded else scan_folders(job.data, latent)
    known = list(cards) or cards_of(find_devices(job.split.devices))
    if known is None:
        raise ValueError(
            "a plan was asked for this machine's cards, but there is none whose memory torch can tell; name cards "
            'with --cards, such as "24GB,24GB"'
        )
    height, width, frames = _largest(samples, encoded, latent)
    return plan_training(Planner(job, info, variant, known, (height, width), frames=frames))


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
        _stock_reader(plan)
    if cache.latent_source:
        refuse_condition(plan.variant)
    if not cache.text_source:
        encoders = _component_folder(plan, cache.text_encoders, "text_encoders")
        dtype = getattr(torch, cache.dtype)
        check_text_device(cache.text_device, plan.variant.text_encoders, encoders, dtype, cache.text_quantize)
        for spec in plan.variant.text_encoders:
            folder_fingerprint(encoders / spec.folder)
            folder_fingerprint(encoders / spec.tokenizer_folder)
    if not cache.latent_source:
        find_vae(_vae_path(plan))


def _stock_reader(plan: JobPlan) -> StockReader:
    return make_stock_reader(plan.family, plan.variant, plan.info.config)


def _vae_path(plan: JobPlan) -> Path:
    setting = plan.job.cache.vae
    return Path(setting) if setting else _component_folder(plan, "", "vae") / "vae"


def run_identity(plan: JobPlan) -> dict[str, Any]:
    """Plain facts that a resumed run must share with the one it continues, beyond the config. Reads every image and
    samples of the weights."""
    return {
        "dataset": _dataset_identity(plan),
        "evaluation": dataset_fingerprint(plan.eval_samples) if plan.eval_samples else "",
        "model": [file_fingerprint(file) for file in plan.info.files],
        "placement": [str(device) for device in plan.placement.devices],
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


def cache_store(job: JobConfig) -> CacheStore:
    """Where the job keeps its captions and latents."""
    if job.data.encoded:
        return store_of_encoded(job.data.encoded)
    return CacheStore(Path(job.cache.folder) if job.cache.folder else Path(job.output.folder) / "cache")


def cache_job(
    plan: JobPlan,
    events: EventLog,
    should_stop: Callable[[], bool] = never,
    encoders: StockEncoders = NO_ENCODERS,
) -> tuple[CachedSamples, CachedSamples | None]:
    """Compute the captions and latents that the cache does not hold yet; returns training and evaluation data.

    Args:
        encoders: those that cache.text_source and cache.latent_source name, if something may have to be computed.
    Raises: what the fill functions raise; ValueError for entries that do not fit the model.
    """
    if plan.encoded:
        return _encoded_data(plan), None
    text_keys = fill_captions(plan, events, should_stop, encoders)
    latent_keys = fill_latents(plan, events, should_stop, encoders)
    store, settings = cache_store(plan.job), plan.job.cache
    varying = frozenset(spec.output for spec in plan.variant.text_encoders if spec.has_varying_length)
    readers: dict[str, Any] = {}
    if settings.text_source:
        reader = _stock_reader(plan)
        readers["read_text"] = reader.read_text
        can_pad = reader.comfy.states in varying  # and make_inputs reads the mask
        refuse_unfit_texts(reader, store, text_keys, frozenset() if can_pad else _captions_in_batches(plan))
    if settings.latent_source:
        readers["read_latents"] = _stock_reader(plan).read_latents
        refuse_unfit_latents(_stock_reader(plan), store, latent_keys)

    def cached(samples: tuple[Sample, ...]) -> CachedSamples:
        keys = [latent_keys[sample.image_request()] for sample in samples]
        tokens_per_cell = plan.family.latent_of(plan.variant).num_tokens_per_cell
        return CachedSamples(
            store,
            samples,
            keys,
            text_keys,
            plan.job.data.use_masks,
            tokens_per_cell,
            varying,
            gives_first_latents=_gives_first_latents(plan),
            **readers,
        )

    return cached(plan.samples), cached(plan.eval_samples) if plan.eval_samples else None


def _captions_in_batches(plan: JobPlan) -> frozenset[str]:
    """Captions that may have to share a batch."""
    if plan.job.train.batch_size == 1:
        return frozenset()
    dropped = {""} if plan.job.data.caption_dropout else set()
    return frozenset(dropped | {sample.caption for sample in plan.samples})


def _encoded_data(plan: JobPlan) -> CachedSamples:
    store = cache_store(plan.job)
    refuse_missing(plan.encoded, store)
    reader = _stock_reader(plan)
    return CachedSamples(
        store,
        plan.encoded,
        [sample.latents for sample in plan.encoded],
        {sample.caption: sample.caption for sample in plan.encoded},
        use_masks=False,
        tokens_per_cell=plan.family.latent_of(plan.variant).num_tokens_per_cell,
        gives_first_latents=_gives_first_latents(plan),
        read_latents=reader.read_latents,
        read_text=reader.read_text,
    )


def _gives_first_latents(plan: JobPlan) -> bool:
    return plan.variant.condition == "first_latents"


def fill_captions(
    plan: JobPlan,
    events: EventLog,
    should_stop: Callable[[], bool] = never,
    encoders: StockEncoders = NO_ENCODERS,
    *,
    not_before_s: float = 0.0,
) -> dict[str, str]:
    """Compute the captions that the cache does not hold yet, the text encoders being freed before this returns.

    Args:
        not_before_s: entries written earlier than this, as time.time() counts, are computed again; 0 for none.
    Returns: caption -> entry; {} for a dataset that arrived encoded.
    Raises: Stopped when should_stop() became true; OSError naming the file if the folder cannot be written. What was
        done stays in the cache.
    """
    if plan.encoded:
        return {}
    events.emit("phase", name="captions")
    pace = Pace()
    return fill_texts(
        _captions(plan),
        _text_sources(plan, encoders),
        cache_store(plan.job),
        _tell_progress(events, pace),
        should_stop,
        not_before_s=not_before_s,
        on_begin=pace.restart,
    )


def fill_latents(
    plan: JobPlan,
    events: EventLog,
    should_stop: Callable[[], bool] = never,
    encoders: StockEncoders = NO_ENCODERS,
    *,
    not_before_s: float = 0.0,
) -> dict[ImageRequest, str]:
    """As fill_captions, for the images; the VAE is freed before this returns.

    Raises: also ValueError naming the images that cannot be read, when all others are done.
    """
    if plan.encoded:
        return {}
    events.emit("phase", name="latents")
    pace = Pace()
    latent_keys = fill_images(
        _image_requests(plan),
        _latent_source(plan, encoders),
        cache_store(plan.job),
        _tell_progress(events, pace),
        should_stop,
        not_before_s=not_before_s,
        on_begin=pace.restart,
    )
    release_cached_memory()
    return latent_keys


def _text_sources(plan: JobPlan, encoders: StockEncoders = NO_ENCODERS) -> Sequence[TextSource]:
    settings = plan.job.cache
    if settings.text_source:
        return [stock_texts(settings, _stock_reader(plan), encoders)]
    return folder_texts(
        plan.variant.text_encoders,
        _component_folder(plan, settings.text_encoders, "text_encoders"),
        settings.text_device,
        getattr(torch, settings.dtype),
        settings.text_quantize,
        int(settings.text_window_gb * 1e9),
    )


def _latent_source(plan: JobPlan, encoders: StockEncoders = NO_ENCODERS) -> LatentSource:
    settings = plan.job.cache
    if settings.latent_source:
        return stock_latents(settings, _stock_reader(plan), encoders)
    device = find_device(settings.vae_device) if settings.vae_device else plan.placement.home
    return FolderLatents(plan.family, plan.variant, _vae_path(plan), device, getattr(torch, settings.dtype))


def cache_entries(plan: JobPlan, part: CachePart) -> dict[str, str]:
    """Key of every entry that filling this part makes -> what it is of, for a message. No weight is loaded."""
    if plan.encoded:
        keys = [sample.caption if part == "captions" else sample.latents for sample in plan.encoded]
        return {key: f"{part} of sample {number}" for number, key in enumerate(keys, start=1)}
    if part == "captions":
        entries = text_entries(_captions(plan), _text_sources(plan))
        return {key: f"caption {textwrap.shorten(caption, 80)!r}" for caption, keys in entries.items() for key in keys}
    images = image_keys(_image_requests(plan), _latent_source(plan))
    return {key: f"{'clip' if request.frames else 'image'} {request.path}" for request, key in images.items()}


def _captions(plan: JobPlan) -> list[str]:
    return sorted({"", *(sample.caption for sample in (*plan.samples, *plan.eval_samples))})


def _image_requests(plan: JobPlan) -> list[ImageRequest]:
    return [sample.image_request() for sample in (*plan.samples, *plan.eval_samples)]


def _tell_progress(events: EventLog, pace: Pace) -> Callable[[int, int, str], None]:
    def tell(done: int, total: int, what: str) -> None:
        pace.update(done)
        events.emit("progress", done, total, what=what, per_second=pace.per_second, left_s=pace.left_s(total))

    return tell


def _component_folder(plan: JobPlan, setting: str, key: str) -> Path:
    if setting:
        return Path(setting)
    if plan.info.pipeline_folder is None:
        raise ValueError(
            f"{plan.job.model.path} holds a transformer only; name the {key.replace('_', ' ')} with cache.{key} "
            "(a diffusers model folder has them)"
        )
    return plan.info.pipeline_folder


_IDENTITY = {
    "dataset": "data: images, captions or masks have changed",
    "evaluation": "evaluation: images, captions or masks have changed",
    "model": "model: the weights in the file have changed",
}


def find_state(plan: JobPlan, identity: dict[str, Any], *, resume: bool) -> TrainingState | None:
    """The newest checkpoint of the job's folder if it is to be resumed, None for a fresh start.

    A run that was killed before its first checkpoint is resumed by starting it again, which gives the same result.

    Raises: ValueError if it was made with other settings, data or weights (names what differs), or if a fresh start
        would mix with the checkpoints of an earlier run.
    """
    folder = checkpoint_folder(plan.job)
    found = list_checkpoints(folder)
    if not resume:
        if found:
            raise ValueError(
                f"{folder} holds the checkpoints of an earlier run, up to {found[-1].name}; resume it, or choose "
                "another output folder"
            )
        return None
    if not found:
        _log.warning("there is no checkpoint in %s yet; the job starts from its first step", folder)
        return None
    state = load_checkpoint(found[-1])
    differing = differing_keys(make_job(state.facts["config"]), plan.job)
    for name, what in _IDENTITY.items():
        if state.facts[name] != identity[name]:
            differing.append(what)
    if differing:
        lines = "\n".join(f"  {line}" for line in differing)
        raise ValueError(
            f"{found[-1]} was made with other settings, so continuing it would not be the same run:\n{lines}\n"
            "Set them back to resume, or start anew in another output folder"
        )
    return state


def _as_decided(job: JobConfig) -> JobConfig:
    """With what "auto" became when the run to resume began: memory that is free today must not change it."""
    found = list_checkpoints(checkpoint_folder(job))
    if not found or (job.model.quantize != "auto" and job.optimizer.name != "auto"):
        return job
    old = make_job(load_checkpoint(found[-1]).facts["config"])
    quantize = old.model.quantize if job.model.quantize == "auto" else job.model.quantize
    name = old.optimizer.name if job.optimizer.name == "auto" else job.optimizer.name
    return replace(job, model=replace(job.model, quantize=quantize), optimizer=replace(job.optimizer, name=name))


def run_job(
    job: JobConfig,
    *,
    resume: bool = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
) -> TrainingResult:
    """Run a job to its end, or until should_stop() is true between two steps; the state is saved in both cases.

    Raises: ValueError for a job that cannot be run as written, before weights are loaded.
    """
    if resume:
        job = _as_decided(job)
    plan = check_job(job)
    job = plan.job
    folder = Path(job.output.folder)
    identity = run_identity(plan)
    state = find_state(plan, identity, resume=resume)
    if state is not None:  # planned from the memory that was free then; another cut would draw dropout elsewhere
        devices = tuple(map(find_device, state.facts["placement"]))
        if devices != plan.placement.devices:
            largest = _largest(plan.samples, plan.encoded, plan.family.latent_of(plan.variant))
            training = _plan_on_cards(job, plan.info, plan.variant, largest, devices)
            plan = replace(plan, placement=replace(plan.placement, devices=devices), training=training)
        identity["placement"] = state.facts["placement"]
    with EventLog(folder, on_event, tensorboard=job.output.tensorboard) as events, ExitStack() as cleanup:
        try:
            train_data, eval_data = cache_job(plan, events, should_stop)
        except Stopped:
            hint = "captions and latents done so far are kept; start the job again to continue"
            events.emit("stopped", hint=hint)
            return TrainingResult("stopped", 0, None, {}, [], None, None, None, hint)
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
    if assembled.compiled is not None:
        cleanup.callback(assembled.compiled.remove)  # it changes settings of the process
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
        pipeline=_make_pipeline(plan, assembled.split),
        is_compiled=assembled.compiled is not None,
    )


def _make_pipeline(plan: JobPlan, split: BlockSplit) -> Pipeline | None:
    if plan.pipeline is None:
        return None
    kind, ahead = plan.pipeline
    return Pipeline(split.bridge, kind=kind, ahead=ahead)


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
        is_compiled=job.train.compile == "auto",
        quantized_cache=Path(job.model.quantized_cache) if job.model.quantized_cache else None,
    )


def _conclude(plan: JobPlan, trainer: Trainer, is_finished: bool) -> TrainingResult:
    compared: Comparison = {}
    if plan.training is not None:
        compared = compare(plan.training.forecast, memory_in_use(trainer.devices))
        trainer.events.emit("forecast", trainer.step, plan.job.train.steps, devices=compared)
    path = save_lora(plan, trainer.lora, Path(plan.job.output.folder))
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
    )


def lora_file_tensors(plan: JobPlan, lora: LoraHandle) -> dict[str, torch.Tensor]:
    """The LoRA as the job's layout and type name it."""
    output = plan.job.output
    is_original = output.lora_layout == "original"
    convert = lora_to_original if is_original else lora_to_diffusers
    trained = lora.tensors_for_comfyui() if is_original else lora.tensors()
    tensors = convert(plan.family, trained, plan.job.lora.alpha, plan.job.lora.rank)
    dtype = getattr(torch, output.lora_dtype)
    # alpha stays float32: a rounded one would change the strength of the whole layer
    return {name: t if name.endswith(".alpha") else t.to(dtype) for name, t in tensors.items()}


def save_lora(plan: JobPlan, lora: LoraHandle, folder: Path) -> Path:
    """Write the LoRA with its metadata to folder/<output.name>.safetensors, atomically."""
    path = folder / f"{plan.job.output.name}.safetensors"
    save_tensors_atomically(path, lora_file_tensors(plan, lora), lora_metadata(plan))
    return path


def lora_metadata(plan: JobPlan) -> dict[str, str]:
    """What the file says of itself: ss_* as other trainers write it, modelspec, and our config.

    No paths and no dates: they would tell about the user's machine, and make equal results unequal files.
    """
    job = plan.job
    resolution = plan.resolution
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{plan.family.modelspec_architecture}/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": job.output.name,
        "modelspec.resolution": f"{resolution}x{resolution}",
        "modelspec.prediction_type": plan.family.prediction_target,
        "ss_base_model_version": plan.family.ss_base_model_version,
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(job.lora.rank),
        "ss_network_alpha": str(job.lora.alpha),
        "ss_learning_rate": str(job.optimizer.learning_rate),
        "ss_optimizer": job.optimizer.name,
        "ss_lr_scheduler": job.schedule.name,
        "ss_max_train_steps": str(job.train.steps),
        "ss_seed": str(job.train.seed),
        "ss_num_train_images": str(len(plan.training_samples)),
        "devicebridge_version": VERSION,
        **_encoded_by(plan),
        "devicebridge_variant": plan.variant.name,
        "devicebridge_config": json.dumps(_without_places(job_to_dict(job)), sort_keys=True),
    }


def _encoded_by(plan: JobPlan) -> dict[str, str]:
    """Whose encoders made what was trained on: a LoRA meets in use what it met in training only with the same."""
    if plan.encoded:
        return {"devicebridge_text_source": "comfyui CONDITIONING", "devicebridge_latent_source": "comfyui LATENT"}
    cache = plan.job.cache
    return {
        "devicebridge_text_source": cache.text_source or "transformers",
        "devicebridge_latent_source": cache.latent_source or "diffusers",
    }


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """The config without what belongs to one machine: folders become names, devices and saving cadence go."""
    config["model"]["path"] = Path(config["model"]["path"]).name
    del config["model"]["quantized_cache"]
    config["data"]["folders"] = [{**folder, "path": Path(folder["path"]).name} for folder in config["data"]["folders"]]
    config["data"]["encoded"] = Path(config["data"]["encoded"]).name
    config["evaluation"]["folder"] = Path(config["evaluation"]["folder"]).name
    for section in ("split", "pipeline", "cache", "output"):
        del config[section]
    return config
