"""What a cache entry is called: a hash of everything that decides its content, and of nothing else.

A renamed image, a moved encoder folder, another device or a second run find their entries again. A changed caption,
setting, weight, resize, crop or type gets a new key, and so does our own code where it changes a result: raise a
version below. What an option adds is in the key only where the option is used, so that older keys stay valid.

The device is left out on purpose: the same encoder on a CPU and a GPU rounds differently but computes the same thing.
So are the versions of torch, transformers, diffusers, Pillow and PyAV: an update would throw away every cache, for
differences that are nearly always none.

Fingerprints of files and weights are in checkpoints/fingerprint.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..checkpoints.fingerprint import content_facts, settings_fingerprint
from ..families.spec import TextEncoderSpec

if TYPE_CHECKING:
    import torch

    from ..data.image import ImageRequest

# Raise when our own code changes what it computes from the same inputs.
TEXT_VERSION = 1
IMAGE_VERSION = 1
CLIP_VERSION = 1  # of how frames are decoded and turned, over and above IMAGE_VERSION
COMFY_VERSION = 1  # how ComfyUI's own encoders are called, and how their weights are hashed
SOUND_VERSION = 2  # of how sound is decoded and cut
CONDITION_VERSION = 1  # how ComfyUI's conditioning nodes are called on files
ROUNDING_VERSION = 2  # of text encoders in 8 bits

_PROMPT_SYNTAX = re.compile(r"[()]|embedding:")  # what ComfyUI's tokenizers take for more than words


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


@dataclass(frozen=True)
class LatentSettings:
    """What decides a VAE's latents besides the image."""

    family: str  # families that share a VAE normalise its latents differently
    normalisation_version: int  # of the family's LatentSpec
    vae_fingerprint: str
    dtype: torch.dtype  # the VAE computes in it
    condition: str = "none"  # what the entry holds besides the latents; see Variant


def latent_key(image_fingerprint: str, request: ImageRequest, settings: LatentSettings) -> str:
    """Key of the latents of one image or clip, resized and cropped.

    Args:
        image_fingerprint: hash of the file's bytes, or those of a clip's images; name and place are not in the key.
        request: a clip's frame rate and window are in the key by the frames that they choose.
    """
    return settings_fingerprint(
        {
            "what": "latents",
            "version": IMAGE_VERSION,
            **_request_facts(image_fingerprint, request),
            "family": settings.family,
            "normalisation_version": settings.normalisation_version,
            "vae": settings.vae_fingerprint,
            "dtype": str(settings.dtype),
            **({"condition": settings.condition} if settings.condition != "none" else {}),
        }
    )


def _request_facts(image_fingerprint: str, request: ImageRequest) -> dict[str, Any]:
    clip: dict[str, Any] = {"frames": request.frames, "clip_version": CLIP_VERSION} if request.frames else {}
    if request.sound:
        clip |= {"part": [request.sound.start_s, request.sound.length_s, request.sound.cells], "sound": SOUND_VERSION}
    return {"image": image_fingerprint, "resize": request.resize, "crop": request.crop, **clip}


def comfy_text_key(text: str, fingerprint: str, *, keeps_all: bool = False, weighs: bool = False) -> str:
    """Key of what ComfyUI's CLIP makes of one text.

    Args:
        fingerprint: of the CLIP; covers all but text, keeps_all and weighs.
        weighs: whether parentheses weigh words and embedding: names a file, as in ComfyUI's prompts.
    """
    facts = {"what": "stock text", "version": COMFY_VERSION, **_prompt_facts("text", text, weighs), "clip": fingerprint}
    return settings_fingerprint({**facts, "keeps_all": True} if keeps_all else facts)


def comfy_token_key(text: str, fingerprint: str, *, weighs: bool = False) -> str:
    """Key of what the tokenizer of ComfyUI's CLIP makes of one text; as comfy_text_key."""
    facts = {"what": "stock tokens", "version": COMFY_VERSION, **_prompt_facts("text", text, weighs)}
    return settings_fingerprint({**facts, "clip": fingerprint})


def _prompt_facts(name: str, text: str, weighs: bool) -> dict[str, Any]:
    """What decides how ComfyUI's CLIP reads a text; a text of words alone is read alike in both ways."""
    return {name: text, **({"literal": True} if not weighs and _PROMPT_SYNTAX.search(text) else {})}


def comfy_latent_key(
    image_fingerprint: str, request: ImageRequest, fingerprint: str, beside: Sequence[str] = ()
) -> str:
    """Key of what ComfyUI's VAE makes of one image or clip; the model's family has no say in it.

    Args:
        beside: of a clip with sound, the sound's content, and the VAE that encodes it.
    """
    return settings_fingerprint(
        {
            "what": "stock latents",
            "version": (COMFY_VERSION, IMAGE_VERSION),
            **_request_facts(image_fingerprint, request),
            "vae": fingerprint,
            **({"beside": beside} if beside else {}),
        }
    )


def condition_key(
    files: Sequence[Any], encoders: Sequence[str], caption: str | None, *, weighs: bool, megapixels: float | None
) -> str:
    """Key of what ComfyUI's nodes make of a sample's files.

    Args:
        files: their content and cuts. encoders: names of those that take part.
        caption: where it takes part. megapixels: where pictures are scaled.
    """
    return settings_fingerprint(
        {
            "what": "condition",
            "version": (CONDITION_VERSION, COMFY_VERSION, IMAGE_VERSION, CLIP_VERSION),
            "files": files,
            "encoders": encoders,
            **({} if caption is None else _prompt_facts("caption", caption, weighs)),
            **({} if megapixels is None else {"megapixels": megapixels}),
        }
    )


def content_key(tensors: Mapping[str, torch.Tensor]) -> str:
    """Key of tensors that are known by nothing but their content: names, types, shapes and all bytes."""
    return settings_fingerprint({"what": "content", "tensors": content_facts(tensors)})
