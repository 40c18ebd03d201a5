"""FLUX.2 (Black Forest Labs): double blocks with separate text and image weights, then single blocks over both.

Sizes and names: diffusers 0.42.1, scripts/convert_flux2_to_diffusers.py and Flux2Transformer2DModel. Differences from
FLUX.1 that matter here: no biases; modulation is computed once for all blocks, so it is not inside them; latents are
patchified and normalised before they are noised; positions have four axes (t, h, w, l).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from .flux import DIVIDED_ATTENTION, DOUBLE_ATTENTION, SHIFTS, SINGLE, TEXT_MODULES, TO_SINGLE, flux_renames
from .spec import (
    BlockList,
    ComfyInputs,
    LatentSpec,
    ModelFamily,
    Rename,
    SamplingSpec,
    ShiftRule,
    TextEncoderSpec,
    TimestepSpec,
    Variant,
)
from .tensor_plan import QKV, Divided, plan

# diffusers' pipelines/flux2/system_messages.py; the line break is part of it (some trainers have a space there).
_SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)


def _language_model(layers: tuple[int, ...], options: Mapping[str, Any], system: str | None = None) -> TextEncoderSpec:
    return TextEncoderSpec(
        kind="chat_hidden_states",
        folder="text_encoder",
        tokenizer_folder="tokenizer",
        output="prompt_embeds",
        max_length=512,
        layers=layers,
        system_prompt=system,
        template_options=options,
    )


# Flux2Pipeline: no generation prompt, the padding goes through the language model, the transformer sees no mask.
_MISTRAL = _language_model((10, 20, 30), {"add_generation_prompt": False}, _SYSTEM_MESSAGE)
# Flux2KleinPipeline: no system message, an empty thinking section, and the assistant's turn begun.
_QWEN3 = _language_model((9, 18, 27), {"add_generation_prompt": True, "enable_thinking": False})

# Trainers disagree about the shift, from 1.88 to 7.56 at 1024x1024. The default is FLUX.1's rule on the number of
# tokens the transformer sees, which gives 3.16 there (musubi-tuner, OneTrainer).
_SHIFTS = {
    **SHIFTS,
    "diffusion_pipe_3.0": ShiftRule("constant", 3.0),  # its documented config
    "diffsynth_2.23": ShiftRule("constant", 2.2255),  # exp(0.8), at every size
    # compute_empirical_mu of the reference sampler at 50 steps, which is linear in tokens up to 4300; it asks for more
    # noise than training needs (7.56 at 1024x1024) and is here for comparisons.
    "bfl_inference_50_steps": ShiftRule("resolution", mu_at=((256.0, 1.62161), (4096.0, 2.02335))),
}

_VAE = {
    "latent_channels": 32,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "batch_norm_eps": 1e-4,
}


def _config(layers: int, single_layers: int, heads: int, text_width: int, guidance: bool) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": 128,
        "num_layers": layers,
        "num_single_layers": single_layers,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "joint_attention_dim": text_width,  # three layers side by side
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "eps": 1e-6,
        "guidance_embeds": guidance,
    }


def _klein(name: str, config: Mapping[str, Any]) -> Variant:
    caution = (
        "klein exists as a base model and step-distilled, with equal shapes; train the base model, and use the LoRA "
        "with either: training the distilled one undoes its distillation"
    )
    return Variant(name, config, (_QWEN3,), vae_config=_VAE, caution=caution)


def sampling_shift(num_tokens: int, steps: int) -> float:
    """The factor that compute_empirical_mu of diffusers' pipelines/flux2 gives; fewer steps stay in noise longer."""
    mu_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return math.exp(mu_200)
    mu_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return math.exp(mu_200 + (mu_200 - mu_10) / 190 * (steps - 200))


