"""How large the text is that ComfyUI's own classes are given, for plans before any caption is encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..spec import UNKNOWN_TEXT
from .inputs import COND, OPTION, POOLED

# Class, or one that it derives from -> a linear of it that reads the text's states, and one that reads pooled_output;
# "" where none does.
_READERS: dict[str, tuple[str, str]] = {
    "Flux": ("txt_in", "vector_in.in_layer"),
    "Chroma": ("txt_in", ""),
    "ChromaRadiance": ("txt_in", ""),
    "QwenImageTransformer2DModel": ("txt_in", ""),
    "OpenAISignatureMMDITWrapper": ("context_embedder", "y_embedder.mlp.0"),
    "NextDiT": ("cap_embedder.1", ""),
    "WanModel": ("text_embedding.0", ""),
    "MiniTrainDIT": ("blocks.0.cross_attn.k_proj", ""),
    "ErnieImageModel": ("text_proj", ""),
    "QwenImage21Transformer2DModel": ("txt_in.in_layer", ""),
    "MiniMaxH3Model": ("condition_proj", ""),
}

# What a checkpoint's tensors of its text encoders begin with, as ComfyUI looks for them.
CLIP_PARTS = ("cond_stage_model.", "conditioner.", "text_encoders.")


_CLIP_TOKENS = 77  # of a caption that is no longer than one window of CLIP's
_HIDREAM_TOKENS = 128  # its encoders make shorter captions as long
_SDXL_POOLED = 1280  # of what label_emb reads; behind it come the picture's sizes


def usual_text(model: nn.Module) -> dict[str, torch.Tensor]:
    """A CONDITIONING of one sample as inputs.py has it, on meta; {} for a class that is not described here."""
    names = [each.__name__ for each in type(model).__mro__]
    if special := next((_SPECIAL[each] for each in names if each in _SPECIAL), None):
        return special(model)
    states, pooled = next((_READERS[each] for each in names if each in _READERS), ("", ""))
    return _sized(UNKNOWN_TEXT, _width(model, states), _width(model, pooled))


def _text_of_unet(model: nn.Module) -> dict[str, torch.Tensor]:
    """Which of its blocks have attention differs by build."""
    readers = [name for name, _ in model.named_modules() if name.endswith(".attn2.to_k")]
    pooled = _SDXL_POOLED if _width(model, "label_emb.0.0") > _SDXL_POOLED else 0
    return _sized(_CLIP_TOKENS, _width(model, readers[0]), pooled) if readers else {}


def _text_of_hidream(model: Any) -> dict[str, torch.Tensor]:
    """T5's states go through the last projection, those of all of Llama's layers through the others."""
    llama, *_, states = (each.linear.in_features for each in model.caption_projection)
    sized = _sized(_HIDREAM_TOKENS, states, _width(model, "p_embedder.pooled_embedder.linear_1"))
    layers = torch.empty(1 + max(model.llama_layers), _HIDREAM_TOKENS, llama, device="meta")
    return {**sized, f"{OPTION}conditioning_llama3": layers}


def _text_of_ltx2(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its connectors make 1024 tokens of as many as there are. LTX-2.3's text has what blocks of each stream read."""
    readers = (f"transformer_blocks.0.{each}.to_k" for each in ("attn2", "audio_attn2"))
    width = _width(model, "caption_projection.linear_1") or sum(_width(model, each) for each in readers)
    return {**_sized(UNKNOWN_TEXT, width, 0), f"{OPTION}unprocessed_ltxav_embeds": torch.tensor(True)}


_SPECIAL: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "UNetModel": _text_of_unet,
    "SingleStreamDiT": lambda model: _sized(  # states of several layers, side by side
        UNKNOWN_TEXT, _width(model, "txtmlp.1") * _width(model, "txtfusion.projector"), 0
    ),
    "HiDreamImageTransformer2DModel": _text_of_hidream,
    "HunyuanVideo": lambda model: _sized(  # builds without vector_in are given pooled_output, too, and do not read it
        UNKNOWN_TEXT, _width(model, "txt_in.input_embedder"), _width(model, "vector_in.in_layer") or 1
    ),
    "LTXVModel": lambda model: {  # does not run without a mask
        **_sized(UNKNOWN_TEXT, _width(model, "caption_projection.linear_1"), 0),
        f"{OPTION}attention_mask": torch.ones(UNKNOWN_TEXT, dtype=torch.long),
    },
    "LTXAVModel": _text_of_ltx2,
}


def _sized(num_tokens: int, width: int, pooled: int) -> dict[str, torch.Tensor]:
    shapes = {COND: (num_tokens, width), POOLED: (pooled,)} if width else {}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if shape[-1]}


def _width(model: nn.Module, name: str) -> int:
    """Of what a linear takes; 0 where this build has none of that name."""
    try:
        found = model.get_submodule(name) if name else None
    except AttributeError:
        return 0
    return found.in_features if isinstance(found, nn.Linear) else 0
