"""Tiny checkpoints that ComfyUI recognises and loads as it loads the real ones.

A family is described by the class of comfy.supported_models that must come out and by what its diffusion model is built
with. Where ComfyUI reads every size from the weights, a small file is enough. Where it takes a size for granted (Qwen's
24 heads, Z-Image's width), `small_sizes` gives it ours at that one question; all before and after is its own code.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_detection
import comfy.supported_models
import torch
from devicebridge.config.job import JobConfig, make_job
from safetensors.torch import save_file

# fmt: off


Condition = list[list[Any]]  # what a text encode node returns: [[embedding, options]]


@dataclass(frozen=True)
class TinyFamily:
    """One kind of checkpoint.

    Args:
        config_class: class of comfy.supported_models the file must be recognised as.
        unet_config: arguments of the diffusion model.
        latent: shape of one latent without the batch: [C, H, W] or [C, F, H, W].
        context: tokens and width of the text embedding.
        block_lists: where the blocks are.
        pooled: width of the pooled embedding, 0 for none.
        is_detected: whether every size is read from the weights.
        overlaps: whether cond and uncond can be computed at the same time once it is split.
        sound: shape of the latent of a second stream, [C, 2, T]; () for none.
        options: generator, tokens -> further entries of a condition.
        noise_mask: of a LATENT, as its node makes it; None for none.
        is_calm: whether the linears of its modulation are drawn as others are. Else they give tens where one is usual,
            and of some gradients float32 keeps four digits.
        has_bool_masks: whether its attention has masks of truth values.
        as_published: of the model's weights, what a file has where ComfyUI's loader changes them.
    """

    config_class: str
    unet_config: Mapping[str, Any]
    latent: tuple[int, ...]
    context: tuple[int, int]
    block_lists: tuple[str, ...]
    pooled: int = 0
    is_detected: bool = True
    overlaps: bool = True
    sound: tuple[int, ...] = ()
    options: Callable[[torch.Generator, int], dict[str, Any]] = lambda generator, tokens: {}
    noise_mask: Callable[[], torch.Tensor] | None = None
    is_calm: bool = False
    has_bool_masks: bool = False
    as_published: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda weights: weights

    def condition(self, seed: int, tokens: int | None = None) -> Condition:
        """A text condition of batch 1, as a text encode node makes it."""
        generator = torch.Generator().manual_seed(seed)
        tokens, width = tokens or self.context[0], self.context[1]
        embedding = torch.randn(1, tokens, width, generator=generator)
        options = self.options(generator, tokens)
        if self.pooled:
            options["pooled_output"] = torch.randn(1, self.pooled, generator=generator)
        return [[embedding, options]]

    def latent_of(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a node hands on."""
        return {"samples": samples, **({} if self.noise_mask is None else {"noise_mask": self.noise_mask()})}


def make_config(family: TinyFamily) -> Any:
    config = getattr(comfy.supported_models, family.config_class)(dict(family.unet_config))
    config.set_inference_dtype(torch.float32, None)
    return config


def make_weights(family: TinyFamily, seed: int = 0) -> dict[str, torch.Tensor]:
    model = make_config(family).get_model({}, "").diffusion_model
    generator = torch.Generator().manual_seed(seed)
    weights = model.state_dict().items()
    return {name: _random(name, tensor, generator, is_calm=family.is_calm) for name, tensor in weights}


def _random(name: str, like: torch.Tensor, generator: torch.Generator, *, is_calm: bool) -> torch.Tensor:
    if not like.is_floating_point() or like.numel() == 0:
        return like.clone()
    noise = torch.randn(like.shape, generator=generator)
    is_modulation = name.endswith("modulation") if is_calm else "modulation" in name
    if like.ndim >= 2 and not is_modulation:
        return noise * like[0].numel() ** -0.5
    return 1 + 0.1 * noise if name.endswith(("weight", "scale", "gamma")) else 0.1 * noise


def save_checkpoint(family: TinyFamily, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    weights = make_weights(family)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}, path)
    return path


