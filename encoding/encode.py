"""Captions and images, encoded once and kept.

Both fill functions do the same: name every result by its content, see what the store already has, and only if something
is missing load the model, encode one thing after the other, and free the model before the next is loaded. Each result
is stored as soon as it is there, so stopping loses at most the one in hand. Who computes is a source's matter: here are
those of the model's own encoders, in sources.py those of encoders that ComfyUI holds.

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
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ..checkpoints.fingerprint import folder_fingerprint
from ..data.image import ImageRequest
from ..data.video import media_fingerprint, read_frames
from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from ..system.stopping import Stopped, never
from .claims import Claims, Shared
from .key import joint_key, latent_key, text_key
from .sources import LatentSource, TextRun, TextSource
from .store import CacheStore, Stamp
from .text_encoder import TextEncoder, prepare_text
from .text_place import TextPlace, open_text_encoder, plan_text_place
from .text_weights import TextScheme, applied_scheme
from .vae import load_vae, vae_fingerprint

__all__ = [
    "FolderLatents",
    "FolderTexts",
    "ImageRequest",
    "Stopped",
    "fill_images",
    "fill_texts",
    "folder_texts",
    "image_keys",
    "load_vae",
    "never",
    "read_frames",
    "text_entries",
]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
OnProgress = Callable[[int, int, str], None]  # done, total, what
ShouldStop = Callable[[], bool]
NONE_OUTDATED: Mapping[str, Stamp] = MappingProxyType({})


def _say_nothing(done: int, total: int, what: str) -> None:
    pass


def _do_nothing() -> None:
    pass


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
        outdated: entries that count as missing while they have these stamps.
    """

    store: CacheStore
    progress: _Progress
    outdated: Mapping[str, Stamp]

    def is_done(self, key: str) -> bool:
        return key in self.store and (key not in self.outdated or self.store.stamp(key) != self.outdated[key])

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

    def put(self, key: str, entry: Mapping[str, torch.Tensor]) -> None:
        self.store.put(key, entry)
        self.progress.add()


@dataclass(frozen=True)
class FolderTexts:
    """What one of the model's own text encoders makes, from its folder; a TextSource."""

    spec: TextEncoderSpec
    folder: Path
    device: torch.device | str
    dtype: torch.dtype
    quantize: TextScheme = "none"
    window_bytes: int = 0

    @property
    def name(self) -> str:
        return f"text encoder {self.spec.folder}"

    @functools.cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {
            "encoder_fingerprint": folder_fingerprint(self.folder / self.spec.folder),
            "tokenizer_fingerprint": folder_fingerprint(self.folder / self.spec.tokenizer_folder),
        }

    def text_of(self, caption: str) -> str:
        return prepare_text(caption, self.spec)

    def key_of(self, text: str) -> str:
        scheme = applied_scheme(self.spec, self.quantize)
        return text_key(text, self.spec, **self._fingerprints, dtype=self.dtype, quantize=scheme)

    def plan(self, num_missing: int) -> _FolderTextRun:
        place = plan_text_place(self.device, self.spec, self.folder, self.dtype, self.quantize, self.window_bytes)
        return _FolderTextRun(self, place)


