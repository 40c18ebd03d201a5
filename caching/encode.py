"""Captions and images, encoded once and kept.

Both functions here do the same: name every result by its content, see what the store already has, and only if
something is missing load the model, encode one thing after the other, and free the model before the next is loaded.
Each result is stored as soon as it is there, so stopping loses at most the one in hand.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from .image import ImageRequest, read_pixels
from .key import file_fingerprint, folder_fingerprint, joint_key, latent_key, text_key
from .store import CacheStore
from .text_encoder import load_text_encoder, prepare_text
from .text_weights import TextScheme, applied_scheme
from .vae import load_vae, vae_fingerprint

__all__ = ["ImageRequest", "Stopped", "encode_captions", "encode_images", "load_vae", "never", "read_pixels"]

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int, str], None]  # done, total, what
ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """The user asked to stop; what was encoded until then is in the store."""


def _say_nothing(done: int, total: int, what: str) -> None:
    pass


def never() -> bool:
    """A should_stop for work that nobody stops."""
    return False


@dataclass
class _Progress:
    """Counts what is done and asks before each step whether to go on."""

    total: int
    on_progress: OnProgress
    should_stop: ShouldStop
    what: str
    done: int = 0

    def add(self, count: int = 1) -> None:
        self.done += count
        self.on_progress(self.done, self.total, self.what)

    def stop_if_asked(self) -> None:
        if self.should_stop():
            raise Stopped(f"stopped after {self.done} of {self.total} {self.what}; these are kept")


def encode_captions(
    captions: Sequence[str],
    specs: Sequence[TextEncoderSpec],
    encoders_folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    quantize: TextScheme = "none",
) -> dict[str, str]:
    """Have the states of every caption in the store, encoding those that are missing; equal captions once.

    Args:
        specs: every text encoder of the model. One is on the device at a time.
        encoders_folder: folder that holds the specs' folders.
        dtype: the encoders compute in it, and the states are stored in it.
        on_progress: done and total count one caption through one encoder.
        quantize: what the encoders' linears are rounded to as they are read.
    Returns: caption -> key of an entry {spec.output: [S, D] or [D]} of all specs together.
    Raises: Stopped; ValueError for folders that do not fit the specs; RuntimeError for states that are not finite.
    """
    outputs = [spec.output for spec in specs]
    assert len(set(outputs)) == len(outputs) > 0, f"text encoders need distinct outputs, not {outputs}"
    unique = list(dict.fromkeys(captions))
    keys = [_text_keys(unique, spec, Path(encoders_folder), dtype, quantize) for spec in specs]
    texts = [{key: text for text, key in key_of.values()} for key_of in keys]
    progress = _Progress(sum(map(len, texts)), on_progress, should_stop, "captions")
    for spec, text_of in zip(specs, texts, strict=True):
        missing = {key: text for key, text in text_of.items() if key not in store}
        progress.add(len(text_of) - len(missing))
        if missing:
            try:
                _encode_missing_captions(missing, spec, Path(encoders_folder), device, dtype, quantize, store, progress)
            finally:
                _free(device, f"text encoder {spec.folder}")
    return {caption: _joined([key_of[caption][1] for key_of in keys], store) for caption in unique}


def _text_keys(
    captions: Sequence[str], spec: TextEncoderSpec, folder: Path, dtype: torch.dtype, quantize: TextScheme
) -> dict[str, tuple[str, str]]:
    """caption -> (text as tokenized, key)."""
    name = functools.partial(
        text_key,
        spec=spec,
        encoder_fingerprint=folder_fingerprint(folder / spec.folder),
        tokenizer_fingerprint=folder_fingerprint(folder / spec.tokenizer_folder),
        dtype=dtype,
        quantize=applied_scheme(spec, quantize),
    )
    texts = {caption: prepare_text(caption, spec) for caption in captions}
    return {caption: (text, name(text)) for caption, text in texts.items()}


def _encode_missing_captions(
    missing: Mapping[str, str],
    spec: TextEncoderSpec,
    folder: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    quantize: TextScheme,
    store: CacheStore,
    progress: _Progress,
) -> None:
    """The encoder lives in this frame only, so that it can be freed when the frame is left, by an error too."""
    progress.stop_if_asked()
    _log_memory(f"loading text encoder {spec.folder} for {len(missing)} captions")
    encoder = load_text_encoder(spec, folder, device, dtype, quantize)
    _log_memory(f"loaded text encoder {spec.folder}")
    try:
        for key, text in missing.items():
            progress.stop_if_asked()
            store.put(key, {spec.output: encoder.encode(text)})
            progress.add()
    finally:
        del encoder


def _joined(parts: list[str], store: CacheStore) -> str:
    """Key of one entry with the tensors of all parts; a single part is that entry itself."""
    if len(parts) == 1:
        return parts[0]
    key = joint_key(parts)
    if key not in store:
        store.link(key, parts)
    return key


def encode_images(
    requests: Sequence[ImageRequest],
    family: ModelFamily,
    variant: Variant,
    vae_path: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
) -> dict[ImageRequest, str]:
    """Have the normalised latents of every image in the store, encoding those that are missing; equal pixels once.

    Args:
        vae_path: what load_vae takes.
        dtype: the VAE computes in it. Latents are stored in float32.
    Returns: request -> key of an entry {"latents": [C, F, H, W]}.
    Raises: Stopped; ValueError naming an image that cannot be read, or a VAE that does not fit the family; RuntimeError
        for latents that are not finite.
    """
    key_of = _latent_keys(list(dict.fromkeys(requests)), family, variant, vae_path, dtype)
    missing = {key: request for request, key in key_of.items() if key not in store}
    progress = _Progress(len(set(key_of.values())), on_progress, should_stop, "images")
    progress.add(progress.total - len(missing))
    if missing:
        try:
            _encode_missing_images(missing, family, variant, vae_path, device, dtype, store, progress)
        finally:
            _free(device, "VAE")
    return key_of


def _latent_keys(
    requests: Sequence[ImageRequest], family: ModelFamily, variant: Variant, vae_path: str | Path, dtype: torch.dtype
) -> dict[ImageRequest, str]:
    vae = vae_fingerprint(family, variant, vae_path)
    images = {path: _image_fingerprint(path) for path in dict.fromkeys(request.path for request in requests)}
    return {
        request: latent_key(
            images[request.path],
            request.resize,
            request.crop,
            family=family.name,
            latent=family.latent_of(variant),
            vae_fingerprint=vae,
            dtype=dtype,
        )
        for request in requests
    }


def _image_fingerprint(path: str) -> str:
    try:
        return file_fingerprint(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); put it back or take it out of the dataset") from error


def _encode_missing_images(
    missing: Mapping[str, ImageRequest],
    family: ModelFamily,
    variant: Variant,
    vae_path: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    store: CacheStore,
    progress: _Progress,
) -> None:
    """The VAE lives in this frame only; see _encode_missing_captions."""
    progress.stop_if_asked()
    _log_memory(f"loading the VAE for {len(missing)} images")
    vae = load_vae(family, variant, vae_path, dtype).to(device)
    _log_memory("loaded the VAE")
    try:
        for key, request in missing.items():
            progress.stop_if_asked()
            pixels = read_pixels(request)[None, :, None].to(device=device, dtype=dtype)  # [B=1, 3, F=1, H, W]
            with torch.inference_mode():
                latents = family.encode_latents(vae, pixels)[0].to(torch.float32)
            if not torch.isfinite(latents).all():
                raise RuntimeError(
                    f"the latents of {request.path} are not finite in {dtype}; "
                    'set cache.dtype to "bfloat16" or "float32"'
                )
            store.put(key, {"latents": latents})
            progress.add()
    finally:
        del vae


def _free(device: torch.device | str, what: str) -> None:
    """Return what nobody refers to any more, on the device as well if it is an accelerator."""
    gc.collect()
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    _log_memory(f"freed {what}")


def _log_memory(what: str) -> None:
    import psutil  # comes with accelerate

    logger.info("%s; %.2f GB in use by this process", what, psutil.Process().memory_info().rss / 1e9)
