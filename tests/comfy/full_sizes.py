"""Published models at full size, as headers without weights: planned before any caption is encoded."""

import json
import math
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import comfy.supported_models
import torch
from devicebridge.config.job import make_job
from devicebridge.families.comfy.inputs import COND, POOLED
from devicebridge.jobs.job import plan_job
from devicebridge.jobs.resolve import why_no_forecast
from devicebridge.nodes.host.native.source import read_native
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.dry_run import NoForecast
from devicebridge.tests.comfy import tiny_checkpoints as tiny
from devicebridge.tests.comfy.trained_families import _HUNYUAN_VIDEO_15
from devicebridge.tests.tiny_pipeline import save_tiny_dataset

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
_FLUX = {"hidden_size": 3072, "num_heads": 24, "context_in_dim": 4096, "depth": 19, "depth_single_blocks": 38}
_FLUX_2 = {"hidden_size": 6144, "num_heads": 48, "context_in_dim": 15360, "depth": 8, "depth_single_blocks": 48}
_CHROMA = {**_FLUX, "out_dim": 3072, "hidden_dim": 5120, "n_layers": 5}
_WAN_14B = {**tiny._WAN, "dim": 5120, "num_heads": 40, "ffn_dim": 13824, "num_layers": 40}
_WAN_5B = {**_WAN_14B, "dim": 3072, "num_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_dim": 48, "out_dim": 48}
_HUNYUAN = {"hidden_size": 3072, "num_heads": 24, "depth": 20, "depth_single_blocks": 40, "context_in_dim": 4096}
_HUNYUAN_15 = {
    **{"hidden_size": 2048, "num_heads": 16, "depth": 54, "depth_single_blocks": 0, "context_in_dim": 3584},
    **{"vision_in_dim": 1152, "byt5": True},
}
_SD_35 = {
    **tiny._SD3, **{"depth": 38, "adm_in_channels": 2048, "pos_embed_max_size": 192, "num_patches": 36864},
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}},
}
_COSMOS = {**tiny._COSMOS_PREDICT_2, "model_channels": 2048, "num_blocks": 28, "num_heads": 16, "adaln_lora_dim": 256}
_HIDREAM = {
    "image_model": "hidream", "attention_head_dim": 128, "axes_dims_rope": [64, 32, 32],
    "caption_channels": [4096, 4096], "max_resolution": [128, 128], "in_channels": 16,
    "llama_layers": [*range(32), *[31] * 16], "num_attention_heads": 20, "num_routed_experts": 4,
    "num_activated_experts": 2, "num_layers": 16, "num_single_layers": 32, "out_channels": 16, "patch_size": 2,
    "text_emb_dim": 2048,
}
_QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}
_H3_PRUNED = {"image_model": "minimax_h3", "adaln_curve_grid": 1025, "time_embed_dim": 32}  # its modulation
_KREA_2_TEXT = 12 * 2560  # twelve layers of Qwen3-VL 4B
# Name -> class of comfy.supported_models, arguments of the model, and how wide its text encoders make text and pooled.
_FILES: Mapping[str, tuple[str, Mapping[str, Any], int, int]] = {
    "FLUX.1, Kontext": ("Flux", {**tiny._FLUX_1, **_FLUX, "vec_in_dim": 768}, 4096, 768),
    "FLUX.2": ("Flux2", {**tiny._FLUX_2, **_FLUX_2}, 15360, 0),
    "Chroma": ("Chroma", {**tiny._CHROMA, **_CHROMA}, 4096, 0), "Wan 2.1, 2.2 14B": ("WAN21_T2V", _WAN_14B, 4096, 0),
    "Wan 2.2 5B": ("WAN22_T2V", _WAN_5B, 4096, 0),
    "Wan Camera": ("WAN21_Camera", {**_WAN_14B, "model_type": "camera", "in_dim": 32}, 4096, 0),
    "Wan 2.2 Animate": ("WAN22_Animate", {**_WAN_14B, "model_type": "animate", "in_dim": 36}, 4096, 0),
    "Qwen-Image": ("QwenImage", _QWEN, 3584, 0), "Z-Image": ("ZImage", Z_IMAGE, 2560, 0),
    "Lumina 2": ("Lumina2", _LUMINA_2, 2304, 0), "SDXL": ("SDXL", SDXL, 2048, 1280),
    "SDXL, v-prediction": ("SDXL", SDXL, 2048, 1280), "SDXL, EDM v-prediction": ("SDXL", SDXL, 2048, 1280),
    "SD 1.5": ("SD15", _SD_15, 768, 0), "SD 3.5": ("SD3", _SD_35, 4096, 2048),
    "LTX-Video": ("LTXV", {"image_model": "ltxv"}, 4096, 0),
    "HunyuanVideo": ("HunyuanVideo", {**tiny._HUNYUAN_VIDEO, **_HUNYUAN}, 4096, 768),
    "HunyuanVideo 1.5": ("HunyuanVideo15", {**_HUNYUAN_VIDEO_15, **_HUNYUAN_15}, 3584, 1),
    "Cosmos-Predict2": ("CosmosT2IPredict2", _COSMOS, 1024, 0),
    "Anima": ("Anima", {**_COSMOS, "image_model": "anima"}, 1024, 0),
    "Krea 2": ("Krea2", {"image_model": "krea2"}, _KREA_2_TEXT, 0),
    "ERNIE-Image": ("ErnieImage", {"image_model": "ernie"}, 3072, 0), "HiDream-I1": ("HiDream", _HIDREAM, 4096, 2048),
    "LTX-2": ("LTXAV", {"image_model": "ltxav"}, 3840, 0),
    "MiniMax H3": ("MiniMaxH3", {"image_model": "minimax_h3"}, 5120, 0),
    "MiniMax H3 pruned": ("MiniMaxH3", _H3_PRUNED, 5120, 0),
}


