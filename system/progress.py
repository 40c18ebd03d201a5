"""Progress in a terminal: one line that moves, drawn by tqdm, which comes with diffusers and with ComfyUI."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TextIO

from .telling import printable

_FORMAT = "{percentage:3.0f}%|{bar:24}| {desc}"


class ProgressLine:
    """A bar for each piece of work, one after the other.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None
        self._what = ""

    def show(self, what: str, done: int, total: int, text: str) -> None:
        """So much of `what` is done; text stands behind the bar. The line ends with the work."""
        from tqdm import tqdm

        try:
            if self._bar is None or what != self._what or done < self._bar.n:
                self.close()
                options = {"initial": done, "file": self._stream, "bar_format": _FORMAT, "dynamic_ncols": True}
                self._bar, self._what = tqdm(total=max(total, 1), **options), what
            self._bar.n, self._bar.total = done, max(total, 1)
            self._bar.set_description_str(printable(text), refresh=True)
        except (OSError, ValueError):  # the terminal is gone, or the stream closed
            self._bar = None
        if done >= total:
            self.close()

    def close(self) -> None:
        """End the line, so that others may follow."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
        self._bar = None


class NowAndThen:
    """Whether a log shall have a line of work that counts: the first, the last, and one every so many seconds."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._last_s = -interval_s

    def is_due(self, done: int, total: int) -> bool:
        now_s = self._clock()
        if done < total and now_s - self._last_s < self._interval_s:
            return False
        self._last_s = now_s
        return True
