"""A job that was read, and one that was checked; and where its blocks go by sizes alone, where no plan was made."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from ..assembly import ExecutionPlan
from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import JobConfig, ModelConfig, SplitConfig
from ..config.model import Strategy, holds_copies
from ..data.samples import EncodedSample, Sample, TrainingSample
from ..families.comfy.inputs import ComfyReader
from ..families.spec import ModelFamily, Variant
from ..parallel.devices import free_bytes
from ..parallel.placement import (
    Placement,
    block_names,
    check_budgets,
    check_one_each,
    parameter_bytes,
    plan_manual,
    plan_placement,
    plan_replicas,
)
from ..planning.dry_run import SampleText
from ..planning.plan import TrainingPlan
from ..quantization.quantize import stored_bytes
from ..sampling.draw import picture_size
from ..training.objective import NoiseSchedule

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadJob:
    """A job as planning and training both need it."""

    job: JobConfig
    info: CheckpointInfo
    variant: Variant
    model: nn.Module  # without weights
    targets: tuple[str, ...]  # fqns of the linears that LoRA adapts
    samples: tuple[Sample, ...] = ()  # images and clips
    encoded: tuple[EncodedSample, ...] = ()  # in their place, where the dataset arrived encoded
    eval_samples: tuple[Sample, ...] = ()

    @property
    def family(self) -> ModelFamily:
        return self.info.family

    @property
    def training_samples(self) -> tuple[TrainingSample, ...]:
        """Either kind."""
        return self.encoded or self.samples

    @property
    def resolution(self) -> int:
        """Of the largest images or entries, in pixels along a square's side; of sound, whose stride is 1, in cells."""
        if not self.encoded and not any(each.image_request().is_sound for each in self.samples):
            return self.job.data.largest_resolution
        sizes = [each.bucket[-3:-1] for each in self.encoded] or [each.bucket for each in self.samples]
        cells = max(map(math.prod, sizes))
        return round(math.sqrt(cells) * self.family.latent_of(self.variant).spatial_stride)

    @property
    def reader(self) -> ComfyReader:
        """Reads what ComfyUI's own encoders left, as this model takes it."""
        family = self.family
        return ComfyReader(family.comfy, self.info.config, family.latent_of(self.variant), self.variant.name)

    @property
    def caption_reader(self) -> ComfyReader:
        """The same of captions alone: what a job makes of files is not in them."""
        comfy = replace(self.reader.comfy, needs=()) if self.job.data.condition else self.reader.comfy
        return replace(self.reader, comfy=comfy)

    def component_folder(self, setting: str, key: str) -> Path:
        """The folder that a setting names, else the model's own.
        Raises: ValueError if the model came without one; it names the setting."""
        if setting:
            return Path(setting)
        if self.info.pipeline_folder is None:
            helps = f"name the {key.replace('_', ' ')} with cache.{key} (a diffusers model folder has them)"
            raise ValueError(f"{self.job.model.path} holds a transformer only; {helps}")
        return self.info.pipeline_folder

    @property
    def vae_path(self) -> Path:
        """Where the job's VAE is. Raises: as component_folder."""
        setting = self.job.cache.vae
        return Path(setting) if setting else self.component_folder("", "vae") / "vae"

    @property
    def picture_size(self) -> tuple[int, int, int] | None:
        """Of the job's sample pictures. Returns and raises: as picture_size of sampling/draw.py."""
        frames = max(sample.num_frames for sample in self.training_samples)
        return picture_size(self.job, self.family, self.variant, frames)

    @property
    def samples_vae(self) -> Path:
        """Where the VAE that decodes sample pictures is. Raises: ValueError if nothing names one."""
        cache, is_of_comfyui = self.job.cache, self.family.host is not None
        if named := self.job.samples.vae or (cache.stock_vae if is_of_comfyui else ""):
            return Path(named)
        if is_of_comfyui:
            graph = "in a graph, connect Load VAE or Load Checkpoint to stock VAE of Cache Captions and Latents"
            raise ValueError(f"samples.prompts need a VAE: name it with cache.stock_vae or samples.vae; {graph}")
        if cache.latent_source and self.info.pipeline_folder is None:
            raise ValueError("samples.prompts need a VAE, and ComfyUI's encoded the images; name it with samples.vae")
        return self.vae_path


