"""Ends a process that would wait for ever: its step takes far too long, or the launcher that started it is gone.

A collective that waits for a process that hangs does not return, so this is a thread beside it. What it finds is told
with the traceback of the thread that trains, also to torchrun, which then ends the other processes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ...system.stopping import say

_POLL_S = 0.5
FIRST_STEP_S = 1800.0  # what the first step may take: it compiles, and libraries choose their kernels


class Watch:
    """Watches the thread that makes it.

    Args:
        limit_s: how much longer than three of the longest steps so far a step may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._watched = threading.get_ident()
        self._parent = os.getppid()
        self._longest_s: float | None = None
        self._deadline: float | None = None
        self._start = 0.0
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="devicebridge-watch", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    @property
    def limit_s(self) -> float:
        """Seconds that the next step may take."""
        if self._longest_s is None:
            return max(FIRST_STEP_S, self._limit_s)
        return self._limit_s + 3 * self._longest_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, this process computes its part of a step, and is ended if it does not come out."""
        start = time.monotonic()
        self._deadline = start + self.limit_s
        try:
            yield
        finally:
            self._deadline = None
        self._start = start

    def met(self) -> None:
        """All ranks have computed the step: what it took the slowest of them is known."""
        self._longest_s = max(self._longest_s or 0.0, time.monotonic() - self._start)

    def _run(self) -> None:
        while not self._is_over.wait(_POLL_S):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._end(f"this step has not ended in the {self.limit_s:.0f} s that it may take")
            if os.getppid() != self._parent:
                self._end("the launcher of this process is gone")

    def _end(self, why: str) -> None:
        frame = sys._current_frames().get(self._watched)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        rank = os.environ.get("RANK", "0")
        text = f"devicebridge: rank {rank} is ended: {why}. It was here:\n{stack}"
        try:
            say(text, sys.stderr)
            record_error(RuntimeError(text))
        finally:
            os._exit(1)


def record_error(error: BaseException) -> None:
    """Leave an error where torchrun looks for it, for the summary that it prints."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
