"""Headers of files at full size, without their weights: what ComfyUI tells their models by is read, and no more."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.supported_models
import torch
from devicebridge.nodes.host.native.source import read_native

# fmt: off

_UNET = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_checkpoint": False,
    "use_spatial_transformer": True, "legacy": False, "use_temporal_resblock": False, "use_temporal_attention": False,
}
_SD_15 = {
    **_UNET, "num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "transformer_depth_middle": 1, "use_linear_in_transformer": False, "context_dim": 768,
}
SDXL = {
    **_UNET, "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10,
    "use_linear_in_transformer": True, "context_dim": 2048, "num_classes": "sequential", "adm_in_channels": 2816,
}
_NEXT_DIT = {"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "qk_norm": True}
Z_IMAGE = {
    **_NEXT_DIT, "dim": 3840, "cap_feat_dim": 2560, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30,
    "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
}
_LUMINA_2 = {
    **_NEXT_DIT, "dim": 2304, "cap_feat_dim": 2304, "n_layers": 26, "n_heads": 24, "n_kv_heads": 8,
    "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
}
_WHOLE = "model.diffusion_model."  # prefix in a checkpoint with text encoders and VAE
# Name -> class of comfy.supported_models, arguments of the model, prefix, what lies beside it, how it predicts.
_FILES: Mapping[str, tuple[str, Mapping[str, Any], str, tuple[str, ...], str]] = {
    "SD 1.5 checkpoint": ("SD15", _SD_15, _WHOLE, ("first_stage_model.quant_conv.bias",), "EPS"),
    "SDXL checkpoint, v-prediction": ("SDXL", SDXL, _WHOLE, ("v_pred", "ztsnr"), "V_PREDICTION"),
    "SDXL checkpoint, EDM v-prediction": ("SDXL", SDXL, _WHOLE, ("edm_vpred.sigma_max",), "V_PREDICTION_EDM"),
    "Z-Image": ("ZImage", Z_IMAGE, "", (), "FLOW"), "Lumina 2": ("Lumina2", _LUMINA_2, "", (), "FLOW"),
}


def recognise(folder: Path) -> dict[str, str]:
    """By file: what is wrong with how it is read, "" for nothing."""
    return {name: _fault(folder / f"{index}.safetensors", *each) for index, (name, each) in enumerate(_FILES.items())}


def _fault(
    path: Path, config_class: str, unet_config: Mapping[str, Any], prefix: str, beside: tuple[str, ...], kind: str
) -> str:
    config = getattr(comfy.supported_models, config_class)(dict(unet_config))
    model = config.get_model({}, "", device=torch.device("meta")).diffusion_model
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    _write_sparse(path, {f"{prefix}{name}": shape for name, shape in shapes.items()}, beside)
    try:
        info = read_native(path, "bfloat16")
    except ValueError as error:
        return str(error)
    finally:
        path.unlink()
    found = info.family.prediction_target, {name: record.shape for name, record in info.tensors.items()}
    return "" if found == (kind, shapes) else f"{found[0]}, {len(found[1])} of {len(shapes)} tensors"


def _write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]], beside: tuple[str, ...]) -> None:
    """A file of float16 that takes no room: what lies beside the model is 120, everything else zero."""
    header, end = {}, 0
    for name, shape in {**dict.fromkeys(beside, (1,)), **shapes}.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + struct.pack("<e", 120.0) * len(beside))
        file.truncate(8 + len(text) + end)
