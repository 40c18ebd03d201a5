"""One run at a time in an output folder: a lock that the system takes back when its owner ends, however that is.

Who holds it is written beside the locked file, which nobody else may read on Windows. A pair of experts holds the
folder of both, and each of its processes its own folder below that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ..runs.record import RUN_LOCK
from ..system.files import remove_leftovers, what_helps, write_atomically
from ..system.locks import NoLocks, take_claim

_log = logging.getLogger(__name__)
_OWNER = ".run.owner"
_LOOK_S = 0.2  # whoever looks whether a run lives holds its lock for a moment


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold an output folder, made if it is not there; sweeps what a killed run has left in it.

    Raises: RuntimeError naming the process that holds it; ValueError for a folder that cannot be written.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = take_claim(folder / RUN_LOCK, _LOOK_S)
    except NoLocks as error:
        _log.warning(
            "%s is on a file system without locks (%s): nothing keeps a second run out of it", folder, error.strerror
        )
        yield
        return
    except OSError as error:
        raise ValueError(
            f"output.folder {folder} cannot be written ({error.strerror or error}); {what_helps(error)}, or choose "
            "another"
        ) from error
    if claim is None:
        owner = "another run"
        with contextlib.suppress(OSError, ValueError):
            owner = (folder / _OWNER).read_text(encoding="utf-8")
        raise RuntimeError(
            f"{folder} is in use by {owner}; wait for that run to end, stop it (it saves what is done), or "
            "choose another output.folder"
        )
    try:
        remove_leftovers(folder)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        with contextlib.suppress(OSError):  # it serves a message only; what a full disk means is said when saving
            write_atomically(folder / _OWNER, owner.encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / _OWNER).unlink()
        claim.release()
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing was begun
