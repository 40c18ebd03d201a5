"""Wan 2.1 and 2.2 (Alibaba), after diffusers 0.42.1 (WanTransformer3DModel, scripts/convert_wan_to_diffusers.py) and
the model cards. A14B is two transformers of 2.1's shape, for high and low noise; the user says which a file is.

TI2V-5B is trained as text-to-video by default; as its -i2v variant, which is the same file, it is given the first
latent frame clean, at timestep 0. Wan 2.1's image-to-video, VACE, Animate and S2V are not described.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .spec import (
    ComfyInputs,
    Condition,
    LatentSpec,
    ModelFamily,
    Rename,
    SamplingSpec,
    ShiftRule,
    TextEncoderSpec,
    TimestepSpec,
    Variant,
)
from .tensor_plan import BlockList, plan

# WanPipeline cuts the states to the caption's length and pads with zeros; the transformer sees no mask.
_UMT5 = TextEncoderSpec(
    kind="last_hidden_state",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="prompt_embeds",
    max_length=512,
    zero_padding=True,
    keep_full_precision=("*.wo",),  # UMT5's own class wants it so: its inputs have outliers beyond float16's range
)

# Training shifts differ: 3 in musubi-tuner's guide, 5 in DiffSynth, the user's in diffusion-pipe. The default is the
# lowest of them, which leaves the most steps for detail. The makers sample with 5 (3 at 480p), A14B with 12.
_SHIFTS = {
    "none": ShiftRule("constant"),
    "musubi_3.0": ShiftRule("constant", 3.0),
    "diffsynth_5.0": ShiftRule("constant", 5.0),
    "a14b_inference_12.0": ShiftRule("constant", 12.0),
}


def _sampling(guidance: float, shift: float) -> SamplingSpec:
    """The makers' guidance and shift (wan/configs; generate.py for 2.1), in fewer steps than their 40 to 50."""
    return SamplingSpec(30, guidance, lambda num_tokens, steps: shift)


_LATENT = LatentSpec(
    channels=16,
    spatial_stride=8,
    frame_stride=4,
    num_tokens_per_cell=0.25,
    fps=16,
    # Short by default: the makers sample 81 frames (TI2V-5B 121), which only large cards can train.
    frame_lengths=(1, 17, 33),
)

_NEEDS_CLIP = (
    "it is image-to-video of Wan 2.1 (or made from it), which needs CLIP's features of the first frame; those are not "
    "computed here. Image-to-video of Wan 2.2 A14B needs none and can be trained"
)


def _config(layers: int, heads: int, ffn_dim: int, channels: int = 16, condition_channels: int = 0) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": channels + condition_channels,
        "out_channels": channels,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn_dim,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }


_14B = _config(40, 40, 13824)
_I2V_14B = _config(40, 40, 13824, condition_channels=4 + 16)  # the mask of four frames per latent frame, and latents

_5B = _config(30, 24, 14336, channels=48)
_LATENT_5B = replace(_LATENT, channels=48, spatial_stride=16, size_multiple=32, fps=24)

_VAE_21 = {"base_dim": 96, "z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4}

# fmt: off
_MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
_STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on
_VAE_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": _MEAN_22,
    "latents_std": _STD_22,
}


def _experts(
    name: str, config: Mapping[str, Any], boundary: float, sampling: SamplingSpec, condition: Condition = "none"
) -> tuple[Variant, Variant]:
    """The two halves of A14B. Noise above WanPipeline's boundary_ratio is the first one's, the rest the second's."""
    high = Variant(
        f"{name}-high",
        config,
        (_UMT5,),
        vae_config=_VAE_21,
        sigma_range=(boundary, 1.0),
        partner=f"{name}-low",
        sampling=sampling,
        condition=condition,
    )
    low = replace(
        high, name=high.partner, sigma_range=(0.0, boundary), transformer_folder="transformer_2", partner=high.name
    )
    return high, low