# What lies beside a model, and how it predicts by that; all others are told by their class.
_SAID: Mapping[str, tuple[tuple[str, ...], str]] = {
    "SD 1.5": (("first_stage_model.quant_conv.bias",), "EPS"),
    "SDXL, v-prediction": (("v_pred", "ztsnr"), "V_PREDICTION"),
    "SDXL, EDM v-prediction": (("edm_vpred.sigma_max",), "V_PREDICTION_EDM"), "Z-Image": ((), "FLOW"),
}
QUICK = ("Krea 2", "HiDream-I1")


def plan_published(folder: Path, names: Collection[str] = tuple(_FILES)) -> dict[str, str]:
    """By file: the fault of its text or of its plan for 2x80GB; "" for none, the error's name without a forecast."""
    save_tiny_dataset(folder / "images")
    return {name: _fault(name, folder, *each) for name, each in _FILES.items() if name in names}


def _fault(name: str, folder: Path, config_class: str, unet_config: Mapping[str, Any], width: int, pooled: int) -> str:
    config = getattr(comfy.supported_models, config_class)(dict(unet_config))
    model = config.get_model({}, "", device=torch.device("meta")).diffusion_model
    prefix = _WHOLE if type(model).__name__ == "UNetModel" else ""
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    beside, kind = _SAID.get(name, ((), ""))
    path = folder / "full_size.safetensors"
    _write_sparse(path, {f"{prefix}{name}": shape for name, shape in shapes.items()}, beside)
    try:
        info = read_native(path, "bfloat16")
        assert info.variant.name == f"comfyui-{config_class}", info.variant.name
        assert {name: record.shape for name, record in info.tensors.items()} == shapes, "other tensors"
        assert info.family.prediction_target == kind or not kind, info.family.prediction_target
        host: Any = info.family.host
        text = host.example(1, torch.device("meta"), None)
        found = {name: text[name].shape[-1] for name in (COND, POOLED) if name in text}
        assert found == {COND: width, **({POOLED: pooled} if pooled else {})}, f"its text is {found}"
        plan_job(_job(path, folder), parse_cards("2x80GB"), info=info)
    except NoForecast as error:
        assert error.reason == why_no_forecast(info.family.native), error
        return type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        path.unlink()
    return ""


def _job(path: Path, folder: Path) -> Any:
    said = {"text_source": f"comfyui 0.33.0 CLIP {'a' * 64}", "latent_source": f"comfyui 0.33.0 VAE {'a' * 64}"}
    return make_job(
        {
            "model": {"path": str(path), "family": "comfyui"},
            "data": {"folders": [{"path": str(folder / "images")}], "resolutions": [512]}, "cache": said,
            "train": {"steps": 5}, "output": {"folder": str(folder / "run"), "tensorboard": False},
        }
    )


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
