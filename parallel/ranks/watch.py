"""Ends a process that would wait for ever: it hangs, another rank does, or the launcher that started it is gone.
faulthandler ends a rank whose work takes longer than `timeout_s`; torchrun then ends the others. Lost ranks of this
machine are killed, so that whoever is inside a collective with them comes out and saves."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...system.stopping import on_progress
from ...system.telling import say
from .place import RankPlace

_BEAT_S = 2.0
_SHORTEST_S = 5.0  # of silence
_GRACE_S = 5.0  # longer than others, for who saves
_SAVING_S = 30.0  # to leave by itself and to save, for who knows that another is lost; as long as torchrun gives
_LONGEST_S = 1800.0  # at least, for what nobody knows the length of


class Watch:
    """Watches the thread that makes it. A rank may be silent for nine tenths of timeout_s, so that it is named. The
    first rank, which saves, ends last. Attributes: lost: what is known of a rank that gives no sign of life; "" while
    all do. Who waits for it need not."""

    def __init__(self, timeout_s: float, *, is_first: bool = False) -> None:
        on_progress(self.alive)
        self._timeout_s, self._extra_s = timeout_s, 2 * _GRACE_S if is_first else 0.0
        self._parent = os.getppid()
        self._limit_s = 0.0  # of what is done; 0 waits
        self.lost, self._is_leaving = "", False
        self._is_over = threading.Event()
        threading.Thread(target=self._guard_launcher, name="devicebridge-watch", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        on_progress()
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def doing(self, *, is_long: bool = False) -> Iterator[None]:
        """Inside, this rank works, and is ended if it does not come out. is_long: half an hour is no hang (loading)."""
        yield from self._within((max(_LONGEST_S, self._timeout_s) if is_long else self._timeout_s) + self._extra_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield from self._within(0.0)

    def _within(self, limit_s: float) -> Iterator[None]:
        outer, self._limit_s = self._limit_s, limit_s
        self.alive()
        try:
            yield
        finally:
            self._limit_s = outer
            self.alive()

    def alive(self) -> None:
        """The work in hand goes on: what comes next of it has all of its time again."""
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
        else:
            faulthandler.cancel_dump_traceback_later()

    def leave(self) -> None:
        self._is_leaving = True

    def _guard_launcher(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            if os.getppid() != self._parent:
                _end("the launcher of this process is gone")

    def listen(self, store: Any, place: RankPlace) -> None:
        """From now on give signs of life in torchrun's store, and look for those of others."""
        arguments = (store.clone(), place)  # a connection of its own: others wait in theirs
        threading.Thread(target=self._listen, args=arguments, name="devicebridge-signs", daemon=True).start()

    def _listen(self, store: Any, place: RankPlace) -> None:
        keys = [f"sign of rank {rank}" for rank in range(place.num_ranks)]
        signs, silent_s = [b""] * len(keys), [0.0] * len(keys)
        limit_s, count, last = max(_SHORTEST_S, 0.9 * self._timeout_s), 0, time.monotonic()
        machine = os.environ.get("GROUP_RANK", "")  # of this torchrun, whose processes see each other
        try:
            while not (self._is_over.wait(_BEAT_S) or self.lost):
                count += 1
                store.set(keys[place.rank], f"{count}\n{os.getpid()}\n{machine}")
                last, before = time.monotonic(), last
                elapsed_s = min(last - before, 2 * _BEAT_S)  # not the time for which this process was stopped itself
                found = [store.get(key) if store.check([key]) else b"" for key in keys]
                silent_s = [
                    0.0 if new != old else silence + elapsed_s
                    for new, old, silence in zip(found, signs, silent_s, strict=True)
                ]
                signs = found
                silent = [rank for rank, silence in enumerate(silent_s) if silence > limit_s]
                names = " and ".join(f"rank {rank}" for rank in silent)
                self.lost = names and f"{names} gave no sign of life for {limit_s:.0f} s"
                for _, pid, where in (signs[rank].decode().split("\n") for rank in silent if machine and signs[rank]):
                    if where == machine:
                        with suppress(OSError):  # it is gone
                            os.kill(int(pid), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has one way
        except RuntimeError:  # the store has ended with torchrun or its machine, which others notice, too
            return
        if self.lost and not self._is_over.wait(_SAVING_S) and not self._is_leaving:
            _end(self.lost)


def _end(why: str) -> None:
    try:
        say(f"devicebridge: rank {os.environ.get('RANK', '0')} is ended: {why}", sys.stderr)
        faulthandler.dump_traceback(sys.__stderr__)  # type: ignore[arg-type]
    finally:
        os._exit(1)


def record_error(error: BaseException) -> None:
    """Leave an error where torchrun looks for it, for the summary that it prints."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
