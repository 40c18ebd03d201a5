"""What is looked at before a job begins: faults that would end it hours later, and settings that its user hardly meant.

Headers, configs and images are read, no weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from ..checkpoints.fingerprint import folder_fingerprint
from ..checkpoints.header import TensorRecord, read_header
from ..checkpoints.model_class import refuse_absurd_sizes, with_defaults
from ..checkpoints.weight_file import find_zero_weights, refuse_zeros
from ..config.job import JobConfig, OptimizerConfig
from ..data.samples import Sample
from ..data.video import media_fingerprint, sequence_files
from ..encoding.text_encoder import check_encoder
from ..encoding.text_place import check_text_device
from ..encoding.vae import check_vae, find_vae
from ..families.spec import TextEncoderSpec
from ..parallel.devices import CPU, find_device
from ..parallel.placement import check_kept_blocks, check_offloaded_blocks
from ..quantization.quantize import check_packages, refusal
from ..system.json_file import read_json_object
from ..training.optimizer import make_optimizer
from .checked_job import JobPlan, comfy_reader, component_folder, vae_path
from .comfy_entries import refuse_condition
from .idle import describe_idle
from .read_job import ReadJob
from .samples import check_samples, describe_expert

_log = logging.getLogger(__name__)
_MAX_NAMES = 5  # spelt out in a message


def refuse_stills(read: ReadJob) -> None:
    """Raises: ValueError naming the single images, if the model is given the first frame."""
    stills = dict.fromkeys(sample.path for sample in (*read.samples, *read.eval_samples) if sample.num_frames == 1)
    stills |= {f"sample {n}": None for n, sample in enumerate(read.encoded, start=1) if sample.num_frames == 1}
    if read.variant.condition != "none" and stills:
        raise ValueError(
            f"{read.variant.name} is given the first frame, so in a single image nothing is left to learn; take out "
            f"these {len(stills)}, or give clips and data.frames above 1: {_names(stills)}"
        )


def check_tools(plan: JobPlan) -> None:
    """Check what the later parts of a job need: blocks, optimizer, devices, encoders, quantization.

    Raises: ValueError or RuntimeError as those parts would, hours later.
    """
    job, placement = plan.job, plan.placement
    kept, offloaded = plan.execution.kept_blocks, plan.execution.offloaded_blocks  # of several ranks this one's
    check_kept_blocks(kept, placement)
    check_offloaded_blocks(offloaded, kept, placement)
    if plan.execution.offloads and all(device == CPU for device in placement.used_devices):
        raise ValueError(
            'train.offload_activations = "on" moves block inputs from GPUs to host memory, but the model is on the '
            'CPU, so they are there; set it to "off"'
        )
    make_optimizer([nn.Parameter(torch.zeros(1))], job.optimizer)
    if job.cache.vae_device:
        try:
            find_device(job.cache.vae_device)
        except ValueError as error:
            raise ValueError(f"cache.vae_device = {job.cache.vae_device!r}: {error}") from error
    if not plan.encoded:
        _check_encoders(plan)
    if job.samples.prompts:
        vae = check_samples(plan)
        if plan.family.host is None:
            _check_vae(plan, vae)
    settings = job.model.quantize_settings
    if settings is not None:
        check_packages(settings)
        reason = refusal(settings, placement.used_devices)
        if reason:
            raise ValueError(reason)


def check_places(job: JobConfig, *, is_writer: bool = True) -> None:
    """Raises: ValueError naming the setting, if its folder is a file or lies in one, or cannot be written.

    Args:
        is_writer: whether this process writes the run's folder.
    """
    folders = {
        "output.folder": job.output.folder,
        "cache.folder": job.cache.folder,
        "model.quantized_cache": job.model.quantized_cache,
    }
    for key, folder in folders.items():
        nearest = _nearest(Path(folder))
        if folder and not nearest.is_dir():
            raise ValueError(f"{key} {folder} was asked for, but {nearest} is a file; choose a folder")
    if is_writer and not os.access(_nearest(Path(job.output.folder)), os.W_OK | os.X_OK):
        raise ValueError(f"output.folder {job.output.folder} cannot be written; choose another, or make it writable")


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest above it that is there."""
    return next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), Path())


# ---- text encoders and VAE ----


def _check_encoders(plan: JobPlan) -> None:
    cache = plan.job.cache
    if plan.family.host is not None and not (cache.has_stock_text and cache.has_stock_latents):
        raise ValueError(
            f"{plan.family.title} is trained on what ComfyUI's own encoders make: connect its CLIP and VAE to Cache "
            "Captions and Latents as stock CLIP and stock VAE, or name them in the job file with cache.stock_clip and "
            "cache.stock_vae"
        )
    if cache.has_stock_text or cache.has_stock_latents:
        comfy_reader(plan)
    if cache.has_stock_latents:
        refuse_condition(plan.variant)
    if not cache.has_stock_text:
        folder = component_folder(plan, cache.text_encoders, "text_encoders")
        dtype = getattr(torch, cache.dtype)
        for spec in plan.variant.text_encoders:
            _check_config(folder / spec.folder)
            refuse_zeros(folder / spec.folder, _read_headers(folder / spec.folder))
        check_text_device(cache.text_device, plan.variant.text_encoders, folder, dtype, cache.text_quantize)
        for spec in plan.variant.text_encoders:
            check_encoder(spec, folder, _text_width(plan, spec))
            folder_fingerprint(folder / spec.folder)
            folder_fingerprint(folder / spec.tokenizer_folder)
    if not cache.has_stock_latents:
        _check_vae(plan, vae_path(plan))


