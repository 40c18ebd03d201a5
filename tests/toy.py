"""One tiny model per family: the real diffusers class with random weights, so small that every test can afford it.

Tests say `from devicebridge.tests.toy import TINY` and take a row by family name.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from devicebridge.families.naming import originals_of
from devicebridge.families.registry import find_family
from devicebridge.families.spec import ModelFamily

_BATCH = 2


@dataclass(frozen=True)
class TinyFamily:
    """A tiny model of one family with inputs that fit it.

    Args:
        name: of the family.
        transformer_config, vae_config: keyword arguments of the family's classes.
        latent_shape: [C, F, H, W] of one sample.
        text_shapes: of one sample's text tensors, by name.
        guidance: None where this model has no guidance input.
    """

    name: str
    transformer_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    latent_shape: tuple[int, int, int, int]
    text_shapes: Mapping[str, tuple[int, ...]]
    guidance: float | None
    # class names: diffusers' pipeline, ComfyUI's model; diffusers' single-file converter
    pipeline_class: str
    comfyui_class: str
    converter: str
    # text encoders of the tiny model folder: kind, layers, encoder folder, tokenizer folder; all 16 wide
    encoders: tuple[tuple[str, int, str, str], ...]
    # what the transformer's config says of the text's width when these encoders make it
    encoder_widths: Mapping[str, int]
    # some of the layers that the original stacks, not the first ones
    stack_parts: tuple[str, ...]
    # the published default shift of the noise schedule, by image tokens
    shift: Callable[[int], float]
    # changes to transformer_config that make the family's other kind of model, e.g. one without guidance
    without_guidance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> ModelFamily:
        return find_family(self.name)

    def make_model(self, seed: int = 0, **changes: Any) -> torch.nn.Module:
        """The transformer in float32 on the CPU, in eval mode; every parameter is random, norms and tables too."""
        import diffusers

        return _make_random(
            getattr(diffusers, self.family.transformer_class), {**self.transformer_config, **changes}, seed
        )

    def make_vae(self, seed: int = 0) -> Any:
        import diffusers

        vae = _make_random(getattr(diffusers, self.family.vae_class), dict(self.vae_config), seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, buffer in vae.named_buffers():
            if buffer.is_floating_point():
                noise = torch.randn(buffer.shape, generator=generator)
                buffer.copy_(noise.abs() + 0.5 if name.endswith("var") else 0.3 * noise)
        return vae

    def make_video_vae(self, seed: int = 0) -> Any:
        """Wan's, with the published one's 4 frames per latent frame: fewer do not go with how diffusers cuts a clip."""
        import diffusers

        assert self.name == "wan"
        levels = {"dim_mult": [1, 2, 2], "temperal_downsample": [True, True]}
        scales = {"scale_factor_spatial": 4, "scale_factor_temporal": 4}
        return _make_random(diffusers.AutoencoderKLWan, {**self.vae_config, **levels, **scales}, seed)

    def make_latents(self, seed: int = 0, batch: int = _BATCH) -> torch.Tensor:
        return torch.randn(batch, *self.latent_shape, generator=torch.Generator().manual_seed(1000 + seed))

    def make_text(self, seed: int = 0, batch: int = _BATCH) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(2000 + seed)
        return {name: torch.randn(batch, *shape, generator=generator) for name, shape in self.text_shapes.items()}

    def make_sigma(self, seed: int = 0, batch: int = _BATCH) -> torch.Tensor:
        return torch.rand(batch, generator=torch.Generator().manual_seed(3000 + seed))

    def make_inputs(self, seed: int = 0, batch: int = _BATCH) -> dict[str, Any]:
        return self.family.make_inputs(
            self.make_latents(seed, batch), self.make_sigma(seed, batch), self.make_text(seed, batch), self.guidance
        )


def stack_tensors(family: ModelFamily, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    original = {}
    for name, stack in originals_of(tensors, family.renames).items():
        tensor = torch.cat([tensors[member] for member in stack.members])
        original[name] = torch.cat(tensor.chunk(2)[::-1]) if stack.swap_halves else tensor
    return original


def _make_random(model_class: Any, config: dict[str, Any], seed: int) -> Any:
    """With the weights of a fresh model, exchanging two norms or dropping a bias would not show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(**config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def _flux_shift(num_tokens: int) -> float:
    """Of FLUX.1's makers, and of most trainers for FLUX.2: exp(mu), mu linear, 0.5 at 256 tokens, 1.15 at 4096."""
    return math.exp(0.5 + (num_tokens - 256) * (1.15 - 0.5) / (4096 - 256))


_KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4, "sample_size": 32,
}  # fmt: skip

