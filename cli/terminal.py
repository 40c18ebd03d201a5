"""A job's events as lines on standard output."""

from __future__ import annotations

import sys

from ..events import Event
from ..planning.plan import describe_comparison
from ..system.progress import NowAndThen, ProgressLine, StepPace, describe_progress
from ..system.telling import say

_INTERVAL_S = 2.0


class Terminal:
    """Prints a job's events; an object of this class is what `on_event` takes.

    In a terminal, progress is one line that is written over; elsewhere a line now and then, so that a log stays short.
    """

    def __init__(self) -> None:
        self._line = ProgressLine(sys.stdout) if sys.stdout.isatty() else None
        self._lines: dict[str, NowAndThen] = {}  # of each of a pair, as below
        self._paces: dict[str, StepPace] = {}

    def __call__(self, event: Event) -> None:
        values = dict(event.values)
        expert = values.pop("expert", None)  # the one of a pair that says it
        whose = "" if expert is None else f"[{expert}] "
        if event.kind == "progress":
            self._show(whose, event, values["what"], describe_progress(event.step, event.total, **values))
        elif event.kind == "step":
            pace = self._paces.setdefault(whose, StepPace())
            pace.update(values["elapsed_s"])
            self._show(whose, event, "steps", pace.describe(event.step, event.total, values["loss"]))
        elif line := _describe(event):
            self._say(whose + line)

    def _show(self, whose: str, event: Event, what: str, text: str) -> None:
        if self._line is not None:
            self._line.show(whose + what, event.step, event.total, whose + text)
        elif self._lines.setdefault(whose, NowAndThen(_INTERVAL_S)).is_due(event.step, event.total):
            self._say(whose + text)

    def _say(self, line: str) -> None:
        if self._line is not None:
            self._line.close()
        say(line)


def _describe(event: Event) -> str:
    values = event.values
    if event.kind == "phase":
        return f"== {values['name']} {values.get('placement', '')}".rstrip()
    if event.kind == "quantized":
        return str(values["summary"])
    if event.kind == "continued":
        return "\n".join([f"goes on after step {event.step} with", *(f"  {line}" for line in values["what"])])
    if event.kind == "eval":
        return f"step {event.step}/{event.total} evaluation loss {values['loss']:.6f}"
    if event.kind == "sample":
        return f"step {event.step}/{event.total} sample {values['file']}: {values['prompt']}"
    if event.kind == "forecast":
        return "\n".join([*describe_comparison(values["devices"]), *filter(None, [values.get("pace", "")])])
    return f"saved {values['path']}" if event.kind == "saved" else ""
