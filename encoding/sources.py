"""Captions and images, encoded once and kept, by any number of processes at once: each claims what it computes. And who
makes the entries: the model's own encoders; those of ComfyUI's are in comfy_sources.py."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ..checkpoints.fingerprint import folder_fingerprint
from ..data.image import ImageRequest
from ..data.video import media_fingerprint, read_frames
from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from ..parallel.devices import release_cached_memory
from ..system.stopping import Stopped, never
from .key import latent_key, text_key
from .store import CacheStore, claimed_batches
from .text_encoder import TextEncoder, load_text_encoder, prepare_text
from .text_place import TextPlace, plan_text_place
from .text_weights import TextScheme, applied_scheme
from .vae import load_vae, vae_fingerprint

Entry = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]  # by tensor name
Item = TypeVar("Item")

_log = logging.getLogger(__name__)


class Source(Generic[Item]):
    """Makes entries of captions, images or conditions."""

    name: str  # of the encoder
    what: str  # it encodes
    dtype: torch.dtype | None = None  # where cache.dtype decides it
    batch_size: int = 1  # items that are encoded at a time; known after plan()

    def keys_of(self, items: Iterable[Item]) -> dict[Item, str]:
        """The entry of each item, without a weight. Raises: ValueError naming all files that cannot be read."""
        items = list(dict.fromkeys(items))
        content, problems = {}, []
        for path in dict.fromkeys(path for item in items for path in self.paths(item)):
            try:
                content[path] = media_fingerprint(path)
            except OSError as error:
                problems.append(f"{path} cannot be read ({error}); put it back or take it out of the dataset")
        if problems:
            raise ValueError("\n".join(problems))
        return {item: self.key(item, content) for item in items}

    def paths(self, item: Item) -> Iterable[str]:
        """The files whose content is in the item's key."""
        return ()

    def key(self, item: Item, content: Mapping[str, str]) -> str:
        """The item's entry. content: hashes of its files."""
        raise NotImplementedError

    def plan(self, missing: Sequence[Item]) -> None:
        """Called before any of these is encoded. Raises: ValueError where that is impossible here."""

    def load(self) -> None:
        """ComfyUI loads with the first item."""

    def read(self, item: Item) -> Any:
        """What encode_batch takes. Raises: ValueError naming a file that cannot be read."""
        return item

    def encode_batch(self, given: Sequence[Any]) -> Sequence[Entry]:
        """An entry for each. Raises: as encode."""
        return [self.encode(each) for each in given]

    def encode(self, given: Any) -> Entry:
        """Raises: ValueError for an encoder that does not fit the model."""
        raise NotImplementedError

    def problem_of(self, entry: Entry, given: Any) -> str:
        """Why an entry must not be kept, and what would help; "" if it may be."""
        if all(tensor.isfinite().all() for tensor in entry.values()):
            return ""
        remedy = 'set cache.dtype to "bfloat16" or "float32"' if self.dtype else "load it in another number type"
        made = f"states of {given!r:.60}" if isinstance(given, str) else f"latents of {given[0]}"
        return f"{self.name}: the {made} are not finite{f' in {self.dtype}' if self.dtype else ''}; {remedy}"

    def close(self) -> None:
        """Free what was loaded."""


class LatentSource(Source[ImageRequest]):
    what = "images"

    def paths(self, item: ImageRequest) -> Iterable[str]:
        return item.paths


def shapes_of(entry: Entry) -> dict[str, tuple[int, ...]]:
    """By tensor name."""
    return {name: tuple(tensor.shape) for name, tensor in entry.items()}


# --- filling the cache ------------------------------------------------------------------------------------------------


def fill(
    items: Iterable[Item],
    source: Source[Item],
    store: CacheStore,
    on_progress: Callable[[int, int, str], None] = lambda *progress: None,
    should_stop: Callable[[], bool] = never,
    *,
    on_begin: Callable[[], None] = lambda: None,
) -> dict[Item, str]:
    """Have what the source makes of every item in the store, encoding what is missing; equal content once. Item -> key.

    Args:
        on_progress: called with the entries that are done and all, whoever computed them, and what they are.
        on_begin: called when the encoder is loaded, from where its pace can be measured.
    Raises: what a source raises; Stopped; ValueError naming all files that cannot be read, behind the others;
        RuntimeError for entries that are not finite; OSError naming the file. What was encoded until then is kept.
    """
    key_of, done = source.keys_of(items), 0
    items_of = {key: item for item, key in key_of.items()}

    def add(count: int = 1) -> None:
        nonlocal done
        done += count
        on_progress(done, len(items_of), source.what)

    def stop_if_requested() -> None:
        if should_stop():
            raise Stopped(f"stopped after {done} of {len(items_of)} {source.what}; these are kept")

    @functools.cache
    def load() -> None:
        _log.info("loading %s for up to %s %s", source.name, len(missing), source.what)
        source.load()
        on_begin()

    missing = {key: item for key, item in items_of.items() if key not in store}
    add(len(items_of) - len(missing))
    if not missing:
        return key_of
    source.plan(list(missing.values()))
    unreadable: list[str] = []
    try:
        stop_if_requested()
        shared = claimed_batches(store, missing, source.batch_size, add, stop_if_requested)
        with closing(shared) as batches:
            for batch in batches:
                for key, entry in _encode(source, {key: missing[key] for key in batch}, load, unreadable):
                    store.put(key, entry)
                    add()
    finally:
        source.close()
        release_cached_memory()
    if unreadable:
        raise ValueError("\n".join([*unreadable, f"all other {source.what} are encoded and kept"]))
    return key_of


