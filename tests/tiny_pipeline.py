"""A whole diffusers model folder of the FLUX.2 klein kind with random weights, a few MB large, made offline."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch
from devicebridge.tests.toy_encoders import save_tiny_text_encoder
from PIL import Image

VARIANT = "flux2-klein-4b"
_TEXT_WIDTH = 16
_NUM_TEXT_LAYERS = 27  # the variant reads hidden states 9, 18 and 27


def save_tiny_pipeline(folder: Path, seed: int = 0) -> Path:
    """Write transformer, VAE, text encoder, tokenizer and model_index.json; returns the folder."""
    torch.manual_seed(seed)
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=128,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=3 * _TEXT_WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    transformer.save_pretrained(folder / "transformer")
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 8, 8],
        layers_per_block=1,
        latent_channels=32,
        norm_num_groups=4,
        sample_size=32,
    )
    vae.save_pretrained(folder / "vae")
    save_tiny_text_encoder(folder, "qwen3", _TEXT_WIDTH, _NUM_TEXT_LAYERS, max_length=512)
    index = {
        "_class_name": "Flux2KleinPipeline",
        "_diffusers_version": "0.42.0",
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
    }
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def save_tiny_dataset(folder: Path, count: int = 3) -> Path:
    """Write a few 64 x 64 images with captions; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for index in range(count):
        pixels = torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture number {index}", encoding="utf-8")
    return folder
