"""Ends a process that would wait for ever: it hangs, another rank does, or the launcher that started it is gone.

A call that does not return cannot look at a clock, so these are threads beside it. What they find is told with the
traceback of the thread that trains, also to torchrun, which then ends the other processes.

Whatever a rank does between two meetings with the others has a limit. Work of a kind and size that was done twice may
take `limit_s` beyond three of the longest of its kind so far. Of other work nobody knows how long it takes: it
compiles, or reads from a slow disk. There it counts how long the thread has not moved, and nothing was read. A rank
that waits for others has no limit, for each of them has one. Whoever cannot even be watched, stopped or in a call that
keeps Python's lock, gives no signs of life (signs.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from ...system.launched import parent_at_start
from ...system.telling import say
from .signs import BEAT_S, LONGEST_S, TRACEBACK_SIGNAL, Signs

_POLL_S = 0.5
_LONG_CALL_S = 300.0  # in which a rank that loads may give no sign of life: reading keeps Python's lock
_SHORTEST_S = 5.0  # the same of one that trains, at least
_GRACE_S = 5.0  # to leave by itself, for who knows that another is lost
_OFTEN = 2  # a size is known from then on: the first time compiles, and chooses kernels
_COMPILING = ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py")
_ANY = (None,)  # the sizes of work that has none


@dataclass(frozen=True)
class _Work:
    """What the watched thread does.

    Args:
        limit_s: None if nobody knows.
        is_timed: whether what it takes tells what such work takes.
        since: when it began, or gave word last.
    """

    kind: str
    limit_s: float | None
    is_timed: bool
    since: float


class Watch:
    """Watches the thread that makes it.

    Args:
        limit_s: how much longer than three of the longest so far work of a known kind may take.
    Attributes:
        lost: what is known of a rank that gives no sign of life; "" while all do. Who waits for it need not.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._watched = threading.get_ident()
        self._parent = parent_at_start()
        self._longest: dict[str, float] = {}
        self._times: Counter[tuple[str, Hashable]] = Counter()
        self._work: _Work | None = _Work("", None, False, time.monotonic())
        self._still: tuple[Any, float] = (None, 0.0)
        self.lost, self._lost_at = "", 0.0
        self._signs: Signs | None = None
        self._is_leaving = False
        self._is_over = threading.Event()
        _tell_on_signal()
        threading.Thread(target=self._run, name="devicebridge-watch", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    # ---- what the watched thread says of itself

    @contextmanager
    def doing(self, kind: str, sizes: Iterable[Hashable] = _ANY) -> Iterator[None]:
        """Inside, this rank does work of this kind, and is ended if it does not come out.

        Args:
            kind: as the subject of a sentence.
            sizes: of what is computed. One that came less than twice makes it work of unknown length.
        """
        named = {(kind, size) for size in sizes}
        is_known = kind in self._longest and all(self._times[each] >= _OFTEN for each in named)
        limit_s = self._limit_s + 3 * self._longest[kind] if is_known else None
        outer = self._pause(_Work(kind, limit_s, all(self._times[each] for each in named), time.monotonic()))
        try:
            yield
            self._times.update(named)
        finally:
            self._resume(outer)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others."""
        outer = self._pause(None)
        try:
            yield
        finally:
            self._resume(outer)

    def alive(self) -> None:
        """The work in hand goes on: what comes next of it has all of its time again."""
        self._resume(self._pause(self._work))

    def leave(self) -> None:
        """This rank knows that another one is lost, and ends by itself."""
        self._is_leaving = True

    def _pause(self, inner: _Work | None) -> _Work | None:
        """Go over to other work; returns what was in hand."""
        outer = self._work
        self._note(outer)
        self._work = inner
        return outer

    def _resume(self, outer: _Work | None) -> None:
        self._note(self._work)
        self._work = None if outer is None else replace(outer, since=time.monotonic())

    def _note(self, work: _Work | None) -> None:
        if work is not None and work.is_timed:
            self._longest[work.kind] = max(self._longest.get(work.kind, 0.0), time.monotonic() - work.since)

    # ---- beside it

    def _run(self) -> None:
        while not self._is_over.wait(_POLL_S):
            now, work = time.monotonic(), self._work
            if os.getppid() != self._parent:
                self._end("the launcher of this process is gone")
            if self.lost and not self._is_leaving and now > self._lost_at + _GRACE_S:
                self._end(self.lost)
            if work is not None and not self.lost and (why := self._overdue(work, now)):
                self._end(why)

    def _overdue(self, work: _Work, now: float) -> str:
        """Why this work counts as hung; "" if it does not."""
        if work.limit_s is None:
            movement = self._movement()
            if movement != self._still[0] or self._still[1] < work.since:
                self._still = movement, now
            is_still = now > self._still[1] + max(LONGEST_S, self._limit_s)
            return f"{work.kind or 'its work'} has not moved for {now - self._still[1]:.0f} s" if is_still else ""
        if now < work.since + work.limit_s:
            return ""
        if self._is_compiling() or (self._signs is not None and self._signs.is_another_compiling):
            if self._work is work:
                self._work = replace(work, limit_s=None, is_timed=False)
            return ""
        is_waiting = any("torch/distributed/" in frame.f_code.co_filename for frame in self._stack()[:3])
        grace_s = self._patience_s + 2 * BEAT_S if is_waiting else 0.0  # whom it waits for ends first, and tells more
        is_over = now > work.since + work.limit_s + grace_s
        return f"{work.kind} has not ended in the {work.limit_s:.0f} s that it may take" if is_over else ""

    def _stack(self) -> list[FrameType]:
        """Of the watched thread, the innermost first; not to be kept: it holds the thread's tensors."""
        return [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(self._watched))]

    def _movement(self) -> Any:
        """What changes while the thread computes or reads."""
        return [(id(frame.f_code), frame.f_lasti) for frame in self._stack()], _bytes_read()

    def _is_compiling(self) -> bool:
        """In any thread: backwards are compiled in autograd's."""
        stacks = (traceback.walk_stack(frame) for frame in sys._current_frames().values())
        return any(frame.f_code.co_filename.endswith(_COMPILING) for stack in stacks for frame, _ in stack)

    def listen(self, signs: Signs) -> None:
        """From now on give signs of life, and look for those of others; before all ranks meet first."""
        self._signs = signs
        signs.give(_LONG_CALL_S)
        threading.Thread(target=self._listen, args=(signs,), name="devicebridge-signs", daemon=True).start()

    def _listen(self, signs: Signs) -> None:
        last = time.monotonic()
        try:
            while not (self._is_over.wait(BEAT_S) or self.lost):
                signs.give(self._patience_s if self._longest else _LONG_CALL_S, is_compiling=self._is_compiling())
                last, before = time.monotonic(), last
                if silent := signs.look(min(last - before, 2 * BEAT_S)):
                    self._lose(signs, silent)
        except RuntimeError:  # the store has ended with torchrun or its machine, which others notice, too
            return

    @property
    def _patience_s(self) -> float:
        """How long others that train need to wait for a sign of this rank."""
        return max(_SHORTEST_S, self._limit_s / 2)

    def _lose(self, signs: Signs, silent: list[int]) -> None:
        names = " and ".join(f"rank {rank}" for rank in silent)
        self.lost = (
            f"{names} gave no sign of life for {self._patience_s:.0f} s or longer: stopped, in a call that never "
            "returns, or on a machine that is gone"
        )
        self._lost_at = time.monotonic()
        signs.end_here(silent)

    def name_lost(self) -> str:
        """Which ranks of this machine have ended; "" if none is known."""
        end = time.monotonic() + _POLL_S  # a process that has just closed its connections may not have ended yet
        while self._signs is not None and not (found := self._signs.gone()) and time.monotonic() < end:
            time.sleep(_POLL_S / 10)
        return "" if self._signs is None else " and ".join(f"rank {rank}" for rank in found)

    def _end(self, why: str) -> None:
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._watched)))
        rank = os.environ.get("RANK", "0")
        text = f"devicebridge: rank {rank} is ended: {why}. It was here:\n{stack}"
        try:
            say(text, sys.stderr)
            record_error(RuntimeError(text))
        finally:
            os._exit(1)


def _tell_on_signal() -> None:
    """Have the system's own signal print where all threads are, also one that keeps Python's lock."""
    if TRACEBACK_SIGNAL is not None:
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # an stderr that is no file
            faulthandler.register(TRACEBACK_SIGNAL, all_threads=True)


def _bytes_read() -> Any:
    """What this process has read from a disk so far: pages, and blocks."""
    if sys.platform == "win32":
        return None
    usage = importlib.import_module("resource").getrusage(0)
    return usage.ru_majflt, usage.ru_inblock


def record_error(error: BaseException) -> None:
    """Leave an error where torchrun looks for it, for the summary that it prints."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
