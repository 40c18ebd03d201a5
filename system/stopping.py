"""How a process of ours is asked to stop: Ctrl-C, SIGTERM (`kill`, a shutdown) or SIGHUP (its terminal has closed).

The first asks for an orderly end, with everything saved. A second Ctrl-C ends at once; a second SIGTERM or SIGHUP
changes nothing, for a closing session sends several.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from .telling import say

STOPPED = 130  # exit code of whoever was asked to stop, by whatever signal

Handler = Callable[[int, FrameType | None], object]


class Stopped(Exception):
    """The user asked to stop; what was done until then is kept."""


def never() -> bool:
    """A should_stop for work that nobody stops."""
    return False


class StopRequest:
    """Whether a stop was asked for; calling it tells."""

    def __init__(self) -> None:
        self._is_asked = False

    def __call__(self) -> bool:
        return self._is_asked

    def ask(self) -> None:
        """Ask, and say so; a second call is a no-op."""
        if not self._is_asked:
            self._is_asked = True
            say("stopping; what is done is saved", sys.stderr)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """The first signal asks for a stop between two steps; a second Ctrl-C interrupts at once."""
    stop = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.ask()

    with _handling(stop_signals(), ask):
        yield stop


@contextmanager
def interrupt_on_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C, but only once."""
    is_interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            raise KeyboardInterrupt

    with _handling(stop_signals()[1:], interrupt):
        yield


def stop_signals() -> list[signal.Signals]:
    """SIGINT, then the others that this system has. A SIGHUP that is ignored stays so: that is what nohup is for."""
    known = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [each for each in known if each.name != "SIGHUP" or signal.getsignal(each) is not signal.SIG_IGN]


@contextmanager
def _handling(numbers: list[signal.Signals], handler: Handler) -> Iterator[None]:
    """Only the main thread may arrange that; elsewhere this is a no-op."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
