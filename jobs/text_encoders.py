"""Text encoders that are trained together with a model: which jobs can, and what they take, by headers alone."""

from __future__ import annotations

from math import prod
from pathlib import Path

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.header import FLOAT_TYPES, TensorRecord, read_header
from ..config.job import JobConfig
from ..families.comfy.text_sizes import CLIP_PARTS

_ELEMENT_SIZE = 4  # they compute in float32, and are held so


def refuse_text_encoders(job: JobConfig, info: CheckpointInfo) -> None:
    """Raises: ValueError for a model without text encoders that can be trained, or a job that does not name them."""
    if not job.lora.text_encoder:
        return
    host, comfy = info.family.host, info.family.comfy
    if host is None or not host.text_class or (comfy is not None and comfy.needs):
        raise ValueError(
            f"lora.text_encoder trains the CLIP of SD 1.5, SD 2 and SDXL, and {job.model.path} is "
            f"{info.family.title} ({(info.variant or info.family.variants[0]).name}); remove it"
        )
    if not job.cache.stock_clip:
        raise ValueError(
            "lora.text_encoder computes with the text encoders themselves, and cache.text_source only names what they "
            "once made; name their files with cache.stock_clip in a job file, or remove lora.text_encoder"
        )


def text_encoder_bytes(job: JobConfig) -> int:
    """What their frozen weights take on the first device; 0 where none is trained."""
    if not job.lora.text_encoder:
        return 0
    records = [each for path in job.cache.stock_clip for each in _records(Path(path), job.model.path).values()]
    return _ELEMENT_SIZE * sum(prod(record.shape) for record in records if record.dtype in FLOAT_TYPES)


def _records(path: Path, model_path: str) -> dict[str, TensorRecord]:
    """Of a file of text encoders, or those of a whole checkpoint."""
    records = read_header(path).records()
    is_whole = path.resolve() == Path(model_path).resolve()
    return {name: each for name, each in records.items() if not is_whole or name.startswith(CLIP_PARTS)}