def _encode(
    source: Source[Item], batch: Mapping[str, Item], load: Callable[[], None], unreadable: list[str]
) -> Iterator[tuple[str, Entry]]:
    """The entries of a batch; adds to unreadable what was broken since it was looked at. Raises: RuntimeError naming
    those that must not be kept, behind the others; ValueError as encode_batch."""
    given: dict[str, Any] = {}
    for key, item in batch.items():
        try:
            given[key] = source.read(item)
        except ValueError as error:
            unreadable.append(str(error))
    if not given:
        return
    load()
    try:
        entries = source.encode_batch(list(given.values()))
    except ValueError as error:
        raise ValueError("\n".join([*unreadable, str(error)])) from error
    problems = []
    for key, entry in zip(given, entries, strict=True):
        if problem := source.problem_of(entry, given[key]):
            problems.append(problem)
        else:
            yield key, entry
    if problems:
        raise RuntimeError("\n".join([*problems, f"all {source.what} encoded until then are kept"]))


# --- the model's own encoders ----------------------------------------------------------------------------------------


@dataclass
class FolderTexts(Source[str]):
    """What one of the model's own text encoders makes."""

    spec: TextEncoderSpec
    folder: str | Path
    text_device: torch.device | str  # where it runs, or a setting that text_place.py turns into such a place
    dtype: torch.dtype  # the encoder computes in it, and the states are stored in it
    quantize: TextScheme = "none"  # what the encoder's linears are rounded to as they are read
    window_bytes: int = 0  # the most a streamed encoder may take on its card; 0 for what is free
    place: TextPlace | None = None
    encoder: TextEncoder | None = None

    what = "captions"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"text encoder {self.spec.folder}"

    @functools.cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {
            "encoder_fingerprint": folder_fingerprint(Path(self.folder, self.spec.folder)),
            "tokenizer_fingerprint": folder_fingerprint(Path(self.folder, self.spec.tokenizer_folder)),
        }

    def read(self, item: str) -> str:
        """The caption as the tokenizer gets it."""
        return prepare_text(item, self.spec)

    def key(self, item: str, content: Mapping[str, str]) -> str:
        scheme = applied_scheme(self.spec, self.quantize)
        return text_key(self.read(item), self.spec, **self._fingerprints, dtype=self.dtype, quantize=scheme)

    def plan(self, missing: Sequence[str]) -> None:
        settings = self.spec, self.folder, self.dtype, self.quantize, self.window_bytes
        self.place = plan_text_place(self.text_device, *settings)
        self.batch_size = max(1, self.place.captions_per_pass)

    def load(self) -> None:
        assert self.place is not None
        _log.info("%s %s", self.name, self.place)
        settings = self.place.device, self.dtype, self.quantize, self.place.captions_per_pass
        self.encoder = load_text_encoder(self.spec, self.folder, *settings)

    def encode_batch(self, given: Sequence[str]) -> Sequence[Entry]:
        assert self.encoder is not None
        return [{self.spec.output: states} for states in self.encoder.encode_batch(given)]

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()
        self.encoder = None


@dataclass
class FolderLatents(LatentSource):
    """What the model's own VAE makes, from a folder or file. Latents are normalised."""

    family: ModelFamily
    variant: Variant
    path: str | Path
    device: torch.device | str
    dtype: torch.dtype
    vae: Any = None

    name = "the VAE"

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """What decides latents besides the image. Families that share a VAE normalise its latents differently."""
        return {
            "family": self.family.name,
            "normalisation_version": self.family.latent_of(self.variant).normalisation_version,
            "vae": vae_fingerprint(self.family, self.variant, self.path),
            "dtype": str(self.dtype),
            **({"condition": self.variant.condition} if self.variant.encodes_condition else {}),
        }

    def key(self, item: ImageRequest, content: Mapping[str, str]) -> str:
        return latent_key(content[item.path], item, self._settings)

    def read(self, item: ImageRequest) -> tuple[str, torch.Tensor]:
        """Its path and pixels, [3, F, height, width], float32 in -1..1; an image is one frame."""
        return item.path, read_frames(item)

    def load(self) -> None:
        self.vae = load_vae(self.family, self.variant, self.path, self.dtype).to(self.device)

    def encode(self, given: tuple[str, torch.Tensor]) -> Entry:
        """Raises: RuntimeError naming a file whose latents are fewer than its frames make."""
        family, variant, (path, pixels) = self.family, self.variant, given
        batch = pixels[None].to(device=self.device, dtype=self.dtype)  # [B=1, 3, F, H, W]
        with torch.inference_mode():
            tensors = {"latents": family.encode_latents(self.vae, batch)[0].to(torch.float32)}
            if variant.encodes_condition:
                assert family.encode_condition is not None
                tensors["image_condition"] = family.encode_condition(self.vae, batch)[0].to(torch.float32)
        frames = pixels.shape[1]
        found, expected = tensors["latents"].shape[1], family.latent_of(variant).num_latent_frames(frames)
        if found != expected:  # a VAE that leaves frames out would train a shorter clip than its caption says
            raise RuntimeError(
                f"the VAE made {found} latent frames of {frames} frames of {path}; {variant.name} needs {expected}"
            )
        return tensors

    def close(self) -> None:
        self.vae = None
