"""A job's captions and latents: which entries there are, filling them, and the samples that training reads."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..config.job import CacheConfig, JobConfig
from ..data.image import ImageRequest
from ..data.samples import Condition, Sample, TrainingSample, Wanted
from ..encoding.comfy_data import store_of_encoded
from ..encoding.comfy_sources import ComfyConditions, ComfyLatents, ComfyTexts
from ..encoding.key import comfy_text_key
from ..encoding.sources import FolderLatents, FolderTexts, LatentSource, Shapes, Source, fill
from ..encoding.store import CacheStore, State
from ..events import EventLog
from ..families.comfy.conditions import WAYS
from ..families.comfy.inputs import num_tokens
from ..families.registry import COMFYUI
from ..parallel.devices import find_device, own_random_states, release_cached_memory
from ..system.progress import Pace
from ..system.stopping import never
from ..training.batches import CachedSamples
from .checked_job import JobPlan, ReadJob

CachePart = Literal["captions", "latents", "conditions"]
CACHE_PARTS: tuple[CachePart, ...] = ("captions", "latents", "conditions")
ONE_EACH = "train.batch_size is above 1, but {}, so they cannot share a batch; set batch_size 1"
ONE_EACH += " (gradient_accumulation_steps does the same)"
_NOT_LOADED = "the job names encoders that only ComfyUI loads, and nothing has loaded them"  # no other may stand in


@dataclass(frozen=True)
class ComfyEncoders:
    """Encoders that ComfyUI holds in this process (nodes/host/comfy_encoders.py); None where none is needed."""

    clip: Any = None
    vae: Any = None
    conditioner: Any = None  # has both, and what sees
    audio_vae: Any = None

    def named_in(self, cache: CacheConfig) -> CacheConfig:
        """The settings with the names of these encoders."""
        own = {"text_source": self.clip, "latent_source": self.vae, "audio_source": self.audio_vae}
        names = {key: each.fingerprint for key, each in own.items() if each is not None}
        names |= {"vision_source": seen} if (seen := getattr(self.conditioner, "sees_with", "")) else {}
        return replace(cache, **names)


NO_ENCODERS = ComfyEncoders()


def cache_store(job: JobConfig) -> CacheStore:
    """Where the job keeps its captions and latents."""
    if job.data.encoded:
        return store_of_encoded(job.data.encoded)
    return CacheStore(Path(job.cache.folder) if job.cache.folder else Path(job.output.folder) / "cache")


def cache_job(
    plan: JobPlan, events: EventLog, should_stop: Callable[[], bool] = never, encoders: ComfyEncoders = NO_ENCODERS
) -> tuple[CachedSamples, CachedSamples | None]:
    """Compute the captions and latents that the cache does not hold yet; returns training and evaluation data.
    Raises: what fill_cache raises; ValueError for entries that do not fit the model."""
    store, settings = cache_store(plan.job), plan.job.cache
    if plan.encoded:
        keys = dict.fromkeys(key for sample in plan.encoded for key in (sample.latents_key, *sample.text_keys[0]))
        if missing := [key for key in keys if key not in store]:
            gone = f"{len(missing)} of {len(keys)} entries of the encoded dataset are gone from {store.folder}"
            raise ValueError(f"{gone}; run the Dataset from Latents and Conditioning node again")
        release_cached_memory()  # of a job before: its model's hooks hold it in a circle
        return _cached(plan, plan.encoded), None
    texts: dict[str, tuple[str, ...]] = fill_cache(plan, "captions", events, should_stop, encoders)
    latent_keys: dict[ImageRequest, str] = fill_cache(plan, "latents", events, should_stop, encoders)
    conditions: dict[Wanted, str] = fill_cache(plan, "conditions", events, should_stop, encoders)
    if settings.text_source:
        _refuse_unfit_texts(plan, store, {text: key for text, (key,) in texts.items()})
    if settings.latent_source:
        for request, key in latent_keys.items():
            if reason := plan.reader.latents_problem(store.shapes(key), len(request.frames) or 1):
                raise ValueError(f"ComfyUI's VAE does not fit: of {request.path}, {reason}")
    if conditions:
        _refuse_unfit_conditions(plan, store, conditions)

    def recompute(key: str) -> None:
        """Compute one entry while the model trains; random numbers stay as they are.
        Raises: what fill_cache raises; RuntimeError where the device has no room beside the model."""
        made: tuple[Mapping[Any, Any], ...] = texts, latent_keys, conditions
        with own_random_states(plan.placement.used_devices):
            for part, keys in zip(CACHE_PARTS, made, strict=True):
                wanted = [item for item, own in keys.items() if key in ([own] if isinstance(own, str) else own)]
                for source in _work(plan, part, encoders)[1] if wanted else ():
                    fill(wanted[:1], source, store)

    def with_keys(sample: Sample) -> Sample:
        keys = tuple(text_keys(text, sample.condition, texts, conditions) for text in (*sample.captions, ""))
        return replace(sample, latents_key=latent_keys[sample.image_request()], text_keys=keys)

    def cached(samples: tuple[Sample, ...]) -> CachedSamples:
        prompts = {each: texts[each] for each in ("", *plan.job.samples.prompts)}
        return replace(_cached(plan, list(map(with_keys, samples))), prompt_keys=prompts, recompute=recompute)

    return cached(plan.samples), cached(plan.eval_samples) if plan.eval_samples else None


def missing_prompts(job: JobConfig) -> list[str]:
    """Sample prompts that ComfyUI's CLIP is to encode and the cache has not; a job asks other encoders itself."""
    source, store = job.cache.text_source, cache_store(job)
    how: dict[str, Any] = {"keeps_all": job.model.family == COMFYUI, "weighs": job.cache.caption_weights}
    return [each for each in job.samples.prompts if source and comfy_text_key(each, source, **how) not in store]


