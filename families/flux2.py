"""FLUX.2 (Black Forest Labs): joint text-image transformer, 8 double and 48 single blocks in dev, shared modulation.

Weights: FLUX.2-dev and FLUX.2-klein model cards. Layout: diffusers 0.42 `transformer_flux2.py`, `pipeline_flux2.py`,
`pipeline_flux2_klein.py`, and its single-file converter, read 2026-11-21.

What is deliberately absent: reference images (editing) and klein's key-value cache; training here is text to image.
The distilled klein checkpoints load like the base ones, which have the same shapes; train the base ones, a LoRA of a
distilled model does not learn what distillation removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .spec import BlockList, LatentSpec, ModelFamily, Rename, ShiftRule, TextEncoderSpec, TimestepSpec, Variant

if TYPE_CHECKING:
    import torch

_SYSTEM_PROMPT = (  # the line break inside is part of it: diffusers and ComfyUI have it
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)

_MISTRAL = TextEncoderSpec(
    kind="chat_hidden_states",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="prompt_embeds",
    max_length=512,
    layers=(10, 20, 30),
    system_prompt=_SYSTEM_PROMPT,
)

_QWEN3 = TextEncoderSpec(
    kind="chat_hidden_states",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="prompt_embeds",
    max_length=512,
    layers=(9, 18, 27),
    template_options={"add_generation_prompt": True, "enable_thinking": False},
)

_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 1024,
}


def make_inputs(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Arguments of Flux2Transformer2DModel. Position ids are (t, h, w, l): (0, h, w, 0) for images, (0, 0, 0, l) for
    text. The timestep is sigma itself and guidance is raw; the model multiplies both by 1000."""
    import torch

    batch, _, _, height, width = latents.shape
    states = text["prompt_embeds"]
    device = latents.device
    zero = torch.arange(1, device=device)
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    positions = torch.arange(states.shape[1], device=device)
    img_ids = torch.cartesian_prod(zero, rows, columns, zero).expand(batch, -1, -1)
    txt_ids = torch.cartesian_prod(zero, zero, zero, positions).expand(batch, -1, -1)
    return {
        "hidden_states": latents.flatten(2).transpose(1, 2),
        "encoder_hidden_states": states,
        "timestep": sigma,
        "guidance": None if guidance is None else torch.full((batch,), guidance, device=device),
        "img_ids": img_ids,
        "txt_ids": txt_ids,
    }


