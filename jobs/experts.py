"""A job for a pair of experts, taken apart into two ordinary jobs that share captions and latents.

Some models are two transformers, one for the high and one for the low half of the noise (Wan 2.2 A14B). Neither sees
what the other learns. Each job is what a user would write for that expert alone, so its LoRA is the same bytes.

LoRA files are named as the published ones of such models: <name>_high_noise.safetensors and
<name>_low_noise.safetensors, each in its own folder below the job's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoints.checkpoint import read_checkpoint
from ..config.job import JobConfig
from ..families.registry import FAMILIES
from ..families.spec import Variant

_PER_DEVICE = ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks")


@dataclass(frozen=True)
class Expert:
    """One of the two: "high_noise" or "low_noise", and its own job."""

    name: str
    job: JobConfig


def expert_jobs(job: JobConfig, devices: Sequence[str]) -> tuple[Expert, Expert]:
    """The jobs of both experts. High noise comes first and gets the first half of the devices. Reads headers.

    Raises: ValueError for a model that is no half of a pair, for the same expert twice, or settings per device that
        are not as many as there are devices.
    """
    first = read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = first.variant or first.family.variants[0]
    if not variant.partner:
        pairs = [each.name for family in FAMILIES.values() for each in family.variants if each.partner]
        raise ValueError(
            f"model.second_expert names the other expert of a pair, but {job.model.path} is {variant.name}, which is "
            f"whole; remove it, or name with model.variant which it is: {', '.join(pairs)}"
        )
    partner = first.family.variant(variant.partner)
    second = read_checkpoint(job.model.second_expert, first.family.name, partner.name)
    if {file.resolve() for file in first.files} == {file.resolve() for file in second.files}:
        raise ValueError(
            f"model.path {job.model.path} and model.second_expert {job.model.second_expert} are the same files; name "
            "the other expert's, or for both the model folder that holds transformer and transformer_2"
        )
    parts = sorted([(variant, job.model.path), (partner, job.model.second_expert)], key=lambda e: -e[0].sigma_range[1])
    middle = (len(devices) + 1) // 2
    shares = (slice(middle), slice(middle, None)) if len(devices) > 1 else (slice(1), slice(1))
    high, low = (
        _make_expert(job, each, path, devices, share) for (each, path), share in zip(parts, shares, strict=True)
    )
    return high, low


def num_at_once(experts: Sequence[Expert]) -> int:
    """How many of the two are trained at a time: both if they have no device in common."""
    first, second = (set(expert.job.split.devices) for expert in experts)
    return 1 if first & second else 2


def _make_expert(job: JobConfig, variant: Variant, path: str, devices: Sequence[str], share: slice) -> Expert:
    name = "high_noise" if variant.sigma_range[1] == 1.0 else "low_noise"
    folder = Path(job.output.folder)
    for setting in _PER_DEVICE:
        values = getattr(job.split, setting)
        if values and len(values) != len(devices):
            raise ValueError(
                f"split.{setting} has {len(values)} values, but the devices of both experts are "
                f"{', '.join(devices)}; give one each"
            )
    own = {setting: getattr(job.split, setting)[share] for setting in _PER_DEVICE}
    own_job = replace(
        job,
        model=replace(job.model, path=path, second_expert="", variant=variant.name),
        split=replace(job.split, devices=tuple(devices[share]), **own),
        cache=replace(job.cache, folder=job.cache.folder or str(folder / "cache")),
        output=replace(job.output, folder=str(folder / name), name=f"{job.output.name}_{name}"),
    )
    return Expert(name, own_job)
