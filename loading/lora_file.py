"""INTERIM: LoRA names. To be replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from ..families.spec import ModelFamily


def lora_to_original(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], alpha: float, rank: int
) -> dict[str, torch.Tensor]:
    groups: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for name in tensors:
        module = name.removesuffix(".lora_A.weight")
        if module == name:
            continue
        for row in family.renames:
            for position, pattern in enumerate(row.diffusers):
                match = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), module)
                if match:
                    original = row.original.format(*match.groups())
                    groups.setdefault(original, {})[position] = module
                    counts[original] = len(row.diffusers)
    out = {}
    for original, members in groups.items():
        if counts[original] == 1:
            a, b, n = tensors[members[0] + ".lora_A.weight"], tensors[members[0] + ".lora_B.weight"], 1
        else:
            assert len(members) == counts[original]
            order = [members[i] for i in sorted(members)]
            a = torch.cat([tensors[m + ".lora_A.weight"] for m in order])
            b = torch.block_diag(*[tensors[m + ".lora_B.weight"] for m in order])
            n = len(order)
        out[f"diffusion_model.{original}.lora_A.weight"] = a
        out[f"diffusion_model.{original}.lora_B.weight"] = b
        out[f"diffusion_model.{original}.alpha"] = torch.tensor(float(alpha * n))
    return out


def lora_to_diffusers(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], alpha: float, rank: int
) -> dict[str, torch.Tensor]:
    out = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            out[f"transformer.{name.removesuffix('.lora_A.weight')}.alpha"] = torch.tensor(float(alpha))
    return out
