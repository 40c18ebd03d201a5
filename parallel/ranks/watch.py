"""Ends a process that would wait for ever: it hangs, another rank does, or the launcher that started it is gone.

Python's own faulthandler ends a rank whose work takes longer than `timeout_s`, also one that keeps Python's lock, and
prints where all of its threads are. torchrun then ends the other ranks, and starts all anew where it may.

A rank that waits for others has no limit, for the first one may encode for hours. But every rank changes a line of
torchrun's store every two seconds. Whoever does not, being stopped or on a machine that is gone, is lost.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...system.stopping import parent_at_start
from ...system.telling import say
from .place import RankPlace

_BEAT_S = 2.0
_SHORTEST_S = 5.0  # of silence
_GRACE_S = 5.0  # to leave by itself, for who knows that another is lost


class Watch:
    """Watches the thread that makes it.

    Args:
        timeout_s: that one piece of work may take; a rank may be silent for nine tenths of it, so that it is named.
        is_first: whether this is the rank that saves. It ends last, so that it saves where another one hangs.
    Attributes:
        lost: what is known of a rank that gives no sign of life; "" while all do. Who waits for it need not.
    """

    def __init__(self, timeout_s: float, *, is_first: bool = False) -> None:
        self._timeout_s, self._work_s = timeout_s, timeout_s + (2 * _GRACE_S if is_first else 0.0)
        self._parent = parent_at_start()
        self._depth = 0
        self.lost, self._is_leaving = "", False
        self._is_over = threading.Event()
        threading.Thread(target=self._guard_launcher, name="devicebridge-watch", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Inside, this rank does work, and is ended if it does not come out."""
        yield from self._at_depth(self._depth + 1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others."""
        yield from self._at_depth(0)

    def _at_depth(self, depth: int) -> Iterator[None]:
        outer, self._depth = self._depth, depth
        self.alive()
        try:
            yield
        finally:
            self._depth = outer
            self.alive()

    def alive(self) -> None:
        """The work in hand goes on: what comes next of it has all of its time again."""
        if self._depth:
            faulthandler.dump_traceback_later(self._work_s, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
        else:
            faulthandler.cancel_dump_traceback_later()

    def leave(self) -> None:
        """This rank knows that another one is lost, and ends by itself."""
        self._is_leaving = True

    def _guard_launcher(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            if os.getppid() != self._parent:
                _end("the launcher of this process is gone")

    def listen(self, store: Any, place: RankPlace) -> None:
        """From now on give signs of life, and look for those of others.

        Args:
            store: torchrun's, for the ranks of this start.
        """
        arguments = (store.clone(), place)  # a connection of its own: others wait in theirs
        threading.Thread(target=self._listen, args=arguments, name="devicebridge-signs", daemon=True).start()

    def _listen(self, store: Any, place: RankPlace) -> None:
        keys = [f"sign of rank {rank}" for rank in range(place.num_ranks)]
        signs, silent_s = [b""] * len(keys), [0.0] * len(keys)
        limit_s, count, last = max(_SHORTEST_S, 0.9 * self._timeout_s), 0, time.monotonic()
        try:
            while not (self._is_over.wait(_BEAT_S) or self.lost):
                count += 1
                store.set(keys[place.rank], str(count))
                last, before = time.monotonic(), last
                elapsed_s = min(last - before, 2 * _BEAT_S)  # not the time for which this process was stopped itself
                found = [store.get(key) if store.check([key]) else b"" for key in keys]
                silent_s = [
                    0.0 if new != old else silence + elapsed_s
                    for new, old, silence in zip(found, signs, silent_s, strict=True)
                ]
                signs = found
                names = " and ".join(f"rank {rank}" for rank, silence in enumerate(silent_s) if silence > limit_s)
                self.lost = names and f"{names} gave no sign of life for {limit_s:.0f} s"
        except RuntimeError:  # the store has ended with torchrun or its machine, which others notice, too
            return
        if self.lost and not self._is_over.wait(_GRACE_S) and not self._is_leaving:
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
