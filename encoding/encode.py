"""Captions and images, encoded once and kept.

Both fill functions do the same: name every result by its content, see what the store already has, and only if something
is missing load the model, encode one thing after the other, and free the model before the next is loaded. Each result
is stored as soon as it is there, so stopping loses at most the one in hand. Who computes is a source's matter
(sources.py).

Any number of processes may do this at once for one store, on any devices: each claims an entry before it computes it
(see claims.py), and a model is loaded only by those that got something to compute. Progress counts what is done by
whomever.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ..data.image import ImageRequest
from ..data.samples import Condition
from ..data.video import media_fingerprint, read_frames
from ..system.stopping import Stopped, never
from .claims import Claims, Shared
from .conditions import ComfyConditions
from .key import joint_key
from .sources import LatentSource, TextSource
from .store import CacheStore, Stamp

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
OnProgress = Callable[[int, int, str], None]  # done, total, what
ShouldStop = Callable[[], bool]
Source = TextSource | LatentSource | ComfyConditions
Wanted = tuple[str, Condition]  # a caption, and what is beside it
NONE_OUTDATED: Mapping[str, Stamp] = MappingProxyType({})


def _say_nothing(*progress: Any) -> None:
    pass


@dataclass
class _Fill:
    """A store being filled: counts what is done and asks before each step whether to go on."""

    store: CacheStore
    total: int
    what: str  # is counted
    on_progress: OnProgress
    should_stop: ShouldStop
    outdated: Mapping[str, Stamp]  # entries that count as missing while they have these stamps
    done: int = 0

    def add(self, count: int = 1) -> None:
        self.done += count
        self.on_progress(self.done, self.total, self.what)

    def stop_if_asked(self) -> None:
        if self.should_stop():
            raise Stopped(f"stopped after {self.done} of {self.total} {self.what}; these are kept")

    def is_done(self, key: str) -> bool:
        return key in self.store and (key not in self.outdated or self.store.stamp(key) != self.outdated[key])

    def missing(self, keys: Mapping[str, _T]) -> dict[str, _T]:
        """Those to compute; the others are counted."""
        missing = {key: value for key, value in keys.items() if not self.is_done(key)}
        self.add(len(keys) - len(missing))
        return missing

    @contextmanager
    def shared(self, keys: Mapping[str, object], size: int = 1) -> Iterator[Iterator[list[str]]]:
        """Batches of keys that this process should compute, each claimed until the next; see claims.py."""
        self.stop_if_asked()
        shared = Shared(Claims(self.store), keys, self.is_done, self.add, self.stop_if_asked)
        with closing(shared.batches(size)) as batches:
            yield batches

    def put(self, key: str, entry: Mapping[str, torch.Tensor]) -> None:
        self.store.put(key, entry)
        self.add()

    def link(self, parts_of: Mapping[str, Sequence[str]]) -> None:
        """Have an entry that holds the tensors of all its parts, for each of these."""
        missing = [key for key in parts_of if key not in self.store]
        shared = Shared(Claims(self.store), missing, self.store.__contains__, _say_nothing, self.stop_if_asked)
        with closing(shared.batches()) as batches:
            for (key,) in batches:
                self.store.link(key, parts_of[key])


@contextmanager
def _in_use(source: Source, what: str, on_begin: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Inside, a function that loads the source unless it is loaded; the source is freed at the end."""
    is_loaded = False

    def load() -> None:
        nonlocal is_loaded
        if not is_loaded:
            _log_memory(f"loading {source.name} for up to {what}", source.device)
            source.load()
            _log_memory(f"loaded {source.name}", source.device)
            on_begin()
            is_loaded = True

    try:
        yield load
    finally:
        source.close()
        gc.collect()
        device = torch.device(source.device)
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        _log_memory(f"freed {source.name}", device)


