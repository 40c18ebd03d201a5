"""Who computes which entry, and which entries runs read, while several processes use one store.

A claim is an operating system's lock on a file named after the entry. One process at a time has it, and the system
takes it back when that process ends, however it ends. So an entry is computed a second time only if whoever computed it
was killed before it was stored.

The lock file goes when its entry is done. A holder that was killed leaves its file, and perhaps a temporary file of the
store. The next one to claim that entry removes both, and so does pruning. Between opening a file and locking it, its
holder may have removed it, so a lock counts only while the file still has its name.

Where there are no locks at all, one warning says so: the store stays whole (see store.py), but work may be done twice.

A run that is under way keeps a list of the entries that it reads beside such a lock, so that pruning spares them. A
list whose lock is free is left over and goes. Until a run knows its entries, while it computes them, all are spared.
Where the folder cannot be written nobody prunes it either, and nothing is listed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from ..system.files import expect, read_json_object, remove_leftovers, write_atomically
from ..system.locks import Claim, NoLocks, open_lock, take_claim
from .store import CacheStore, unwritable

logger = logging.getLogger(__name__)

POLL_S = 0.2  # how often work that others have claimed is looked at, once nothing else remains
_OLD_S = 60.0  # after which no writer without a claim is at work on a temporary file: writing takes a moment
_FOLDER = ".claims"
_SUFFIX = ".lock"


class Claims:
    """The claims on a store's entries, kept in a folder of its own inside the store's."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        self.folder = store.folder / _FOLDER
        self._has_locks = True

    def take(self, key: str) -> Claim | None:
        """Claim an entry; None if another process, or another thread, has it.

        Raises: OSError naming the file if the folder cannot be written.
        """
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            claim = take_claim(path)
        except NoLocks as error:
            if self._has_locks:
                logger.warning(
                    "%s is on a file system without locks (%s): processes that fill this cache at once may compute the "
                    "same entries",
                    self._store.folder,
                    error,
                )
            self._has_locks = False
            return Claim(path, open_lock(path))
        except OSError as error:
            raise unwritable(path, error) from error
        if claim is not None and claim.was_left:
            self._store.remove_leftovers(key)
        return claim

    def remove_left(self) -> None:
        """Remove what killed processes have left: lock files nobody holds, and temporary files of their entries."""
        locks = {path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}")}
        old = set()
        for key, path in self._store.temporary_files():
            with contextlib.suppress(FileNotFoundError):  # it has got its name just now
                if time.time() - path.stat().st_mtime > _OLD_S:
                    old.add(key)
        for key in locks | old:
            claim = self.take(key)
            if claim is None:
                continue
            if self._has_locks or key in old:  # without locks a claim does not tell that nobody is writing
                self._store.remove_leftovers(key)
            claim.release()


def claimed_batches(
    claims: Claims,
    keys: Iterable[str],
    size: int,
    is_done: Callable[[str], bool],
    on_found: Callable[[], None],
    stop_if_asked: Callable[[], None],
) -> Generator[list[str], None, None]:
    """Entries to compute and store now, up to `size` at a time, shared with whoever else fills the same store; they are
    claimed until the next are requested. Ends when every entry is done, by whomever, or was handed out.

    Args:
        keys: the entries, in the order to compute them.
        is_done: whether an entry needs no computing any more; called while it is claimed.
        on_found: called for every entry that turned out to be done already.
        stop_if_asked: called before every batch and while waiting for others; raises to stop.
    """
    remaining = list(keys)
    num_told = 0
    while remaining:
        queue, remaining, has_worked = deque(remaining), [], False
        while queue:
            batch: dict[str, Claim] = {}
            try:
                while queue and len(batch) < size:
                    key = queue.popleft()
                    claim = claims.take(key)
                    if claim is None:
                        remaining.append(key)
                    elif is_done(key):
                        claim.release()
                        on_found()
                    else:
                        batch[key] = claim
                if batch:
                    has_worked = True
                    yield list(batch)
            finally:
                for claim in batch.values():
                    claim.release()
            stop_if_asked()
        if remaining and not has_worked:
            if len(remaining) != num_told:
                num_told = len(remaining)
                logger.info("waiting for %d entries that other processes are computing", num_told)
            stop_if_asked()
            time.sleep(POLL_S)


_RUNS, _LIST = ".runs", ".json"


@contextmanager
def living_run(store: CacheStore) -> Iterator[Callable[[Iterable[str]], None]]:
    """Keep pruning from the store's entries inside; what killed runs have left in the store is deleted first.

    Yields: a function to say which entries the run reads; until then all are spared.
    """
    name = uuid.uuid4().hex
    folder = store.folder / _RUNS
    try:
        _sweep(store)
        claim = take_claim(folder / f"{name}{_SUFFIX}")
    except OSError as error:
        logger.debug("runs are not listed in %s: %s", store.folder, error)
        claim = None
    if claim is None:
        yield lambda keys: None
        return
    file = folder / f"{name}{_LIST}"

    def needs(keys: Iterable[str]) -> None:
        try:
            write_atomically(file, json.dumps({"keys": sorted(keys)}).encode())
        except OSError as error:
            logger.warning("all cache entries are kept from pruning while this runs: %s", error)

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
            keys = expect(read_json_object(store.folder / _RUNS / f"{name}{_LIST}").get("keys"), list, "keys")
        except (OSError, ValueError):
            return None
        found.update(keys)
    return found


def _sweep(store: CacheStore) -> list[str]:
    """Delete what killed runs have left; names of those that live."""
    if not store.folder.is_dir():
        return []
    Claims(store).remove_left()
    folder = store.folder / _RUNS
    living = []
    for lock in sorted(folder.glob(f"*{_SUFFIX}")):
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
