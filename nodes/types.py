"""What travels on the links between our nodes: frozen parts of a job config, never weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .host import io

if TYPE_CHECKING:
    from ..config.job import CacheConfig, DataConfig, EvaluationConfig, ModelConfig, SplitConfig

ModelSocket = io.Custom("DEVICEBRIDGE_MODEL")
DatasetSocket = io.Custom("DEVICEBRIDGE_DATASET")


@dataclass(frozen=True)
class TrainingModel:
    """A checkpoint that was recognised, and the devices that will hold it."""

    model: ModelConfig
    split: SplitConfig


@dataclass(frozen=True)
class TrainingDataset:
    """Images to train and to evaluate on, and where their captions and latents are kept; cache None is the default."""

    data: DataConfig
    evaluation: EvaluationConfig
    cache: CacheConfig | None = None
