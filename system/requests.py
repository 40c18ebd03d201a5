"""What a running training is asked for from outside, as files in its folder: whoever can write there may ask.

A file in place of a signal or a socket: it works between any two processes, on every system, and survives neither
(a run clears what was asked of the one before it).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal, get_args

Request = Literal["stop", "save", "sample"]
REQUESTS: tuple[Request, ...] = get_args(Request)
_FOLDER = ".requests"


def nothing_asked(what: Request) -> bool:
    """Of a run that nobody outside knows."""
    return False


class Requests:
    """The requests of one run folder, which need not hold any."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / _FOLDER

    def ask(self, what: Request) -> None:
        """Ask for something at the end of the step in hand; asked twice is asked once. Raises: OSError."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / what).touch()

    def is_asked(self, what: Request) -> bool:
        return (self._folder / what).exists()

    def take(self, what: Request) -> bool:
        """Whether that was asked for; it is not any more."""
        try:
            (self._folder / what).unlink()
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Forget everything that was asked."""
        for what in REQUESTS:
            self.take(what)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
