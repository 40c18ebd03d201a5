"""Tiny text encoders and VAEs as ComfyUI's loaders hand them on: its own classes and tokenizers, random weights."""

import base64
import json
from typing import Any

import comfy.ldm.wan.vae
import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.supported_models_base
import comfy.text_encoders.flux
import comfy.text_encoders.sd2_clip
import torch

_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>")
_NUM_SPECIAL = 20  # Mistral3Tokenizer pads with token 11
_WIDTH = 16  # of every hidden state, as in tests/tiny_pipeline.py


def tekken() -> bytes:
    """A Mistral tokenizer of single bytes."""
    vocabulary = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    names = [*_SPECIAL, *(f"<special {index}>" for index in range(len(_SPECIAL), _NUM_SPECIAL))]
    special = [{"rank": rank, "token_str": name} for rank, name in enumerate(names)]
    config = {"default_num_special_tokens": _NUM_SPECIAL, "default_vocab_size": _NUM_SPECIAL + 256}
    return json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}).encode()


def make_clip(family: str, seed: int = 0, width: int = _WIDTH) -> comfy.sd.CLIP:
    """ "flux2" and "flux2_native": Mistral, states 3 * width wide; "flux1": CLIP-L and T5, width wide both; "sd15",
    "sd2" and "sdxl": CLIP, width wide, and CLIP-G, twice as wide."""
    flux = comfy.text_encoders.flux
    data: dict[str, Any] = {}
    if family.startswith("flux2"):
        sizes = {"vocab_size": _NUM_SPECIAL + 256, "hidden_size": width, "intermediate_size": 2 * width}
        heads = {"num_hidden_layers": 31, "num_attention_heads": 2, "num_key_value_heads": 1}
        target = (flux.Flux2Tokenizer, flux.flux2_te())
        data["tekken_model"] = torch.frombuffer(bytearray(tekken()), dtype=torch.uint8)
        options = {"mistral3_24b_model_config": {**sizes, **heads}}
    elif family.startswith("sd"):
        clip = {"num_attention_heads": 2, "num_hidden_layers": 3}
        widths = {"clip_l": width, "clip_h": width, "clip_g": 2 * width}
        options = {
            f"{name}_model_config": {**clip, "hidden_size": each, "intermediate_size": 2 * each, "projection_dim": each}
            for name, each in widths.items()
        }
        sd1, sd2, sdxl = comfy.sd1_clip, comfy.text_encoders.sd2_clip, comfy.sdxl_clip
        target = {
            "sd15": (sd1.SD1Tokenizer, sd1.SD1ClipModel),
            "sd2": (sd2.SD2Tokenizer, sd2.SD2ClipModel),
            "sdxl": (sdxl.SDXLTokenizer, sdxl.SDXLClipModel),
        }[family]
    else:
        target = (flux.FluxTokenizer, flux.flux_clip())
        t5 = {"d_model": width, "d_ff": 2 * width, "d_kv": width // 2, "num_heads": 2, "num_layers": 2}
        clip = {"hidden_size": width, "intermediate_size": 2 * width, "projection_dim": width}
        options = {
            "t5xxl_model_config": t5,
            "clip_l_model_config": {**clip, "num_attention_heads": 2, "num_hidden_layers": 2},
        }
    target = comfy.supported_models_base.ClipTarget(target[0], target[1])
    made = comfy.sd.CLIP(target, tokenizer_data=data, model_options={**options, "dtype": torch.float32})
    _randomise(made.cond_stage_model, seed)
    return made


def make_vae(family: str, seed: int = 0, channels: int = 4) -> comfy.sd.VAE:
    """A KL encoder of stride 2; for flux2 with the batch norm over 2 x 2 patches, and 4 times the channels then.
    "flux2_native": with the 128 channels and the stride of 16 that ComfyUI's own FLUX.2 takes. "sd": a stride of 8."""
    is_whole = family == "flux2_native"
    is_packed, stride = family.startswith("flux2"), 8 if is_whole or family == "sd" else 2
    channels = 32 if is_whole else channels
    sizes = {"double_z": True, "z_channels": channels, "resolution": 32, "in_channels": 3, "out_ch": 3, "ch": 32}
    sizes |= {"ch_mult": [1] * stride.bit_length(), "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
    if is_packed:
        sizes["batch_norm_latent"] = True
    vae = comfy.sd.VAE(sd={}, config={"params": {"ddconfig": sizes, "embed_dim": channels}}, dtype=torch.float32)
    vae.latent_channels = 4 * channels if is_packed else channels
    vae.downscale_ratio = vae.upscale_ratio = 2 * stride if is_packed else stride
    _randomise(vae.first_stage_model, seed)
    return vae


def make_video_vae(seed: int = 0, width: int = 8) -> comfy.sd.VAE:
    """Wan 2.1's with a twelfth of its width: 16 channels, stride 8, 4 frames per latent frame."""
    layout = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
    strides = {"temperal_downsample": [False, True, True]}
    model = comfy.ldm.wan.vae.WanVAE(dim=width, z_dim=16, **layout, **strides)
    _randomise(model, seed)
    return comfy.sd.VAE(sd=model.state_dict(), dtype=torch.float32)


@torch.no_grad()
def _randomise(model: torch.nn.Module, seed: int) -> None:
    """The host's layers leave their weights as memory was."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or name.endswith("logit_scale"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        is_scale = name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight"))
        scale = tensor[0].numel() ** -0.5 if tensor.ndim > 1 else 0.1
        tensor.copy_(1 + 0.1 * noise.abs() if is_scale else noise * scale)