def fill_texts(
    captions: Sequence[str],
    sources: Sequence[TextSource],
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _say_nothing,
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
    fill = _Fill(store, sum(map(len, texts)), "captions", on_progress, should_stop, outdated)
    for source, text_of in zip(sources, texts, strict=True):
        missing = fill.missing(text_of)
        if missing:
            source.plan(len(missing))
            _encode_texts(missing, source, fill, on_begin)
    parts = _parts(keys)
    if len(sources) > 1:
        fill.link({joint_key(each): each for each in parts.values()})
    return {caption: joint_key(each) if len(sources) > 1 else each[0] for caption, each in parts.items()}


def text_entries(captions: Sequence[str], sources: Sequence[TextSource]) -> dict[str, list[str]]:
    """caption -> keys of all entries that fill_texts makes of it; no weight is loaded."""
    parts = _parts(_keys_of_sources(captions, sources))
    return {caption: each if len(each) == 1 else [*each, joint_key(each)] for caption, each in parts.items()}


def _keys_of_sources(captions: Sequence[str], sources: Sequence[TextSource]) -> list[dict[str, tuple[str, str]]]:
    """caption -> (text as tokenized, key), for every source."""
    unique = dict.fromkeys(captions)
    return [
        {caption: (text, source.key_of(text)) for caption in unique for text in [source.text_of(caption)]}
        for source in sources
    ]


def _parts(keys: Sequence[Mapping[str, tuple[str, str]]]) -> dict[str, list[str]]:
    """caption -> keys of what each source makes of it."""
    return {caption: [key_of[caption][1] for key_of in keys] for caption in keys[0]}


def _encode_texts(missing: Mapping[str, str], source: TextSource, fill: _Fill, on_begin: Callable[[], None]) -> None:
    with (
        _in_use(source, f"{len(missing)} captions", on_begin) as load,
        fill.shared(missing, source.batch_size) as batches,
    ):
        for batch in batches:
            load()
            texts = [missing[key] for key in batch]
            problems = []
            for key, text, entry in zip(batch, texts, source.encode_batch(texts), strict=True):
                if problem := source.problem_of(entry, text):
                    problems.append(problem)
                else:
                    fill.put(key, entry)
            if problems:
                raise RuntimeError("\n".join([*problems, "all captions encoded until then are kept"]))


def fill_images(
    requests: Sequence[ImageRequest],
    source: LatentSource,
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _say_nothing,
) -> dict[ImageRequest, str]:
    """Have what the source makes of every image and clip in the store, encoding what is missing; equal pixels once.

    One that cannot be read does not keep the others from being encoded. Arguments as for fill_texts.

    Returns: request -> key of its entry.
    Raises: Stopped; ValueError naming all files that cannot be read, or a VAE that does not fit; RuntimeError for
        latents that are not finite; OSError naming the file if the store cannot be written.
    """
    key_of = image_keys(requests, source)
    fill = _Fill(store, len(set(key_of.values())), "images", on_progress, should_stop, outdated)
    missing = fill.missing({key: request for request, key in key_of.items()})
    if missing:
        source.check(list(missing.values()))
        _encode_images(missing, source, fill, on_begin)
    return key_of


def fill_conditions(
    wanted: Iterable[Wanted],
    source: ComfyConditions,
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _say_nothing,
) -> dict[Wanted, str]:
    """Have what conditions every sample in the store, as fill_images does of images.

    Args:
        wanted: captions with the files beside them.
    Returns: the same -> key of its entry.
    Raises: as fill_images.
    """
    key_of = condition_keys(wanted, source)
    fill = _Fill(store, len(set(key_of.values())), "conditions", on_progress, should_stop, outdated)
    missing = fill.missing({key: each for each, key in key_of.items()})
    if not missing:
        return key_of
    source.check(len(missing))
    problems = []
    with _in_use(source, f"{len(missing)} conditions", on_begin) as load, fill.shared(missing) as batches:
        for (key,) in batches:
            load()
            try:
                entry = source.encode(*missing[key])
            except ValueError as error:
                problems.append(str(error))
            else:
                fill.put(key, entry)
    if problems:
        raise ValueError("\n".join([*problems, "all other conditions are made and kept"]))
    return key_of


def condition_keys(wanted: Iterable[Wanted], source: ComfyConditions) -> dict[Wanted, str]:
    """The keys of the entries that fill_conditions makes; as image_keys."""
    wanted = list(dict.fromkeys(wanted))
    content = _fingerprints([path for _, condition in wanted for path in condition.paths])
    return {each: source.key_of(*each, content) for each in wanted}


def image_keys(requests: Sequence[ImageRequest], source: LatentSource) -> dict[ImageRequest, str]:
    """request -> key of the entry that fill_images makes of it; reads the files' bytes, loads no weight.

    Raises: ValueError naming all files that cannot be read.
    """
    fingerprints = _fingerprints([request.path for request in requests])
    return {request: source.key_of(request, fingerprints[request.path]) for request in dict.fromkeys(requests)}


def _fingerprints(paths: Sequence[str]) -> dict[str, str]:
    """Raises: ValueError naming all files that cannot be read."""
    fingerprints, problems = {}, []
    for path in dict.fromkeys(paths):
        try:
            fingerprints[path] = media_fingerprint(path)
        except OSError as error:
            problems.append(f"{path} cannot be read ({error}); put it back or take it out of the dataset")
    if problems:
        raise ValueError("\n".join(problems))
    return fingerprints


def _encode_images(
    missing: Mapping[str, ImageRequest], source: LatentSource, fill: _Fill, on_begin: Callable[[], None]
) -> None:
    problems = []
    with _in_use(source, f"{len(missing)} images", on_begin) as load, fill.shared(missing) as batches:
        for (key,) in batches:
            request = missing[key]
            try:
                pixels = read_frames(request)
            except ValueError as error:  # broken since the dataset was looked at
                problems.append(str(error))
                continue
            load()
            fill.put(key, source.encode(pixels, request.path))
    if problems:
        raise ValueError("\n".join([*problems, "all other images are encoded and kept"]))


def _log_memory(what: str, device: torch.device | str) -> None:
    """One line with what this process holds in host memory and, of tensors, on the device."""
    import psutil  # comes with accelerate

    held = f"{psutil.Process().memory_info().rss / 1e9:.2f} GB"
    device = torch.device(device)
    if device.type in {"cuda", "xpu"}:
        held += f" and {torch.get_device_module(device).memory_allocated(device) / 1e9:.2f} GB on {device}"
    logger.info("%s; %s in use by this process", what, held)