@contextlib.contextmanager
def small_sizes(family: TinyFamily) -> Iterator[None]:
    """While a file of this family is loaded: its sizes where ComfyUI takes the real ones for granted."""
    if family.is_detected:
        yield
        return
    detect = comfy.model_detection.detect_unet_config
    def detect_small(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
        return None if detect(*args, **kwargs) is None else dict(family.unet_config)
    with (
        mock.patch.object(comfy.model_detection, "detect_unet_config", detect_small),
        mock.patch.object(comfy.model_detection, "model_config_from_unet_config", _config_of(family)),
    ):
        yield


def _config_of(family: TinyFamily) -> Callable[..., Any]:
    config_class = getattr(comfy.supported_models, family.config_class)
    return lambda unet_config, *args, **kwargs: config_class(dict(unet_config))


_FLUX = {
    "out_channels": 16, "in_channels": 16, "hidden_size": 128, "num_heads": 1, "context_in_dim": 48, "depth": 2,
    "depth_single_blocks": 4, "guidance_embed": True, "yak_mlp": False, "txt_norm": False,
}
_FLUX_1 = {
    **_FLUX, "image_model": "flux", "axes_dim": [16, 56, 56], "mlp_ratio": 4.0, "theta": 10000, "qkv_bias": True,
    "txt_ids_dims": [], "patch_size": 2, "vec_in_dim": 32,
}
_FLUX_2 = {
    **_FLUX, "image_model": "flux2", "in_channels": 128, "out_channels": 128, "axes_dim": [32, 32, 32, 32],
    "mlp_ratio": 3.0, "theta": 2000, "global_modulation": True, "mlp_silu_act": True, "qkv_bias": False,
    "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3], "patch_size": 1,
    "vec_in_dim": None,
}
_CHROMA = {
    **{key: value for key, value in _FLUX_1.items() if key not in {"guidance_embed", "yak_mlp", "txt_norm"}},
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "in_dim": 64, "out_dim": 128, "hidden_dim": 64,
    "n_layers": 2, "vec_in_dim": None,
}
_WAN = {
    "image_model": "wan2.1", "model_type": "t2v", "dim": 128, "in_dim": 16, "out_dim": 16, "num_heads": 1,
    "ffn_dim": 192, "num_layers": 4, "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1),
    "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6,
}
_HUNYUAN_VIDEO = {
    "image_model": "hunyuan_video", "in_channels": 16, "patch_size": [1, 2, 2], "out_channels": 16, "vec_in_dim": 768,
    "axes_dim": [16, 56, 56], "meanflow": False, "context_in_dim": 48, "hidden_size": 128, "mlp_ratio": 4.0,
    "num_heads": 1, "depth": 2, "depth_single_blocks": 3, "theta": 256, "qkv_bias": True, "byt5": False,
    "guidance_embed": True, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}
_NEXT_DIT = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 256, "cap_feat_dim": 48, "n_layers": 4,
    "n_refiner_layers": 1, "qk_norm": True, "multiple_of": 32, "n_heads": 4, "axes_dims": [16, 24, 24],
}
_LUMINA_2 = {
    **_NEXT_DIT, "n_kv_heads": 2, "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
}
_Z_IMAGE = {
    **_NEXT_DIT, "n_kv_heads": 4, "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0,
    "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
}
_SD3 = {
    "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 3, "input_size": None, "adm_in_channels": 64,
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 192}},
    "num_patches": 64, "pos_embed_max_size": 8, "pos_embed_scaling_factor": None, "qk_norm": "rms",
    "x_block_self_attn_layers": [],
}
_SDXL = {
    "use_checkpoint": False, "image_size": 32, "use_spatial_transformer": True, "legacy": False,
    "num_classes": "sequential", "adm_in_channels": 2816, "in_channels": 4, "out_channels": 4, "model_channels": 64,
    "num_res_blocks": [1, 1], "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1],
    "channel_mult": [1, 2], "transformer_depth_middle": 1, "use_linear_in_transformer": True, "context_dim": 48,
    "num_head_channels": 64, "num_heads": -1, "use_temporal_resblock": False, "use_temporal_attention": False,
}
_COSMOS_PREDICT_2 = {
    "image_model": "cosmos_predict2", "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16,
    "out_channels": 16, "patch_spatial": 2, "patch_temporal": 1, "model_channels": 128, "concat_padding_mask": True,
    "crossattn_emb_channels": 1024, "pos_emb_cls": "rope3d", "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop", "min_fps": 1, "max_fps": 30, "use_adaln_lora": True, "adaln_lora_dim": 32,
    "num_blocks": 4, "num_heads": 2, "extra_per_block_abs_pos_emb": False, "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0, "rope_t_extrapolation_ratio": 1.0, "extra_h_extrapolation_ratio": 1.0,
    "extra_w_extrapolation_ratio": 1.0, "extra_t_extrapolation_ratio": 1.0, "rope_enable_fps_modulation": False,
}
_KREA_2 = {
    "image_model": "krea2", "features": 64, "tdim": 16, "txtdim": 12, "heads": 2, "kvheads": 1, "multiplier": 2,
    "layers": 4, "channels": 16, "txtlayers": 3, "txtheads": 2, "txtkvheads": 2,
}
_HIDREAM = {
    "image_model": "hidream", "attention_head_dim": 32, "axes_dims_rope": [16, 8, 8], "caption_channels": [40, 48],
    "max_resolution": [32, 32], "in_channels": 16, "llama_layers": [0, 1, 2, 3, 3], "num_attention_heads": 2,
    "num_routed_experts": 4, "num_activated_experts": 2, "num_layers": 2, "num_single_layers": 3, "out_channels": 16,
    "patch_size": 2, "text_emb_dim": 64,
}


