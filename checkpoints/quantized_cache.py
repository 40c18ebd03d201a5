"""Quantized weights kept on disk, so that the next run reads half the bytes and rounds nothing.

An entry is a safetensors file of the weights that we rounded ourselves, with their scales; a hash of all that decides
its content is in its metadata. What fails about the cache is one line in the log, and the weights are rounded as if
there were none. Header and scales are checked before use; flipped bits among the weights are not looked for.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from ..quantization.frozen_linear import FrozenLinear8
from ..quantization.quantize import ROUNDINGS, QuantizeSettings
from ..system.files import remove_leftovers, write_atomically
from .checkpoint import CheckpointInfo
from .fingerprint import file_fingerprint, settings_fingerprint
from .header import FILE_TYPES, TensorRecord, read_header
from .quantized_files import is_kept, read_scales
from .weight_file import tensors_in_pieces

_log = logging.getLogger(__name__)

_ABANDONED_S = 3600  # a run writes a layer within seconds
FOREIGN = (OSError, ValueError, KeyError)  # what reading a file raises that is not what we wrote


def open_cached(
    folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype
) -> CheckpointInfo | None:
    """The same model, its rounded weights those of the cache; None if that has no whole entry."""
    file, key = _file_and_key(folder, info, settings, dtype)
    if not file.exists():
        return None
    records: dict[str, TensorRecord] = {}
    try:
        header = read_header(file)
        if header.metadata.get("key") != key:
            raise ValueError("it is of another model or of other settings")
        found = header.records()
        for name, record in found.items():
            if not name.endswith("_scale"):
                shape, scale = info.tensors[name].shape, found[f"{name}_scale"]
                wanted = shape, FILE_TYPES[settings.stored_dtype], (shape[0], 1)
                if (record.shape, record.dtype, scale.shape) != wanted:
                    raise ValueError(f"its {name} is {record.dtype} {list(record.shape)}")
                records[name] = replace(record, scale=scale, rotation=settings.rotation_of(shape[1]))
        read_scales(records)
    except FOREIGN as error:
        _log.warning("%s is damaged and its weights are rounded again (%s)", file, error)
        return None
    _log.info("%d quantized weights are read from %s", len(records), file)
    return replace(info, tensors={**info.tensors, **records})


def _file_and_key(
    folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype
) -> tuple[Path, str]:
    """The entry's file and the whole key."""
    fingerprints = {file: file_fingerprint(file) for file in info.files}
    key = settings_fingerprint(
        {
            "version": ROUNDINGS.get(settings.scheme, 1),
            "tensors": {name: _described(record, fingerprints) for name, record in info.tensors.items()},
            "family": info.family.name,
            "config": info.config,
            "kept": info.family.keep_full_precision,
            "scheme": settings.scheme,
            "rotation": settings.rotation if settings.scheme == "int8-compute" else 0,
            "dtype": str(dtype),
        }
    )
    return folder / f"{info.family.name}-{settings.scheme}-{key[:20]}.safetensors", key


def _described(record: TensorRecord, fingerprints: Mapping[Path, str]) -> Any:
    scale = None if record.scale is None else _described(record.scale, fingerprints)
    return [fingerprints[record.file], *astuple(replace(record, file=Path(), scale=None))[1:], scale]


def keep_quantized(
    folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype, model: torch.nn.Module
) -> None:
    """Write an entry of the layers of a model that were rounded, if there are any."""
    file, key = _file_and_key(folder, info, settings, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear8) and not is_kept(info.tensors[f"{name}.weight"], settings):
            tensors |= {f"{name}.weight": module.weight, f"{name}.weight_scale": module.scale}
    if not tensors:
        return
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, _ABANDONED_S)
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)  # of earlier versions, which needs its room
        if (missing := num_bytes - shutil.disk_usage(folder).free) > 0:  # a disk too small is not filled first
            raise OSError(f"{folder} has {missing} bytes ({missing / 1e9:.2f} GB) too little room")
        write_atomically(file, tensors_in_pieces(tensors, {"key": key}))
    except OSError as error:
        _log.warning("%s: the quantized weights are not kept for the next run: %s", file, error)
    else:
        _log.info("%d quantized weights are kept in %s (%.2f GB)", len(tensors) // 2, file, num_bytes / 1e9)