def text_keys(
    caption: str, condition: Condition | None, texts: Mapping[str, tuple[str, ...]], conditions: Mapping[Wanted, str]
) -> tuple[str, ...]:
    """The entries that a sample's text is read from, with this caption; () if there are none."""
    if condition is None:
        return texts[caption]
    made = conditions.get((caption, condition))
    if made is None:
        return ()
    return (made,) if WAYS[condition.way].reads_text else (*texts[caption], made)


def _cached(plan: JobPlan, samples: Sequence[TrainingSample]) -> CachedSamples:
    return CachedSamples(
        cache_store(plan.job),
        samples,
        plan.job.data.use_masks,
        plan.family.latent_of(plan.variant).num_tokens_per_cell,
        plan.family.comfy,
        gives_first_latents=plan.variant.condition == "first_latents",
    )


def fill_cache(
    plan: JobPlan,
    part: CachePart,
    events: EventLog,
    should_stop: Callable[[], bool] = never,
    encoders: ComfyEncoders = NO_ENCODERS,
) -> dict[Any, Any]:
    """Compute what this part of the cache does not hold yet; text encoders or VAE are freed before this returns.
    encoders: those that cache.text_source and cache.latent_source name, if something may have to be computed.
    Returns: the entries of each caption, one of every text encoder, or the entry of each image request or condition.
    Raises: Stopped when should_stop() became true; OSError naming the file if the folder cannot be written; ValueError
    naming the images that cannot be read. What was done stays in the cache."""
    if plan.encoded or part == "conditions" and not plan.job.data.condition:
        return {}
    events.emit("phase", name=part)
    pace, store, (items, sources) = Pace(), cache_store(plan.job), _work(plan, part, encoders)
    tell = partial(tell_progress, events, pace)
    made = [fill(items, source, store, tell, should_stop, on_begin=pace.restart) for source in sources]
    if part == "captions":
        return {caption: tuple(keys[caption] for keys in made) for caption in items}
    if part == "latents":
        release_cached_memory()
    return made[0]


def _work(
    plan: JobPlan, part: CachePart, encoders: ComfyEncoders = NO_ENCODERS
) -> tuple[Sequence[Any], Sequence[Source[Any]]]:
    """What the entries of this part are made of, and who makes them."""
    match part:
        case "captions":
            captions, settings = captions_of(plan), plan.job.cache
            if settings.text_source:
                return captions, [comfy_texts(plan, encoders)]
            if settings.has_stock_text:
                raise RuntimeError(_NOT_LOADED)
            folder = plan.component_folder(settings.text_encoders, "text_encoders")
            dtype, window_bytes = getattr(torch, settings.dtype), int(settings.text_window_gb * 1e9)
            return captions, [
                FolderTexts(spec, folder, settings.text_device, dtype, settings.text_quantize, window_bytes)
                for spec in plan.variant.text_encoders
            ]
        case "latents":
            return [each.image_request() for each in (*plan.samples, *plan.eval_samples)], [
                _latent_source(plan, encoders)
            ]
        case "conditions":
            wanted = wanted_conditions(plan)
            return wanted, [comfy_conditions(plan, encoders)] if wanted else []


