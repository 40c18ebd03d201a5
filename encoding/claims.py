"""Who computes which entry, while several processes fill one store.

A claim is an operating system's lock on a file named after the entry. One process at a time has it, and the system
takes it back when that process ends, however it ends. So an entry is computed a second time only if whoever computed it
was killed before it was stored.

The lock file goes when its entry is done. A holder that was killed leaves its file, and perhaps a temporary file of the
store. The next one to claim that entry removes both, and so does pruning. Between opening a file and locking it, its
holder may have removed it, so a lock counts only while the file still has its name.

Where there are no locks at all, one warning says so: the store stays whole (see store.py), but work may be done twice.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..system.locks import Claim, NoLocks, open_lock, take_claim
from .store import CacheStore, unwritable

logger = logging.getLogger(__name__)

POLL_S = 0.2  # how often work that others have claimed is looked at, once nothing else remains
_OLD_S = 60.0
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
            self._say_no_locks(error)
            return Claim(path, open_lock(path))
        except OSError as error:
            raise unwritable(path, error) from error
        if claim is not None and claim.was_left:
            self._store.remove_leftovers(key)
        return claim

    def remove_left(self) -> None:
        """Remove what killed processes have left: lock files nobody holds, and temporary files of their entries."""
        locks = {path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}")}
        old = {key for key, path in self._store.temporary_files() if _is_old(path)}
        for key in locks | old:
            claim = self.take(key)
            if claim is None:
                continue
            if self._has_locks or key in old:  # without locks a claim does not tell that nobody is writing
                self._store.remove_leftovers(key)
            claim.release()

    def _say_no_locks(self, error: OSError) -> None:
        if self._has_locks:
            logger.warning(
                "%s is on a file system without locks (%s): processes that fill this cache at once may compute the "
                "same entries",
                self._store.folder,
                error,
            )
        self._has_locks = False


@dataclass(frozen=True)
class Shared:
    """Entries to compute, shared with whoever else fills the same store."""

    claims: Claims
    keys: Iterable[str]  # the entries, in the order to compute them
    is_done: Callable[[str], bool]  # whether an entry needs no computing any more; asked while it is claimed
    on_found: Callable[[], None]  # called for every entry that turned out to be done already
    stop_if_asked: Callable[[], None]  # called before every batch and while waiting for others; raises to stop

    def batches(self, size: int = 1) -> Generator[list[str], None, None]:
        """Entries to compute and store now, up to `size` at a time; they are claimed until the next is asked for.

        Ends when every entry is done, by whomever, or was handed out.
        """
        remaining = list(self.keys)
        num_told = 0
        while remaining:
            queue, remaining, has_worked = iter(remaining), [], False
            while batch := self._claim(queue, size, remaining):
                has_worked = True
                try:
                    yield list(batch)
                finally:
                    _release(batch)
                self.stop_if_asked()
            if remaining and not has_worked:
                if len(remaining) != num_told:
                    num_told = len(remaining)
                    logger.info("waiting for %d entries that other processes are computing", num_told)
                self.stop_if_asked()
                time.sleep(POLL_S)

    def _claim(self, queue: Iterator[str], size: int, held_by_others: list[str]) -> dict[str, Claim]:
        """The next entries that are neither done nor claimed; appends to held_by_others."""
        batch: dict[str, Claim] = {}
        try:
            while len(batch) < size and (key := next(queue, None)) is not None:
                claim = self.claims.take(key)
                if claim is None:
                    held_by_others.append(key)
                elif self.is_done(key):
                    claim.release()
                    self.on_found()
                else:
                    batch[key] = claim
        except BaseException:
            _release(batch)
            raise
        return batch


def _is_old(temporary: Path) -> bool:
    """Whether no writer without a claim can be at work on a file: writing takes a moment."""
    with contextlib.suppress(FileNotFoundError):  # it has got its name just now
        return time.time() - temporary.stat().st_mtime > _OLD_S
    return False


def _release(claims: dict[str, Claim]) -> None:
    for claim in claims.values():
        claim.release()