@dataclass
class _FolderTextRun:
    """Holds the encoder while it is needed, so that close can free it."""

    source: FolderTexts
    place: TextPlace
    encoder: TextEncoder | None = None

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def batch_size(self) -> int:
        return self.place.captions_per_batch

    def load(self) -> None:
        source = self.source
        self.encoder = open_text_encoder(source.spec, source.folder, self.place, source.dtype, source.quantize)

    def encode_batch(self, texts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        assert self.encoder is not None
        return [{self.source.spec.output: states} for states in self.encoder.encode_batch(texts)]

    def problem_of(self, entry: Mapping[str, torch.Tensor], text: str) -> str:
        assert self.encoder is not None
        return self.encoder.problem_of(entry[self.source.spec.output], text)

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()
        self.encoder = None


def fill_texts(
    captions: Sequence[str],
    sources: Sequence[TextSource],
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _do_nothing,
) -> dict[str, str]:
    """Have what every source makes of every caption in the store, encoding what is missing; equal captions once.

    Args:
        sources: every text encoder of the model. One is in memory at a time.
        on_progress: done and total count one caption through one encoder, whoever computed it.
        outdated: entries that are computed again while they have these stamps, from CacheStore.stamps.
        on_begin: called when an encoder is loaded and begins, from where its pace can be measured.
    Returns: caption -> key of an entry of all sources' tensors together.
    Raises: Stopped; ValueError for folders that do not fit, or a source that cannot compute; RuntimeError naming the
        captions of a pass whose states are not finite; OSError naming the file if the store cannot be written. What
        was encoded until then is in the store.
    """
    keys = _keys_of_sources(captions, sources)
    texts = [{key: text for text, key in key_of.values()} for key_of in keys]
    progress = _Progress(sum(map(len, texts)), on_progress, should_stop, "captions")
    fill = _Fill(store, progress, outdated)
    for source, text_of in zip(sources, texts, strict=True):
        missing = fill.missing(text_of)
        if missing:
            run = source.plan(len(missing))
            try:
                _encode_missing_texts(missing, source.name, run, fill, on_begin)
            finally:
                run.close()
                _free(run.device, source.name)
    parts = {caption: [key_of[caption][1] for key_of in keys] for caption in keys[0]}
    if len(sources) == 1:
        return {caption: part for caption, (part,) in parts.items()}
    joint = {caption: joint_key(each) for caption, each in parts.items()}
    _link({joint[caption]: each for caption, each in parts.items()}, fill)
    return joint


def folder_texts(
    specs: Sequence[TextEncoderSpec],
    encoders_folder: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    quantize: TextScheme = "none",
    window_bytes: int = 0,
) -> list[FolderTexts]:
    """The model's own text encoders as sources.

    Args:
        specs: every text encoder of the model.
        encoders_folder: folder that holds the specs' folders.
        device: where the encoders run, or a setting that text_place.py turns into such a place.
        dtype: the encoders compute in it, and the states are stored in it.
        quantize: what the encoders' linears are rounded to as they are read.
        window_bytes: the most a streamed encoder may take on its card; 0 for what is free. Captions that share a pass
            are claimed, and lost by a kill, together.
    """
    outputs = [spec.output for spec in specs]
    assert len(set(outputs)) == len(outputs) > 0, f"text encoders need distinct outputs, not {outputs}"
    folder = Path(encoders_folder)
    return [FolderTexts(spec, folder, device, dtype, quantize, window_bytes) for spec in specs]


def text_entries(captions: Sequence[str], sources: Sequence[TextSource]) -> dict[str, list[str]]:
    """caption -> keys of all entries that fill_texts makes of it; no weight is loaded."""
    keys = _keys_of_sources(captions, sources)
    parts = {caption: [key_of[caption][1] for key_of in keys] for caption in keys[0]}
    return {caption: each if len(each) == 1 else [*each, joint_key(each)] for caption, each in parts.items()}


def _keys_of_sources(captions: Sequence[str], sources: Sequence[TextSource]) -> list[dict[str, tuple[str, str]]]:
    """caption -> (text as tokenized, key), for every source."""
    unique = list(dict.fromkeys(captions))
    texts = [{caption: source.text_of(caption) for caption in unique} for source in sources]
    return [
        {caption: (text, source.key_of(text)) for caption, text in text_of.items()}
        for source, text_of in zip(sources, texts, strict=True)
    ]


def _encode_missing_texts(
    missing: Mapping[str, str], name: str, run: TextRun, fill: _Fill, on_begin: Callable[[], None]
) -> None:
    is_loaded = False
    with fill.shared(missing, run.batch_size) as batches:
        for batch in batches:
            if not is_loaded:
                _log_memory(f"loading {name} for up to {len(missing)} captions", run.device)
                run.load()
                _log_memory(f"loaded {name}", run.device)
                on_begin()
                is_loaded = True
            texts = [missing[key] for key in batch]
            problems = []
            for key, text, entry in zip(batch, texts, run.encode_batch(texts), strict=True):
                if problem := run.problem_of(entry, text):
                    problems.append(problem)
                else:
                    fill.put(key, entry)
            if problems:
                raise RuntimeError("\n".join([*problems, "all captions encoded until then are kept"]))


def _link(parts_of: Mapping[str, Sequence[str]], fill: _Fill) -> None:
    """Have an entry that holds the tensors of all its parts, for each of these."""
    store = fill.store
    missing = [key for key in parts_of if key not in store]
    shared = Shared(Claims(store), missing, store.__contains__, _do_nothing, fill.progress.stop_if_asked)
    with closing(shared.batches()) as batches:
        for (key,) in batches:
            store.link(key, parts_of[key])


@dataclass
class FolderLatents:
    """What the model's own VAE makes, from a folder or file; a LatentSource. Latents are normalised."""

    family: ModelFamily
    variant: Variant
    path: str | Path
    device: torch.device | str
    dtype: torch.dtype
    vae: Any = None
    name: str = "VAE"

    @functools.cached_property
    def _fingerprint(self) -> str:
        return vae_fingerprint(self.family, self.variant, self.path)

    def key_of(self, request: ImageRequest, image_fingerprint: str) -> str:
        return latent_key(
            image_fingerprint,
            request.resize,
            request.crop,
            family=self.family.name,
            latent=self.family.latent_of(self.variant),
            vae_fingerprint=self._fingerprint,
            dtype=self.dtype,
            frames=request.frames,
            condition=self.variant.condition if self.variant.encodes_condition else "none",
        )

    def check(self, missing: Sequence[ImageRequest]) -> None:
        pass

    def load(self) -> None:
        self.vae = load_vae(self.family, self.variant, self.path, self.dtype).to(self.device)

    def encode(self, pixels: torch.Tensor, path: str) -> dict[str, torch.Tensor]:
        family, variant = self.family, self.variant
        batch = pixels[None].to(device=self.device, dtype=self.dtype)  # [B=1, 3, F, H, W]
        with torch.inference_mode():
            tensors = {"latents": family.encode_latents(self.vae, batch)[0].to(torch.float32)}
            if variant.encodes_condition:
                assert family.encode_condition is not None
                tensors["image_condition"] = family.encode_condition(self.vae, batch)[0].to(torch.float32)
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise RuntimeError(
                f'the latents of {path} are not finite in {self.dtype}; set cache.dtype to "bfloat16" or "float32"'
            )
        num_frames = pixels.shape[1]
        found, expected = tensors["latents"].shape[1], family.latent_of(variant).num_latent_frames(num_frames)
        if found != expected:  # a VAE that leaves frames out would train a clip that is shorter than its caption says
            raise RuntimeError(
                f"the VAE made {found} latent frames of {num_frames} frames of {path}; {variant.name} needs {expected}"
            )
        return tensors

    def close(self) -> None:
        self.vae = None


def fill_images(
    requests: Sequence[ImageRequest],
    source: LatentSource,
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _do_nothing,
) -> dict[ImageRequest, str]:
    """Have what the source makes of every image and clip in the store, encoding those that are missing; equal pixels
    once.

    One that cannot be read does not keep the others from being encoded.

    Args:
        on_progress, outdated, on_begin: as for fill_texts.
    Returns: request -> key of its entry.
    Raises: Stopped; ValueError naming all files that cannot be read, or a VAE that does not fit; RuntimeError for
        latents that are not finite; OSError naming the file if the store cannot be written.
    """
    key_of = image_keys(requests, source)
    progress = _Progress(len(set(key_of.values())), on_progress, should_stop, "images")
    fill = _Fill(store, progress, outdated)
    missing = fill.missing({key: request for request, key in key_of.items()})
    if missing:
        source.check(list(missing.values()))
        try:
            _encode_missing_images(missing, source, fill, on_begin)
        finally:
            source.close()
            _free(source.device, source.name)
    return key_of


def image_keys(requests: Sequence[ImageRequest], source: LatentSource) -> dict[ImageRequest, str]:
    """request -> key of the entry that fill_images makes of it; reads the files' bytes, loads no weight.

    Raises: ValueError naming all files that cannot be read.
    """
    images = _image_fingerprints(dict.fromkeys(request.path for request in requests))
    return {request: source.key_of(request, images[request.path]) for request in dict.fromkeys(requests)}


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
    missing: Mapping[str, ImageRequest], source: LatentSource, fill: _Fill, on_begin: Callable[[], None]
) -> None:
    is_loaded, problems = False, []
    with fill.shared(missing) as batches:
        for (key,) in batches:
            request = missing[key]
            try:
                pixels = read_frames(request)
            except ValueError as error:  # broken since the dataset was looked at
                problems.append(str(error))
                continue
            if not is_loaded:
                _log_memory(f"loading the {source.name} for up to {len(missing)} images", source.device)
                source.load()
                _log_memory(f"loaded the {source.name}", source.device)
                on_begin()
                is_loaded = True
            fill.put(key, source.encode(pixels, request.path))
    if problems:
        raise ValueError("\n".join([*problems, "all other images are encoded and kept"]))


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
