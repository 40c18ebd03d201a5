"""Captions and images, encoded once and kept, by any number of processes at once: each claims what it computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import cache
from typing import Any

from ..parallel.devices import release_cached_memory
from ..system.stopping import Stopped, never
from .sources import Entry, Item, Source
from .store import CacheStore, claimed_batches

logger = logging.getLogger(__name__)


def _say_nothing(*progress: Any) -> None:
    pass


def fill(
    items: Iterable[Item],
    source: Source[Item],
    store: CacheStore,
    on_progress: Callable[[int, int, str], None] = _say_nothing,
    should_stop: Callable[[], bool] = never,
    *,
    on_begin: Callable[[], None] = _say_nothing,
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

    @cache
    def load() -> None:
        logger.info("loading %s for up to %s %s", source.name, len(missing), source.what)
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
