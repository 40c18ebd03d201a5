"""What a cache entry is called: a hash of everything that decides its content, and of nothing else.

Same inputs, same key: a renamed image, a moved encoder folder, another device or a second run find their entries
again. Changed inputs, new key: a caption, a setting of the text encoder, a weight, the resize or crop, the type, or
our own code where it changes a result (`TEXT_VERSION`, `IMAGE_VERSION`, `CLIP_VERSION`, the family's
`normalisation_version`).

An encoder held in 8 bits makes other states than in full precision: the scheme is in the key. Without one nothing is
said about schemes, so keys of full precision are what they were before there were any.

The device is left out on purpose: the same encoder on a CPU and a GPU rounds differently but computes the same thing.
So are the versions of torch, transformers, diffusers, Pillow and PyAV: an update would throw away every cache, for
differences that are nearly always none. Where an update does matter to our code, raise a version below.

Fingerprints of files and weights are in checkpoints/fingerprint.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..checkpoints.fingerprint import content_facts, settings_fingerprint
from ..families.spec import LatentSpec, TextEncoderSpec

if TYPE_CHECKING:
    import torch

# Raise when our own code changes what it computes from the same inputs.
TEXT_VERSION = 1
IMAGE_VERSION = 1
CLIP_VERSION = 1  # of how frames are decoded and turned, over and above IMAGE_VERSION
STOCK_VERSION = 1  # how ComfyUI's own encoders are asked, and how their weights are hashed
ROUNDING_VERSION = 1  # of text encoders in 8 bits


def text_key(
    text: str,
    spec: TextEncoderSpec,
    *,
    encoder_fingerprint: str,
    tokenizer_fingerprint: str,
    dtype: torch.dtype,
    quantize: str = "none",
) -> str:
    """Key of what one text encoder makes of one text.

    Args:
        text: the caption as the tokenizer gets it, so that cleaning it differently gives another key.
        spec: all of it is in the key; keep_full_precision where something is quantized.
        encoder_fingerprint, tokenizer_fingerprint: from folder_fingerprint.
        dtype: type the encoder computes in.
        quantize: what its linears are rounded to; "none" for an encoder that is kept in full precision anyway.
    """
    described = {field.name: getattr(spec, field.name) for field in fields(spec)}
    kept = described.pop("keep_full_precision")
    rounding = {} if quantize == "none" else {"quantize": quantize, "kept": kept, "rounding": ROUNDING_VERSION}
    return settings_fingerprint(
        {
            "what": "text",
            "version": TEXT_VERSION,
            "text": text,
            "spec": described,
            "encoder": encoder_fingerprint,
            "tokenizer": tokenizer_fingerprint,
            "dtype": str(dtype),
            **rounding,
        }
    )


def joint_key(parts: list[str]) -> str:
    """Key of the entry that holds several encoders' results for one caption."""
    return settings_fingerprint({"what": "joint", "parts": parts})


def latent_key(
    image_fingerprint: str,
    resize: tuple[int, int],
    crop: tuple[int, int, int, int],
    *,
    family: str,
    latent: LatentSpec,
    vae_fingerprint: str,
    dtype: torch.dtype,
    frames: Sequence[int] = (),
    condition: str = "none",
) -> str:
    """Key of the latents of one image or clip, resized and cropped.

    Args:
        image_fingerprint: hash of the file's bytes, or those of a clip's images; name and place are not in the key.
        resize: (height, width) in pixels. crop: (top, left, height, width) in pixels.
        family: name; families that share a VAE normalise its latents differently.
        latent: only normalisation_version matters.
        dtype: type the VAE computes in.
        frames: of a clip, which of its frames; so frame rate and window are in the key by what they choose.
        condition: what the entry holds besides the latents; see Variant.
    """
    conditioned = {"condition": condition} if condition != "none" else {}
    return settings_fingerprint(
        {
            "what": "latents",
            "version": IMAGE_VERSION,
            "image": image_fingerprint,
            "resize": resize,
            "crop": crop,
            "family": family,
            "normalisation_version": latent.normalisation_version,
            "vae": vae_fingerprint,
            "dtype": str(dtype),
            **_clip_facts(frames),
            **conditioned,
        }
    )


def _clip_facts(frames: Sequence[int]) -> dict[str, Any]:
    """Said only where there is something to say: keys of images are what they were before there were clips."""
    return {"frames": list(frames), "clip_version": CLIP_VERSION} if frames else {}


def stock_text_key(text: str, fingerprint: str) -> str:
    """Key of what a stock CLIP makes of one text; its fingerprint covers all but the text."""
    return settings_fingerprint({"what": "stock text", "version": STOCK_VERSION, "text": text, "clip": fingerprint})


def stock_latent_key(
    image_fingerprint: str,
    resize: tuple[int, int],
    crop: tuple[int, int, int, int],
    fingerprint: str,
    frames: Sequence[int] = (),
) -> str:
    """Key of what a stock VAE makes of one image or clip. What the model's family makes of it is done when it is read.

    frames: as for latent_key.
    """
    return settings_fingerprint(
        {
            "what": "stock latents",
            "version": (STOCK_VERSION, IMAGE_VERSION),
            "image": image_fingerprint,
            "resize": resize,
            "crop": crop,
            "vae": fingerprint,
            **_clip_facts(frames),
        }
    )


def content_key(tensors: Mapping[str, torch.Tensor]) -> str:
    """Key of tensors that are known by nothing but their content: names, types, shapes and all bytes."""
    return settings_fingerprint({"what": "content", "tensors": content_facts(tensors)})
