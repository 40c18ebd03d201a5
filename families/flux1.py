"""FLUX.1 (Black Forest Labs): joint text-image transformer, 19 double and 38 single blocks, modulation in every block.

Weights: FLUX.1-dev and FLUX.1-schnell model cards. Layout: diffusers 0.42 `transformer_flux.py`, `pipeline_flux.py` and
its single-file converter, read 2026-11-21.

What is deliberately absent: Kontext, Fill and the control variants, whose inputs have further channels or tokens.
schnell is distilled to few steps and has no guidance input; a LoRA trained on it without its adapter undoes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .spec import BlockList, LatentSpec, ModelFamily, Rename, ShiftRule, TextEncoderSpec, TimestepSpec, Variant

if TYPE_CHECKING:
    import torch

_ENCODERS = (
    TextEncoderSpec(
        kind="last_hidden_state",  # T5-XXL; padding tokens are kept as they come out, like in the pipeline
        folder="text_encoder_2",
        tokenizer_folder="tokenizer_2",
        output="prompt_embeds",
        max_length=512,
    ),
    TextEncoderSpec(
        kind="pooled",  # CLIP-L
        folder="text_encoder",
        tokenizer_folder="tokenizer",
        output="pooled_prompt_embeds",
        max_length=77,
    ),
)

_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "force_upcast": True,
}


def make_inputs(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Arguments of FluxTransformer2DModel: 2x2 latent cells make a token; ids are (0, h, w) for images, 0 for text. The
    timestep is sigma itself and guidance is raw; the model multiplies both by 1000."""
    import torch

    batch, channels, _, height, width = latents.shape
    device = latents.device
    cells = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    rows, columns = torch.arange(height // 2, device=device), torch.arange(width // 2, device=device)
    img_ids = torch.cartesian_prod(torch.arange(1, device=device), rows, columns)
    return {
        "hidden_states": cells.reshape(batch, (height // 2) * (width // 2), channels * 4),
        "encoder_hidden_states": text["prompt_embeds"],
        "pooled_projections": text["pooled_prompt_embeds"],
        "timestep": sigma,
        "guidance": None if guidance is None else torch.full((batch,), guidance, device=device),
        "img_ids": img_ids.to(latents.dtype),
        "txt_ids": torch.zeros(text["prompt_embeds"].shape[1], 3, device=device, dtype=latents.dtype),
    }


def read_prediction(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Tokens [B, H/2 * W/2, 4C] back to [B, C, 1, H, W]."""
    batch, channels, _, height, width = latents.shape
    cells = output.view(batch, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(latents.shape)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """VAE mode, then (z - shift_factor) * scaling_factor."""
    latents = vae.encode(pixels[:, :, 0].to(vae.dtype)).latent_dist.mode().float()
    return ((latents - vae.config.shift_factor) * vae.config.scaling_factor).unsqueeze(2)


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    latents = latents[:, :, 0].float() / vae.config.scaling_factor + vae.config.shift_factor
    return vae.decode(latents.to(vae.dtype), return_dict=False)[0].float().unsqueeze(2)


def _transformer(*, guidance: bool) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": guidance,
        "axes_dims_rope": (16, 56, 56),
    }


_DOUBLE = "transformer_blocks.{}."
_SINGLE = "single_transformer_blocks.{}."

FLUX1 = ModelFamily(
    name="flux1",
    title="FLUX.1",
    transformer_class="FluxTransformer2DModel",
    vae_class="AutoencoderKL",
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
        "time_text_embed.*",
        "*norm*",  # the modulation linears are inside the norms here
        "proj_out",  # the last layer; the single blocks' proj_out has a longer name and is quantized
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
        "*.ff.net.0.proj",
        "*.ff.net.2",
        "*.ff_context.net.0.proj",
        "*.ff_context.net.2",
        "single_transformer_blocks.*.proj_mlp",
        "single_transformer_blocks.*.proj_out",
    ),
    latent=LatentSpec(channels=16, spatial_stride=8, size_multiple=16, num_tokens_per_cell=0.25),
    timesteps=TimestepSpec(
        sampling="logit_normal",
        # The schedule FLUX.1-dev was trained and is sampled with: mu linear in packed tokens.
        shift="resolution",
        shift_presets={
            "none": ShiftRule("none"),
            "resolution": ShiftRule("resolution", mu_at=((256.0, 0.5), (4096.0, 1.15))),
            "constant-3": ShiftRule("constant", 3.0),
        },
    ),
    variants=(
        # 1.0 is what trainers use for the distilled guidance input; inference uses about 3.5.
        Variant("flux1-dev", _transformer(guidance=True), _ENCODERS, vae_config=_VAE, training_guidance=1.0),
        Variant("flux1-schnell", _transformer(guidance=False), _ENCODERS, vae_config=_VAE),
    ),
    renames=(
        Rename("img_in", ("x_embedder",)),
        Rename("txt_in", ("context_embedder",)),
        Rename("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
        Rename("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
        Rename("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
        Rename("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
        Rename("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
        Rename("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
        Rename("final_layer.linear", ("proj_out",)),
        # (shift, scale) in the original, (scale, shift) in diffusers
        Rename("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),
        Rename("double_blocks.{}.img_mod.lin", (_DOUBLE + "norm1.linear",)),
        Rename("double_blocks.{}.txt_mod.lin", (_DOUBLE + "norm1_context.linear",)),
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
        Rename("double_blocks.{}.img_mlp.0", (_DOUBLE + "ff.net.0.proj",)),
        Rename("double_blocks.{}.img_mlp.2", (_DOUBLE + "ff.net.2",)),
        Rename("double_blocks.{}.txt_mlp.0", (_DOUBLE + "ff_context.net.0.proj",)),
        Rename("double_blocks.{}.txt_mlp.2", (_DOUBLE + "ff_context.net.2",)),
        *(
            Rename(
                f"double_blocks.{{}}.{stream}_attn.norm.{kind}_norm.scale",
                (f"{_DOUBLE}attn.norm_{added}{kind[0]}.weight",),
                aliases=(f"double_blocks.{{}}.{stream}_attn.norm.{kind}_norm.weight",),
            )
            for stream, added in (("img", ""), ("txt", "added_"))
            for kind in ("query", "key")
        ),
        Rename("single_blocks.{}.modulation.lin", (_SINGLE + "norm.linear",)),
        Rename(
            "single_blocks.{}.linear1",
            (_SINGLE + "attn.to_q", _SINGLE + "attn.to_k", _SINGLE + "attn.to_v", _SINGLE + "proj_mlp"),
        ),
        Rename("single_blocks.{}.linear2", (_SINGLE + "proj_out",)),
        *(
            Rename(
                f"single_blocks.{{}}.norm.{kind}_norm.scale",
                (f"{_SINGLE}attn.norm_{kind[0]}.weight",),
                aliases=(f"single_blocks.{{}}.norm.{kind}_norm.weight",),
            )
            for kind in ("query", "key")
        ),
    ),
    modelspec_architecture="flux-1-dev",
    ss_base_model_version="flux1",
    make_inputs=make_inputs,
    read_prediction=read_prediction,
    encode_latents=encode_latents,
    decode_latents=decode_latents,
)
