"""One tiny model of every family's real class: a row here, and every family test runs for the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from devicebridge.families.registry import FAMILIES


@dataclass(frozen=True)
class TinyFamily:
    """A tiny config and the tensors that fit it.

    Args:
        transformer_config: for the family's class in diffusers; under 1 M parameters.
        latent_shape: of one normalised latent, [C, F, H, W].
        text_shapes: of one sample's text states, by name.
        guidance: embedded guidance, None where the config has none.
        copies_per_border: tensors that cross to the next device in one forward: the stream and the loop constants.
        copies_home: tensors the last block hands home.
    """

    family: str
    transformer_config: Mapping[str, Any]
    latent_shape: tuple[int, int, int, int]
    text_shapes: Mapping[str, tuple[int, ...]]
    guidance: float | None
    copies_per_border: int
    copies_home: int = 1

    def make_model(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = getattr(diffusers, FAMILIES[self.family].transformer_class)(**self.transformer_config)
        return model.eval()

    def make_latents(self, seed: int = 0, batch: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randn(batch, *self.latent_shape, generator=generator)

    def make_text(self, seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(2000 + seed)
        return {name: torch.randn(batch, *shape, generator=generator) for name, shape in self.text_shapes.items()}

    def make_inputs(self, seed: int = 0, batch: int = 1) -> dict[str, Any]:
        sigma = torch.rand(batch, generator=torch.Generator().manual_seed(3000 + seed))
        make = FAMILIES[self.family].make_inputs
        return make(self.make_latents(seed, batch), sigma, self.make_text(seed, batch), self.guidance)


TINY = {
    "flux2": TinyFamily(
        family="flux2",
        transformer_config={
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 24,
            "timestep_guidance_channels": 32,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        latent_shape=(16, 1, 4, 4),
        text_shapes={"prompt_embeds": (6, 24)},
        guidance=1.0,
        copies_per_border=4,  # stream, modulation, cos, sin
    ),
    "flux1": TinyFamily(
        family="flux1",
        transformer_config={
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 12,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
        latent_shape=(4, 1, 8, 8),
        text_shapes={"prompt_embeds": (6, 24), "pooled_prompt_embeds": (12,)},
        guidance=1.0,
        copies_per_border=5,  # image stream, text stream, temb, cos, sin
        copies_home=2,
    ),
    "wan": TinyFamily(
        family="wan",
        transformer_config={
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 4,
            "rope_max_seq_len": 32,
        },
        latent_shape=(4, 2, 4, 4),
        text_shapes={"prompt_embeds": (6, 16)},
        guidance=None,
        copies_per_border=5,  # stream, text, timestep projection, cos, sin
    ),
}
