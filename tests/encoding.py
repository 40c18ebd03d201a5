"""Filling a cache with a model's own encoders in one call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from devicebridge.data.image import ImageRequest
from devicebridge.encoding.sources import FolderLatents, FolderTexts, fill
from devicebridge.encoding.store import CacheStore
from devicebridge.families.spec import (
    BlockList,
    LatentSpec,
    ModelFamily,
    ShiftRule,
    TextEncoderSpec,
    TimestepSpec,
    Variant,
)


def encode_captions(
    captions: Sequence[str], specs: Sequence[TextEncoderSpec], folder: str | Path, device: torch.device | str,
    dtype: torch.dtype, store: CacheStore, *progress: Any, quantize: Any = "none", window_bytes: int = 0,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """The entries of each caption, one of every encoder; of one encoder alone its entry."""
    sources = [FolderTexts(spec, folder, device, dtype, quantize, window_bytes) for spec in specs]
    first, *others = [fill(captions, source, store, *progress, **options) for source in sources]
    return {caption: (key, *(keys[caption] for keys in others)) if others else key for caption, key in first.items()}


def encode_images(
    requests: Sequence[ImageRequest], family: ModelFamily, variant: Variant, vae_path: str | Path, dtype: torch.dtype,
    store: CacheStore, *progress: Any,
) -> dict[ImageRequest, str]:  # fmt: skip
    return fill(requests, FolderLatents(family, variant, vae_path, "cpu", dtype), store, *progress)


def example_family(vae_class: str, vae_config: Mapping[str, Any] | None = None, **changes: Any) -> ModelFamily:
    """As much of a family as its VAE needs; one variant."""
    values: dict[str, Any] = {
        "latent": LatentSpec(4, 2),
        "timesteps": TimestepSpec("uniform", "none", {"none": ShiftRule("constant")}),
        "variants": (Variant("small", {}, (), vae_config=vae_config or {}),),
    }
    names = ("transformer_class", "modelspec_architecture", "ss_base_model_version")
    values |= dict.fromkeys(names, "")
    values |= dict.fromkeys(("tail", "keep_full_precision", "lora_targets", "renames"), ())
    values |= dict.fromkeys(("make_inputs", "read_prediction", "encode_latents", "decode_latents", "comfy"))
    lists = (BlockList("blocks"),)
    return ModelFamily(
        **{"name": "example", "title": "Example", "vae_class": vae_class, "block_lists": lists, **values, **changes}
    )
