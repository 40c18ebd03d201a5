"""The families' models and LoRA files at full size, on meta; made once, for that takes a second each."""

import functools
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from devicebridge.checkpoints.lora_file import make_lora_tensors
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.lora import resolve_targets
from torch import nn

ASSETS = Path(__file__).resolve().parent / "assets"


@functools.cache
def full_model(name: str) -> nn.Module:
    family = FAMILIES[name]
    with torch.device("meta"):
        return getattr(diffusers, family.transformer_class)(**dict(family.variants[0].transformer_config))


def full_lora(name: str) -> dict[str, torch.Tensor]:
    model = full_model(name)
    tensors: dict[str, torch.Tensor] = {}
    for module in resolve_targets(model, FAMILIES[name].lora_targets):
        rows, columns = model.get_submodule(module).weight.shape
        tensors[f"{module}.lora_A.weight"] = torch.zeros(1, columns, device="meta")
        tensors[f"{module}.lora_B.weight"] = torch.zeros(rows, 1, device="meta")
    return tensors


@functools.cache
def full_file(name: str) -> dict[str, torch.Tensor]:
    return make_lora_tensors(FAMILIES[name], "original", {}, full_lora(name), 1.0, 1)


def asset(name: str) -> Any:
    return json.loads((ASSETS / f"lora_keys_{name}.json").read_text(encoding="utf-8"))
