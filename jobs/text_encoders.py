"""Text encoders that are trained together with a model: which jobs can, and what they take, by headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.header import FLOAT_TYPES, TensorRecord, read_header
from ..config.job import JobConfig
from ..data.samples import TrainingSample
from ..encoding.key import comfy_token_key
from ..families.comfy.inputs import TOKENS, WEIGHTS
from ..families.comfy.text_sizes import CLIP_PARTS
from ..families.spec import ModelFamily
from ..planning.question import NOTHING, Resident
from ..planning.text_layers import LayerSize, kept_of_window
from .encode_job import cache_store

_ELEMENT_SIZE = 4  # they compute in float32, and are held so
_IN_LAYERS = (".layers.", ".resblocks.")
_WIDENING = ("mlp.fc1.weight", "mlp.c_fc.weight")  # of every layer one
_WIDTH_OF_CLIP_L = 768


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


def text_encoders_held(job: JobConfig, family: ModelFamily, samples: Iterable[TrainingSample]) -> Resident:
    """What they and their LoRA take on the first device, and what they keep of the longest caption.

    Args:
        family: of the diffusion model. samples: to train on, whose captions' tokens may be in the cache.
    """
    if not job.lora.text_encoder:
        return NOTHING
    records = [each for path in job.cache.stock_clip for each in _records(Path(path), job.model.path).items()]
    num_trained = sum(_num_trained(name, record, job.lora.text_rank) for name, record in records)
    weights = sum(prod(record.shape) for _, record in records if record.dtype in FLOAT_TYPES)
    lora = num_trained * getattr(torch, job.lora.dtype).itemsize
    layers = Counter(_layers(records))
    found = {size: kept_of_window(size, job.lora, family) for size in layers}
    windows = _num_windows(job, samples)
    inputs = windows * sum((count + 1) * found[size].inputs for size, count in layers.items())  # the last norm's too
    kept = windows * sum(count * found[size].kept for size, count in layers.items())
    return Resident(weights * _ELEMENT_SIZE, lora, num_trained, inputs, kept)


def _layers(records: Iterable[tuple[str, TensorRecord]]) -> Iterator[LayerSize]:
    for name, record in records:
        if name.endswith(_WIDENING) and any(part in name for part in _IN_LAYERS):
            inner, width = record.shape
            yield LayerSize(width, inner, is_quick=width == _WIDTH_OF_CLIP_L)


def _num_windows(job: JobConfig, samples: Iterable[TrainingSample]) -> int:
    """Windows of tokens that the longest caption is computed in; 1 as long as no tokens are in the cache."""
    if not job.cache.text_source:
        return 1
    store = cache_store(job)
    weighs = job.cache.caption_weights
    keys = {comfy_token_key(each.caption, job.cache.text_source, weighs=weighs) for each in samples}
    return max((_windows_of(entry) for key in keys if (entry := store.get(key))), default=1)


def _windows_of(entry: Mapping[str, torch.Tensor]) -> int:
    """Where a prompt weighs tokens, ComfyUI computes one more, without words."""
    is_weighted = any(bool((each != 1).any()) for name, each in entry.items() if name.startswith(WEIGHTS))
    return max(each.shape[0] for name, each in entry.items() if name.startswith(TOKENS)) + is_weighted


def _records(path: Path, model_path: str) -> dict[str, TensorRecord]:
    """Of a file of text encoders, or those of a whole checkpoint."""
    records = read_header(path).records()
    is_whole = path.resolve() == Path(model_path).resolve()
    return {name: each for name, each in records.items() if not is_whole or name.startswith(CLIP_PARTS)}


def _num_trained(name: str, record: TensorRecord, rank: int) -> int:
    """Values of the LoRA of a weight, if it is of a layer. CLIP-G's files have q, k and v as one."""
    if len(record.shape) != 2 or not any(part in name for part in _IN_LAYERS):
        return 0
    rows, columns = record.shape
    return rank * (rows + columns * (3 if "in_proj" in name else 1))
