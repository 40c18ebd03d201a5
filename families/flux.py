"""FLUX.1 and FLUX.2 (Black Forest Labs), after diffusers 0.42.1 and the model cards. FLUX.2 has no biases, and one
modulation for all blocks; its latents are patchified and normalised before they are noised, where FLUX.1's 2x2 packing
happens in make_inputs. Kontext, Fill, Depth and Canny are not described: they need more than a caption."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from .spec import (
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
from .tensor_plan import QKV, BlockList, Divided, plan

# ---- names of parameters

_DOUBLE, _SINGLE = "double_blocks.{}.", "single_blocks.{}."
_TO_DOUBLE, _TO_SINGLE = "transformer_blocks.{}.", "single_transformer_blocks.{}."


def _renames(embed: str, linear_in: str, linear_out: str) -> tuple[Rename, ...]:
    """The rows that both tables have. embed: diffusers' name of the module that embeds timestep and guidance.
    linear_in, linear_out: diffusers' names of the linears of a feed-forward."""
    attention = f"{_TO_DOUBLE}attn."
    rows = {
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_in.in_layer": (f"{embed}.timestep_embedder.linear_1",),
        "time_in.out_layer": (f"{embed}.timestep_embedder.linear_2",),
        "guidance_in.in_layer": (f"{embed}.guidance_embedder.linear_1",),
        "guidance_in.out_layer": (f"{embed}.guidance_embedder.linear_2",),
        f"{_DOUBLE}img_attn.qkv": tuple(f"{attention}to_{each}" for each in "qkv"),
        f"{_DOUBLE}img_attn.proj": (f"{attention}to_out.0",),
        f"{_DOUBLE}txt_attn.qkv": tuple(f"{attention}add_{each}_proj" for each in "qkv"),
        f"{_DOUBLE}txt_attn.proj": (f"{attention}to_add_out",),
        f"{_DOUBLE}img_mlp.0": (f"{_TO_DOUBLE}ff.{linear_in}",),
        f"{_DOUBLE}img_mlp.2": (f"{_TO_DOUBLE}ff.{linear_out}",),
        f"{_DOUBLE}txt_mlp.0": (f"{_TO_DOUBLE}ff_context.{linear_in}",),
        f"{_DOUBLE}txt_mlp.2": (f"{_TO_DOUBLE}ff_context.{linear_out}",),
        "final_layer.linear": ("proj_out",),
    }
    return (
        *(Rename(original, diffusers) for original, diffusers in rows.items()),
        *_norms(f"{_DOUBLE}img_attn.", f"{attention}norm_"),
        *_norms(f"{_DOUBLE}txt_attn.", f"{attention}norm_added_"),
        *_norms(_SINGLE, f"{_TO_SINGLE}attn.norm_"),
        Rename("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),  # shift, scale | scale, shift
    )


def _norms(original: str, diffusers: str) -> Iterator[Rename]:
    """Of queries and keys: `scale` in the makers' files, `weight` in some that ComfyUI saved."""
    for each in ("query", "key"):
        name = f"{original}norm.{each}_norm"
        yield Rename(f"{name}.scale", (f"{diffusers}{each[0]}.weight",), aliases=(f"{name}.weight",))


# ---- what both have

_TEXT_MODULES = ("attn.add_?_proj", "attn.to_add_out", "ff_context.*")
_DOUBLE_ATTENTION = (  # patterns of LoRA targets
    "transformer_blocks.*.attn.to_[qkv]",
    "transformer_blocks.*.attn.to_out.0",
    "transformer_blocks.*.attn.add_[qkv]_proj",
    "transformer_blocks.*.attn.to_add_out",
)
# How a double block's attention is divided among devices that compute it together.
_DIVIDED = {"heads": "attn.to_[qkv] attn.add_[qkv]_proj", "back": "attn.to_out.0 attn.to_add_out"}
# "resolution" is FLUX.1-dev's own scheduler: mu rises linearly with the number of tokens the transformer sees, so that
# the shift is 1.88 at 512x512 and 3.16 at 1024x1024.
_RESOLUTION = ShiftRule("resolution")
_SHIFTS = {"none": ShiftRule("constant"), "resolution": _RESOLUTION}
_BLOCK_CHANNELS = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}  # of a VAE


def _config(channels: int, layers: int, single_layers: int, heads: int, text_width: int, **more: Any) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": channels,
        "num_layers": layers,
        "num_single_layers": single_layers,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
        "joint_attention_dim": text_width,
        **more,
    }