def make_inputs(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Keyword arguments of the transformer, as Flux2Pipeline passes them. latents: noisy, [B, C, 1, H, W]. sigma,
    guidance: the model multiplies both by 1000 itself. text: prompt_embeds [B, S, D]."""
    batch, _, frames, height, width = latents.shape
    assert frames == 1, f"FLUX.2 makes images; these latents have {frames} frames"
    states = text["prompt_embeds"]
    device = latents.device
    rows = torch.arange(height, device=device).repeat_interleave(width)
    columns = torch.arange(width, device=device).repeat(height)
    zeros = torch.zeros_like(rows)
    image_ids = torch.stack([zeros, rows, columns, zeros], dim=-1)
    text_ids = torch.zeros(states.shape[1], 4, dtype=image_ids.dtype, device=device)
    text_ids[:, 3] = torch.arange(states.shape[1], device=device)
    return {
        "hidden_states": latents.flatten(2).transpose(1, 2),
        "encoder_hidden_states": states,
        "timestep": sigma,
        "guidance": None if guidance is None else torch.full((batch,), guidance, device=device),
        "img_ids": image_ids.expand(batch, -1, -1),
        "txt_ids": text_ids.expand(batch, -1, -1),
    }


def read_prediction(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Tokens back to cells: [B, H*W, C] -> [B, C, 1, H, W]."""
    return output.transpose(1, 2).reshape(latents.shape)


def _batch_norm_statistics(vae: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of patchified latents, float32, [1, C, 1, 1]; they are part of the VAE's weights."""
    mean = vae.bn.running_mean.to(device, torch.float32)
    variance = vae.bn.running_var.to(device, torch.float32)
    return mean.view(1, -1, 1, 1), torch.sqrt(variance + vae.config.batch_norm_eps).view(1, -1, 1, 1)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """[B, 3, 1, height, width] -> [B, 4 * latent_channels, 1, height / 16, width / 16], float32.

    The mode of the distribution, as Flux2Pipeline takes for reference images: a sample would be drawn once and then
    repeated from the cache. Each 2x2 patch becomes one cell, and cells are normalised by the VAE's batch norm.
    """
    assert pixels.shape[2] == 1, f"FLUX.2 makes images; these pixels have {pixels.shape[2]} frames"
    latents = vae.encode(pixels[:, :, 0].to(vae.dtype)).latent_dist.mode().float()
    cells = pixel_unshuffle(latents, 2)
    mean, std = _batch_norm_statistics(vae, cells.device)
    return ((cells - mean) / std).unsqueeze(2)


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of encode_latents, up to the VAE's loss: [B, C, 1, H, W] -> [B, 3, 1, height, width]."""
    mean, std = _batch_norm_statistics(vae, latents.device)
    cells = latents[:, :, 0].float() * std + mean
    return vae.decode(pixel_shuffle(cells, 2).to(vae.dtype)).sample.unsqueeze(2)


def normalise_samples(samples: torch.Tensor) -> torch.Tensor:
    """Nothing: ComfyUI's VAE patchifies and applies the batch norm itself, so its LATENT is normalised."""
    return samples


# Mistral's real tokens only, with zeros in front up to 512 that the transformer sees unmasked; klein's encoder pads to
# 512 itself. The attention_mask beside them is not read without attention_mask_img_shape.
_COMFY = ComfyInputs(
    states="prompt_embeds",
    width="joint_attention_dim",
    normalise=normalise_samples,
    min_tokens=512,
)

_RENAMES = (
    *flux_renames("time_guidance_embed", "linear_in", "linear_out"),
    Rename("double_stream_modulation_img.lin", ("double_stream_modulation_img.linear",)),
    Rename("double_stream_modulation_txt.lin", ("double_stream_modulation_txt.linear",)),
    Rename("single_stream_modulation.lin", ("single_stream_modulation.linear",)),
    Rename(SINGLE + "linear1", (TO_SINGLE + "attn.to_qkv_mlp_proj",)),  # fused in both layouts
    Rename(SINGLE + "linear2", (TO_SINGLE + "attn.to_out",)),
)

_TENSOR = plan(
    block="Flux2TransformerBlock",
    **DIVIDED_ATTENTION,
    mlp="ff.linear_in>ff.linear_out ff_context.linear_in>ff_context.linear_out",
) + plan(
    Divided("attn.to_qkv_mlp_proj", "column", (*QKV, "features"), into="attn.to_out"),
    Divided("attn.to_out", "row", ("heads", "features")),
    block="Flux2SingleTransformerBlock",
    width="attn.inner_dim",
    attributes={"attn.heads": "heads", "attn.inner_dim": "heads", "attn.mlp_hidden_dim": "attn.to_out"},
)

FLUX2 = ModelFamily(
    name="flux2",
    title="FLUX.2",
    transformer_class="Flux2Transformer2DModel",
    vae_class="AutoencoderKLFlux2",
    block_lists=(
        BlockList("transformer_blocks", text_modules=TEXT_MODULES),
        BlockList("single_transformer_blocks", is_joint=True),
    ),
    tail=("norm_out", "proj_out"),
    # Everything outside the blocks (2.5 % of FLUX.2-dev), for each of these acts on every token or every block at once.
    keep_full_precision=(
        "*norm*",
        "time_guidance_embed",
        "double_stream_modulation_*",
        "single_stream_modulation",
        "x_embedder",
        "context_embedder",
        "proj_out",
    ),
    # Not among them: modulation and embedders, for ComfyUI's loader knows those only under their original names, and
    # seven of FLUX.2's are skipped in silence under diffusers' names.
    lora_targets=(
        *DOUBLE_ATTENTION,
        "transformer_blocks.*.ff.linear_*",
        "transformer_blocks.*.ff_context.linear_*",
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",
    ),
    # flux_to_diffusers in ComfyUI 0.33; under the original names diffusers 0.42 loads no alpha and no DoRA.
    shared_lora_names="diffusers",
    unread_lora=("time_guidance_embed.*", "*_stream_modulation*"),
    latent=LatentSpec(channels=128, spatial_stride=16),
    timesteps=TimestepSpec(sampling="logit_normal", shift="resolution", shift_presets=_SHIFTS),
    variants=(
        Variant(
            name="flux2-dev",
            transformer_config=_config(8, 48, 48, 15360, guidance=True),
            text_encoders=(_MISTRAL,),
            vae_config=_VAE,
            # dev is guidance-distilled. Trainers embed 1.0 (diffusion-pipe, musubi-tuner, DiffSynth, OneTrainer), so
            # that the LoRA need not learn guidance; diffusers' script has 3.5.
            training_guidance=1.0,
        ),
        _klein("flux2-klein-4b", _config(5, 20, 24, 7680, guidance=False)),
        _klein("flux2-klein-9b", _config(8, 24, 32, 12288, guidance=False)),
    ),
    renames=_RENAMES,
    modelspec_architecture="Flux.2-dev",
    ss_base_model_version="flux2",
    make_inputs=make_inputs,
    read_prediction=read_prediction,
    encode_latents=encode_latents,
    decode_latents=decode_latents,
    tensor=_TENSOR,
    comfy=_COMFY,
    # The pipelines' guidance (klein's: that of the base model). They take 50 steps; 28 is what dev's card recommends.
    sampling=SamplingSpec(28, 4.0, sampling_shift),
)
