"""Tiny builds of what can be trained natively, beside those of tiny_checkpoints.py: further classes, and classes with
all that their conditioning nodes add."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.ldm.anima.model
import torch
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, TinyFamily, make_weights
from safetensors.torch import save_file

_UNET = {**FAMILIES["sdxl"].unet_config, "channel_mult": [1, 1]}
_SD15 = {
    **{name: value for name, value in _UNET.items() if name not in ("num_classes", "adm_in_channels")},
    "use_linear_in_transformer": False,
    "num_head_channels": -1,
    "num_heads": 8,
    "adm_in_channels": None,
}
_NARROW = {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [8, 12, 12]}
_WAN_22 = {**FAMILIES["wan"].unet_config, "in_dim": 48, "out_dim": 48}
_HUNYUAN_VIDEO_15 = {
    **FAMILIES["hunyuan_video"].unet_config,
    "in_channels": 65,
    "out_channels": 32,
    "patch_size": [1, 1, 1],
    "vec_in_dim": None,
    "guidance_embed": False,
    "use_cond_type_embedding": True,
    "vision_in_dim": 24,
    "meanflow_sum": True,
}
_KREA_2 = {
    "image_model": "krea2",
    "features": 64,
    "tdim": 16,
    "txtdim": 12,
    "heads": 2,
    "kvheads": 1,
    "multiplier": 2,
    "layers": 4,
    "channels": 16,
    "txtlayers": 3,
    "txtheads": 2,
    "txtkvheads": 2,
}
_ERNIE = {
    "image_model": "ernie",
    "hidden_size": 48,
    "num_attention_heads": 2,
    "num_layers": 4,
    "ffn_hidden_size": 64,
    "in_channels": 128,
    "out_channels": 128,
    "text_in_dim": 12,
    "rope_axes_dim": (8, 8, 8),
}
_ANIMA = {**FAMILIES["cosmos_predict2"].unet_config, "image_model": "anima", "crossattn_emb_channels": 48}


class Output:
    """What CLIP Vision Encode gives: attributes, some of them tensors."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _sizes(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As CLIPTextEncodeSDXL says them: numbers."""
    return {"width": 1024, "height": 768, "crop_w": 8, "crop_h": 0, "target_width": 1024, "target_height": 768}