@dataclass(frozen=True, kw_only=True)
class JobPlan(ReadJob):
    """A checked job, without "auto" for what the planner decides: what will be loaded where."""

    execution: ExecutionPlan
    schedule: NoiseSchedule
    training: TrainingPlan | None = None  # what the planner chose; None on machines it knows nothing of
    start: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)  # layers that its LoRA begins with

    @property
    def placement(self) -> Placement:
        """Which part of the model is where."""
        return self.execution.placement


@dataclass(frozen=True)
class Subject:
    """What is trained, as far as it decides how: a model without weights, and the sizes of its data."""

    info: CheckpointInfo
    variant: Variant
    model: nn.Module
    largest: tuple[int, int, int]  # height and width in pixels and frames of the samples that take the most
    train: frozenset[tuple[int, ...]]  # what tells the shapes of batches apart, of all samples that are trained on
    alone: frozenset[tuple[int, ...]] = frozenset()  # the same of those that are evaluated
    text: SampleText | None = None  # what one of ComfyUI's own models is given of the longest caption, where known
    picture: tuple[int, int, int] | None = None  # as largest, of sample pictures, if they are of a size of their own
    beside_bytes: int = 0  # of weights that the first device holds beside the model
    has_empty_caption: bool = False  # whether a sample has one, or may be given one
    disk_note: str = ""  # of what its texts take there


def place_by_size(
    config: ModelConfig,
    split: SplitConfig,
    subject: Subject,
    devices: Sequence[torch.device],
    *,
    strategy: Strategy = "none",
) -> Placement:
    """Which block goes where, or which device has a copy. Raises: ValueError if it does not fit."""
    model, family = subject.model, subject.info.family
    blocks = block_names(model, family)
    block_bytes, main_bytes = held_bytes(config, subject)
    main_bytes += subject.beside_bytes
    check_one_each("split.memory_limit_gb", split.memory_limit_gb, devices)
    budgets: dict[torch.device, int | None] = {}
    for number, device in enumerate(devices):
        # the user's limits, else what is free, less a tenth on accelerators: a guess at activations, LoRA and optimizer
        limit = int(split.memory_limit_gb[number] * 1e9) if split.memory_limit_gb else free_bytes(device)
        if limit is not None and device.type != "cpu" and not split.memory_limit_gb:
            limit = int(0.9 * limit)
        budgets[device] = limit
    if holds_copies(strategy):
        return plan_replicas(blocks, devices, sum(block_bytes) + main_bytes, budgets, strategy)
    if split.balance == "manual":
        manual = plan_manual(blocks, list(devices), split.split_at)
        check_budgets(manual, block_bytes, main_bytes, budgets)
        return manual
    if split.balance == "time":
        _log.warning('split.balance = "time" needs a forecast, which there is none of here; blocks are cut by memory')
    capacity = [budgets[device] for device in devices]
    return plan_placement(
        blocks,
        devices,
        block_cost=list(map(float, block_bytes)),
        main_cost=float(main_bytes),
        block_bytes=block_bytes,
        main_bytes=main_bytes,
        budget_bytes=budgets,
        capacity=capacity if all(capacity) else (),
    )


def held_bytes(config: ModelConfig, subject: Subject) -> tuple[list[int], int]:
    """Weights of each block as they will be held, and of all else."""
    model, family, settings = subject.model, subject.info.family, config.quantize_settings
    blocks, dtype = block_names(model, family), getattr(torch, config.dtype)
    if settings is None:
        return parameter_bytes(model, blocks, dtype.itemsize)
    return stored_bytes(model, family, blocks, dtype, settings)
