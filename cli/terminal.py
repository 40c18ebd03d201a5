"""A job's events as lines on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from ..events import Event
from ..planning.report import describe_comparison
from ..system.pace import describe_progress
from ..system.stopping import say

_INTERVAL_S = 2.0
_BAR_WIDTH = 24


class Terminal:
    """Prints a job's events; an object of this class is what `on_event` takes.

    In a terminal, progress is one line that is written over; elsewhere a line now and then, so that a log stays short.
    Where nobody can read any more, on_gone is called.
    """

    def __init__(self, on_gone: Callable[[], None] = lambda: None) -> None:
        self._on_gone = on_gone
        self._is_terminal = sys.stdout.isatty()
        self._is_line_open = False
        self._last_s = 0.0

    def __call__(self, event: Event) -> None:
        values = dict(event.values)
        expert = values.pop("expert", None)  # the one of a pair that says it
        whose = "" if expert is None else f"[{expert}] "
        if event.kind == "progress":
            line = describe_progress(event.step, event.total, **values)
            self._show_progress(whose + line, event.step, event.total)
        elif line := _describe(event):
            self._end_line()
            self._say(whose + line)

    def _show_progress(self, line: str, done: int, total: int) -> None:
        is_last, now_s = done == total, time.monotonic()
        if self._is_terminal:
            filled = _BAR_WIDTH * done // max(1, total)
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            self._say(f"\r[{bar}] {line}\033[K", end="")  # the escape clears what a longer line has left
            self._is_line_open = True
            if is_last:
                self._end_line()
        elif is_last or now_s - self._last_s >= _INTERVAL_S:
            self._last_s = now_s
            self._say(line)

    def _end_line(self) -> None:
        if self._is_line_open:
            self._say("")
        self._is_line_open = False

    def _say(self, line: str, end: str = "\n") -> None:
        if not say(line, end=end):
            self._on_gone()


def _describe(event: Event) -> str:
    values = event.values
    if event.kind == "phase":
        return f"== {values['name']} {values.get('placement', '')}".rstrip()
    if event.kind == "quantized":
        return str(values["summary"])
    if event.kind == "step":
        return f"step {event.step}/{event.total} loss {values['loss']:.5f} {values['elapsed_s']:.2f} s"
    if event.kind == "eval":
        return f"step {event.step}/{event.total} evaluation loss {values['loss']:.6f}"
    if event.kind == "sample":
        return f"step {event.step}/{event.total} sample {values['file']}: {values['prompt']}"
    if event.kind == "forecast":
        return "\n".join([*describe_comparison(values["devices"]), *filter(None, [values.get("pace", "")])])
    return f"saved {values['path']}" if event.kind == "saved" else ""