_FLUX = {
    "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
    "joint_attention_dim": 24,
}  # fmt: skip
TINY: dict[str, TinyFamily] = {
    "flux2": TinyFamily(
        name="flux2", transformer_config={**_FLUX, "timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)},
        vae_config=_KL, latent_shape=(16, 1, 4, 6), text_shapes={"prompt_embeds": (5, 24)}, guidance=1.0,
        pipeline_class="Flux2Pipeline", comfyui_class="Flux2",
        converter="convert_flux2_transformer_checkpoint_to_diffusers",
        encoders=(("mistral3", 31, "text_encoder", "tokenizer"),),
        encoder_widths={"joint_attention_dim": 48},  # three layers side by side
        stack_parts=("*.attn.to_v", "*.attn.add_k_proj", "*.ff.linear_in"), shift=_flux_shift,
        without_guidance={"guidance_embeds": False},
    ),
    "flux1": TinyFamily(
        name="flux1",
        transformer_config={
            **_FLUX, "pooled_projection_dim": 12, "guidance_embeds": True, "axes_dims_rope": (4, 6, 6),
        },
        vae_config={**_KL, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False},
        latent_shape=(4, 1, 8, 12), text_shapes={"prompt_embeds": (5, 24), "pooled_prompt_embeds": (12,)}, guidance=1.0,
        pipeline_class="FluxPipeline", comfyui_class="Flux",
        converter="convert_flux_transformer_checkpoint_to_diffusers",
        encoders=(("clip", 2, "text_encoder", "tokenizer"), ("t5", 2, "text_encoder_2", "tokenizer_2")),
        encoder_widths={"joint_attention_dim": 16, "pooled_projection_dim": 16},
        stack_parts=("*.attn.to_k", "*.proj_mlp", "*.attn.add_v_proj"), shift=_flux_shift,
        without_guidance={"guidance_embeds": False},
    ),
    "wan": TinyFamily(
        name="wan",
        transformer_config={
            "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 24,
            "freq_dim": 32, "ffn_dim": 96, "num_layers": 4, "rope_max_seq_len": 32,
        },
        vae_config={
            "base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True],
            "latents_mean": [-0.76, 0.11, 0.97, -0.15], "latents_std": [2.8, 1.5, 0.7, 1.2], "scale_factor_spatial": 2,
            "scale_factor_temporal": 2,
        },
        latent_shape=(4, 3, 4, 6), text_shapes={"prompt_embeds": (5, 24)}, guidance=None,
        pipeline_class="WanPipeline", comfyui_class="WAN21",
        converter="convert_wan_transformer_to_diffusers", encoders=(("umt5", 2, "text_encoder", "tokenizer"),),
        encoder_widths={"text_dim": 16}, stack_parts=("*.attn2.to_k", "*.ffn.net.2"),
        shift=lambda num_tokens: 3.0,
    ),
}  # fmt: skip


@torch.no_grad()
def slopes(loss: Callable[[], torch.Tensor], tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Central differences of a loss, of every number of these tensors in float64."""
    found = []
    for tensor in tensors:
        slope, numbers = torch.empty_like(tensor), tensor.view(-1)
        for index in range(tensor.numel()):
            ends = []
            for step in (1e-6, -2e-6):
                numbers[index] += step
                ends.append(loss())
            numbers[index] += 1e-6
            slope.view(-1)[index] = (ends[0] - ends[1]) / 2e-6
        found.append(slope)
    return found
