"""What a job tells the outside while it runs: plain events (docs/internals/events.md), to a callback and as JSON lines
in the run folder."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .system.files import what_helps
from .system.import_faults import import_fault

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger(__name__)
_CHUNK = 1 << 22  # bytes of the file that are read at a time
_MOST_LINE = 1 << 24  # bytes; what is longer is no event


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
    What a full disk or a closed pipe keeps from being written is warned of once, and left out: it ends no training.
    folder: of the run, made if it is not there; None for a process that another speaks for, whom nobody hears.
    listener: called in the thread that trains; None for nobody.
    tensorboard: write scalars to folder/tensorboard; said once and skipped where the package is missing."""

    def __init__(self, folder: Path | None, listener: Listener | None = None, *, tensorboard: bool = False) -> None:
        self._listener, self._file = listener, None
        self._is_whole, self._has_warned = True, False  # the file's last line
        self._scalars: SummaryWriter | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "events.jsonl").open("ab", buffering=0)
        try:
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._scalars = SummaryWriter(str(folder / "tensorboard"))
        except Exception as error:  # whatever its import raises, or a full disk
            _log.warning("TensorBoard scalars are not written: %s", import_fault(error) or error)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._file is not None:
                self._file.close()
            if self._scalars is not None:
                self._scalars.close()
        except OSError as failed:
            self._warn(failed)

    def emit(self, kind: str, step: int = 0, total: int = 0, **values: Any) -> None:
        if self._file is None:
            return
        try:
            line = json.dumps({"kind": kind, "step": step, "total": total, **values}).encode() + b"\n"
            data = line if self._is_whole else b"\n" + line
            self._is_whole = False  # after an OSError the next line is whole all the same
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._is_whole = True
            if self._scalars is not None and kind in {"step", "eval"}:
                for name, value in values.items():
                    if not isinstance(value, list):
                        self._scalars.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:
            self._scalars = None  # whose writer waits for ever once its own thread has met a full disk
            self._warn(error)
        if self._listener is not None:
            try:
                self._listener(Event(kind, step, total, values))
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            name, why = self._file and self._file.name, f"{error.strerror or error}; {what_helps(error)}"
            _log.warning("the training goes on, but not all of it can be written to %s: %s", name, why)


class EventTail:
    """Hears what another process appends to an events.jsonl, from now on or, from_start, from its beginning."""

    def __init__(self, folder: Path, *, from_start: bool = False) -> None:
        self.file, self._rest = folder / "events.jsonl", b""
        self.offset = self.file.stat().st_size if self.file.exists() and not from_start else 0

    def new(self) -> list[Event]:
        """What was written since the last call, whole lines alone."""
        if not self.file.exists():
            return []
        return [Event(values.pop("kind"), values.pop("step"), values.pop("total"), values) for values in self.values()]

    def values(self) -> Iterator[dict[str, Any]]:
        """The same as anybody's JSON; lines that are no object, or far too long for an event, are left out."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            while chunk := file.read(_CHUNK):
                self.offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError, RecursionError):  # cut short; brackets inside brackets
                        if isinstance(values := json.loads(line), dict):
                            yield values
                self._rest = self._rest if len(self._rest) < _MOST_LINE else b""


def first_line(error: BaseException) -> str:
    """What an error says first, else its type; the lines after it are for developers."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