def _inputs(
    tokens: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """The model multiplies sigma and guidance by 1000 itself."""
    return {
        "hidden_states": tokens,
        "encoder_hidden_states": text["prompt_embeds"],
        "timestep": sigma,
        "guidance": None if guidance is None else torch.full((len(tokens),), guidance, device=tokens.device),
    }


def _grid(latents: torch.Tensor, patch: int, axes: int, dtype: torch.dtype) -> torch.Tensor:
    """Positions of tokens, row and column on the second and third axis. [S, axes]"""
    height, width = (side // patch for side in latents.shape[-2:])
    ids = torch.zeros(height, width, axes, dtype=dtype, device=latents.device)
    ids[..., 1] = torch.arange(height, device=ids.device)[:, None]
    ids[..., 2] = torch.arange(width, device=ids.device)
    return ids.flatten(0, 1)


# ---- FLUX.1

_CLIP = TextEncoderSpec(
    kind="pooled",
    folder="text_encoder",
    tokenizer_folder="tokenizer",
    output="pooled_prompt_embeds",
    max_length=77,
    keep_full_precision=("*",),  # 8 bits would save 0.09 GB, and its one vector modulates every block
)


def _t5(max_length: int) -> TextEncoderSpec:
    """T5-XXL; the padding is encoded unmasked, as in FluxPipeline."""
    return TextEncoderSpec(
        kind="last_hidden_state",
        folder="text_encoder_2",
        tokenizer_folder="tokenizer_2",
        output="prompt_embeds",
        max_length=max_length,
        keep_full_precision=("*.wo",),  # T5's own class wants it so: its inputs have outliers beyond float16's range
    )


_SHIFTS_1 = {**_SHIFTS, "constant_3.16": ShiftRule("constant", 3.1582)}  # the value at 1024x1024, for every size
_SHIFT, _SCALE = 0.1159, 0.3611  # of the latents
_VAE_1 = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    **_BLOCK_CHANNELS,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": _SCALE,
    "shift_factor": _SHIFT,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def _config_1(*, guidance: bool) -> dict[str, Any]:
    rest = {"pooled_projection_dim": 768, "guidance_embeds": guidance, "axes_dims_rope": (16, 56, 56)}
    return _config(64, 19, 38, 24, 4096, **rest)


def make_inputs_1(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Keyword arguments of the transformer, as FluxPipeline passes them. latents: noisy, [B, C, 1, H, W]; each 2x2
    patch becomes one token of 4 * C. text: prompt_embeds [B, S, D] and pooled_prompt_embeds [B, D]."""
    tokens = pixel_unshuffle(latents.squeeze(2), 2).flatten(2).transpose(1, 2)
    return {
        **_inputs(tokens, sigma, text, guidance),
        "pooled_projections": text["pooled_prompt_embeds"],
        "img_ids": _grid(latents, 2, 3, torch.float32),
        "txt_ids": torch.zeros(text["prompt_embeds"].shape[1], 3, device=latents.device),
    }


def read_prediction_1(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Tokens back to cells: [B, H/2 * W/2, 4 * C] -> [B, C, 1, H, W]."""
    batch, _, _, height, width = latents.shape
    packed = output.transpose(1, 2).reshape(batch, -1, height // 2, width // 2)
    return pixel_shuffle(packed, 2).unsqueeze(2)


def encode_latents_1(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """[B, 3, 1, height, width] -> [B, C, 1, height / 8, width / 8], float32; the mode, as FluxKontextPipeline takes."""
    latents = vae.encode(pixels.squeeze(2).to(vae.dtype)).latent_dist.mode().float()
    return ((latents - vae.config.shift_factor) * vae.config.scaling_factor).unsqueeze(2)


def decode_latents_1(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of encode_latents, up to the VAE's loss: [B, C, 1, H, W] -> [B, 3, 1, height, width]."""
    scaled = latents.squeeze(2).float() / vae.config.scaling_factor + vae.config.shift_factor
    return vae.decode(scaled.to(vae.dtype)).sample.unsqueeze(2)


FLUX1 = ModelFamily(
    name="flux1",
    title="FLUX.1",
    transformer_class="FluxTransformer2DModel",
    vae_class="AutoencoderKL",
    block_lists=(
        BlockList(
            "transformer_blocks", text_modules=_TEXT_MODULES, sample_modules=("norm1.linear", "norm1_context.linear")
        ),
        BlockList("single_transformer_blocks", is_joint=True, sample_modules=("norm.linear",)),
    ),
    tail=("norm_out", "proj_out"),
    # "*norm*" includes the modulation inside the blocks, 3.2 of 11.9 billion weights: float8 then saves 8.6 GB, not
    # 11.8. Their output scales and gates every token of a block, and they see one vector each, so speed is no reason.
    keep_full_precision=("*norm*", "time_text_embed", "x_embedder", "context_embedder", "proj_out"),
    # Modulation is not among them: it moves the style of everything, and few trainers adapt it.
    lora_targets=(
        *_DOUBLE_ATTENTION,
        "transformer_blocks.*.ff.net.*",
        "transformer_blocks.*.ff_context.net.*",
        "single_transformer_blocks.*.attn.to_[qkv]",
        "single_transformer_blocks.*.proj_mlp",
        "single_transformer_blocks.*.proj_out",
    ),
    # flux_to_diffusers in ComfyUI 0.33; under the original names diffusers 0.42 loads no alpha and no DoRA.
    shared_lora_names="diffusers",
    latent=LatentSpec(channels=16, spatial_stride=8, num_tokens_per_cell=0.25),
    timesteps=TimestepSpec(sampling="logit_normal", shift="resolution", shift_presets=_SHIFTS_1),
    variants=(
        Variant(
            name="flux1-dev",
            transformer_config=_config_1(guidance=True),
            text_encoders=(_CLIP, _t5(512)),
            vae_config=_VAE_1,
            # dev is guidance-distilled; trainers embed 1.0 (diffusion-pipe, ai-toolkit, FluxTrainer), so that the LoRA
            # need not learn guidance.
            training_guidance=1.0,
        ),
        Variant(
            name="flux1-schnell",
            transformer_config=_config_1(guidance=False),
            text_encoders=(_CLIP, _t5(256)),  # the length it was made for; FluxPipeline allows no more
            vae_config=_VAE_1,
            # Its scheduler has no shift (shift 1, no dynamic shifting).
            timesteps=TimestepSpec(sampling="logit_normal", shift="none", shift_presets=_SHIFTS_1),
            sampling=SamplingSpec(steps=4, guidance=1.0, shift=lambda num_tokens, steps: 1.0),
            caution="schnell is step-distilled, and training it undoes that: images in four steps will get worse",
        ),
    ),
    renames=(
        *_renames("time_text_embed", "net.0.proj", "net.2"),
        Rename("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
        Rename("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
        Rename(_DOUBLE + "img_mod.lin", (_TO_DOUBLE + "norm1.linear",)),
        Rename(_DOUBLE + "txt_mod.lin", (_TO_DOUBLE + "norm1_context.linear",)),
        Rename(_SINGLE + "modulation.lin", (_TO_SINGLE + "norm.linear",)),
        Rename(
            _SINGLE + "linear1",
            tuple(_TO_SINGLE + name for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
            proportions=(1, 1, 1, 4),  # the class fixes mlp_ratio at 4
        ),
        Rename(_SINGLE + "linear2", (_TO_SINGLE + "proj_out",)),
    ),
    modelspec_architecture="flux-1-dev",
    ss_base_model_version="flux1",
    make_inputs=make_inputs_1,
    read_prediction=read_prediction_1,
    encode_latents=encode_latents_1,
    decode_latents=decode_latents_1,
    tensor=plan(
        block="FluxTransformerBlock",
        **_DIVIDED,
        gathered="norm1*.linear",  # modulation, a sixth of the model's weights
        mlp="ff.net.0.proj>ff.net.2 ff_context.net.0.proj>ff_context.net.2",
    )
    + plan(
        Divided("proj_mlp", "column", ("features",), into="proj_out"),
        Divided("proj_out", "row", ("heads", "features")),
        block="FluxSingleTransformerBlock",
        heads="attn.to_[qkv]",
        gathered="norm.linear",
        width="attn.inner_dim",
    ),
    # ComfyUI encodes at least 256 T5 tokens and cuts nothing: dev's makers fill up to 512, so its states differ in
    # length. Its Flux latent format makes of a LATENT what encode_latents does.
    comfy=ComfyInputs(
        states="prompt_embeds",
        width="joint_attention_dim",
        pooled="pooled_prompt_embeds",
        pooled_width="pooled_projection_dim",
        normalise=lambda samples: (samples - _SHIFT) * _SCALE,
        cells_per_token=4,
    ),
    # FluxPipeline's steps and guidance; dev's scheduler shifts as it was trained.
    sampling=SamplingSpec(28, 3.5, shift=lambda num_tokens, steps: _RESOLUTION.factor(num_tokens)),
)

# ---- FLUX.2

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


# Flux2KleinPipeline: no system message, an empty thinking section, and the assistant's turn begun.
_QWEN3 = _language_model((9, 18, 27), {"add_generation_prompt": True, "enable_thinking": False})

# Trainers disagree about the shift, from 1.88 to 7.56 at 1024x1024. The default is FLUX.1's rule on the number of
# tokens the transformer sees, which gives 3.16 there (musubi-tuner, OneTrainer).
_SHIFTS_2 = {
    **_SHIFTS,
    "diffusion_pipe_3.0": ShiftRule("constant", 3.0),  # its documented config
    "diffsynth_2.23": ShiftRule("constant", 2.2255),  # exp(0.8), at every size
    # compute_empirical_mu of the reference sampler at 50 steps, which is linear in tokens up to 4300; it asks for more
    # noise than training needs (7.56 at 1024x1024) and is here for comparisons.
    "bfl_inference_50_steps": ShiftRule("resolution", mu_at=((256.0, 1.62161), (4096.0, 2.02335))),
}
_VAE_2 = {"latent_channels": 32, **_BLOCK_CHANNELS, "batch_norm_eps": 1e-4}


def _config_2(layers: int, single_layers: int, heads: int, text_width: int, *, guidance: bool) -> dict[str, Any]:
    """text_width: of three layers side by side."""
    rest = {"timestep_guidance_channels": 256, "mlp_ratio": 3.0, "axes_dims_rope": (32, 32, 32, 32), "rope_theta": 2000}
    return _config(128, layers, single_layers, heads, text_width, **rest, eps=1e-6, guidance_embeds=guidance)


def _klein(name: str, config: Mapping[str, Any]) -> Variant:
    caution = (
        "klein exists as a base model and step-distilled, with equal shapes; train the base model, and use the LoRA "
        "with either: training the distilled one undoes its distillation"
    )
    return Variant(name, config, (_QWEN3,), vae_config=_VAE_2, caution=caution)


def sampling_shift_2(num_tokens: int, steps: int) -> float:
    """The factor that compute_empirical_mu of diffusers' pipelines/flux2 gives; fewer steps stay in noise longer."""
    mu_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return math.exp(mu_200)
    mu_10 = 8.73809524e-05 * num_tokens + 1.89833333
    return math.exp(mu_200 + (mu_200 - mu_10) / 190 * (steps - 200))


def make_inputs_2(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Arguments as of Flux2Pipeline. latents: noisy, [B, C, 1, H, W]. text: prompt_embeds [B, S, D]."""
    batch, num_tokens, _ = text["prompt_embeds"].shape
    image_ids = _grid(latents, 1, 4, torch.int64)
    text_ids = image_ids.new_zeros(num_tokens, 4)
    text_ids[:, 3] = torch.arange(num_tokens, device=text_ids.device)
    return {
        **_inputs(latents.squeeze(2).flatten(2).transpose(1, 2), sigma, text, guidance),
        "img_ids": image_ids.expand(batch, -1, -1),
        "txt_ids": text_ids.expand(batch, -1, -1),
    }


def read_prediction_2(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Tokens back to cells: [B, H*W, C] -> [B, C, 1, H, W]."""
    return output.transpose(1, 2).reshape(latents.shape)


def _statistics_2(vae: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of patchified latents, float32, [1, C, 1, 1]; they are part of the VAE's weights."""
    mean = vae.bn.running_mean.to(device, torch.float32)
    variance = vae.bn.running_var.to(device, torch.float32)
    return mean.view(1, -1, 1, 1), torch.sqrt(variance + vae.config.batch_norm_eps).view(1, -1, 1, 1)


def encode_latents_2(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """[B, 3, 1, height, width] -> [B, 4 * latent_channels, 1, height / 16, width / 16], float32. The mode, as
    Flux2Pipeline takes for reference images; each 2x2 patch becomes a cell, which the VAE's batch norm normalises."""
    latents = vae.encode(pixels.squeeze(2).to(vae.dtype)).latent_dist.mode().float()
    mean, std = _statistics_2(vae, latents.device)
    return ((pixel_unshuffle(latents, 2) - mean) / std).unsqueeze(2)


def decode_latents_2(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of encode_latents, up to the VAE's loss: [B, C, 1, H, W] -> [B, 3, 1, height, width]."""
    mean, std = _statistics_2(vae, latents.device)
    cells = latents.squeeze(2).float() * std + mean
    return vae.decode(pixel_shuffle(cells, 2).to(vae.dtype)).sample.unsqueeze(2)


FLUX2 = ModelFamily(
    name="flux2",
    title="FLUX.2",
    transformer_class="Flux2Transformer2DModel",
    vae_class="AutoencoderKLFlux2",
    block_lists=(
        BlockList("transformer_blocks", text_modules=_TEXT_MODULES),
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
        *_DOUBLE_ATTENTION,
        "transformer_blocks.*.ff.linear_*",
        "transformer_blocks.*.ff_context.linear_*",
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",
    ),
    shared_lora_names="diffusers",  # for FLUX.1's reasons
    unread_lora=("time_guidance_embed.*", "*_stream_modulation*"),
    latent=LatentSpec(channels=128, spatial_stride=16),
    timesteps=TimestepSpec(sampling="logit_normal", shift="resolution", shift_presets=_SHIFTS_2),
    variants=(
        Variant(
            name="flux2-dev",
            transformer_config=_config_2(8, 48, 48, 15360, guidance=True),
            # Flux2Pipeline: no generation prompt, the padding goes through the language model, the transformer sees no
            # mask.
            text_encoders=(_language_model((10, 20, 30), {"add_generation_prompt": False}, _SYSTEM_MESSAGE),),
            vae_config=_VAE_2,
            # dev is guidance-distilled. Trainers embed 1.0 (diffusion-pipe, musubi-tuner, DiffSynth, OneTrainer), so
            # that the LoRA need not learn guidance; diffusers' script has 3.5.
            training_guidance=1.0,
        ),
        _klein("flux2-klein-4b", _config_2(5, 20, 24, 7680, guidance=False)),
        _klein("flux2-klein-9b", _config_2(8, 24, 32, 12288, guidance=False)),
    ),
    renames=(
        *_renames("time_guidance_embed", "linear_in", "linear_out"),
        Rename("double_stream_modulation_img.lin", ("double_stream_modulation_img.linear",)),
        Rename("double_stream_modulation_txt.lin", ("double_stream_modulation_txt.linear",)),
        Rename("single_stream_modulation.lin", ("single_stream_modulation.linear",)),
        Rename(_SINGLE + "linear1", (_TO_SINGLE + "attn.to_qkv_mlp_proj",)),  # fused in both layouts
        Rename(_SINGLE + "linear2", (_TO_SINGLE + "attn.to_out",)),
    ),
    modelspec_architecture="Flux.2-dev",
    ss_base_model_version="flux2",
    make_inputs=make_inputs_2,
    read_prediction=read_prediction_2,
    encode_latents=encode_latents_2,
    decode_latents=decode_latents_2,
    tensor=plan(
        block="Flux2TransformerBlock",
        **_DIVIDED,
        mlp="ff.linear_in>ff.linear_out ff_context.linear_in>ff_context.linear_out",
    )
    + plan(
        Divided("attn.to_qkv_mlp_proj", "column", (*QKV, "features"), into="attn.to_out"),
        Divided("attn.to_out", "row", ("heads", "features")),
        block="Flux2SingleTransformerBlock",
        width="attn.inner_dim",
        attributes={"attn.inner_dim": "heads", "attn.mlp_hidden_dim": "attn.to_out"},
    ),
    # Mistral's real tokens only, with zeros in front up to 512 that the transformer sees unmasked; klein's encoder pads
    # to 512 itself. The attention_mask beside them is not read without attention_mask_img_shape. ComfyUI's VAE
    # patchifies and applies the batch norm itself, so its LATENT is normalised.
    comfy=ComfyInputs(
        states="prompt_embeds", width="joint_attention_dim", normalise=lambda samples: samples, min_tokens=512
    ),
    # The pipelines' guidance (klein's: that of the base model). They take 50 steps; 28 is what dev's card recommends.
    sampling=SamplingSpec(28, 4.0, sampling_shift_2),
)