def comfy_texts(read: ReadJob, encoders: ComfyEncoders = NO_ENCODERS) -> ComfyTexts:
    """The source that cache.text_source names; where encoders compute in every step, of what they are given.
    Raises: ValueError if another CLIP is given than is named."""
    settings, reader = read.job.cache, read.caption_reader
    _refuse_other(settings.text_source, encoders.clip, "text_source")
    how = reader.comfy.reads_all, settings.caption_weights, read.job.lora.text_encoder
    return ComfyTexts(settings.text_source, reader.text_problem, encoders.clip, *how)


def comfy_conditions(read: ReadJob, encoders: ComfyEncoders = NO_ENCODERS) -> ComfyConditions:
    """The source of what a job's model is given beside captions."""
    data, cache = read.job.data, read.job.cache
    way = WAYS[data.condition]
    names = ((cache.text_source, way.reads_text), (cache.latent_source, True), (cache.vision_source, way.sees))
    used = tuple(name for name, takes_part in names if takes_part)
    options = read.reader.text_problem, data.reference_megapixels, encoders.conditioner, cache.caption_weights
    return ComfyConditions(data.condition, used, *options)


def _latent_source(plan: JobPlan, encoders: ComfyEncoders) -> LatentSource:
    settings = plan.job.cache
    if settings.latent_source:
        _refuse_other(settings.latent_source, encoders.vae, "latent_source")
        _refuse_other(settings.audio_source, encoders.audio_vae, "audio_source")
        reader = plan.reader
        of_sound = settings.audio_source, encoders.audio_vae, reader.comfy.sound
        return ComfyLatents(settings.latent_source, reader.latents_problem, encoders.vae, *of_sound)
    if settings.has_stock_latents:
        raise RuntimeError(_NOT_LOADED)
    device = find_device(settings.vae_device) if settings.vae_device else plan.placement.main_device
    return FolderLatents(plan.family, plan.variant, plan.vae_path, device, getattr(torch, settings.dtype))


def _refuse_other(named: str, given: Any, key: str) -> None:
    """Raises: ValueError if another encoder is given than cache.<key> names."""
    if given is not None and given.fingerprint != named:
        raise ValueError(f"cache.{key} names {named!r}, but the encoder given is {given.fingerprint!r}; give that one")


def _refuse_unfit_texts(plan: JobPlan, store: CacheStore, keys: Mapping[str, str]) -> None:
    """Raises: ValueError for entries of another model, or captions that cannot share a batch, by their headers."""
    reader, sharing = plan.caption_reader, set[str]()
    if plan.job.train.batch_size > 1 and not _has_own_texts(plan.job):
        sharing = {caption for sample in plan.samples for caption in sample.captions}
        sharing |= {""} if plan.job.data.caption_dropout else set()
    lengths = {}
    for caption, key in keys.items():
        shapes = store.shapes(key)
        if reason := reader.text_problem(shapes):
            raise ValueError(f"ComfyUI's CLIP does not fit: of the caption {caption!r}, {reason}")
        lengths[caption] = num_tokens(reader.comfy, shapes)
    shared = {caption: lengths[caption] for caption in sharing}
    if len(set(shared.values())) > 1:
        longest = max(shared, key=lambda caption: (shared[caption], caption))
        found = f"ComfyUI's CLIP encodes the captions to {min(shared.values())} to {shared[longest]} tokens"
        raise ValueError(f"{ONE_EACH.format(found)}, or shorten the longest, {longest[:80]!r}")


def _refuse_unfit_conditions(plan: JobPlan, store: CacheStore, keys: Mapping[Wanted, str]) -> None:
    """Raises: ValueError for entries of another model, or that cannot share a batch, by their headers."""
    sharing = set(wanted_conditions(replace(plan, eval_samples=())) if plan.job.train.batch_size > 1 else ())
    seen: dict[Any, Shapes] = {}
    for wanted, key in keys.items():
        _, condition = wanted
        shapes = store.shapes(key)
        if reason := plan.reader.text_problem(shapes):
            raise ValueError(f"the condition of {condition.paths[0]} does not fit: {reason}")
        cut = condition.control or condition.clip
        group = condition.sizes, cut and (cut.crop[2:], len(cut.frames))
        if wanted in sharing and seen.setdefault(group, shapes) != shapes:
            raise ValueError(ONE_EACH.format(f"{condition.paths[0]} has conditions of other sizes than another"))


