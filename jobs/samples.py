"""The sample pictures of a job: what can be refused of them before weights are loaded, and what draws them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from PIL import features

from ..assembly import Assembled
from ..config.job import JobConfig
from ..data.samples import bucket_step, make_buckets
from ..events import EventLog
from ..families.spec import ModelFamily, Variant
from ..parallel.devices import CPU, find_device
from ..parallel.ranks.group import Ranks
from ..parallel.runner import Runner
from ..planning.costs import latent_shape_of
from ..sampling.draw import Decoder, Drawing, make_drawing, picture_size
from ..sampling.sampler import Sampler
from ..training.batches import CachedSamples
from .checked_job import JobPlan


def size_of_pictures(job: JobConfig, family: ModelFamily, variant: Variant, frames: int) -> tuple[int, int, int] | None:
    """Height and width in pixels and frames; None where none are drawn, or as large as the samples that are trained on,
    whose most frames are given. Raises: ValueError naming the setting that the model does not take."""
    settings = job.samples
    if not settings.prompts:
        return None
    if variant.condition != "none":
        if settings.width or settings.frames:
            why = f"{variant.name} starts from the first frame of a training clip, and its sample clips are as large"
            raise ValueError(f"samples.width, height and frames: {why}; leave them out")
        return None
    latent = family.latent_of(variant)
    ((side, _),) = make_buckets(job.data.largest_resolution, bucket_step(job.data, latent), 1.0)
    return picture_size(settings, family, variant, side, frames)


def samples_vae(plan: JobPlan) -> Path:
    """Where the VAE that decodes is. Raises: ValueError if nothing names one."""
    if plan.job.samples.vae:
        return Path(plan.job.samples.vae)
    if plan.family.host is not None:
        if plan.job.cache.stock_vae:
            return Path(plan.job.cache.stock_vae)
        graph = "in a graph, connect Load VAE or Load Checkpoint to stock VAE of Cache Captions and Latents"
        raise ValueError(f"samples.prompts need a VAE: name it with cache.stock_vae or samples.vae; {graph}")
    if plan.job.cache.latent_source and plan.info.pipeline_folder is None:
        raise ValueError("samples.prompts need a VAE, and ComfyUI's encoded the images; name it with samples.vae")
    return plan.vae_path


def check_samples(plan: JobPlan) -> Path:
    """The VAE that will decode. Raises: ValueError for pictures that cannot be drawn, naming the setting."""
    needs = () if plan.family.comfy is None else plan.family.comfy.needs
    reason = "" if plan.family.host is None else " and ".join(needs) or plan.job.data.condition
    if reason:
        raise ValueError(f"samples.prompts: {plan.family.title} is given {reason} beside a prompt; remove them")
    if plan.family.latent_of(plan.variant).audio_rows:
        raise ValueError(f"samples.prompts draw pictures, and {plan.family.title} makes sound; remove them")
    _drawing(plan)
    size = size_of_pictures(plan.job, plan.family, plan.variant, _longest(plan))
    if not features.check("webp") and (size[2] if size else _longest(plan)) > 1:
        raise ValueError("samples.prompts: this Pillow cannot write WebP; install one that can, or set frames = 1")
    return samples_vae(plan)


def _drawing(plan: JobPlan) -> Drawing:
    """A guidance input of one of ComfyUI's own models gets what the job trains with, where nothing else is said."""
    settings, trained = plan.job.samples, plan.job.objective.guidance
    if plan.family.host is not None and plan.variant.training_guidance is not None and settings.guidance is None:
        settings = replace(settings, guidance=trained)
    return make_drawing(settings, plan.family, plan.variant)


def _longest(plan: JobPlan) -> int:
    """Frames of the longest training sample."""
    return max(sample.num_frames for sample in plan.training_samples)


def describe_expert(plan: JobPlan) -> str:
    """What to know of the pictures of a model that is one of a pair; "" for a whole one."""
    name, partner = plan.variant.name, plan.variant.partner
    if expert := plan.job.objective.expert:
        name, partner = f"the {expert} expert", "the other one"
    if not (plan.job.samples.prompts and partner):
        return ""
    found = f"sample pictures are drawn by {name} alone, at every noise level"
    return f"{found}; with {partner} they would look better, so compare them only with each other"


def make_sampler(
    plan: JobPlan,
    assembled: Assembled,
    runner: Runner,
    data: CachedSamples,
    events: EventLog,
    ranks: Ranks,
) -> Sampler | None:
    """What draws a job's pictures by the runner's model; None if it has none. data has the states of all prompts."""
    job, family, variant = plan.job, plan.family, plan.variant
    if not job.samples.prompts:
        return None
    size, path = size_of_pictures(job, family, variant, _longest(plan)), samples_vae(plan)
    wanted = find_device(job.cache.vae_device) if job.cache.vae_device else plan.placement.main_device
    limits: dict[torch.device, int] = {}  # where nobody forecasts, or the CPU is to decode
    if plan.training is not None and wanted != CPU:
        reserved = {find_device(each.device): each.reserved for each in plan.training.devices}
        limits = {device: reserved[device] for device in sorted(reserved, key=lambda device: device != wanted)}
    return Sampler(
        settings=job.samples,
        drawing=_drawing(plan),
        family=family,
        variant=variant,
        dtype=plan.execution.dtype,
        folder=Path(job.output.folder),
        last=job.train.steps,
        shape=() if size is None else latent_shape_of(plan.info, variant, size[:2], size[2]),
        data=data,
        replica=lambda: runner.replica_for(0),
        compiled=assembled.all_compiled,
        devices=plan.placement.used_devices,
        decoder=Decoder(family, variant, path, getattr(torch, job.cache.dtype), limits),
        events=events,
        ranks=ranks,
        in_lockstep=runner.in_lockstep,
    )
