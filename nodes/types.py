"""What travels on the links between our nodes: frozen parts of a job config, never weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.job import CacheConfig, DataConfig, EvaluationConfig, JobConfig, ModelConfig, SplitConfig
from .host import io

ModelSocket = io.Custom("DEVICEBRIDGE_MODEL")
DatasetSocket = io.Custom("DEVICEBRIDGE_DATASET")


@dataclass(frozen=True)
class TrainingModel:
    """A checkpoint that was recognised, and the devices that will hold it."""

    model: ModelConfig
    split: SplitConfig

    def job(self, dataset: TrainingDataset, **sections: Any) -> JobConfig:
        return JobConfig(model=self.model, split=self.split, data=dataset.data, **sections)


@dataclass(frozen=True)
class TrainingDataset:
    """Images to train and to evaluate on, and where their captions and latents are kept; cache None is the default."""

    data: DataConfig
    evaluation: EvaluationConfig
    cache: CacheConfig | None = None
