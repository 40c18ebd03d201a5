"""A FLUX.2 that ComfyUI's own code and diffusers both run: small, with heads as wide as ComfyUI takes for granted."""

from pathlib import Path

import diffusers
import torch
from devicebridge.families.flux import FLUX2
from devicebridge.families.naming import originals_of
from devicebridge.tests.tiny_pipeline import save_tiny_pipeline
from safetensors.torch import load_file


def save_comfy_sized_pipeline(folder: Path) -> Path:
    """A small FLUX.2 whose heads are as wide as ComfyUI takes for granted, in place of the tiny one."""
    save_tiny_pipeline(folder, "flux2")
    tiny = diffusers.Flux2Transformer2DModel.load_config(folder / "transformer")
    sizes = {"in_channels": 128, "attention_head_dim": 128, "num_attention_heads": 1, "axes_dims_rope": [32] * 4}
    sizes["timestep_guidance_channels"] = 256
    torch.manual_seed(0)
    transformer = diffusers.Flux2Transformer2DModel.from_config({**tiny, **sizes})
    transformer.save_pretrained(folder / "transformer")
    vae = diffusers.AutoencoderKLFlux2.load_config(folder / "vae")
    diffusers.AutoencoderKLFlux2.from_config({**vae, "latent_channels": 32}).save_pretrained(folder / "vae")
    return folder


def original_weights(transformer: Path) -> dict[str, torch.Tensor]:
    weights = load_file(transformer / "diffusion_pytorch_model.safetensors")
    originals = {}
    for name, stack in originals_of(weights, FLUX2.renames).items():
        tensor = torch.cat([weights[member] for member in stack.members])
        originals[name] = torch.cat(tensor.chunk(2)[::-1]).clone() if stack.swap_halves else tensor
    return originals
