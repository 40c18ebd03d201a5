"""Locks on files that the system takes back when their process ends, however it ends."""

from __future__ import annotations

import errno
import sys
from typing import IO

_HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK, errno.ESTALE}  # the systems' answers when another has, or had, it


class NoLocks(OSError):
    """The file system has no locks."""


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file against all other opens of it, without waiting; closing it, or ending, gives it back.

    Raises: NoLocks where the file system has none.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise NoLocks(error.errno, error.strerror) from error
    return True
