"""How a process of ours is stopped: Ctrl-C, SIGTERM (`kill`, a shutdown) or SIGHUP (its terminal has closed). The
first asks for an orderly end. A second Ctrl-C ends at once; a closing session sends several of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, get_args

from .telling import say

STOPPED = 130  # exit code of a process that a signal has stopped

Handler = Callable[[int, FrameType | None], object]


class Stopped(Exception):
    """The user has stopped it; what was done until then is kept."""


def never() -> bool:
    """A should_stop for work that nobody stops."""
    return False


_progress: list[Callable[[], None]] = []


def alive() -> None:
    """Long work goes on, for whoever ends this process where it does not."""
    for hear in _progress:
        hear()


def on_progress(*hear: Callable[[], None]) -> None:
    """Have these called by alive, and nothing else any more."""
    _progress[:] = hear


class StopRequest:
    """Whether a stop was requested; calling it tells."""

    _is_asked = False

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


# ---- what others request of a running training, as files in its folder: whoever can write there may ask


Request = Literal["stop", "save", "sample"]
REQUESTS: tuple[Request, ...] = get_args(Request)


@dataclass(frozen=True)
class Requests:
    """The requests of one run folder: its files stop_now, save_now and sample_now."""

    folder: Path

    def ask(self, what: Request) -> None:
        """Ask for something at the end of the step in hand; two equal requests are one. Raises: OSError."""
        with contextlib.suppress(FileExistsError):  # nor is a link there followed
            self._file(what).touch(exist_ok=False)

    def is_asked(self, what: Request) -> bool:
        return os.path.lexists(self._file(what))

    def take(self, what: Request) -> bool:
        """Whether that was requested; the request is gone then."""
        try:
            self._file(what).unlink()
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Forget every request."""
        for what in REQUESTS:
            self.take(what)

    def _file(self, what: Request) -> Path:
        return self.folder / f"{what}_now"


# ---- a command that starts another as several processes, and what the two say to each other: files of a folder


_VARIABLE = "DEVICEBRIDGE_LAUNCH"


class Launch(Requests):
    """The folder of one launch, which may be asked to stop."""

    @property
    def environment(self) -> Mapping[str, str]:
        """By which the processes find it."""
        return {_VARIABLE: str(self.folder)}

    def is_first_to_say(self, text: str) -> bool:
        """Whether no other process has asked this of the same text before."""
        try:
            (self.folder / f"said-{zlib.crc32(text.encode())}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def say_code(self, code: int) -> None:
        """What the command is to end with, if all processes end well."""
        (self.folder / "code").write_text(str(code), encoding="ascii")

    def code(self) -> int:
        """What a process has said; 0 if none has."""
        file = self.folder / "code"
        return int(file.read_text(encoding="ascii")) if file.exists() else 0


def find_launch() -> Launch | None:
    """The launch that this process is of; None if torchrun was called by somebody else."""
    folder = os.environ.get(_VARIABLE, "")
    return Launch(Path(folder)) if folder and Path(folder).is_dir() else None
