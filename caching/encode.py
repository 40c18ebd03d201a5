"""Captions and images, encoded once and kept.

Both functions here do the same: name every result by its content, see what the store already has, and only if
something is missing load the model, encode one thing after the other, and free the model before the next is loaded.
Each result is stored as soon as it is there, so stopping loses at most the one in hand.

Any number of processes may do this at once for one store, on any devices: each claims an entry before it computes it
(see claims.py), and a model is loaded only by those that got something to compute. Progress counts what is done by
whomever.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from .claims import Claims, Shared
from .image import ImageRequest
from .key import folder_fingerprint, joint_key, latent_key, text_key
from .store import CacheStore
from .text_encoder import prepare_text
from .text_place import TextPlace, open_text_encoder, plan_text_place
from .text_weights import TextScheme, applied_scheme
from .vae import load_vae, vae_fingerprint
from .video import media_fingerprint, read_frames

__all__ = [
    "ImageRequest",
    "Stopped",
    "caption_entries",
    "encode_captions",
    "encode_images",
    "image_entries",
    "load_vae",
    "never",
    "read_frames",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
OnProgress = Callable[[int, int, str], None]  # done, total, what
ShouldStop = Callable[[], bool]


class Stopped(Exception):
    """The user asked to stop; what was encoded until then is in the store."""


def _say_nothing(done: int, total: int, what: str) -> None:
    pass


def _do_nothing() -> None:
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


@dataclass(frozen=True)
class _Fill:
    """A store being filled.

    Args:
        not_before_s: entries written earlier than this count as missing.
    """

    store: CacheStore
    progress: _Progress
    not_before_s: float

    def is_done(self, key: str) -> bool:
        return key in self.store and (not self.not_before_s or self.store.written_s(key) >= self.not_before_s)

    def missing(self, keys: Mapping[str, _T]) -> dict[str, _T]:
        """Those to compute; the others are counted."""
        missing = {key: value for key, value in keys.items() if not self.is_done(key)}
        self.progress.add(len(keys) - len(missing))
        return missing

    @contextmanager
    def shared(self, keys: Mapping[str, object], size: int = 1) -> Iterator[Iterator[list[str]]]:
        """Batches of keys that this process should compute, each claimed until the next; see claims.py."""
        progress = self.progress
        progress.stop_if_asked()
        claims = Claims(self.store)
        with closing(Shared(claims, keys, self.is_done, progress.add, progress.stop_if_asked).batches(size)) as batches:
            yield batches

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.store.put(key, tensors)
        self.progress.add()


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
    window_bytes: int = 0,
    not_before_s: float = 0.0,
    on_begin: Callable[[], None] = _do_nothing,
) -> dict[str, str]:
    """Have the states of every caption in the store, encoding those that are missing; equal captions once.

    Args:
        specs: every text encoder of the model. One is on the device at a time.
        encoders_folder: folder that holds the specs' folders.
        device: where the encoders run, or a setting that text_place.py turns into such a place.
        dtype: the encoders compute in it, and the states are stored in it.
        on_progress: done and total count one caption through one encoder, whoever computed it.
        quantize: what the encoders' linears are rounded to as they are read.
        window_bytes: the most a streamed encoder may take on its card; 0 for what is free. Captions that share a pass
            are claimed, and lost by a kill, together.
        not_before_s: entries written earlier than this, as time.time() counts, are computed again; 0 for none.
        on_begin: called when an encoder is loaded and begins, from where its pace can be measured.
    Returns: caption -> key of an entry {spec.output: [S, D] or [D]} of all specs together.
    Raises: Stopped; ValueError for folders that do not fit the specs; RuntimeError for states that are not finite;
        OSError naming the file if the store cannot be written. What was encoded until then is in the store.
    """
    folder = Path(encoders_folder)
    keys = _keys_of_specs(captions, specs, folder, dtype, quantize)
    texts = [{key: text for text, key in key_of.values()} for key_of in keys]
    progress = _Progress(sum(map(len, texts)), on_progress, should_stop, "captions")
    fill = _Fill(store, progress, not_before_s)
    for spec, text_of in zip(specs, texts, strict=True):
        missing = fill.missing(text_of)
        if missing:
            place = plan_text_place(device, spec, folder, dtype, quantize, window_bytes)
            try:
                _encode_missing_captions(missing, spec, folder, place, dtype, quantize, fill, on_begin)
            finally:
                _free(place.device, f"text encoder {spec.folder}")
    parts = {caption: [key_of[caption][1] for key_of in keys] for caption in keys[0]}
    if len(specs) == 1:
        return {caption: part for caption, (part,) in parts.items()}
    joint = {caption: joint_key(each) for caption, each in parts.items()}
    _link({joint[caption]: each for caption, each in parts.items()}, fill)
    return joint


def caption_entries(
    captions: Sequence[str],
    specs: Sequence[TextEncoderSpec],
    encoders_folder: str | Path,
    dtype: torch.dtype,
    quantize: TextScheme = "none",
) -> dict[str, list[str]]:
    """caption -> keys of all entries that encode_captions makes of it; no weight is loaded."""
    keys = _keys_of_specs(captions, specs, Path(encoders_folder), dtype, quantize)
    parts = {caption: [key_of[caption][1] for key_of in keys] for caption in keys[0]}
    return {caption: each if len(each) == 1 else [*each, joint_key(each)] for caption, each in parts.items()}


def _keys_of_specs(
    captions: Sequence[str], specs: Sequence[TextEncoderSpec], folder: Path, dtype: torch.dtype, quantize: TextScheme
) -> list[dict[str, tuple[str, str]]]:
    """What _text_keys says, for every spec."""
    outputs = [spec.output for spec in specs]
    assert len(set(outputs)) == len(outputs) > 0, f"text encoders need distinct outputs, not {outputs}"
    unique = list(dict.fromkeys(captions))
    return [_text_keys(unique, spec, folder, dtype, quantize) for spec in specs]


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
    place: TextPlace,
    dtype: torch.dtype,
    quantize: TextScheme,
    fill: _Fill,
    on_begin: Callable[[], None],
) -> None:
    """The encoder lives in this frame only, so that it can be freed when the frame is left, by an error too."""
    encoder = None
    try:
        with fill.shared(missing, place.captions_per_batch) as batches:
            for batch in batches:
                if encoder is None:
                    _log_memory(f"loading text encoder {spec.folder} for up to {len(missing)} captions", place.device)
                    encoder = open_text_encoder(spec, folder, place, dtype, quantize)
                    _log_memory(f"loaded text encoder {spec.folder}", place.device)
                    on_begin()
                for key, states in zip(batch, encoder.encode_batch([missing[key] for key in batch]), strict=True):
                    fill.put(key, {spec.output: states})
    finally:
        if encoder is not None:
            encoder.close()
        del encoder


def _link(parts_of: Mapping[str, Sequence[str]], fill: _Fill) -> None:
    """Have an entry that holds the tensors of all its parts, for each of these."""
    store = fill.store
    missing = [key for key in parts_of if key not in store]
    shared = Shared(Claims(store), missing, store.__contains__, _do_nothing, fill.progress.stop_if_asked)
    with closing(shared.batches()) as batches:
        for (key,) in batches:
            store.link(key, parts_of[key])


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
    *,
    not_before_s: float = 0.0,
    on_begin: Callable[[], None] = _do_nothing,
) -> dict[ImageRequest, str]:
    """Have the normalised latents of every image and clip in the store, encoding those that are missing; equal pixels
    once.

    One that cannot be read does not keep the others from being encoded.

    Args:
        vae_path: what load_vae takes.
        dtype: the VAE computes in it. Latents are stored in float32.
        on_progress, not_before_s, on_begin: as for encode_captions.
    Returns: request -> key of an entry {"latents": [C, F, H, W]}; of a variant that encodes its condition also
        {"image_condition": [C', F, H, W]}.
    Raises: Stopped; ValueError naming all files that cannot be read, or a VAE that does not fit the family;
        RuntimeError for latents that are not finite; OSError naming the file if the store cannot be written.
    """
    key_of = image_entries(requests, family, variant, vae_path, dtype)
    progress = _Progress(len(set(key_of.values())), on_progress, should_stop, "images")
    fill = _Fill(store, progress, not_before_s)
    missing = fill.missing({key: request for request, key in key_of.items()})
    if missing:
        try:
            _encode_missing_images(missing, family, variant, vae_path, device, dtype, fill, on_begin)
        finally:
            _free(device, "VAE")
    return key_of


def image_entries(
    requests: Sequence[ImageRequest], family: ModelFamily, variant: Variant, vae_path: str | Path, dtype: torch.dtype
) -> dict[ImageRequest, str]:
    """request -> key of the entry that encode_images makes of it; reads the images' bytes, loads no weight.

    Raises: ValueError naming all images that cannot be read.
    """
    vae = vae_fingerprint(family, variant, vae_path)
    images = _image_fingerprints(dict.fromkeys(request.path for request in requests))
    return {
        request: latent_key(
            images[request.path],
            request.resize,
            request.crop,
            family=family.name,
            latent=family.latent_of(variant),
            vae_fingerprint=vae,
            dtype=dtype,
            frames=request.frames,
            condition=variant.condition if variant.encodes_condition else "none",
        )
        for request in dict.fromkeys(requests)
    }


def _image_fingerprints(paths: Iterable[str]) -> dict[str, str]:
    fingerprints, problems = {}, []
    for path in paths:
        try:
            fingerprints[path] = media_fingerprint(path)
        except OSError as error:
            problems.append(f"{path} cannot be read ({error}); put it back or take it out of the dataset")
    if problems:
        raise ValueError("\n".join(problems))
    return fingerprints


def _encode_missing_images(
    missing: Mapping[str, ImageRequest],
    family: ModelFamily,
    variant: Variant,
    vae_path: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    fill: _Fill,
    on_begin: Callable[[], None],
) -> None:
    """The VAE lives in this frame only; see _encode_missing_captions."""
    vae, problems = None, []
    try:
        with fill.shared(missing) as batches:
            for (key,) in batches:
                try:
                    pixels = read_frames(missing[key])[None]  # [B=1, 3, F, H, W]
                except ValueError as error:  # broken since the dataset was looked at
                    problems.append(str(error))
                    continue
                if vae is None:
                    _log_memory(f"loading the VAE for up to {len(missing)} images", device)
                    vae = load_vae(family, variant, vae_path, dtype).to(device)
                    _log_memory("loaded the VAE", device)
                    on_begin()
                pixels = pixels.to(device=device, dtype=dtype)
                fill.put(key, _encode_image(vae, family, variant, pixels, missing[key].path))
    finally:
        del vae
    if problems:
        raise ValueError("\n".join([*problems, "all other images are encoded and kept"]))


def _encode_image(
    vae: Any, family: ModelFamily, variant: Variant, pixels: torch.Tensor, path: str
) -> dict[str, torch.Tensor]:
    """What the entry of one image or clip holds."""
    with torch.inference_mode():
        tensors = {"latents": family.encode_latents(vae, pixels)[0].to(torch.float32)}
        if variant.encodes_condition:
            assert family.encode_condition is not None
            tensors["image_condition"] = family.encode_condition(vae, pixels)[0].to(torch.float32)
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise RuntimeError(
            f'the latents of {path} are not finite in {pixels.dtype}; set cache.dtype to "bfloat16" or "float32"'
        )
    found, expected = tensors["latents"].shape[1], family.latent_of(variant).num_latent_frames(pixels.shape[2])
    if found != expected:  # a VAE that leaves frames out would train a clip that is shorter than its caption says
        raise RuntimeError(
            f"the VAE made {found} latent frames of {pixels.shape[2]} frames of {path}; {variant.name} needs {expected}"
        )
    return tensors


def _free(device: torch.device | str, what: str) -> None:
    """Return what nobody refers to any more, on the device as well if it is an accelerator."""
    gc.collect()
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    _log_memory(f"freed {what}", device)


def _log_memory(what: str, device: torch.device | str) -> None:
    """One line with what this process holds in host memory and, of tensors, on the device."""
    import psutil  # comes with accelerate

    held = f"{psutil.Process().memory_info().rss / 1e9:.2f} GB"
    device = torch.device(device)
    if device.type in {"cuda", "xpu"}:
        held += f" and {torch.get_device_module(device).memory_allocated(device) / 1e9:.2f} GB on {device}"
    logger.info("%s; %s in use by this process", what, held)
