"""Locks on files that the system takes back when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK, errno.ESTALE}  # the systems' answers when another has, or had, it
_NUM_TRIES = 50
_TRY_AGAIN_S = 0.02
_GONE = {errno.ENOENT, errno.ESTALE}  # the latter on NFS, where another machine has removed an open file


_log = logging.getLogger(__name__)
_warned: set[Path] = set()


class NoLocks(OSError):
    """The file system has no locks."""


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file against all other opens of it, without waiting; closing it, or ending, gives it back.
    Raises: NoLocks where the file system has none."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)  # it locks from where the file stands: for one opened to append, behind its text
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise NoLocks(error.errno, error.strerror) from error
    return True


@dataclass
class Claim:
    """The right to do what the file stands for, until it is released or its process ends."""

    path: Path
    file: IO[bytes]
    was_left: bool = False  # by a holder that was killed
    is_sure: bool = True  # else the file system has no locks, and others may have it as well

    def release(self) -> None:
        """A second call is a no-op."""
        if self.file.closed:
            return
        if os.name == "nt":  # no open file can be removed there, and none that another has opened meanwhile
            self.file.close()
        with contextlib.suppress(OSError):
            self.path.unlink()  # while it is locked: whoever waits for it sees that the name is gone
        self.file.close()


def is_locked(path: Path) -> bool:
    """Whether somebody holds a file, which is locked for a moment to find out; one that is not there nobody holds.
    Raises: NoLocks where the file system has none; OSError if it cannot be opened."""
    try:
        with open(path, "r+b") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


def take_claim(path: Path, wait_s: float = 0.0) -> Claim | None:
    """Claim what this file stands for; None if another process, or another thread, has it after wait_s. Where the file
    system has no locks everybody gets it, and one warning says so. Raises: OSError if the file cannot be opened."""
    until = time.monotonic() + wait_s
    try:
        while (claim := _try_claim(path)) is None and time.monotonic() < until:
            time.sleep(_TRY_AGAIN_S)
    except NoLocks as error:
        if path.parent not in _warned:
            _warned.add(path.parent)
            what = "nothing keeps a second run out of it, and processes at once may do the same work"
            _log.warning("%s is on a file system without locks (%s): %s", path.parent, error.strerror, what)
        return Claim(path, open_lock(path), is_sure=False)
    return claim


def _try_claim(path: Path) -> Claim | None:
    for _ in range(_NUM_TRIES):
        was_left = path.exists()
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open_lock(path))
            if not try_lock(file):
                return None
            try:
                has_its_name = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                has_its_name = False
            if has_its_name:
                closing.pop_all()
                return Claim(path, file, was_left)
    raise NoLocks(errno.EOPNOTSUPP, "an open file is not identified by its number")


def open_lock(path: Path) -> IO[bytes]:
    """A lock file, made with its folder if it is not there. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_NUM_TRIES):
        with contextlib.suppress(PermissionError):  # Windows' answer in the moment in which another removes it
            return open(path, "ab")
        time.sleep(_TRY_AGAIN_S * (os.name == "nt"))
    return open(path, "ab")


@contextmanager
def alone(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Whether no other thread or process is inside with this lock file. Arguments and errors as of take_claim."""
    claim = take_claim(path, wait_s)
    try:
        yield claim is not None
    finally:
        if claim is not None:
            claim.release()
