"""What is looked at before a job begins: faults that would end it hours later, and settings that nobody meant."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import features
from torch import nn

from ..checkpoints.checkpoint import expert_by_name
from ..checkpoints.fingerprint import folder_fingerprint
from ..checkpoints.load import weight_types
from ..checkpoints.model_class import with_defaults
from ..checkpoints.model_files import first
from ..checkpoints.weight_file import find_zero_weights, refuse_zeros
from ..config.job import WRITTEN, FolderConfig, JobConfig, job_keys, paths_of, values_at
from ..data.captions import TEXT_FILES
from ..data.folders import concepts
from ..data.samples import Sample
from ..data.video import media_fingerprint, sequence_files
from ..encoding.text_encoder import check_encoder
from ..encoding.text_place import check_text_device
from ..encoding.vae import check_vae
from ..families.spec import Variant
from ..parallel.devices import CPU, find_device
from ..parallel.placement import check_kept_and_offloaded
from ..quantization.quantize import describe_quantized, refusal
from ..runs.store import NO_RUNS
from ..sampling.draw import make_drawing
from ..system.files import go_on
from ..training.optimizer import make_optimizer
from .checked_job import JobPlan, ReadJob
from .read_job import refuse_condition

_log = logging.getLogger(__name__)
_names = partial(first, most=5)  # for a message
_FILES_ONLY = ("data.folders.path", "data.folders.references", "evaluation.folder", "evaluation.references")
_REPEATS: tuple[str, ...] = ("data.resolutions", "data.folders.resolutions", "data.frames", "evaluation.quantiles")
_REPEATS += ("data.folders.references", "evaluation.references", "samples.prompts", "cache.stock_clip")


def refuse_stills(read: ReadJob) -> None:
    """Raises: ValueError naming the single images, if the model is given the first frame."""
    stills = dict.fromkeys(sample.path for sample in (*read.samples, *read.eval_samples) if sample.num_frames == 1)
    stills |= {f"sample {n}": None for n, sample in enumerate(read.encoded, start=1) if sample.num_frames == 1}
    if read.variant.condition != "none" and stills:
        why = f"{read.variant.name} is given the first frame, so in a single image nothing is left to learn"
        raise ValueError(f"{why}; take out these {len(stills)}, or set data.frames above 1: {_names(stills)}")


def check_tools(plan: JobPlan) -> None:
    """Check what the later parts of a job need: blocks, optimizer, devices, encoders, quantization.
    Raises: ValueError or RuntimeError as those parts would, hours later."""
    job, placement = plan.job, plan.placement
    kept, offloaded = plan.execution.kept_blocks, plan.execution.offloaded_blocks  # of several ranks this one's
    check_kept_and_offloaded(kept, offloaded, placement)
    if plan.execution.offloads and all(device == CPU for device in placement.used_devices):
        raise ValueError('train.offload_activations = "on" needs a GPU, and the model is on the CPU; set it to "off"')
    make_optimizer([nn.Parameter(torch.zeros(1))], job.optimizer)
    if job.cache.vae_device:
        try:
            find_device(job.cache.vae_device)
        except ValueError as error:
            raise ValueError(f"cache.vae_device = {job.cache.vae_device!r}: {error}") from error
    if not plan.encoded:
        _check_encoders(plan)
    if job.samples.prompts:
        _check_samples(plan)
    if (settings := job.model.quantize_settings) is not None:
        if reason := refusal(settings, placement.used_devices):
            raise ValueError(reason)
        describe_quantized(plan.model, plan.family, settings, weight_types(plan.model, plan.execution.dtype))


def _check_samples(plan: JobPlan) -> None:
    """Raises: ValueError for pictures that cannot be drawn, naming the setting."""
    reason = "" if plan.family.host is None else " and ".join(plan.family.comfy.needs) or plan.job.data.condition
    if reason:
        raise ValueError(f"samples.prompts: {plan.family.title} is given {reason} beside a prompt; remove them")
    if plan.family.latent_of(plan.variant).audio_rows:
        raise ValueError(f"samples.prompts draw pictures, and {plan.family.title} makes sound; remove them")
    make_drawing(plan.job, plan.family, plan.variant)
    size = plan.picture_size
    frames = size[2] if size else max(sample.num_frames for sample in plan.training_samples)
    if frames > 1 and not features.check("webp"):
        raise ValueError("samples.prompts: this Pillow cannot write WebP; install one that can, or set frames = 1")
    vae = plan.samples_vae
    if plan.family.host is None:
        _check_vae(plan, vae)


def check_places(job: JobConfig) -> None:
    """Raises: ValueError naming the setting, if its folder is a file or lies in one."""
    for key, (folder,) in {key: values_at(job, key) for key in WRITTEN}.items():
        above = (Path(folder), *Path(folder).absolute().parents)
        nearest = next(filter(os.path.lexists, above), Path())  # on Windows not even its drive may be there
        if folder and not nearest.is_dir():
            raise ValueError(f"{key} {folder} was asked for, but {nearest} is a file; choose a folder")


def refuse_repeats(job: JobConfig) -> None:
    """Raises: ValueError for a value that a list has twice, and for a folder named twice with equal settings."""
    for key in (*_REPEATS, "data.folders"):
        helps = ", with data.folders.repeats = 2" if key == "data.folders" else ""
        for values in values_at(job, key):
            if again := [each for number, each in enumerate(values) if each in values[:number]]:
                raise ValueError(f"{key} has {getattr(again[0], 'path', again[0])!r} twice; name it once{helps}")


def refuse_overlaps(job: JobConfig) -> None:
    """Raises: ValueError where the job would write into a folder that it reads, or over a file that it reads."""
    lora = Path(job.output.folder, job.output.file_name)
    for key, given in [(key, Path(path)) for key, path in paths_of(job) if key not in WRITTEN]:
        if given.is_file() and _place_in(lora, given) is not None:
            raise ValueError(f"the LoRA file {lora} would be written over {key}; choose another output.name")
        if not given.is_dir():
            continue
        for our_key in WRITTEN:
            (ours,) = values_at(job, our_key)
            place = _place_in(Path(ours), given) if ours else None
            # a sub-folder of a dataset that has a caption beside it is read as a clip, one of a folder of folders too
            is_clip = any(os.path.lexists(given / f"{place}{ending}") for ending in TEXT_FILES)
            if place and key in ("data.folders.path", "evaluation.folder"):
                is_clip |= place in [Path(each.path).name for each in concepts(FolderConfig(str(given)), go_on)]
            if place is not None and not (place and key in _FILES_ONLY and not is_clip):
                fault = f"{our_key} {ours} lies in {key} {given}, or is that folder, and would be among what is read"
                raise ValueError(f"{fault}; choose a folder beside it")
        own = [name for name in sorted(NO_RUNS) if _place_in(given, Path(job.output.folder, name)) is not None]
        if own:
            fault = f"{key} {given} is where output.folder {job.output.folder} keeps its {own[0]}"
            raise ValueError(f"{fault}; choose another output.folder")


def _place_in(inner: Path, outer: Path) -> str | None:
    """The name of the entry in which a path lies, "" if it is outer itself, and None if it lies elsewhere.
    The path need not be there, whatever links and spellings lead to it."""
    if not outer.exists():
        return None
    real = Path(os.path.realpath(inner))
    places = {each: name for each, name in zip((real, *real.parents), ("", *real.parts[:0:-1]), strict=True)}
    return next((name for each, name in places.items() if each.exists() and each.samefile(outer)), None)


def _check_encoders(plan: JobPlan) -> None:
    cache = plan.job.cache
    if plan.family.host is not None and not (cache.has_stock_text and cache.has_stock_latents):
        wanted = "give its CLIP and VAE to cache.stock_clip and cache.stock_vae"
        raise ValueError(f"{plan.family.title} is trained on what ComfyUI's own encoders make: {wanted}")
    if cache.has_stock_latents:
        refuse_condition(plan.variant)
    if not cache.has_stock_text:
        folder = plan.component_folder(cache.text_encoders, "text_encoders")
        check_text_device(cache.text_device, plan.variant.text_encoders, folder, cache.text_quantize)
        comfy, config = plan.family.comfy, with_defaults(plan.family, plan.info.config)
        keys = {comfy.states: comfy.width, comfy.pooled: comfy.pooled_width}
        for spec in plan.variant.text_encoders:
            width = int(config[keys[spec.output]]) if spec.output in keys else None  # where the family says it
            check_encoder(spec, folder, width)
            folder_fingerprint(folder / spec.tokenizer_folder)  # small; whether it is there
    if not cache.has_stock_latents:
        _check_vae(plan, plan.vae_path)


def _check_vae(plan: JobPlan, path: Path) -> None:
    """Raises: ValueError naming a VAE of another family, of other latents than the model takes, or a file cut short."""
    family, config, published = plan.family, plan.info.config, plan.variant.vae_config
    own = published.get("latent_channels") or published.get("z_dim")
    patch = family.latent_of(plan.variant).channels // own if own else 1
    patch *= family.comfy.cells_per_token
    channels = (config.get("out_channels") or config["in_channels"]) // patch  # before they are packed
    check_vae(family, plan.variant, path, channels)


def give_cautions(plan: JobPlan) -> None:
    """Log a warning for each. What can be seen of a dataset folder alone is said where it is read.
    Raises: ValueError naming a model file that cannot be read."""
    for line in (describe_idle(plan.job), *_of_settings(plan.job, plan.samples, plan.variant), *_of_files(plan)):
        if line:
            _log.warning("%s", line)


def _of_settings(job: JobConfig, samples: Sequence[Sample], variant: Variant) -> Iterator[str]:
    word, optimizer = job.data.trigger_word.strip(), job.optimizer
    captions = [caption.lower() for sample in samples for caption in sample.captions]
    if word and captions and not any(word.lower() in each for each in captions):
        helps = "put {trigger} into data.caption_template, or train on folders that are not regularisation"
        yield f"data.trigger_word {word!r} is in none of the {len(samples)} captions; {helps}"
    if "lr" in optimizer.options:
        rate = f"the learning rate is optimizer.learning_rate = {optimizer.learning_rate:g}"
        yield f"optimizer.options.lr = {optimizer.options['lr']!r} is ignored: {rate}; remove one of the two"
    if "prodigy" in optimizer.name.lower() and optimizer.learning_rate < 0.05:
        found = f"optimizer.learning_rate = {optimizer.learning_rate:g}"
        yield f"{found} is a factor of the rate that prodigy finds, and makes it as much smaller; 1 is usual"
    if job.objective.masked_prior and not (job.data.use_masks and any(sample.mask_path for sample in samples)):
        yield "objective.masked_prior holds what loss masks leave black, and no image has one that is used; remove it"
    if job.cache.has_sound and samples and not any(sample.has_sound for sample in samples):
        yield "cache.stock_audio_vae has no effect: no clip has a track of sound, or a sound file of its name"
    expert, name = job.objective.expert, Path(job.model.path).name
    if variant.is_expert and not expert:
        why = "it is trained at all noise levels, and draws at some of them only"
        helps = 'set objective.expert to "high_noise" or "low_noise"'
        yield f"{name} is one of Wan 2.2's two experts, and nothing says which: {why}; {helps}"
    if expert and expert_by_name(Path(name)) not in ("", expert):
        yield f'objective.expert is "{expert}", and {name} seems to be the other one; compare the two'
    if job.samples.prompts and (expert or variant.partner):
        drawn, partner = (f"the {expert} expert", "the other one") if expert else (variant.name, variant.partner)
        found = f"sample pictures are drawn by {drawn} alone, at every noise level"
        yield f"{found}; with {partner} they would look better, so compare them only with each other"


def _of_files(plan: JobPlan) -> Iterator[str]:
    known: dict[int, list[str]] = {}  # by size, for only files of equal sizes are read
    for path in dict.fromkeys(sample.path for sample in plan.samples):
        known.setdefault(_num_bytes(path), []).append(path)
    both, evaluated = [], dict.fromkeys(sample.path for sample in plan.eval_samples)
    for path in evaluated:
        alike = known.get(_num_bytes(path), [])
        if path in alike or alike and media_fingerprint(path) in map(media_fingerprint, alike):
            both.append(path)
    if both:
        why = f"so their loss does not tell how the LoRA does on others: {_names(both)}"
        found = f"{len(both)} of {len(evaluated)} evaluation images and clips are trained on as well"
        yield f"{found}, {why}; give evaluation.folder a folder of its own"
    info = plan.info
    refuse_zeros(info.files[0].parent if len(info.files) > 1 else info.files[0], info.tensors)
    if zeros := find_zero_weights(info.tensors):
        found = f"{len(zeros)} of {len(info.tensors)} weights in {info.path} are all zeros: {_names(zeros)}"
        yield f"{found}; download the model again, unless it was made so"


def _num_bytes(path: str) -> int:
    files = sequence_files(Path(path)) if Path(path).is_dir() else [Path(path)]
    return sum(file.stat().st_size for file in files)


# Settings -> those that they depend on, and the values of one with which they have an effect; () for any but none.
_IDLE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "parallel.hang_timeout_s parallel.shard_degree train.cuda_graphs split.calibrate": ("", ()),  # of older versions
    "schedule.min_factor": ("schedule.name", ("linear", "cosine")),
    "model.rotation": ("model.quantize", ("int8-compute", "auto")),
    "output.use_ema samples.use_ema": ("train.ema_decay", ()),
    "samples.every_steps samples.before_first samples.seed samples.steps samples.guidance samples.width samples.height "
    "samples.frames samples.vae": ("samples.prompts", ()),
    "evaluation.every_steps evaluation.quantiles evaluation.seed": ("evaluation.folder", ()),
    "objective.logit_mean objective.logit_std": ("objective.timestep_sampling", ("", "logit_normal")),
    "objective.sigmoid_scale": ("objective.timestep_sampling", ("", "sigmoid")),
    "objective.min_snr_gamma": ("objective.loss_weighting", ("min_snr",)),
    "lora.alpha": ("lora.kind", ("lora", "lokr", "loha")),
    "cache.text_window_gb": ("cache.text_device", ("auto", "stream")),
    "parallel.microbatches_ahead": ("parallel.strategy", ("auto", "pipeline")),
    "data.reference_megapixels": ("data.condition", ("reference",)),
    "data.keep_tags data.tag_variants": ("data.shuffle_tags data.tag_dropout", ()),
    "data.resolutions data.max_aspect_ratio data.bucket_step data.frames data.fps data.window data.seconds "
    "data.trigger_word data.caption_lines data.shuffle_tags data.tag_dropout": ("data.encoded", ("",)),
}


def describe_idle(job: JobConfig) -> str:
    """What is set and has no effect, with the reasons; "" for nothing."""
    found = []
    if 0 < job.train.steps <= job.schedule.warmup_steps:
        found.append("schedule.warmup_steps (train.steps end before the full learning rate is reached)")
    for keys, (others, known) in _IDLE.items():
        given = [key for key in keys.split() if values_at(job, key) != [job_keys()[key].default]]
        values = {other: values_at(job, other)[0] for other in others.split()}
        if given and not any(value in known if known else value for value in values.values()):
            why = " and ".join(f"{other} is {value!r}" for other, value in values.items()) or "nothing reads it"
            found.append(f"{', '.join(given)} ({why})")
    return f"without effect, as this job is: {'; '.join(found)}" if found else ""
