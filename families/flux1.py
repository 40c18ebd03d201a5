"""FLUX.1 (Black Forest Labs): double blocks with separate text and image weights, then single blocks over both.

Sizes and names: diffusers 0.42.1, FluxTransformer2DModel and convert_flux_transformer_checkpoint_to_diffusers; model
cards of FLUX.1-dev and FLUX.1-schnell. The cached latents are the VAE's; the transformer's 2x2 packing happens in
make_inputs. Kontext, Fill, Depth and Canny are not described: their extra inputs need more than a caption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from .flux import (
    DIVIDED_ATTENTION,
    DOUBLE,
    DOUBLE_ATTENTION,
    SHIFTS,
    SINGLE,
    TEXT_MODULES,
    TO_DOUBLE,
    TO_SINGLE,
    flux_renames,
)
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
from .tensor_plan import Divided, plan

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


_SHIFTS = {**SHIFTS, "constant_3.16": ShiftRule("constant", 3.1582)}  # the value at 1024x1024, for every size


def _config(guidance: bool) -> dict[str, Any]:
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


_SHIFT, _SCALE = 0.1159, 0.3611  # of the latents
_VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": _SCALE,
    "shift_factor": _SHIFT,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def make_inputs(
    latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: float | None
) -> dict[str, Any]:
    """Keyword arguments of the transformer, as FluxPipeline passes them.

    Args:
        latents: noisy, [B, C, 1, H, W]; each 2x2 patch becomes one token of 4 * C.
        sigma, guidance: the model multiplies both by 1000 itself.
        text: prompt_embeds [B, S, D] and pooled_prompt_embeds [B, D].
    """
    batch, _, frames, height, width = latents.shape
    assert frames == 1, f"FLUX.1 makes images; these latents have {frames} frames"
    states = text["prompt_embeds"]
    device = latents.device
    image_ids = torch.zeros(height // 2, width // 2, 3, device=device)
    image_ids[..., 1] = torch.arange(height // 2, device=device)[:, None]
    image_ids[..., 2] = torch.arange(width // 2, device=device)
    return {
        "hidden_states": pixel_unshuffle(latents[:, :, 0], 2).flatten(2).transpose(1, 2),
        "encoder_hidden_states": states,
        "pooled_projections": text["pooled_prompt_embeds"],
        "timestep": sigma,
        "guidance": None if guidance is None else torch.full((batch,), guidance, device=device),
        "img_ids": image_ids.flatten(0, 1),
        "txt_ids": torch.zeros(states.shape[1], 3, device=device),
    }


def read_prediction(output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """Tokens back to cells: [B, H/2 * W/2, 4 * C] -> [B, C, 1, H, W]."""
    batch, _, _, height, width = latents.shape
    packed = output.transpose(1, 2).reshape(batch, -1, height // 2, width // 2)
    return pixel_shuffle(packed, 2).unsqueeze(2)


def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """[B, 3, 1, height, width] -> [B, C, 1, height / 8, width / 8], float32. The mode of the distribution, as
    FluxKontextPipeline takes it: a sample would be drawn once and then repeated from the cache."""
    assert pixels.shape[2] == 1, f"FLUX.1 makes images; these pixels have {pixels.shape[2]} frames"
    latents = vae.encode(pixels[:, :, 0].to(vae.dtype)).latent_dist.mode().float()
    return ((latents - vae.config.shift_factor) * vae.config.scaling_factor).unsqueeze(2)


def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """The inverse of encode_latents, up to the VAE's loss: [B, C, 1, H, W] -> [B, 3, 1, height, width]."""
    scaled = latents[:, :, 0].float() / vae.config.scaling_factor + vae.config.shift_factor
    return vae.decode(scaled.to(vae.dtype)).sample.unsqueeze(2)


def normalise_samples(samples: torch.Tensor) -> torch.Tensor:
    """What ComfyUI's Flux latent format makes of a LATENT: encode_latents' own shift and scale."""
    return (samples - _SHIFT) * _SCALE


# ComfyUI encodes at least 256 T5 tokens and cuts nothing: dev's makers fill up to 512, so its states differ in length.
_COMFY = ComfyInputs(
    states="prompt_embeds",
    width="joint_attention_dim",
    pooled="pooled_prompt_embeds",
    pooled_width="pooled_projection_dim",
    normalise=normalise_samples,
    cells_per_token=4,
)

