"""Wan 2.1 and 2.2 text to video (Alibaba): video transformer with cross-attention to the text, 40 blocks in 14B.

Weights: Wan2.1-T2V-1.3B/14B, Wan2.2-T2V-A14B and Wan2.2-TI2V-5B model cards. Layout: diffusers 0.42
`transformer_wan.py`, `pipeline_wan.py` and its single-file converter, read 2026-11-21.

Wan 2.2 A14B is two experts of the shape of 2.1-14B in two files: one for timesteps above 0.875, one below. Nothing in
the file tells them from 2.1 or from each other, so the user names the variant.
What is deliberately absent: image-to-video inputs (further channels, CLIP image states), VACE, Animate, S2V.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .spec import BlockList, LatentSpec, ModelFamily, Rename, ShiftRule, TextEncoderSpec, TimestepSpec, Variant

if TYPE_CHECKING:
    import torch

_UMT5 = TextEncoderSpec(
    kind="last_hidden_state",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="prompt_embeds",
    max_length=512,
    zero_padding=True,
)

_LATENT_5B = LatentSpec(channels=48, spatial_stride=16, frame_stride=4, size_multiple=32, num_tokens_per_cell=0.25)


def make_inputs(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Arguments of WanTransformer3DModel. It makes patches and positions itself; the timestep is 0..1000, and stays
    float32 because its embedding is computed from it directly."""
    return {
        "hidden_states": latents,
        "timestep": sigma * 1000,
        "encoder_hidden_states": text["prompt_embeds"],
    }


def read_prediction(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """The model answers in the shape of its input. [B, C, F, H, W]"""
    return output


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """VAE mode, then (z - mean) / std per channel, with the numbers of the VAE's config."""
    mean, std = _latent_statistics(vae, pixels.device)
    latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode().float()
    return (latents - mean) / std


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    mean, std = _latent_statistics(vae, latents.device)
    return vae.decode((latents.float() * std + mean).to(vae.dtype), return_dict=False)[0].float()


def _latent_statistics(vae: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(device)
    return mean, torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(device)


def _transformer(heads: int, layers: int, ffn: int, channels: int) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": channels,
        "out_channels": channels,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "rope_max_seq_len": 1024,
    }


_14B = _transformer(40, 40, 13824, 16)
_BOUNDARY = 0.875  # of the text-to-video pair; image-to-video switches at 0.9
_BLOCK = "blocks.{}."

WAN = ModelFamily(
    name="wan",
    title="Wan",
    transformer_class="WanTransformer3DModel",
    vae_class="AutoencoderKLWan",
    block_lists=(BlockList("blocks", text_modules=("attn2.to_k", "attn2.to_v")),),
    tail=("norm_out", "proj_out"),
    keep_full_precision=("patch_embedding", "condition_embedder.*", "*norm*", "proj_out"),
    lora_targets=(
        "*.attn1.to_q",
        "*.attn1.to_k",
        "*.attn1.to_v",
        "*.attn1.to_out.0",
        "*.attn2.to_q",
        "*.attn2.to_k",
        "*.attn2.to_v",
        "*.attn2.to_out.0",
        "*.ffn.net.0.proj",
        "*.ffn.net.2",
    ),
    latent=LatentSpec(channels=16, spatial_stride=8, frame_stride=4, size_multiple=16, num_tokens_per_cell=0.25),
    timesteps=TimestepSpec(
        sampling="logit_normal",
        # musubi-tuner's documentation says 3, DiffSynth trains at 5, inference of A14B uses 12. 3 leaves enough steps
        # at low noise for detail, and an expert's range cuts the rest anyway.
        shift="constant-3",
        shift_presets={
            "none": ShiftRule("none"),
            "constant-3": ShiftRule("constant", 3.0),
            "diffsynth": ShiftRule("constant", 5.0),
            "inference": ShiftRule("constant", 12.0),
        },
    ),
    variants=(
        Variant("wan2.1-t2v-14b", _14B, (_UMT5,)),
        Variant("wan2.1-t2v-1.3b", _transformer(12, 30, 8960, 16), (_UMT5,)),
        Variant("wan2.2-t2v-a14b-high", _14B, (_UMT5,), sigma_range=(_BOUNDARY, 1.0)),
        Variant("wan2.2-t2v-a14b-low", _14B, (_UMT5,), sigma_range=(0.0, _BOUNDARY)),
        Variant("wan2.2-ti2v-5b", _transformer(24, 30, 14336, 48), (_UMT5,), latent=_LATENT_5B),
    ),
    renames=(
        Rename("patch_embedding", ("patch_embedding",)),
        Rename("time_embedding.0", ("condition_embedder.time_embedder.linear_1",)),
        Rename("time_embedding.2", ("condition_embedder.time_embedder.linear_2",)),
        Rename("time_projection.1", ("condition_embedder.time_proj",)),
        Rename("text_embedding.0", ("condition_embedder.text_embedder.linear_1",)),
        Rename("text_embedding.2", ("condition_embedder.text_embedder.linear_2",)),
        Rename("head.head", ("proj_out",)),
        Rename("head.modulation", ("scale_shift_table",)),
        Rename("blocks.{}.modulation", (_BLOCK + "scale_shift_table",)),
        # norm2 and norm3 are counted the other way round; the third has no weights
        Rename("blocks.{}.norm3", (_BLOCK + "norm2",)),
        *(
            Rename(f"blocks.{{}}.{original}_attn.{name}", (f"{_BLOCK}{ours}.{to}",))
            for original, ours in (("self", "attn1"), ("cross", "attn2"))
            for name, to in (
                ("q", "to_q"),
                ("k", "to_k"),
                ("v", "to_v"),
                ("o", "to_out.0"),
                ("norm_q", "norm_q"),
                ("norm_k", "norm_k"),
            )
        ),
        Rename("blocks.{}.ffn.0", (_BLOCK + "ffn.net.0.proj",)),
        Rename("blocks.{}.ffn.2", (_BLOCK + "ffn.net.2",)),
    ),
    modelspec_architecture="wan-video",
    ss_base_model_version="wan",
    make_inputs=make_inputs,
    read_prediction=read_prediction,
    encode_latents=encode_latents,
    decode_latents=decode_latents,
)
