"""Filling a cache with a model's own encoders in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from devicebridge.data.image import ImageRequest
from devicebridge.encoding.encode import fill, fill_texts
from devicebridge.encoding.sources import FolderLatents, FolderTexts
from devicebridge.encoding.store import CacheStore
from devicebridge.families.spec import ModelFamily, TextEncoderSpec, Variant


def encode_captions(
    captions: Sequence[str],
    specs: Sequence[TextEncoderSpec],
    folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    store: CacheStore,
    *progress: Any,
    quantize: Any = "none",
    window_bytes: int = 0,
    **options: Any,
) -> dict[str, str]:
    sources = [FolderTexts(spec, folder, device, dtype, quantize, window_bytes) for spec in specs]
    return fill_texts(captions, sources, store, *progress, **options)


def encode_images(
    requests: Sequence[ImageRequest],
    family: ModelFamily,
    variant: Variant,
    vae_path: str | Path,
    dtype: torch.dtype,
    store: CacheStore,
    *progress: Any,
) -> dict[ImageRequest, str]:
    return fill(requests, FolderLatents(family, variant, vae_path, "cpu", dtype), store, *progress)
