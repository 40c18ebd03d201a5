"""A job's captions and latents: which entries there are, filling them, and the samples that training reads."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..config.job import JobConfig
from ..data.image import ImageRequest
from ..data.samples import Sample
from ..encoding.encode import (
    NONE_OUTDATED,
    fill_images,
    fill_texts,
    image_keys,
    never,
    text_entries,
)
from ..encoding.encoded import store_of_encoded
from ..encoding.sources import FolderLatents, FolderTexts, LatentSource, TextSource
from ..encoding.store import CacheStore, Stamp
from ..events import EventLog
from ..parallel.devices import find_device, random_states, release_cached_memory, restore_random_states
from ..system.pace import Pace
from ..training.batches import CachedSamples
from .checked_job import JobPlan, component_folder, stock_reader, vae_path
from .comfy_entries import (
    NO_ENCODERS,
    StockEncoders,
    refuse_missing,
    refuse_unfit_latents,
    refuse_unfit_texts,
    stock_latents,
    stock_texts,
)

CachePart = Literal["captions", "latents"]
CACHE_PARTS: tuple[CachePart, ...] = ("captions", "latents")


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
    readers: dict[str, Any] = {}
    if settings.text_source:
        reader = stock_reader(plan)
        readers["read_text"] = reader.read_text
        refuse_unfit_texts(reader, store, text_keys, _captions_in_batches(plan))
    if settings.latent_source:
        readers["read_latents"] = stock_reader(plan).read_latents
        refuse_unfit_latents(stock_reader(plan), store, latent_keys)

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
            gives_first_latents=_gives_first_latents(plan),
            recompute=_Recompute(plan, encoders, text_keys, latent_keys),
            **readers,
        )

    return cached(plan.samples), cached(plan.eval_samples) if plan.eval_samples else None


@dataclass(frozen=True)
class _Recompute:
    """Computes one entry while the model trains; leaves random numbers as they are.

    Args:
        text_keys: by caption. latent_keys: by request.
    """

    plan: JobPlan
    encoders: StockEncoders
    text_keys: Mapping[str, str]
    latent_keys: Mapping[ImageRequest, str]

    def __call__(self, key: str) -> None:
        """Raises: what the fill functions raise; RuntimeError where the device has no room beside the model."""
        store, devices = cache_store(self.plan.job), self.plan.placement.used_devices
        states = random_states(devices)
        try:
            captions = [caption for caption, other in self.text_keys.items() if other == key]
            requests = [request for request, other in self.latent_keys.items() if other == key]
            if captions:
                fill_texts(captions[:1], _text_sources(self.plan, self.encoders), store)
            if requests:
                fill_images(requests[:1], _latent_source(self.plan, self.encoders), store)
        finally:
            restore_random_states(states)


def _captions_in_batches(plan: JobPlan) -> frozenset[str]:
    """Captions that may have to share a batch."""
    if plan.job.train.batch_size == 1:
        return frozenset()
    dropped = {""} if plan.job.data.caption_dropout else set()
    return frozenset(dropped | {sample.caption for sample in plan.samples})


def _encoded_data(plan: JobPlan) -> CachedSamples:
    store = cache_store(plan.job)
    refuse_missing(plan.encoded, store)
    reader = stock_reader(plan)
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
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
) -> dict[str, str]:
    """Compute the captions that the cache does not hold yet, the text encoders being freed before this returns.

    Args:
        outdated: entries that are computed again while they have these stamps, from CacheStore.stamps.
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
        tell_progress(events, pace),
        should_stop,
        outdated=outdated,
        on_begin=pace.restart,
    )


def fill_latents(
    plan: JobPlan,
    events: EventLog,
    should_stop: Callable[[], bool] = never,
    encoders: StockEncoders = NO_ENCODERS,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
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
        tell_progress(events, pace),
        should_stop,
        outdated=outdated,
        on_begin=pace.restart,
    )
    release_cached_memory()
    return latent_keys


def _text_sources(plan: JobPlan, encoders: StockEncoders = NO_ENCODERS) -> Sequence[TextSource]:
    settings = plan.job.cache
    if settings.text_source:
        return [stock_texts(settings, stock_reader(plan), encoders)]
    folder = component_folder(plan, settings.text_encoders, "text_encoders")
    dtype, window_bytes = getattr(torch, settings.dtype), int(settings.text_window_gb * 1e9)
    return [
        FolderTexts(spec, folder, settings.text_device, dtype, settings.text_quantize, window_bytes)
        for spec in plan.variant.text_encoders
    ]


def _latent_source(plan: JobPlan, encoders: StockEncoders = NO_ENCODERS) -> LatentSource:
    settings = plan.job.cache
    if settings.latent_source:
        return stock_latents(settings, stock_reader(plan), encoders)
    device = find_device(settings.vae_device) if settings.vae_device else plan.placement.home
    return FolderLatents(plan.family, plan.variant, vae_path(plan), device, getattr(torch, settings.dtype))


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


def tell_progress(events: EventLog, pace: Pace) -> Callable[[int, int, str], None]:
    """Counts for the log and whoever listens, with a rate and the time left."""

    def tell(done: int, total: int, what: str) -> None:
        pace.update(done)
        events.emit("progress", done, total, what=what, per_second=pace.per_second, left_s=pace.left_s(total))

    return tell
