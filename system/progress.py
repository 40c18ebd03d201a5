"""Progress: in a terminal one line that moves, drawn by tqdm, which comes with diffusers and with ComfyUI."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TextIO

from .telling import printable

_RECENT = 20  # steps whose median time tells how long the rest takes
_FORMAT = "{percentage:3.0f}%|{bar:24}| {desc}"


class ProgressLine:
    """A bar for each piece of work if the stream is a terminal; elsewhere say gets a line every interval_s seconds."""

    def __init__(
        self,
        stream: TextIO | None,
        say: Callable[[str], object],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._say = say
        self._due: defaultdict[str, NowAndThen] = defaultdict(lambda: NowAndThen(interval_s, clock))
        self._bar: Any = None
        self._what = ""

    def show(self, what: str, done: int, total: int, text: str) -> None:
        """So much of `what` is done; text stands behind the bar. The line ends with the work."""
        from tqdm import tqdm

        if self._stream is None:
            if self._due[what].is_due(done, total):
                self._say(text)
            return

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


class Pace:
    """Measures from `restart` on, so that loading a model is not taken for slow work.
    The first count, and one that grows by more than one, stand for work found done, and restart the measurement too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = self._first_done = -1  # the first count cannot be taken for work
        self._first_s = clock()

    def restart(self) -> None:
        """Measure from here."""
        self._first_done, self._first_s = self._done, self._clock()

    def update(self, done: int, total: int) -> dict[str, float | None]:
        """So much is done now: "per_second", None until something was done since the restart, and seconds "left_s"."""
        is_found = done - self._done != 1 or self._done < 0
        self._done = done
        if is_found:
            self.restart()
        elapsed_s, num_done = self._clock() - self._first_s, done - self._first_done
        if not num_done or elapsed_s <= 0:
            return {"per_second": None, "left_s": None}
        return {"per_second": num_done / elapsed_s, "left_s": (total - done) * elapsed_s / num_done}


class StepPace:
    """Seconds of a step: the median of the last ones, so that the time left does not jump; None before there is one."""

    def __init__(self) -> None:
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self.seconds: float | None = None

    def update(self, elapsed_s: float) -> None:
        """A step took so long."""
        self._recent_s.append(elapsed_s)
        self.seconds = statistics.median(self._recent_s)

    def describe(self, step: int, total: int, loss: float) -> str:
        """ "step 12/500: loss 0.12345, 2.10 s/step, about 17 min left"."""
        seconds = self.seconds or 0.0
        left = describe_duration((total - step) * seconds)
        return f"step {step}/{total}: loss {loss:.5f}, {seconds:.2f} s/step, about {left} left"


def describe_progress(
    done: int, total: int, what: str, per_second: float | None = None, left_s: float | None = None
) -> str:
    """ "captions 12/500, 0.067 captions/s, about 2 h 01 min left"; without speed and time where they are not known."""
    line = f"{what} {done}/{total}"
    if per_second is None:
        return line
    line += f", {per_second:.1f} {what}/s" if per_second >= 10 else f", {per_second:.2g} {what}/s"
    return line if left_s is None or done >= total else f"{line}, about {describe_duration(left_s)} left"


def describe_duration(seconds: float) -> str:
    """ "45 s", "12 min" or "3 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