def _reference(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As ReferenceLatent gives it, of another size than the picture."""
    return {"reference_latents": [torch.randn(1, 16, 4, 6, generator=generator)]}


def _first_frame(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanImageToVideo gives it without CLIP vision."""
    mask = torch.ones(1, 1, 2, 4, 4)
    mask[:, :, 0] = 0
    return {"concat_latent_image": torch.randn(1, 16, 2, 4, 4, generator=generator), "concat_mask": mask}


def _first_frame_seen(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanImageToVideo gives it with CLIP vision."""
    states = torch.randn(1, 5, 1280, generator=generator)
    seen = Output(penultimate_hidden_states=states, last_hidden_state=states + 1, image_embeds=states[:, 0])
    return {**_first_frame(generator, tokens), "clip_vision_output": seen}


def _tokens_of_t5(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As Anima's text encoder gives them: without a batch."""
    ids = torch.randint(0, 32, (tokens + 2,), generator=generator, dtype=torch.int)
    return {"t5xxl_ids": ids, "t5xxl_weights": torch.rand(tokens + 2, generator=generator)}


def _made_of(name: str, **changes: Any) -> TinyFamily:
    return dataclasses.replace(FAMILIES[name], **changes)


def _with(name: str, *, options: Any = None, config_class: str = "", latent: Any = (), **sizes: Any) -> TinyFamily:
    """Of other sizes than its weights tell."""
    own = FAMILIES[name]
    return dataclasses.replace(
        own,
        unet_config={**own.unet_config, **sizes},
        is_detected=False,
        options=options or own.options,
        config_class=config_class or own.config_class,
        latent=latent or own.latent,
    )


# Every class of the first release by the name its row of the table has.
TRAINED: dict[str, TinyFamily] = {
    "FLUX.1": FAMILIES["flux1"],
    "FLUX.1 Kontext": _made_of("flux1", options=_reference),
    "FLUX.2": FAMILIES["flux2"],
    "Chroma": FAMILIES["chroma"],
    "Wan 2.1 T2V, 2.2 T2V 14B": FAMILIES["wan"],
    "Wan 2.1 I2V": _made_of("wan_i2v", options=_first_frame_seen),
    "Wan 2.2 I2V 14B": _made_of("wan", unet_config={**FAMILIES["wan"].unet_config, "in_dim": 36}, options=_first_frame),
    "Wan 2.2 TI2V 5B": _made_of("wan", config_class="WAN22_T2V", unet_config=_WAN_22, latent=(48, 2, 4, 4)),
    "Qwen-Image": FAMILIES["qwen_image"],
    "Z-Image": _made_of("z_image", unet_config={**FAMILIES["z_image"].unet_config, "n_layers": 2}),
    "Lumina 2": _made_of("lumina2", unet_config={**FAMILIES["lumina2"].unet_config, **_NARROW, "n_kv_heads": 1}),
    "SDXL": _made_of("sdxl", unet_config=_UNET, options=_sizes),
    "SDXL v-prediction": _made_of("sdxl", unet_config=_UNET, options=_sizes),
    "SD 1.5": _made_of("sdxl", config_class="SD15", unet_config=_SD15, pooled=0),
    "SD 3.5": FAMILIES["sd3"],
    "LTX-Video": FAMILIES["ltxv"],
    "HunyuanVideo": FAMILIES["hunyuan_video"],
    "HunyuanVideo 1.5": _made_of(
        "hunyuan_video",
        config_class="HunyuanVideo15",
        unet_config=_HUNYUAN_VIDEO_15,
        latent=(32, 2, 4, 4),
        pooled=16,  # made, and not read
        is_detected=False,
    ),
    "Cosmos-Predict2": FAMILIES["cosmos_predict2"],
    "Anima": _made_of(
        "cosmos_predict2", config_class="Anima", unet_config=_ANIMA, context=(6, 48), options=_tokens_of_t5
    ),
    "Krea 2": TinyFamily("Krea2", _KREA_2, (16, 1, 8, 8), (6, 36), ("blocks",), is_detected=False),
    "ERNIE-Image": TinyFamily("ErnieImage", _ERNIE, (128, 4, 4), (6, 12), ("layers",), is_detected=False),
    "HiDream-I1": FAMILIES["hidream"],
}

# Builds with more heads, for what divides them among cards; the others have enough.
DIVIDED: dict[str, TinyFamily] = {
    "FLUX.1": FAMILIES["flux1_heads"],
    "FLUX.1 Kontext": _made_of("flux1_heads", options=_reference),
    "FLUX.2": FAMILIES["flux2_heads"],
    "Chroma": FAMILIES["chroma_heads"],
    "Wan 2.1 T2V, 2.2 T2V 14B": FAMILIES["wan_heads"],
    "Wan 2.1 I2V": _made_of("wan_i2v_heads", options=_first_frame_seen),
    "Wan 2.2 I2V 14B": _with("wan_heads", in_dim=36, options=_first_frame),
    "Wan 2.2 TI2V 5B": _with("wan_heads", in_dim=48, out_dim=48, config_class="WAN22_T2V", latent=(48, 2, 4, 4)),
    "Qwen-Image": _with("qwen_image", num_attention_heads=4),
    "Lumina 2": _with("lumina2", **{**_NARROW, "n_heads": 8, "n_kv_heads": 4, "axes_dims": [4, 2, 2]}),
    "HunyuanVideo": FAMILIES["hunyuan_video_heads"],
    "HunyuanVideo 1.5": dataclasses.replace(
        TRAINED["HunyuanVideo 1.5"], unet_config={**_HUNYUAN_VIDEO_15, "num_heads": 4, "axes_dim": [8, 12, 12]}
    ),
}

# What a file says beside its weights.
_SAYS = {"SDXL v-prediction": {"v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}}


def save_trained(name: str, path: Path, family: TinyFamily | None = None) -> Path:
    """The build's weights as one safetensors file."""
    weights = {key: tensor.contiguous() for key, tensor in make_weights(family or TRAINED[name]).items()}
    save_file({**weights, **_SAYS.get(name, {})}, path)
    return path


@contextlib.contextmanager
def small_adapter() -> Iterator[None]:
    """Inside, Anima's text adapter, whose sizes are fixed, is small; its table of tokens is as long as ever."""
    own = comfy.ldm.anima.model.LLMAdapter
    sizes = {"source_dim": 48, "target_dim": 48, "model_dim": 48, "num_layers": 1, "num_heads": 2}
    with mock.patch.object(comfy.ldm.anima.model, "LLMAdapter", functools.partial(own, **sizes)):
        yield
