"""How far a run is, read from its events.jsonl as that grows: curves, forecast, memory, and what is left to do."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..events import EventTail
from ..system.files import is_number
from ..system.progress import StepPace

_MOST_BLOCKS = 10_000  # of a model
_MOST_LINES, _MOST_TEXT = 100, 1000  # of what was changed, and characters of each
_RANK = re.compile(r"rank [0-9]+ ")  # before a card's name where several processes train
Point = tuple[float, ...]


@dataclass
class Progress:
    """What the events of a run have reported up to now.
    steps: per step done: step, loss, learning rate, seconds. evals: step and evaluation loss. total: steps of the run;
    0 before the first. phase: what it is doing, such as "captions" or "training". forecast: per device, as the event
    says it. memory: per device GB, as last measured. prompts: of samples, by file name.
    changes: step after which it went on with other settings -> a line for each."""

    path: Path
    steps: list[Point] = field(default_factory=list)
    evals: list[Point] = field(default_factory=list)
    total: int = 0
    phase: str = ""
    phase_progress: Mapping[str, Any] = field(default_factory=dict)
    forecast: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    blocks: Sequence[Any] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    changes: dict[int, list[str]] = field(default_factory=dict)
    _pace: StepPace = field(default_factory=StepPace)

    def __post_init__(self) -> None:
        self._tail = EventTail(self.path.parent, from_start=True)

    def update(self) -> bool:
        """Read what was written since the last call; whether there was anything. A file that is gone tells nothing."""
        try:
            size = self.path.stat().st_size
            if size < self._tail.offset:  # another run in the same place
                self.__init__(self.path)  # type: ignore[misc]
            if size == self._tail.offset:
                return False
            for event in self._tail.values():
                self._hear(event)
            return True
        except OSError:
            return False

    @property
    def step(self) -> int:
        return int(self.steps[-1][0]) if self.steps else 0

    @property
    def step_s(self) -> float | None:
        """Median of the last steps; None before there are any."""
        return self._pace.seconds

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at that pace."""
        return None if self.step_s is None else self.step_s * max(0, self.total - self.step)

    def _hear(self, event: Mapping[str, Any]) -> None:
        kind, step = event.get("kind"), event.get("step", 0)
        if "expert" in event or not _is_count(step):  # experts write their own
            return
        if kind == "step":
            values, total = [event.get(name) for name in ("loss", "learning_rate", "elapsed_s")], event.get("total", 0)
            if all(map(is_number, values)) and _is_count(total):
                _cut(self.steps, step)  # a resumed run does the steps after its checkpoint again
                _cut(self.evals, step)
                self.total = total
                self.phase = "training"
                self.steps.append((step, *values))  # type: ignore[arg-type]
                self._pace.update(values[-1])  # type: ignore[arg-type]
        elif kind == "eval" and is_number(event.get("loss")):
            _cut(self.evals, step)
            self.evals.append((step, event["loss"]))
        elif kind == "continued" and isinstance(lines := event.get("what"), list):
            self.changes[step] = [_text(line)[:_MOST_TEXT] for line in lines[:_MOST_LINES]]
        elif kind in ("saved", "stopped"):  # of a resumed run that was stopped before its first step
            _cut(self.steps, step + 1)
            _cut(self.evals, step + 1)
        elif kind == "phase":
            self.phase, self.phase_progress = _text(event.get("name")), {}
            self.blocks = _blocks(event["blocks"]) if "blocks" in event else self.blocks
        elif kind == "progress":
            counts = _numbers({name: event.get(name) for name in ("step", "total", "left_s")})
            self.phase_progress = {"what": _text(event.get("what")), **counts}
        elif kind == "forecast" and isinstance(devices := event.get("devices"), dict):
            parts, known = event.get("parts"), {name: self.forecast.get(name, {}).get("parts") for name in devices}
            parts = {name: _numbers(each) for name, each in parts.items()} if isinstance(parts, dict) else known
            self.forecast = {name: {**_numbers(each), "parts": parts.get(name)} for name, each in devices.items()}
        elif kind == "memory":
            of_cards = ((_RANK.sub("", name), _numbers(each)) for name, each in event.items() if isinstance(each, dict))
            self.memory = dict(reversed(list(of_cards)))  # of one name on several machines, the first one's
        elif kind == "sample" and isinstance(event.get("file"), str):
            self.prompts[Path(event["file"]).name] = _text(event.get("prompt"))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0 and is_number(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _numbers(values: Any) -> dict[str, float]:
    return {name: each for name, each in values.items() if is_number(each)} if isinstance(values, dict) else {}


def _blocks(runs: Any) -> Sequence[Any]:
    """Card and number of blocks, as often as the card changes; () for what is none such."""
    for each in runs if isinstance(runs, list) else ():
        if not (isinstance(each, list) and [type(one) for one in each] == [str, int] and 0 < each[1] < _MOST_BLOCKS):
            return ()
    return runs if isinstance(runs, list) and len(runs) < _MOST_BLOCKS else ()


def _cut(points: list[Point], step: int) -> None:
    """Leave out what an attempt that was given up did from this step on."""
    while points and points[-1][0] >= step:
        points.pop()


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points: means of runs of neighbours, the last as it is."""
    if len(points) <= most:
        return list(points)
    size = math.ceil((len(points) - 1) / max(1, most - 1))
    groups = [points[start : min(start + size, len(points) - 1)] for start in range(0, len(points) - 1, size)]
    means = [tuple(math.fsum(column) / len(group) for column in zip(*group, strict=True)) for group in groups]
    return [*((round(mean[0]), *mean[1:]) for mean in means), points[-1]]
