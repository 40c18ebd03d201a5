"""What a job tells the outside while it runs: plain events, to a callback and as JSON lines in the run folder.

docs/internals/events.md lists kinds and values.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .system.files import what_helps

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One thing that happened; step and total count optimizer steps, captions or images."""

    kind: str
    step: int = 0
    total: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


class EventLog:
    """Hands every event to a listener, appends it to events.jsonl and writes scalars for TensorBoard.

    Args:
        folder: run folder; made if it does not exist.
        listener: called in the thread that trains; None for nobody.
        tensorboard: write scalars to folder/tensorboard; said once and skipped where the package is missing.
    """

    def __init__(self, folder: Path, listener: Listener | None = None, *, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._listener = listener
        self._file = (folder / "events.jsonl").open("a", encoding="utf-8")
        self._scalars = _make_scalar_writer(folder / "tensorboard") if tensorboard else None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # of a full disk, which has been told of
            self._file.close()
        if self._scalars is not None:
            self._scalars.close()

    def emit(self, kind: str, step: int = 0, total: int = 0, **values: Any) -> None:
        """Announce one event."""
        event = Event(kind, step, total, values)
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, "total": total, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            message = f"{self._file.name} cannot be written: {error.strerror}; {what_helps(error)}"
            raise OSError(error.errno, message) from error
        if self._scalars is not None and kind in {"step", "eval"}:
            for name, value in values.items():
                if not isinstance(value, list):
                    self._scalars.add_scalar(f"{kind}/{name}", value, step)
        if self._listener is not None:
            self._listener(event)


class EventTail:
    """Hears what another process appends to an events.jsonl from now on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "events.jsonl"
        self._offset = self._file.stat().st_size if self._file.exists() else 0

    def new(self) -> list[Event]:
        """What was written since the last call, whole lines alone."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._offset)
            lines, _, _ = file.read().rpartition(b"\n")
        self._offset += len(lines) + bool(lines)
        return [_event_of(line) for line in lines.splitlines()]


def _event_of(line: bytes) -> Event:
    values = json.loads(line)
    return Event(values.pop("kind"), values.pop("step"), values.pop("total"), values)


class NoEvents(EventLog):
    """Of a process that another one speaks for."""

    def __init__(self) -> None:
        self._scalars = None

    def __exit__(self, *error: object) -> None:
        """There is nothing to close."""

    def emit(self, kind: str, step: int = 0, total: int = 0, **values: Any) -> None:
        """Nobody is told."""


def _make_scalar_writer(folder: Path) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _log.warning("TensorBoard scalars are not written: the package is missing (pip install tensorboard)")
        return None
    return SummaryWriter(str(folder))


def first_line(error: BaseException) -> str:
    """What an error says first, else its type; the lines after it are for developers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
