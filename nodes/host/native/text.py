"""CLIP text encoders that are trained: the stock CLIP's own modules, called as CLIPTextEncode does, with gradients. As
a child of the diffusion model, TEXT_ENCODERS, they have their LoRA in its own. They compute in float32, as stock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....encoding.comfy_data import token_lists
from ....families.comfy.inputs import COND, POOLED, is_tokens
from ....families.spec import TEXT_ENCODERS
from ....parallel.offload.recompute import InPlaceGuard, checkpoint_calls, recompute
from ..comfy_encoders import HostClip
from .files import load_clip_files

# ComfyUI's classes of text encoders that can be trained -> the encoders inside.
PARTS = {
    "SD1ClipModel": ("clip_l",),
    "SD2ClipModel": ("clip_h",),
    "SDXLClipModel": ("clip_l", "clip_g"),
    "SDXLRefinerClipModel": ("clip_g",),
}


def class_of_clip(config: Any) -> str:
    """What ComfyUI makes of the text encoders of a model with this config; "" where none of them can be trained."""
    target = config.clip_target({}) if hasattr(config, "clip_target") else None  # ComfyUI's base class has none
    name = getattr(getattr(target, "clip", None), "__name__", "")
    return name if name in PARTS else ""


def refuse_other_class(clip: HostClip, wanted: str, *, is_trained: bool = True) -> None:
    """Raises: ValueError for a stock CLIP of another class than is wanted; if it is not trained, only for PARTS."""
    found = type(clip.stock.cond_stage_model).__name__
    if found != wanted and (is_trained or found in PARTS):
        files = f"name the files of {' and '.join(PARTS[wanted])} there, and their kind with stock_clip_type"
        raise ValueError(f"cache.stock_clip makes a {found}, and this model is given the text of a {wanted}; {files}")


def attach_text_encoders(
    model: nn.Module, wanted: str, files: Sequence[str], kind: str, path: str, fingerprint: str, device: torch.device
) -> None:
    """See HostModel.attach_text_encoders. wanted: their class. path: of the diffusion model.
    Raises: ValueError for files of other encoders than the captions' tokens are of, or than this model is given."""
    clip = load_clip_files(files, kind, path)
    name = HostClip(clip)
    if name.fingerprint != fingerprint:
        found = f"cache.stock_clip is {name.fingerprint!r}"
        raise ValueError(f"cache.text_source names {fingerprint!r}, but {found}; give that one")
    refuse_other_class(name, wanted)
    name.release()
    stage = clip.cond_stage_model
    stage.reset_clip_options()
    # Plain layers in the place of ComfyUI's, whose forwards look for Cancel and convert weights at every call.
    for part, module in stage.named_modules():
        plain = next((each for each in _PLAIN if isinstance(module, each)), None)
        if plain is not None and all(each.is_floating_point() for each in module.parameters()):
            module.__class__ = _PLAIN[plain]
        elif any(key in module._parameters for key in ("weight", "bias")):
            found = f"{type(module).__name__} in {module.weight.dtype}"
            raise ValueError(f"{part} of cache.stock_clip is a {found}, not trained here; name files in 16 or 32 bits")
    for layer in _layers(stage):
        layer.forward = InPlaceGuard(layer)
    model.add_module(TEXT_ENCODERS, stage.to(device=device, dtype=torch.float32).eval())


def recompute_layers(stage: nn.Module) -> None:
    checkpoint_calls(_layers(stage), lambda call, *values: recompute(call, values, values[0].device), ())


def encoded(stage: Any, given: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What a CONDITIONING of these tokens has in their place, as CLIPTextEncode makes it; gradients reach the LoRA."""
    made = [stage.encode_token_weights(tokens) for tokens in token_lists(given)]
    states, pooled = (torch.cat([each[index] for each in made]).to(device) for index in (0, 1))
    return {**{name: each for name, each in given.items() if not is_tokens(name)}, COND: states, POOLED: pooled}


def _layers(stage: nn.Module) -> list[nn.Module]:
    parts = (getattr(stage, name) for name in PARTS[type(stage).__name__])
    return [layer for part in parts for layer in part.transformer.text_model.encoder.layers]


class _Embedding(nn.Embedding):
    """Called as ComfyUI's, with the type of the result."""

    def forward(self, tokens: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return F.embedding(tokens, self.weight).to(out_dtype or self.weight.dtype)


_PLAIN: dict[type[nn.Module], type[nn.Module]] = {each: each for each in (nn.Linear, nn.LayerNorm)}
_PLAIN[nn.Embedding] = _Embedding
