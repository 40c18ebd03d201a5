"""Which entries of a store the runs that are under way will read, so that pruning spares them.

A run keeps a list in a folder of the store, beside a lock that the system takes back when the run ends, however it ends
(see claims.py). A list whose lock is free is left over and goes. Until a run knows its entries, while it computes them,
all are spared. Where the folder cannot be written nobody prunes it either, and nothing is listed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ..system.files import remove_leftovers, write_atomically
from ..system.json_file import expect, read_json_object
from ..system.locks import take_claim
from .claims import Claims
from .store import CacheStore

_log = logging.getLogger(__name__)
_FOLDER, _LOCK, _LIST = ".runs", ".lock", ".json"


@contextmanager
def living_run(store: CacheStore) -> Iterator[Callable[[Iterable[str]], None]]:
    """Keep pruning from the store's entries inside; what killed runs have left in the store is deleted first.

    Yields: a function to say which entries the run reads; until then all are spared.
    """
    name = uuid.uuid4().hex
    folder = store.folder / _FOLDER
    try:
        _sweep(store)
        claim = take_claim(folder / f"{name}{_LOCK}")
    except OSError as error:
        _log.debug("runs are not listed in %s: %s", store.folder, error)
        claim = None
    if claim is None:
        yield lambda keys: None
        return
    file = folder / f"{name}{_LIST}"

    def needs(keys: Iterable[str]) -> None:
        try:
            write_atomically(file, json.dumps({"keys": sorted(keys)}).encode())
        except OSError as error:
            _log.warning("all cache entries are kept from pruning while this runs: %s", error)

    try:
        yield needs
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        claim.release()
        with contextlib.suppress(OSError):
            folder.rmdir()  # of the last of them


def living_keys(store: CacheStore) -> set[str] | None:
    """Entries that living runs read; None if one of them may read any.

    Raises: OSError if the folder cannot be read or written.
    """
    found: set[str] = set()
    for name in _sweep(store):
        try:
            keys = expect(read_json_object(store.folder / _FOLDER / f"{name}{_LIST}").get("keys"), list, "keys")
        except (OSError, ValueError):
            return None
        found.update(keys)
    return found


def _sweep(store: CacheStore) -> list[str]:
    """Delete what killed runs have left; names of those that live."""
    if not store.folder.is_dir():
        return []
    Claims(store).remove_left()
    folder = store.folder / _FOLDER
    living = []
    for lock in sorted(folder.glob(f"*{_LOCK}")):
        claim = take_claim(lock)
        if claim is None:
            living.append(lock.stem)
            continue
        with contextlib.suppress(OSError):
            lock.with_suffix(_LIST).unlink()
        claim.release()
    if not living:
        remove_leftovers(folder)
    return living
