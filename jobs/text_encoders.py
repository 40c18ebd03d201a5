"""Text encoders that are trained together with a model: which jobs can, and what they take, by headers alone."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.header import FLOAT_TYPES, TensorRecord, read_header
from ..config.job import JobConfig
from ..families.comfy.text_sizes import CLIP_PARTS
from ..planning.question import NOTHING, Resident

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


def text_encoders_held(job: JobConfig) -> Resident:
    """What they and their LoRA take on the first device."""
    if not job.lora.text_encoder:
        return NOTHING
    records = [each for path in job.cache.stock_clip for each in _records(Path(path), job.model.path).items()]
    num_trained = sum(_num_trained(name, record, job.lora.text_rank) for name, record in records)
    weights = sum(prod(record.shape) for _, record in records if record.dtype in FLOAT_TYPES)
    lora = num_trained * getattr(torch, job.lora.dtype).itemsize
    return Resident(weights * _ELEMENT_SIZE, lora, num_trained)


def _records(path: Path, model_path: str) -> dict[str, TensorRecord]:
    """Of a file of text encoders, or those of a whole checkpoint."""
    records = read_header(path).records()
    is_whole = path.resolve() == Path(model_path).resolve()
    return {name: each for name, each in records.items() if not is_whole or name.startswith(CLIP_PARTS)}


def _num_trained(name: str, record: TensorRecord, rank: int) -> int:
    """Values of the LoRA of a weight, if it is of a layer. CLIP-G's files have q, k and v as one."""
    if len(record.shape) != 2 or not any(part in name for part in (".layers.", ".resblocks.")):
        return 0
    rows, columns = record.shape
    return rank * (rows + columns * (3 if "in_proj" in name else 1))
