"""What a running training is asked for from outside, as files in its folder: whoever can write there may ask.

A file in place of a signal or a socket: it works between any two processes, on every system. A run forgets what was
asked of the one before it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, get_args

Request = Literal["stop", "save", "sample"]
REQUESTS: tuple[Request, ...] = get_args(Request)


def nothing_asked(what: Request) -> bool:
    """Of a run that nobody outside knows."""
    return False


class Requests:
    """The requests of one run folder: its files stop_now, save_now and sample_now."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder

    def ask(self, what: Request) -> None:
        """Ask for something at the end of the step in hand; asked twice is asked once. Raises: OSError."""
        with contextlib.suppress(FileExistsError):  # nor is a link there followed
            self._file(what).touch(exist_ok=False)

    def is_asked(self, what: Request) -> bool:
        return os.path.lexists(self._file(what))

    def take(self, what: Request) -> bool:
        """Whether that was asked for; it is not any more."""
        try:
            self._file(what).unlink()
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Forget everything that was asked."""
        for what in REQUESTS:
            self.take(what)

    def _file(self, what: Request) -> Path:
        return self._folder / f"{what}_now"
