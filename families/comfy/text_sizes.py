"""How large the text is that ComfyUI's own classes are given, for plans before any caption is encoded."""

from __future__ import annotations

import torch
from torch import nn

from ..spec import UNKNOWN_TEXT
from .inputs import COND, POOLED

# Class -> a linear of it that reads the text's states, and one that reads pooled_output; "" where none does.
_READERS: dict[str, tuple[str, str]] = {
    "Flux": ("txt_in", "vector_in.in_layer"),
    "Chroma": ("txt_in", ""),
    "ChromaRadiance": ("txt_in", ""),
    "QwenImageTransformer2DModel": ("txt_in", ""),
    "OpenAISignatureMMDITWrapper": ("context_embedder", "y_embedder.mlp.0"),
    "NextDiT": ("cap_embedder.1", ""),
    "WanModel": ("text_embedding.0", ""),
    "HunyuanVideo": ("txt_in.input_embedder", "vector_in.in_layer"),
    "LTXVModel": ("caption_projection.linear_1", ""),
    "MiniTrainDIT": ("blocks.0.cross_attn.k_proj", ""),
}

# What a checkpoint's tensors of its text encoders begin with, as ComfyUI looks for them.
CLIP_PARTS = ("cond_stage_model.", "conditioner.", "text_encoders.")


def usual_text(model: nn.Module) -> dict[str, torch.Tensor]:
    """A CONDITIONING of one sample as inputs.py has it, on meta; {} for a class that is not described here."""
    states, pooled = _READERS.get(type(model).__name__, ("", ""))
    widths = {COND: _width(model, states), POOLED: _width(model, pooled)}
    if not widths[COND]:
        return {}
    shapes = {COND: (UNKNOWN_TEXT, widths[COND]), POOLED: (widths[POOLED],)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if widths[name]}


def _width(model: nn.Module, name: str) -> int:
    """Of what a linear takes; 0 where this build has none of that name."""
    try:
        found = model.get_submodule(name) if name else None
    except AttributeError:
        return 0
    return found.in_features if isinstance(found, nn.Linear) else 0
