"""LoRA of CLIP text encoders under the names of kohya's trainer, which every loader of ComfyUI and others know.

lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight     one encoder: SD 1.5, SD 2
lora_te1_..., lora_te2_...                                                CLIP-L and CLIP-G: SDXL
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from ..families.spec import TEXT_ENCODERS

_NUMBERS = {"clip_l": "1", "clip_g": "2"}  # where there are both
_LAYER = re.compile(rf"^{TEXT_ENCODERS}\.(?P<part>\w+)\.transformer\.(?P<name>.+)\.lora_(?P<kind>[AB])\.weight$")
_KINDS = {"A": "lora_down", "B": "lora_up"}


def without_text(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A LoRA's tensors by fqn, less those of text encoders."""
    return {name: each for name, each in tensors.items() if not name.startswith(f"{TEXT_ENCODERS}.")}


def text_lora_for_comfyui(tensors: Mapping[str, torch.Tensor], strength: float) -> dict[str, torch.Tensor]:
    """The LoRA of text encoders as files name it; {} without one.

    Args:
        tensors: a LoRA's, "<linear>.lora_A.weight" [R, in] and ".lora_B.weight" [out, R], by fqn.
        strength: alpha / rank of all layers.
    """
    found = [match for name in tensors if (match := _LAYER.match(name))]
    has_both = {match["part"] for match in found} == _NUMBERS.keys()
    written: dict[str, torch.Tensor] = {}
    for match in found:
        layer = f"lora_te{_NUMBERS[match['part']] if has_both else ''}_{match['name'].replace('.', '_')}"
        tensor = tensors[match[0]]
        written[f"{layer}.{_KINDS[match['kind']]}.weight"] = tensor.contiguous()
        if match["kind"] == "A":
            written[f"{layer}.alpha"] = torch.tensor(strength * tensor.shape[0], dtype=torch.float32)
    return written
