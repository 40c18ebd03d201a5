"""What travels on the links between our nodes: frozen parts of a job config, never weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.job import CacheConfig, DataConfig, EvaluationConfig, JobConfig, ModelConfig, SplitConfig
from ..families.registry import COMFYUI
from . import host
from .host import io

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo

ModelSocket = io.Custom("DEVICEBRIDGE_MODEL")
DatasetSocket = io.Custom("DEVICEBRIDGE_DATASET")


@dataclass(frozen=True)
class TrainingModel:
    """A checkpoint that was recognised, and the devices that will hold it."""

    model: ModelConfig
    split: SplitConfig

    def prepared(self, info: CheckpointInfo | None = None) -> AbstractContextManager[CheckpointInfo | None]:
        """Inside, ComfyUI is ready to train its own model, which is given (again); None for a family that we build."""
        return host.native_model(self.model, info) if self.model.family == COMFYUI else nullcontext()

    def read(self) -> CheckpointInfo:
        """What the file's headers say; once for each call. Raises: ValueError for a file that has changed since."""
        from ..checkpoints.checkpoint import read_checkpoint

        with self.prepared() as native:
            return native or read_checkpoint(self.model.path, variant=self.model.variant)

    def job(self, dataset: TrainingDataset, **sections: Any) -> JobConfig:
        return JobConfig(model=self.model, split=self.split, data=dataset.data, **sections)


@dataclass(frozen=True)
class TrainingDataset:
    """Images to train and to evaluate on, and where their captions and latents are kept; cache None is the default.
    vae_file, clip_files, clip_type: of the stock VAE and CLIP that encoded them; "" where nobody knows.
    find_clip: gives that CLIP, as encoding/sources.py asks it, or None where it is gone; None where there was none."""

    data: DataConfig
    evaluation: EvaluationConfig
    cache: CacheConfig | None = None
    vae_file: str = ""
    clip_files: tuple[str, ...] = ()
    clip_type: str = ""
    find_clip: Callable[[], Any] | None = None
