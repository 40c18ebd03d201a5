"""How a job's events look on a node: a bar, one line of text, and the same events for the browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.pace import describe_duration, describe_progress
from . import host

if TYPE_CHECKING:
    from ..events import Event

_TEXT_INTERVAL_S = 0.25
_PHASES = {
    "captions": "Encoding captions",
    "latents": "Encoding images",
    "loading": "Loading the model onto its devices",
    "training": "Training",
    "samples": "Drawing sample pictures",
}


class JobView(host.NodeView):
    """Listens to a job; an object of this class is what `on_event` takes.

    Every event is also sent to the browser as {"node", "kind", "step", "total", "values"}; see
    docs/internals/events.md.
    """

    def __init__(self, node_id: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(node_id)
        self._clock = clock
        self._last_text_s = -_TEXT_INTERVAL_S  # the first line is never too early
        self._seconds_per_step = 0.0
        self.pictures: dict[int, Path] = {}  # the newest of each prompt

    def __call__(self, event: Event) -> None:
        host.send_event(
            {
                "node": self.node_id,
                "kind": event.kind,
                "step": event.step,
                "total": event.total,
                "values": dict(event.values),
            }
        )
        if event.kind in {"progress", "step"}:
            self.show_progress(event.step, event.total)
        if event.kind == "sample":
            path = self.pictures[event.values["index"]] = Path(event.values["path"])
            self.show_picture(path, event.step, event.total)
        self._show_line(event)

    def _show_line(self, event: Event) -> None:
        text = self._line(event)
        now = self._clock()
        is_last = event.step == event.total
        if text and (event.kind == "phase" or is_last or now - self._last_text_s >= _TEXT_INTERVAL_S):
            self._last_text_s = now
            self.show_text(text)

    def _line(self, event: Event) -> str:
        values = event.values
        if event.kind == "phase":
            text = _PHASES.get(values["name"], values["name"])
            return f"{text}: {values['placement']}" if values.get("placement") else text
        if event.kind == "progress":
            return describe_progress(event.step, event.total, **values)
        if event.kind == "step":
            return self._step_line(event.step, event.total, values["loss"], values["elapsed_s"])
        if event.kind == "eval":
            return f"Step {event.step}/{event.total}: evaluation loss {values['loss']:.5f}"
        return ""

    def _step_line(self, step: int, total: int, loss: float, elapsed_s: float) -> str:
        """The speed is smoothed over about ten steps, so that the time left does not jump."""
        before = self._seconds_per_step or elapsed_s
        self._seconds_per_step = 0.9 * before + 0.1 * elapsed_s
        left_s = (total - step) * self._seconds_per_step
        return (
            f"Step {step}/{total}: loss {loss:.5f}, {self._seconds_per_step:.2f} s/step, "
            f"about {describe_duration(left_s)} left"
        )
