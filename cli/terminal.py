"""A job's events as lines on standard output."""

from __future__ import annotations

import sys
from collections import defaultdict

from ..events import Event
from ..planning.plan import describe_comparison
from ..system.progress import ProgressLine, StepPace, describe_progress
from ..system.telling import say

_INTERVAL_S = 2.0


class Terminal:
    """Prints a job's events; an object of this class is what `on_event` takes."""

    def __init__(self) -> None:
        self._line = ProgressLine(sys.stdout, say, _INTERVAL_S)
        self._paces: defaultdict[str, StepPace] = defaultdict(StepPace)  # of each of a pair

    def __call__(self, event: Event) -> None:
        values = dict(event.values)
        expert = values.pop("expert", None)  # the one of a pair that says it
        whose = "" if expert is None else f"[{expert}] "
        if event.kind == "progress":
            text = whose + describe_progress(event.step, event.total, **values)
            self._line.show(whose + values["what"], event.step, event.total, text)
        elif event.kind == "step":
            self._paces[whose].update(values["elapsed_s"])
            text = self._paces[whose].describe(event.step, event.total, values["loss"])
            self._line.show(f"{whose}steps", event.step, event.total, whose + text)
        elif line := _describe(event):
            self._line.close()
            say(whose + line)


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
