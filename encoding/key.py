"""What a cache entry is called: a hash of all that decides its content; of an option only where it is used, so that
older keys stay valid. Device and versions of libraries are left out on purpose: each update would empty every cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    """Of what one text encoder, which computes in dtype, makes of one text, as its tokenizer gets it."""
    described = dict(vars(spec))
    kept = described.pop("keep_full_precision")
    rounding = {} if quantize == "none" else {"quantize": quantize, "kept": kept, "rounding": ROUNDING_VERSION}
    facts = {"what": "text", "version": TEXT_VERSION, "text": text, "spec": described, "dtype": str(dtype)}
    encoders = {"encoder": encoder_fingerprint, "tokenizer": tokenizer_fingerprint}
    return settings_fingerprint({**facts, **encoders, **rounding})


def latent_key(image_fingerprint: str, request: ImageRequest, settings: Mapping[str, Any]) -> str:
    """Of the latents of one image, clip or sound. settings: what else decides them."""
    facts = {"what": "latents", "version": IMAGE_VERSION, "image": image_fingerprint}
    facts |= {"resize": request.resize, "crop": request.crop}
    if request.frames:
        facts |= {"frames": request.frames, "clip_version": CLIP_VERSION}
    if request.sound:
        facts |= {"part": [request.sound.start_s, request.sound.length_s, request.sound.cells], "sound": SOUND_VERSION}
    return settings_fingerprint({**facts, **settings})


def comfy_latent_key(
    image_fingerprint: str, request: ImageRequest, fingerprint: str, beside: Sequence[str] = ()
) -> str:
    """Of what ComfyUI's VAE makes of one. beside: of a clip with sound, the sound's content and its VAE."""
    settings = {"what": "stock latents", "version": (COMFY_VERSION, IMAGE_VERSION), "vae": fingerprint}
    return latent_key(image_fingerprint, request, {**settings, "beside": beside} if beside else settings)


def comfy_text_key(
    text: str, fingerprint: str, *, what: str = "stock text", keeps_all: bool = False, weighs: bool = False
) -> str:
    """Of a text for ComfyUI's CLIP, or with "stock tokens" its tokenizer. weighs: as ComfyUI's prompts do."""
    facts = {"what": what, "version": COMFY_VERSION, **prompt_facts("text", text, weighs), "clip": fingerprint}
    return settings_fingerprint({**facts, "keeps_all": True} if keeps_all else facts)


def prompt_facts(name: str, text: str, weighs: bool) -> dict[str, Any]:
    """What decides how ComfyUI's CLIP reads a text; a text of words alone is read alike in both ways."""
    return {name: text, **({"literal": True} if not weighs and _PROMPT_SYNTAX.search(text) else {})}


def content_key(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of tensors that are known by nothing but their content: names, types, shapes and all bytes."""
    return settings_fingerprint({"what": "content", "tensors": content_facts(tensors)})
