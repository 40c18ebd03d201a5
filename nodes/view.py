"""How a job's events look on a node: a bar, one line of text, and the same events for the browser."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..events import Event
from ..system.progress import NowAndThen, ProgressLine, StepPace, describe_progress
from . import host

_log = logging.getLogger(__name__)

_TEXT_INTERVAL_S = 0.25
_LOG_INTERVAL_S = 10.0  # of lines in a log that is no terminal
_PHASES = {
    "captions": "Encoding captions",
    "latents": "Encoding images",
    "conditions": "Encoding references and control clips",
    "loading": "Loading the model onto its devices",
    "training": "Training",
    "samples": "Drawing sample pictures",
}


class JobView(host.NodeView):
    """Listens to a job; an object of this class is what `on_event` takes.
    Every event is sent to the browser as {"node", "kind", "step", "total", "values"}; see docs/internals/events.md."""

    def __init__(self, node_id: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(node_id)
        self._texts = NowAndThen(_TEXT_INTERVAL_S, clock)
        self._pace = StepPace()
        self._lines = ProgressLine(sys.stderr, lambda text: _log.info("training: %s", text), _LOG_INTERVAL_S, clock)
        self.pictures: dict[int, Path] = {}  # the newest of each prompt
        self._phase = ""  # the last phase
        self._memory = ""  # every rank's peak in the last event; "" of one process, whose cards the page shows

    def __call__(self, event: Event) -> None:
        host.send_event({"node": self.node_id, **vars(event), "values": dict(event.values)})
        if event.kind == "phase":
            self.begin_bar()
            self.show_progress(0, 1)
        if event.kind == "step":
            self._pace.update(event.values["elapsed_s"])
        if event.kind == "memory":
            ranks = ((name, each) for name, each in event.values.items() if name.startswith("rank "))
            peaks = ", ".join(f"{name} {each['peak']:.1f} GB" for name, each in ranks)
            self._memory = f"peak memory: {peaks}" if peaks else ""
        text = self._line(event)
        if event.kind in {"progress", "step"}:
            self.show_progress(event.step, event.total)
            self._lines.show(event.values.get("what", "steps"), event.step, event.total, text)
        else:
            self._lines.close()
        if event.kind == "sample":
            path = self.pictures[event.values["index"]] = Path(event.values["path"])
            self.show_picture(path, event.step, event.total)
        if text and (self._texts.is_due(event.step, event.total) or event.kind == "phase"):
            self.show_text(text)

    def _line(self, event: Event) -> str:
        values = event.values
        if event.kind == "phase":
            text = _PHASES.get(values["name"], values["name"])
            self._phase = f"{text}: {values['placement']}" if values.get("placement") else text
            return self._phase
        if event.kind == "forecast" and not event.total:  # before the first step
            return "\n".join(filter(None, [self._phase, values.get("pace", "")]))
        if event.kind == "progress":
            return describe_progress(event.step, event.total, **values)
        if event.kind == "step":
            text = self._pace.describe(event.step, event.total, values["loss"]).capitalize()
            losses = ", ".join(f"rank {rank} {loss:.5f}" for rank, loss in enumerate(values.get("rank_losses", ())))
            return "\n".join(filter(None, [text, f"loss: {losses}" if losses else "", self._memory]))
        if event.kind == "eval":
            return f"Step {event.step}/{event.total}: evaluation loss {values['loss']:.5f}"
        return ""