def _check_vae(plan: JobPlan, path: Path) -> None:
    """Raises: ValueError naming a VAE of another family, of other latents than the model takes, or a file cut short."""
    source = find_vae(path)
    if source.is_dir():
        _check_config(source)
    records = _read_headers(source) if source.is_dir() else read_header(source).records()
    refuse_zeros(source, records)
    shapes = {name: record.shape for name, record in records.items()}
    check_vae(plan.family, plan.variant, source, shapes, _vae_channels(plan))


def _text_width(plan: JobPlan, spec: TextEncoderSpec) -> int | None:
    """Of the states that the transformer takes from this encoder; None where the family does not say."""
    comfy = plan.family.comfy
    keys = {} if comfy is None else {comfy.states: comfy.width, comfy.pooled: comfy.pooled_width}
    if spec.output not in keys:
        return None
    return int(with_defaults(plan.family, plan.info.config)[keys[spec.output]])


def _vae_channels(plan: JobPlan) -> int:
    """Channels of the VAE's latents that the transformer takes, before they are packed into tokens or patches."""
    family, config = plan.family, plan.info.config
    cells = family.comfy.cells_per_token if family.comfy else 1
    published = plan.variant.vae_config
    own = published.get("latent_channels") or published.get("z_dim")
    patch = family.latent_of(plan.variant).channels // own if own else 1
    return (config.get("out_channels") or config["in_channels"]) // cells // patch


def _check_config(folder: Path) -> None:
    """Raises: ValueError for a size that no model has."""
    file = folder / "config.json"
    if file.is_file():  # whoever loads it says so otherwise
        refuse_absurd_sizes(file, read_json_object(file))


def _read_headers(folder: Path) -> dict[str, TensorRecord]:
    """Raises: ValueError naming a file that is cut short."""
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    return {name: record for file in files for name, record in read_header(file).records().items()}


# ---- what its user hardly meant ----


def give_cautions(plan: JobPlan) -> None:
    """Log a warning for each. What can be seen of a dataset folder alone is said where it is read.

    Raises: ValueError naming a model file that cannot be read.
    """
    for line in filter(
        None,
        [
            describe_idle(plan.job),
            _unused_trigger(plan),
            _ignored_rate(plan.job.optimizer),
            _small_factor(plan.job.optimizer),
            _trained_on(plan),
            _zero_weights(plan),
            describe_expert(plan),
            _which_expert(plan),
        ],
    ):
        _log.warning("%s", line)


def _which_expert(plan: JobPlan) -> str:
    """What is missing, or does not fit its file's name, about one of two experts that ComfyUI loads."""
    expert, name = plan.job.objective.expert, Path(plan.job.model.path).name
    if plan.variant.is_expert and not expert:
        return (
            f"{name} is one of Wan 2.2's two experts, and objective.expert does not say which: it is trained at all "
            'noise levels, and draws at some of them only; set it to "high_noise" or "low_noise"'
        )
    other = {"high_noise": "low", "low_noise": "high"}.get(expert)
    if other and re.search(rf"{other}[ _-]?noise", name, re.IGNORECASE):
        return f'objective.expert is "{expert}", and {name} seems to be the other one; compare the two'
    return ""


def _unused_trigger(plan: JobPlan) -> str:
    word = plan.job.data.trigger_word.strip()
    if not word or any(word.lower() in sample.caption.lower() for sample in plan.samples) or not plan.samples:
        return ""
    return (
        f"data.trigger_word {word!r} is in none of the {len(plan.samples)} captions; put {{trigger}} into "
        "data.caption_template, or train on folders that are not regularisation"
    )


def _ignored_rate(optimizer: OptimizerConfig) -> str:
    if "lr" not in optimizer.options:
        return ""
    return (
        f"optimizer.options.lr = {optimizer.options['lr']!r} is ignored: the learning rate is "
        f"optimizer.learning_rate = {optimizer.learning_rate:g}; remove one of the two"
    )


def _small_factor(optimizer: OptimizerConfig) -> str:
    if "prodigy" not in optimizer.name.lower() or optimizer.learning_rate >= 0.05:
        return ""
    return (
        f"optimizer.learning_rate = {optimizer.learning_rate:g} is a factor of the rate that prodigy finds, and makes "
        "it as much smaller; 1 is usual"
    )


def _trained_on(plan: JobPlan) -> str:
    both = _find_common(plan.samples, plan.eval_samples)
    if not both:
        return ""
    num = len({sample.path for sample in plan.eval_samples})
    return (
        f"{len(both)} of {num} evaluation images and clips are trained on as well, so their loss does not tell how the "
        f"LoRA does on others: {_names(both)}; give evaluation.folder a folder of its own"
    )


def _find_common(training: Sequence[Sample], evaluation: Sequence[Sample]) -> list[str]:
    """Paths of evaluation whose content is trained on as well; only files of equal sizes are read."""
    known: dict[int, list[str]] = {}
    for path in dict.fromkeys(sample.path for sample in training):
        known.setdefault(_num_bytes(path), []).append(path)
    found = []
    for path in dict.fromkeys(sample.path for sample in evaluation):
        alike = known.get(_num_bytes(path), [])
        if path in alike or alike and media_fingerprint(path) in map(media_fingerprint, alike):
            found.append(path)
    return found


def _num_bytes(path: str) -> int:
    files = sequence_files(Path(path)) if Path(path).is_dir() else [Path(path)]
    return sum(file.stat().st_size for file in files)


def _zero_weights(plan: JobPlan) -> str:
    refuse_zeros(plan.info.files[0].parent if len(plan.info.files) > 1 else plan.info.files[0], plan.info.tensors)
    zeros = find_zero_weights(plan.info.tensors)
    if not zeros:
        return ""
    return (
        f"{len(zeros)} of {len(plan.info.tensors)} weights in {plan.info.path} are all zeros: {_names(zeros)}; "
        "download the model again, unless it was made so"
    )


def _names(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