def read_prediction(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Tokens [B, H * W, C] back to [B, C, 1, H, W]."""
    return output.transpose(1, 2).reshape(latents.shape)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """VAE mode, 2x2 patches into channels, then the VAE's running BatchNorm statistics with its own eps."""
    mean, std = _latent_statistics(vae)
    latents = vae.encode(pixels[:, :, 0].to(vae.dtype)).latent_dist.mode().float()
    batch, channels, height, width = latents.shape
    latents = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    latents = latents.reshape(batch, channels * 4, height // 2, width // 2)
    return ((latents - mean) / std).unsqueeze(2)


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    mean, std = _latent_statistics(vae)
    latents = latents[:, :, 0].float() * std + mean
    batch, channels, height, width = latents.shape
    latents = latents.reshape(batch, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
    latents = latents.reshape(batch, channels // 4, height * 2, width * 2)
    return vae.decode(latents.to(vae.dtype), return_dict=False)[0].float().unsqueeze(2)


def _latent_statistics(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mean = vae.bn.running_mean.float().view(1, -1, 1, 1)
    variance = vae.bn.running_var.float().view(1, -1, 1, 1)
    return mean, (variance + vae.config.batch_norm_eps).sqrt()


def _transformer(heads: int, layers: int, single_layers: int, text_width: int, *, guidance: bool) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": 128,
        "num_layers": layers,
        "num_single_layers": single_layers,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "joint_attention_dim": text_width,
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": guidance,
    }


_DOUBLE = "transformer_blocks.{}."
_SINGLE = "single_transformer_blocks.{}."

FLUX2 = ModelFamily(
    name="flux2",
    title="FLUX.2",
    transformer_class="Flux2Transformer2DModel",
    vae_class="AutoencoderKLFlux2",
    block_lists=(
        BlockList(
            "transformer_blocks",
            text_modules=("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out", "ff_context.*"),
        ),
        BlockList("single_transformer_blocks", is_joint=True),
    ),
    tail=("norm_out", "proj_out"),
    keep_full_precision=(
        "x_embedder",
        "context_embedder",
        "time_guidance_embed.*",
        "*_stream_modulation*",  # one linear each for all blocks: small, and every block depends on it
        "*norm*",
        "proj_out",
    ),
    lora_targets=(
        "*.attn.to_q",
        "*.attn.to_k",
        "*.attn.to_v",
        "*.attn.to_out.0",
        "*.attn.add_q_proj",
        "*.attn.add_k_proj",
        "*.attn.add_v_proj",
        "*.attn.to_add_out",
        "*.ff.linear_in",
        "*.ff.linear_out",
        "*.ff_context.linear_in",
        "*.ff_context.linear_out",
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",  # a linear here; in the double blocks a ModuleList of that name
    ),
    latent=LatentSpec(channels=128, spatial_stride=16, size_multiple=16),
    timesteps=TimestepSpec(
        sampling="logit_normal",
        # Trainers disagree at 1024²: musubi-tuner and OneTrainer 3.16 (resolution-dependent), diffusion-pipe 3.0 as
        # documented, DiffSynth 2.23, inference 7.56. The resolution rule is the one the model was described with, and
        # most trainers' results were made near it.
        shift="resolution",
        shift_presets={
            "none": ShiftRule("none"),
            "resolution": ShiftRule("resolution", mu_at=((256.0, 0.5), (4096.0, 1.15))),
            "diffusion-pipe": ShiftRule("constant", 3.0),
            "diffsynth": ShiftRule("constant", 2.2255),  # exp(0.8)
            "inference": ShiftRule("constant", 7.54),  # exp(2.02), too noisy for most training
        },
    ),
    variants=(
        Variant(
            "flux2-dev",
            _transformer(48, 8, 48, 15360, guidance=True),
            (_MISTRAL,),
            vae_config=_VAE,
            # Guidance is an input of the distilled model; 1.0 (no guidance) is what every trainer but one uses.
            training_guidance=1.0,
        ),
        Variant("flux2-klein-4b", _transformer(24, 5, 20, 7680, guidance=False), (_QWEN3,), vae_config=_VAE),
        Variant("flux2-klein-9b", _transformer(32, 8, 24, 12288, guidance=False), (_QWEN3,), vae_config=_VAE),
    ),
    renames=(
        Rename("img_in", ("x_embedder",)),
        Rename("txt_in", ("context_embedder",)),
        Rename("time_in.in_layer", ("time_guidance_embed.timestep_embedder.linear_1",)),
        Rename("time_in.out_layer", ("time_guidance_embed.timestep_embedder.linear_2",)),
        Rename("guidance_in.in_layer", ("time_guidance_embed.guidance_embedder.linear_1",)),
        Rename("guidance_in.out_layer", ("time_guidance_embed.guidance_embedder.linear_2",)),
        Rename("double_stream_modulation_img.lin", ("double_stream_modulation_img.linear",)),
        Rename("double_stream_modulation_txt.lin", ("double_stream_modulation_txt.linear",)),
        Rename("single_stream_modulation.lin", ("single_stream_modulation.linear",)),
        Rename("final_layer.linear", ("proj_out",)),
        # (shift, scale) in the original, (scale, shift) in diffusers
        Rename("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),
        Rename(
            "double_blocks.{}.img_attn.qkv",
            (_DOUBLE + "attn.to_q", _DOUBLE + "attn.to_k", _DOUBLE + "attn.to_v"),
        ),
        Rename(
            "double_blocks.{}.txt_attn.qkv",
            (_DOUBLE + "attn.add_q_proj", _DOUBLE + "attn.add_k_proj", _DOUBLE + "attn.add_v_proj"),
        ),
        Rename("double_blocks.{}.img_attn.proj", (_DOUBLE + "attn.to_out.0",)),
        Rename("double_blocks.{}.txt_attn.proj", (_DOUBLE + "attn.to_add_out",)),
        Rename("double_blocks.{}.img_mlp.0", (_DOUBLE + "ff.linear_in",)),
        Rename("double_blocks.{}.img_mlp.2", (_DOUBLE + "ff.linear_out",)),
        Rename("double_blocks.{}.txt_mlp.0", (_DOUBLE + "ff_context.linear_in",)),
        Rename("double_blocks.{}.txt_mlp.2", (_DOUBLE + "ff_context.linear_out",)),
        *(
            Rename(
                f"double_blocks.{{}}.{stream}_attn.norm.{kind}_norm.scale",
                (f"{_DOUBLE}attn.norm_{added}{kind[0]}.weight",),
                aliases=(f"double_blocks.{{}}.{stream}_attn.norm.{kind}_norm.weight",),
            )
            for stream, added in (("img", ""), ("txt", "added_"))
            for kind in ("query", "key")
        ),
        Rename("single_blocks.{}.linear1", (_SINGLE + "attn.to_qkv_mlp_proj",)),
        Rename("single_blocks.{}.linear2", (_SINGLE + "attn.to_out",)),
        *(
            Rename(
                f"single_blocks.{{}}.norm.{kind}_norm.scale",
                (f"{_SINGLE}attn.norm_{kind[0]}.weight",),
                aliases=(f"single_blocks.{{}}.norm.{kind}_norm.weight",),
            )
            for kind in ("query", "key")
        ),
    ),
    modelspec_architecture="flux-2",
    ss_base_model_version="flux2",
    make_inputs=make_inputs,
    read_prediction=read_prediction,
    encode_latents=encode_latents,
    decode_latents=decode_latents,
)