_HIDREAM_O1 = {
    "image_model": "hidream_o1",
    "text_config_overrides": {
        "hidden_size": 32,
        "intermediate_size": 6000,  # the blocks must outweigh a table of 150,000 tokens
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_dims": [4, 2, 2],
    },
    "vision_config_overrides": {
        "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "depth": 1, "num_position_embeddings": 16,
    },
}


def _token_ids(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    ids = torch.randint(0, 1000, (1, tokens), generator=generator)
    ids[:, -1] = 151673
    return {"text_input_ids": ids}


_MINIMAX_H3 = {
    "image_model": "minimax_h3", "hidden_size": 64, "num_layers": 4, "token_refiner_num_layers": 1,
    "num_attention_heads": 2, "attention_head_dim": 32, "ffn_hidden_size": 96, "latents_dim": 24,
    "audio_latents_dim": 32, "text_dim": 48, "timestep_input_dim": 32, "time_embed_hidden_size": 48,
    "time_embed_dim": 40, "rope_inv_freq_len": 4,
}


def _qwen() -> dict[str, Any]:
    return {
        "image_model": "qwen_image", "in_channels": 64, "num_layers": 4, "attention_head_dim": 32,
        "num_attention_heads": 2, "joint_attention_dim": 48, "axes_dims_rope": (8, 12, 12),
    }


def _ltxv() -> dict[str, Any]:
    return {
        "image_model": "ltxv", "num_layers": 4, "attention_head_dim": 4, "cross_attention_dim": 128,
        "use_keyframes_abs_pos_embedding": False,
    }


def _mask(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As of a text shorter than its padding."""
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, -1] = 0
    return {"attention_mask": mask}


def _llama(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    return {"conditioning_llama3": torch.randn(1, 4, tokens, 48, generator=generator)}


def _clip_vision(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    states = torch.randn(1, 5, 1280, generator=generator)
    return {"clip_vision_output": _Output(penultimate_hidden_states=states)}


class _Output(dict[str, Any]):
    """As comfy.clip_vision's: entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


_DOUBLE_SINGLE = ("double_blocks", "single_blocks")

FAMILIES: dict[str, TinyFamily] = {
    "flux1": TinyFamily("Flux", _FLUX_1, (16, 8, 8), (6, 48), _DOUBLE_SINGLE, pooled=32),
    "flux2": TinyFamily("Flux2", _FLUX_2, (128, 4, 4), (6, 48), _DOUBLE_SINGLE),
    "chroma": TinyFamily("Chroma", _CHROMA, (16, 8, 8), (6, 48), _DOUBLE_SINGLE, is_detected=False, overlaps=False),
    "wan": TinyFamily("WAN21_T2V", _WAN, (16, 2, 4, 4), (6, 4096), ("blocks",)),
    "wan_i2v": TinyFamily(
        "WAN21_I2V", {**_WAN, "model_type": "i2v", "in_dim": 36}, (16, 2, 4, 4), (6, 4096), ("blocks",),
        options=_clip_vision,
    ),
    "wan_vace": TinyFamily(
        "WAN21_Vace", {**_WAN, "model_type": "vace", "vace_in_dim": 96, "vace_layers": 2}, (16, 2, 4, 4), (6, 4096),
        ("blocks", "vace_blocks"), overlaps=False,
    ),
    "qwen_image": TinyFamily("QwenImage", _qwen(), (16, 1, 8, 8), (6, 48), ("transformer_blocks",), is_detected=False),
    "hunyuan_video": TinyFamily("HunyuanVideo", _HUNYUAN_VIDEO, (16, 2, 4, 4), (6, 48), _DOUBLE_SINGLE, pooled=768),
    "ltxv": TinyFamily("LTXV", _ltxv(), (128, 2, 2, 2), (6, 4096), ("transformer_blocks",), options=_mask),
    "lumina2": TinyFamily("Lumina2", _LUMINA_2, (16, 8, 8), (6, 48), ("layers",), is_detected=False, options=_mask),
    "z_image": TinyFamily("ZImage", _Z_IMAGE, (16, 8, 8), (6, 48), ("layers",), is_detected=False, options=_mask),
    "sd3": TinyFamily("SD3", _SD3, (16, 8, 8), (6, 48), ("joint_blocks",), pooled=64),
    "sdxl": TinyFamily(
        "SDXL", _SDXL, (4, 8, 8), (6, 48), ("input_blocks", "middle_block", "output_blocks"), pooled=1280,
        is_detected=False, overlaps=False,
    ),
    "hidream_o1": TinyFamily(
        "HiDreamO1", _HIDREAM_O1, (3, 64, 64), (6, 32), ("language_model.layers",), is_detected=False, overlaps=False,
        options=_token_ids,
    ),
    "minimax_h3": TinyFamily("MiniMaxH3", _MINIMAX_H3, (24, 2, 4, 6), (6, 48), ("blocks",), sound=(32, 2, 3)),
    "cosmos_predict2": TinyFamily(
        "CosmosT2IPredict2", _COSMOS_PREDICT_2, (16, 1, 4, 4), (6, 1024), ("blocks",), is_detected=False, is_calm=True
    ),
    "krea2": TinyFamily("Krea2", _KREA_2, (16, 1, 8, 8), (6, 36), ("blocks",), is_detected=False),
    "hidream": TinyFamily(
        "HiDream", _HIDREAM, (16, 8, 8), (6, 40), ("double_stream_blocks", "single_stream_blocks"), pooled=64,
        is_detected=False, overlaps=False, options=_llama, is_calm=True,
    ),
}


def _with_heads(name: str, **sizes: Any) -> TinyFamily:
    """The family with more heads than its weights tell: ComfyUI derives their number from the width of a real head."""
    family = FAMILIES[name]
    return dataclasses.replace(family, unet_config={**family.unet_config, **sizes}, is_detected=False)


# Of families whose tiny build has a single head; for what divides heads among cards.
FAMILIES |= {
    "flux1_heads": _with_heads("flux1", num_heads=4, axes_dim=[8, 12, 12]),
    "flux2_heads": _with_heads("flux2", num_heads=4, axes_dim=[8, 8, 8, 8]),
    "chroma_heads": _with_heads("chroma", num_heads=4, axes_dim=[8, 12, 12]),
    "hunyuan_video_heads": _with_heads("hunyuan_video", num_heads=4, axes_dim=[8, 12, 12]),
    "wan_heads": _with_heads("wan", num_heads=4), "wan_i2v_heads": _with_heads("wan_i2v", num_heads=4),
    "wan_vace_heads": _with_heads("wan_vace", num_heads=4),
    "krea2_heads": _with_heads("krea2", features=128, heads=8, kvheads=4),
}


@functools.cache
def lora_weights(name: str, seed: int, rank: int = 2) -> dict[str, torch.Tensor]:
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    lora = {}
    for key, tensor in make_weights(family).items():
        if tensor.ndim == 2 and key.endswith(".weight") and key.startswith(family.block_lists):
            base = f"diffusion_model.{key.removesuffix('.weight')}"
            lora[f"{base}.lora_A.weight"] = 0.3 * torch.randn(rank, tensor.shape[1], generator=generator)
            lora[f"{base}.lora_B.weight"] = 0.3 * torch.randn(tensor.shape[0], rank, generator=generator)
    return lora


def native_job(path: Path, output: Path, sections: Mapping[str, Any], *, steps: int) -> JobConfig:
    """A training of one of ComfyUI's own models on the CPU. sections: values of "model", "train" and "output" are added
    to those here; others replace a section."""
    own = {
        "model": {"path": str(path), "family": "comfyui", "dtype": "float32"}, "train": {"steps": steps, "seed": 3},
        "output": {"folder": str(output), "tensorboard": False, "lora_dtype": "float32"},
    }  # fmt: skip
    merged = {name: {**section, **sections.get(name, {})} for name, section in own.items()}
    return make_job({"lora": {"rank": 2, "alpha": 2.0}, "split": {"devices": ["cpu"]}, **sections, **merged})