def cache_entries(plan: JobPlan, part: CachePart) -> dict[str, str]:
    """What each entry of this part is of, by its key, for a message. No weight is loaded."""
    if plan.encoded:
        known = [{"captions": each.text_keys[0], "latents": (each.latents_key,)} for each in plan.encoded]
        return {key: f"{part} of sample {n}" for n, each in enumerate(known, start=1) for key in each.get(part, ())}
    items, sources = _work(plan, part)
    entries = [pair for source in sources for pair in source.keys_of(items).items()]
    if part == "captions":
        return {key: f"caption {textwrap.shorten(caption, 80)!r}" for caption, key in entries}
    if part == "conditions":
        return {key: f"condition of {condition.paths[0]}" for (_, condition), key in entries}
    kinds = {each: "sound" if each.is_sound else "clip" if each.frames else "image" for each, _ in entries}
    return {key: f"{kinds[request]} {request.path}" for request, key in entries}


def captions_of(read: ReadJob) -> list[str]:
    """Of all samples that are not encoded with their references, the empty one, and the prompts of pictures."""
    samples = () if _has_own_texts(read.job) else (*read.samples, *read.eval_samples)
    return sorted({"", *read.job.samples.prompts, *(caption for each in samples for caption in each.captions)})


def _has_own_texts(job: JobConfig) -> bool:
    """Whether the texts of samples are in the entries of their conditions."""
    way = WAYS.get(job.data.condition)
    return way is not None and way.reads_text


def wanted_conditions(read: ReadJob) -> list[Wanted]:
    """Every caption with the files beside it that a run may read; of held-out samples no caption is dropped."""
    dropped = [""] if read.job.data.caption_dropout else []
    found = [(each, [*each.captions, *dropped]) for each in read.samples]
    found += [(each, [each.caption]) for each in read.eval_samples]
    return [(text, sample.condition) for sample, texts in found if sample.condition for text in texts]


def tell_progress(events: EventLog, pace: Pace, done: int, total: int, what: str) -> None:
    """Emit progress, with a rate and the time left."""
    events.emit("progress", done, total, what=what, **pace.update(done, total))


_MAX_NAMES = 20  # of a kind that a report spells out


def verify_cache(plan: JobPlan, parts: Sequence[CachePart]) -> tuple[list[str], int]:
    """Read every entry the job needs and compare checksums; damaged ones are removed for the next run to compute.
    Returns: a report by lines, with the first of the entries that are not whole, and how many these are."""
    store = cache_store(plan.job)
    lines, problems = [f"cache: {store.folder}"], []
    for part in parts:
        counts: Counter[State] = Counter()
        for key, what in cache_entries(plan, part).items():
            state = store.check(key)
            counts[state] += 1
            if state != "whole":
                problems.append(f"{state}: {what}" + (f" ({store.path(key)})" if state == "damaged" else ""))
        whole, missing, damaged = counts["whole"], counts["missing"], counts["damaged"]
        lines.append(f"{part}: {whole} entries whole, {missing} missing, {damaged} damaged")
    more = len(problems) - _MAX_NAMES
    return [*lines, *problems[:_MAX_NAMES], *([f"and {more} more"] if more > 0 else [])], len(problems)


def prune_caches(plans: Mapping[str, JobPlan], parts: Sequence[CachePart]) -> list[str]:
    """Delete from the jobs' folders what neither they nor a run under way needs, and what killed processes have left.
    plans: by a name for the report. Returns: a report of each folder. Raises: OSError naming a file that stays."""
    needed = {key for plan in plans.values() for part in parts for key in cache_entries(plan, part)}
    jobs: dict[Path, list[str]] = {}
    for name, plan in plans.items():
        jobs.setdefault(cache_store(plan.job).folder.resolve(), []).append(name)
    reports = []
    for folder, names in jobs.items():
        store = CacheStore(folder)
        is_read = store.has_living_runs()  # before the entries are looked at
        keys = list(store.keys())
        others = [key for key in keys if key not in needed]
        sizes = [] if is_read else [store.remove(key) for key in others]
        spared = f", and {len(others)} that a run under way may need" if is_read and others else ""
        deleted = f"{len(sizes)} entries deleted, {sum(sizes)} bytes ({sum(sizes) / 1e9:.2f} GB)"
        kept = (
            f"{len(keys) - len(others)} entries that {'any of ' * (len(names) > 1)}{', '.join(names)} may need are kept"
        )
        reports.append(f"cache: {folder}\n{deleted}; {kept}{spared}")
    return reports
