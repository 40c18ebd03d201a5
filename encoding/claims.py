"""Who computes which entry, and which entries runs read, while several processes use one store.

A claim is an operating system's lock on a file named after the entry. One process at a time has it, and the system
takes it back when that process ends, however it ends. So an entry is computed a second time only if whoever computed it
was killed before it was stored.

The lock file goes when its entry is done. A holder that was killed leaves its file, and perhaps a temporary file of the
store. The next one to claim that entry removes both, and so does pruning. Between opening a file and locking it, its
holder may have removed it, so a lock counts only while the file still has its name.

Where there are no locks at all, one warning says so: the store stays whole (see store.py), but work may be done twice.

A run that is under way holds such a lock, too, and pruning spares all entries meanwhile. Where the folder cannot be
written nobody prunes it either, and nothing is locked.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from ..system.locks import Claim, take_claim
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

    def take(self, key: str) -> Claim | None:
        """Claim an entry; None if another process, or another thread, has it. Raises: OSError naming the file if the
        folder cannot be written."""
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            claim = take_claim(path)
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
            if claim.is_sure or key in old:  # without locks a claim does not tell that nobody is writing
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


_RUNS = ".runs"


@contextmanager
def living_run(store: CacheStore) -> Iterator[None]:
    """Keep pruning from the store's entries inside; what killed runs have left in the store is deleted first."""
    folder, claim = store.folder / _RUNS, None
    try:
        has_living_runs(store)
        claim = take_claim(folder / f"{uuid.uuid4().hex}{_SUFFIX}")
    except OSError as error:
        logger.debug("runs are not listed in %s: %s", store.folder, error)
    try:
        yield
    finally:
        if claim is not None:
            claim.release()
            with contextlib.suppress(OSError):
                folder.rmdir()  # of the last of them


def has_living_runs(store: CacheStore) -> bool:
    """Whether runs may read the store; what killed ones have left in it is deleted. Raises: OSError if the folder
    cannot be read or written."""
    if not store.folder.is_dir():
        return False
    Claims(store).remove_left()
    claims = list(map(take_claim, (store.folder / _RUNS).glob(f"*{_SUFFIX}")))
    for claim in filter(None, claims):
        claim.release()
    return not all(claim and claim.is_sure for claim in claims)
