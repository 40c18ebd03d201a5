"""Caches of earlier versions stay valid: entries have the names and bytes that those wrote."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from devicebridge.data.image import ImageRequest
from devicebridge.data.samples import Condition
from devicebridge.encoding.comfy_sources import ComfyConditions, ComfyLatents, ComfyTexts, ComfyTokens
from devicebridge.encoding.encode import fill, fill_texts
from devicebridge.encoding.store import CacheStore
from PIL import Image

# Beginnings of names, and of the SHA-256 of the files' bytes, as version 0.1 of November 2026 wrote them.
WRITTEN = {
    "16169bbaff7a3ddac3f8": "bb9be1209c88fdc3",
    "4dd4cdc6b2af63f4397d": "e56d721f6d8b49c8",
    "524b8fee28734cef4ec7": "208d1a8054267697",
    "7c05f81db0d3fccf2b74": "d927d18dea81bdc5",
    "8a4004c22108d9934161": "7ba16db24976938d",
    "c7d249a39b29ffc33873": "186ad53da71f0fd3",
    "da118f32f4019327aae0": "5d3779dfcdc765bf",
    "de84de26a0f61807fa5b": "4b42833cc80c7e7e",
    "fddd825b006fac831c84": "ecc28249b21afae4",
}


class _Encoders:
    """A CLIP, a VAE and conditioning nodes."""

    takes_clips, sees_with = False, ""

    def __init__(self, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint

    def encode(self, given: Any) -> Any:
        if isinstance(given, str):
            return [[torch.full((1, 2, 3), float(len(given))), {"pooled_output": torch.ones(1, 4)}]]
        return given.movedim(-1, 1)[:, :, ::4, ::4].contiguous()

    def tokens(self, text: str) -> Any:
        return {"l": [[(len(text), 1.0), (2, 1.5)]]}

    def make(self, parts: Any) -> Any:
        return [[torch.ones(1, 2, 3) * len(parts.caption), {"reference_latents": [torch.ones(1, 3, 2, 2)]}]]

    def release(self) -> None:
        pass


def test_entries_have_the_names_and_bytes_that_earlier_versions_wrote(tmp_path: Path) -> None:
    path = str(tmp_path / "a.bmp")
    Image.fromarray(np.arange(12 * 8 * 3, dtype=np.uint8).reshape(12, 8, 3)).save(path)
    clip, vae = _Encoders("comfyui-clip:" + "a" * 64), _Encoders("comfyui-vae:" + "b" * 64)
    store = CacheStore(tmp_path / "cache")

    def fits(*shapes: Any) -> str:
        return ""

    texts, tokens = (source(clip.fingerprint, fits, clip) for source in (ComfyTexts, ComfyTokens))
    weighing = ComfyTexts(clip.fingerprint, fits, clip, keeps_all=True, weighs=True)
    fill_texts(["a cat", "a (red:1.3) dog"], [texts], store)
    fill_texts(["a (red:1.3) dog"], [weighing], store)
    fill_texts(["a cat"], [tokens], store)
    other = _Encoders("comfyui-clip:" + "c" * 64)
    fill_texts(["a cat"], [ComfyTexts(other.fingerprint, fits, other), tokens], store)
    fill([ImageRequest(path, (12, 8), (2, 0, 8, 8))], ComfyLatents(vae.fingerprint, fits, vae), store)
    for way, captions, megapixels in (("reference", ("a cat", ""), 0.5), ("qwen-image-edit", ("a (big) cat",), 1.0)):
        source = ComfyConditions(way, ("enc",), fits, megapixels, _Encoders())
        fill([(caption, Condition(way, (path,), ((12, 8),))) for caption in captions], source, store)

    files = (tmp_path / "cache").glob("??/*.safetensors")
    found = {file.name[:20]: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    assert found == WRITTEN
