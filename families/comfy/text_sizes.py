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


_CLIP_TOKENS = 77  # of a caption that is no longer than one window of CLIP's
_SDXL_POOLED = 1280  # of what label_emb reads; behind it come the picture's sizes


def usual_text(model: nn.Module) -> dict[str, torch.Tensor]:
    """A CONDITIONING of one sample as inputs.py has it, on meta; {} for a class that is not described here."""
    if type(model).__name__ == "UNetModel":
        return _text_of_unet(model)
    states, pooled = _READERS.get(type(model).__name__, ("", ""))
    return _sized(UNKNOWN_TEXT, _width(model, states), _width(model, pooled))


def _text_of_unet(model: nn.Module) -> dict[str, torch.Tensor]:
    """Which of its blocks have attention differs by build."""
    readers = [name for name, _ in model.named_modules() if name.endswith(".attn2.to_k")]
    pooled = _SDXL_POOLED if _width(model, "label_emb.0.0") > _SDXL_POOLED else 0
    return _sized(_CLIP_TOKENS, _width(model, readers[0]), pooled) if readers else {}


def _sized(num_tokens: int, width: int, pooled: int) -> dict[str, torch.Tensor]:
    if not width:
        return {}
    widths = {COND: width, POOLED: pooled}
    shapes = {COND: (num_tokens, width), POOLED: (pooled,)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if widths[name]}


def _width(model: nn.Module, name: str) -> int:
    """Of what a linear takes; 0 where this build has none of that name."""
    try:
        found = model.get_submodule(name) if name else None
    except AttributeError:
        return 0
    return found.in_features if isinstance(found, nn.Linear) else 0