_RENAMES = (
    *flux_renames("time_text_embed", "net.0.proj", "net.2"),
    Rename("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    Rename("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    Rename(DOUBLE + "img_mod.lin", (TO_DOUBLE + "norm1.linear",)),
    Rename(DOUBLE + "txt_mod.lin", (TO_DOUBLE + "norm1_context.linear",)),
    Rename(SINGLE + "modulation.lin", (TO_SINGLE + "norm.linear",)),
    Rename(
        SINGLE + "linear1",
        (TO_SINGLE + "attn.to_q", TO_SINGLE + "attn.to_k", TO_SINGLE + "attn.to_v", TO_SINGLE + "proj_mlp"),
        proportions=(1, 1, 1, 4),  # the class fixes mlp_ratio at 4
    ),
    Rename(SINGLE + "linear2", (TO_SINGLE + "proj_out",)),
)

_TENSOR = plan(
    block="FluxTransformerBlock",
    **DIVIDED_ATTENTION,
    gathered="norm1*.linear",  # modulation, a sixth of the model's weights
    mlp="ff.net.0.proj>ff.net.2 ff_context.net.0.proj>ff_context.net.2",
) + plan(
    Divided("proj_mlp", "column", ("features",), into="proj_out"),
    Divided("proj_out", "row", ("heads", "features")),
    block="FluxSingleTransformerBlock",
    heads="attn.to_[qkv]",
    gathered="norm.linear",
    width="attn.inner_dim",
)

FLUX1 = ModelFamily(
    name="flux1",
    title="FLUX.1",
    transformer_class="FluxTransformer2DModel",
    vae_class="AutoencoderKL",
    block_lists=(
        BlockList(
            "transformer_blocks",
            text_modules=TEXT_MODULES,
            sample_modules=("norm1.linear", "norm1_context.linear"),
        ),
        BlockList("single_transformer_blocks", is_joint=True, sample_modules=("norm.linear",)),
    ),
    tail=("norm_out", "proj_out"),
    # "*norm*" includes the modulation inside the blocks, 3.2 of 11.9 billion weights: float8 then saves 8.6 GB, not
    # 11.8. Their output scales and gates every token of a block, and they see one vector each, so speed is no reason.
    keep_full_precision=("*norm*", "time_text_embed", "x_embedder", "context_embedder", "proj_out"),
    # Modulation is not among them: it moves the style of everything, and few trainers adapt it.
    lora_targets=(
        *DOUBLE_ATTENTION,
        "transformer_blocks.*.ff.net.*",
        "transformer_blocks.*.ff_context.net.*",
        "single_transformer_blocks.*.attn.to_[qkv]",
        "single_transformer_blocks.*.proj_mlp",
        "single_transformer_blocks.*.proj_out",
    ),
    # flux_to_diffusers in ComfyUI 0.33; under the original names diffusers 0.42 loads no alpha and no DoRA.
    shared_lora_names="diffusers",
    latent=LatentSpec(channels=16, spatial_stride=8, num_tokens_per_cell=0.25),
    timesteps=TimestepSpec(sampling="logit_normal", shift="resolution", shift_presets=_SHIFTS),
    variants=(
        Variant(
            name="flux1-dev",
            transformer_config=_config(guidance=True),
            text_encoders=(_CLIP, _t5(512)),
            vae_config=_VAE,
            # dev is guidance-distilled; trainers embed 1.0 (diffusion-pipe, ai-toolkit, FluxTrainer), so that the LoRA
            # need not learn guidance.
            training_guidance=1.0,
        ),
        Variant(
            name="flux1-schnell",
            transformer_config=_config(guidance=False),
            text_encoders=(_CLIP, _t5(256)),  # the length it was made for; FluxPipeline allows no more
            vae_config=_VAE,
            # Its scheduler has no shift (shift 1, no dynamic shifting).
            timesteps=TimestepSpec(sampling="logit_normal", shift="none", shift_presets=_SHIFTS),
            sampling=SamplingSpec(steps=4, guidance=1.0, shift=lambda num_tokens, steps: 1.0),
            caution="schnell is step-distilled, and training it undoes that: images in four steps will get worse",
        ),
    ),
    renames=_RENAMES,
    modelspec_architecture="flux-1-dev",
    ss_base_model_version="flux1",
    make_inputs=make_inputs,
    read_prediction=read_prediction,
    encode_latents=encode_latents,
    decode_latents=decode_latents,
    tensor=_TENSOR,
    comfy=_COMFY,
    # FluxPipeline's steps and guidance; dev's scheduler shifts as it was trained.
    sampling=SamplingSpec(28, 3.5, shift=lambda num_tokens, steps: SHIFTS["resolution"].factor(num_tokens)),
)
