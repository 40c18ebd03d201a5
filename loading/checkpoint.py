"""INTERIM: diffusers folders only. To be replaced by the full reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from ..families.registry import FAMILIES
from ..families.spec import ModelFamily, Variant


@dataclass(frozen=True)
class TensorRecord:
    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CheckpointInfo:
    path: Path
    family: ModelFamily
    variant: Variant | None
    config: Mapping[str, Any]
    layout: Literal["diffusers", "original"]
    tensors: Mapping[str, TensorRecord]
    pipeline_folder: Path | None


def read_checkpoint(path: str | Path, family: str = "", variant: str = "") -> CheckpointInfo:
    path = Path(path)
    pipeline = path if (path / "model_index.json").exists() else None
    folder = path / "transformer" if pipeline else path
    if not (folder / "config.json").exists():
        raise ValueError(f"{path} is no diffusers folder")
    config = json.loads((folder / "config.json").read_text())
    cls = config.pop("_class_name")
    found = next(f for f in FAMILIES.values() if f.transformer_class == cls)
    config = {k: v for k, v in config.items() if not k.startswith("_")}
    chosen = found.variant(variant) if variant else None
    if chosen is None:
        guided = config.get("guidance_embeds")
        chosen = next((v for v in found.variants if bool(v.training_guidance is not None) == bool(guided)), None)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for key in handle.keys():
                part = handle.get_slice(key)
                tensors[key] = TensorRecord(file, key, tuple(part.get_shape()), part.get_dtype())
    return CheckpointInfo(path, found, chosen, config, "diffusers", tensors, pipeline)


def make_empty_transformer(info: CheckpointInfo) -> nn.Module:
    import diffusers
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return getattr(diffusers, info.family.transformer_class)(**info.config)


def load_transformer(info: CheckpointInfo, device_of: Callable[[str], torch.device], dtype: torch.dtype) -> nn.Module:
    model = make_empty_transformer(info)
    for name, record in info.tensors.items():
        owner, _, leaf = name.rpartition(".")
        with safe_open(record.file, "pt") as handle:
            data = handle.get_tensor(record.key).to(device=device_of(name), dtype=dtype)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(data, requires_grad=False))
    return model.eval()
