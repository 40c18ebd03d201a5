"""Captions and images, encoded once and kept.

Filling names every result by its content and sees what the store already has. Only if something is missing it loads
the model, encodes one thing after the other, and frees the model before the next is loaded. Each result is stored as
soon as it is there, so stopping loses at most the one in hand. Who computes is a source's matter (sources.py).

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
from typing import Any

import torch

from ..system.stopping import Stopped, never
from .claims import Claims, Shared
from .key import joint_key
from .sources import Item, Source, TextSource
from .store import CacheStore, Stamp

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int, str], None]  # done, total, what
ShouldStop = Callable[[], bool]
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

    def missing(self, keys: Mapping[str, Item]) -> dict[str, Item]:
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
def _in_use(source: Source[Any], what: str, on_begin: Callable[[], None]) -> Iterator[Callable[[], None]]:
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


def fill(
    items: Iterable[Item],
    source: Source[Item],
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _say_nothing,
) -> dict[Item, str]:
    """Have what the source makes of every item in the store, encoding what is missing; equal content once.

    A file that cannot be read does not keep the others from being encoded.

    Args:
        on_progress: done and total count entries, whoever computed them.
        outdated: entries that are computed again while they have these stamps, from CacheStore.stamps.
        on_begin: called when the encoder is loaded and begins, from where its pace can be measured.
    Returns: item -> key of its entry.
    Raises: Stopped; ValueError naming all files that cannot be read, or for an encoder that does not fit or is not
        here; RuntimeError naming the items whose entries are not finite; OSError naming the file if the store cannot be
        written. What was encoded until then is in the store.
    """
    key_of = source.keys_of(items)
    progress = _Fill(store, len(set(key_of.values())), source.what, on_progress, should_stop, outdated)
    _fill(key_of, source, progress, on_begin)
    return key_of


def fill_texts(
    captions: Iterable[str],
    sources: Sequence[TextSource],
    store: CacheStore,
    on_progress: OnProgress = _say_nothing,
    should_stop: ShouldStop = never,
    *,
    outdated: Mapping[str, Stamp] = NONE_OUTDATED,
    on_begin: Callable[[], None] = _say_nothing,
) -> dict[str, str]:
    """fill() by every text encoder of a model. One is in memory at a time.

    Returns: caption -> key of an entry with the tensors of all sources.
    """
    captions = list(dict.fromkeys(captions))
    keys = [source.keys_of(captions) for source in sources]
    total = sum(len(set(each.values())) for each in keys)
    progress = _Fill(store, total, sources[0].what, on_progress, should_stop, outdated)
    for source, key_of in zip(sources, keys, strict=True):
        _fill(key_of, source, progress, on_begin)
    if len(sources) == 1:
        return keys[0]
    parts = {caption: [key_of[caption] for key_of in keys] for caption in captions}
    progress.link({joint_key(each): each for each in parts.values()})
    return {caption: joint_key(each) for caption, each in parts.items()}


def text_entries(captions: Iterable[str], sources: Sequence[TextSource]) -> dict[str, list[str]]:
    """caption -> keys of all entries that fill_texts makes of it; no weight is loaded."""
    captions = list(captions)
    keys = [source.keys_of(captions) for source in sources]
    parts = {caption: [key_of[caption] for key_of in keys] for caption in keys[0]}
    return {caption: each if len(each) == 1 else [*each, joint_key(each)] for caption, each in parts.items()}


def _fill(key_of: Mapping[Item, str], source: Source[Item], fill: _Fill, on_begin: Callable[[], None]) -> None:
    missing = fill.missing({key: item for item, key in key_of.items()})
    if not missing:
        return
    source.plan(list(missing.values()))
    unreadable = []
    what = f"{len(missing)} {source.what}"
    with _in_use(source, what, on_begin) as load, fill.shared(missing, source.batch_size) as batches:
        for batch in batches:
            given = {}
            for key in batch:
                try:
                    given[key] = source.read(missing[key])
                except ValueError as error:  # broken since the dataset was looked at
                    unreadable.append(str(error))
            if not given:
                continue
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
                    fill.put(key, entry)
            if problems:
                raise RuntimeError("\n".join([*problems, f"all {source.what} encoded until then are kept"]))
    if unreadable:
        raise ValueError("\n".join([*unreadable, f"all other {source.what} are encoded and kept"]))


def _log_memory(what: str, device: torch.device | str) -> None:
    """One line with what this process holds in host memory and, of tensors, on the device."""
    import psutil

    held = f"{psutil.Process().memory_info().rss / 1e9:.2f} GB"
    device = torch.device(device)
    if device.type in {"cuda", "xpu"}:
        held += f" and {torch.get_device_module(device).memory_allocated(device) / 1e9:.2f} GB on {device}"
    logger.info("%s; %s in use by this process", what, held)