def make_inputs(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Keyword arguments of the transformer, as WanPipeline passes them, but of TI2V-5B's equal timesteps of all tokens
    one per sample, at a fraction of the memory. latents: noisy, [B, C, F, H, W]; H and W even. text: prompt_embeds
    [B, S, D]; for image-to-video also image_condition, as encode_condition makes it, or the clean first_latents
    [B, C, 1, H, W]."""
    if "image_condition" in text:
        latents = torch.cat([latents, text["image_condition"].to(latents)], dim=1)
    timestep = sigma * 1000.0
    if "first_latents" in text:
        latents = torch.cat([text["first_latents"].to(latents), latents[:, :, 1:]], dim=2)
        # Per token: 0 for those of the first latent frame, which has no noise. [B] -> [B, S]
        _, _, frames, height, width = latents.shape
        per_frame = timestep[:, None].repeat(1, frames)
        per_frame[:, 0] = 0
        timestep = per_frame.repeat_interleave((height // 2) * (width // 2), dim=1)
    return {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text["prompt_embeds"]}


def read_prediction(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The model unpatchifies its output itself: [B, C, F, H, W] in and out."""
    return output


def _statistics(vae: Any, device: torch.device) -> list[torch.Tensor]:
    """Mean and standard deviation per channel, [C, 1, 1, 1], float32, from the VAE's config."""
    both = vae.config.latents_mean, vae.config.latents_std
    return [torch.tensor(values, device=device).view(-1, 1, 1, 1) for values in both]


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """[B, 3, F, height, width] -> [B, C, 1 + (F - 1) / 4, height / stride, width / stride], float32. The mode of the
    distribution, as WanImageToVideoPipeline takes it: a sample would be drawn once and then repeated from the cache."""
    latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode().float()
    mean, std = _statistics(vae, latents.device)
    return (latents - mean) / std


def encode_condition(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """The first frame as WanImageToVideoPipeline gives it: [B, 3, F, height, width] -> [B, stride + C, F', H, W].

    Mask first, 1 where a frame is given: its channels are the video frames of a latent frame, and the first latent
    frame, which stands for one video frame, has it in all of them. Then the latents of first frame and grey.
    """
    given = torch.cat([pixels[:, :, :1], torch.zeros_like(pixels[:, :, 1:])], dim=2)
    latents = encode_latents(vae, given)
    batch, _, *cells = latents.shape
    mask = latents.new_zeros(batch, vae.config.scale_factor_temporal, *cells)
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of encode_latents, up to the VAE's loss: [B, C, F, H, W] -> [B, 3, frames, height, width]."""
    mean, std = _statistics(vae, latents.device)
    return vae.decode((latents.float() * std + mean).to(vae.dtype)).sample


# AutoencoderKLWan's own defaults, which the 2.1 VAE has; ComfyUI's Wan21 latent format holds the same.
# fmt: off
_MEAN_21 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
_STD_21 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
# fmt: on
_STATISTICS = {16: (_MEAN_21, _STD_21), 48: (_MEAN_22, _STD_22)}  # by number of channels


def normalise_samples(samples: torch.Tensor) -> torch.Tensor:
    """What ComfyUI's Wan21 and Wan22 latent formats make of a LATENT; its channels tell which."""
    mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in _STATISTICS[samples.shape[0]])
    return (samples - mean) / std


_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
# Below "blocks.{}.": original name -> diffusers'. The original counts norms in the order they were written (norm3 comes
# second), diffusers as they run. The other two have no weights.
_IN_BLOCKS = {
    **{
        f"{original}.{short}": f"{diffusers}.{long}"
        for original, diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for short, long in _ATTENTION.items()
    },
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.modulation": "scale_shift_table",
    "head.head": "proj_out",
}
WAN = ModelFamily(
    name="wan",
    title="Wan",
    transformer_class="WanTransformer3DModel",
    vae_class="AutoencoderKLWan",
    block_lists=(BlockList("blocks", text_modules=("attn2.to_k", "attn2.to_v")),),
    # The free parameter scale_shift_table is added between norm_out and proj_out, on the main device.
    tail=("norm_out", "proj_out"),
    read_by_tail={"condition_embedder": 0},  # the time embedding
    # What diffusers keeps out of low precision as well (_skip_layerwise_casting_patterns), and the last projection. The
    # blocks' modulation is a bare parameter, which quantization does not touch.
    keep_full_precision=("*norm*", "patch_embedding", "condition_embedder", "proj_out"),
    lora_targets=("blocks.*.attn[12].to_[qkv]", "blocks.*.attn[12].to_out.0", "blocks.*.ffn.net.*"),
    shared_lora_names="original",  # ComfyUI 0.33 knows no others
    latent=_LATENT,
    timesteps=TimestepSpec(sampling="logit_normal", shift="musubi_3.0", shift_presets=_SHIFTS),
    variants=(
        Variant("wan2.1-t2v-14b", _14B, (_UMT5,), vae_config=_VAE_21),
        Variant("wan2.1-t2v-1.3b", _config(30, 12, 8960), (_UMT5,), vae_config=_VAE_21),
        *_experts("wan2.2-t2v-a14b", _14B, boundary=0.875, sampling=_sampling(4.0, 12.0)),
        Variant("wan2.2-ti2v-5b", _5B, (_UMT5,), vae_config=_VAE_22, latent=_LATENT_5B),
        *_experts("wan2.2-i2v-a14b", _I2V_14B, boundary=0.9, sampling=_sampling(3.5, 5.0), condition="first_frame"),
        Variant("wan2.2-ti2v-5b-i2v", _5B, (_UMT5,), vae_config=_VAE_22, latent=_LATENT_5B, condition="first_latents"),
    ),
    renames=(
        *(Rename(f"blocks.{{}}.{name}", (f"blocks.{{}}.{diffusers}",)) for name, diffusers in _IN_BLOCKS.items()),
        *(Rename(original, (diffusers,)) for original, diffusers in _OUTSIDE.items()),
    ),
    modelspec_architecture="wan2.1",
    ss_base_model_version="wan",
    make_inputs=make_inputs,
    read_prediction=read_prediction,
    encode_latents=encode_latents,
    decode_latents=decode_latents,
    encode_condition=encode_condition,
    unsupported={
        "img_emb.*": _NEEDS_CLIP,
        "condition_embedder.image_embedder.*": _NEEDS_CLIP,
        "vace_*": "it is VACE, whose control inputs are not made here",
        "control_adapter.*": "it is a camera model, whose control inputs are not made here",
    },
    tensor=plan(
        heads="attn[12].to_[qkv]",
        back="attn[12].to_out.0",
        mlp="ffn.net.0.proj>ffn.net.2",
        num_heads="attn1.heads",
        norms=("attn[12].norm_[qk]",),  # over all heads
    ),
    # ComfyUI pads to 512 tokens, zeroes the padding's states, and cuts nothing.
    comfy=ComfyInputs(states="prompt_embeds", width="text_dim", normalise=normalise_samples, latent_dims=3),
    sampling=_sampling(5.0, 5.0),
)
