"""A checked job, and where the parts of its model lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..assembly import ExecutionPlan
from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import JobConfig
from ..data.samples import EncodedSample, Sample, TrainingSample
from ..families.comfy.inputs import ComfyReader
from ..families.spec import ModelFamily, Variant
from ..parallel.placement import Placement
from ..planning.plan import TrainingPlan
from ..training.objective import NoiseSchedule
from .comfy_entries import make_comfy_reader, resolution_of


@dataclass(frozen=True)
class JobPlan:
    """A checked job: what will be loaded where, and what it will be trained on.

    Args:
        job: without "auto" for what the planner decides.
        execution: how it is loaded and trained.
        samples: images and clips; () where the dataset arrived encoded.
        encoded: then, its samples.
        training: what the planner chose; None on machines it knows nothing of.
        targets: fqns of the linears that LoRA adapts.
        start: layers of the LoRA file that it begins with; {} begins afresh.
    """

    job: JobConfig
    info: CheckpointInfo
    variant: Variant
    execution: ExecutionPlan
    schedule: NoiseSchedule
    samples: tuple[Sample, ...]
    eval_samples: tuple[Sample, ...]
    encoded: tuple[EncodedSample, ...] = ()
    training: TrainingPlan | None = None
    targets: tuple[str, ...] = ()
    start: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """Which part of the model is where."""
        return self.execution.placement

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
        if self.encoded or any(each.image_request().is_sound for each in self.samples):
            return resolution_of(self.training_samples, self.family.latent_of(self.variant))
        return self.job.data.largest_resolution


def comfy_reader(plan: JobPlan) -> ComfyReader:
    """Reads what ComfyUI's own encoders left, as this model takes it."""
    return make_comfy_reader(plan.family, plan.variant, plan.info.config)


def caption_reader(plan: JobPlan) -> ComfyReader:
    """The same of captions alone: what a job makes of files is not in them."""
    reader = comfy_reader(plan)
    return without_conditions(reader) if plan.job.data.condition else reader


def without_conditions(reader: ComfyReader) -> ComfyReader:
    """Reads text alone."""
    return replace(reader, comfy=replace(reader.comfy, needs=()))


def vae_path(plan: JobPlan) -> Path:
    """Where the job's VAE is."""
    setting = plan.job.cache.vae
    return Path(setting) if setting else component_folder(plan, "", "vae") / "vae"


def component_folder(plan: JobPlan, setting: str, key: str) -> Path:
    """The folder that a setting names, else the model's own.

    Raises: ValueError if the model came without one; it names the setting.
    """
    if setting:
        return Path(setting)
    if plan.info.pipeline_folder is None:
        raise ValueError(
            f"{plan.job.model.path} holds a transformer only; name the {key.replace('_', ' ')} with cache.{key} "
            "(a diffusers model folder has them)"
        )
    return plan.info.pipeline_folder
