"""What has changed since the last look: for pages that are open, so that none needs to ask again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .queue import JobQueue
from .store import RunStore

_MOST_POINTS = 500  # in one message; a page that gets more asks for the run again


@dataclass
class _Known:
    """What pages know of one run."""

    state: str
    last_step: int
    last_eval: int
    num_files: int


@dataclass
class News:
    """Gathers once a second; looks at running trainings, and at others only as they end or appear."""

    store: RunStore
    queue: JobQueue
    is_busy: bool = False  # a training runs
    _known: dict[str, _Known] = field(default_factory=dict)
    _jobs: list[dict[str, Any]] = field(default_factory=list)

    def gather(self) -> dict[str, Any]:
        """Look after the queue, and what is new: {} or {"runs": [...], "jobs": [...], "gone": [...]}."""
        self.queue.tick()
        looked = [self._look(run) for run in self.store.shown()]
        news = [values for values in looked if values is not None]
        self.is_busy = any(known.state == "running" for known in self._known.values())
        found: dict[str, Any] = {"runs": news} if news else {}
        if gone := [run for run in self._known if run not in self.store]:
            found["gone"] = gone
            for run in gone:
                del self._known[run]
        jobs = self.queue.describe()
        if jobs != self._jobs:
            self._jobs = found["jobs"] = jobs
        return found

    def _look(self, run: str) -> dict[str, Any] | None:
        record, known = self.store.record(run), self._known.get(run)
        if known is not None and known.state != "running" and (record is None or record.state == known.state):
            return None
        is_new = self.store.progress_is_new(run)
        summary = self.store.summary(run)
        progress = self.store.progress(run)
        num_files = self.store.num_files(run)
        now = _Known(summary["state"], progress.step, int(progress.evals[-1][0]) if progress.evals else -1, num_files)
        if known == now and not is_new:
            return None
        self._known[run] = now
        if known is None:
            return summary
        first = min(known.last_step, now.last_step - 1) if now.last_step < known.last_step else known.last_step
        points = [point for point in progress.steps if point[0] > first]
        evals = [point for point in progress.evals if point[0] > min(known.last_eval, now.last_eval - 1)]
        values = {"points": points, "evals": evals} if len(points) <= _MOST_POINTS else {"is_stale": True}
        return {**summary, **values, "memory": progress.memory, "files_changed": num_files != known.num_files}
