"""Signs of life that ranks leave for each other in torchrun's store.

A process that is stopped, or in a call that keeps Python's lock, cannot end itself, and a machine that is gone tells
nobody. So each rank writes a line every two seconds, and looks whether the others' have changed. What the line says is
how long others should wait for the next one, and whether the rank compiles, which may keep those waiting that share the
weights with it.

A compiler may keep Python's lock, too, and a busy machine may keep a process from it. So a silent rank has half an hour
while there is a reason to think that it works: on this machine that it computes, on another that its last sign says it
compiles.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, NamedTuple

from ...system.processes import cpu_seconds, is_running
from .place import RankPlace

BEAT_S = 2.0
LONGEST_S = 1800.0  # of silence, or without any movement, for work of which nobody knows how long it takes
# Of the time that a process computes if it works. Threads that wait for Python's lock use less than a hundredth each.
_AT_WORK = 0.05
_TELLING_S = 1.0  # for a process to say where it is, before it is killed
TRACEBACK_SIGNAL = getattr(signal, "SIGUSR2", None)  # on which a rank tells where all its threads are; not on Windows


class _Sign(NamedTuple):
    number: int
    patience_s: float
    is_compiling: bool
    pid: int

    def line(self) -> str:
        return f"{self.number} {self.patience_s:g} {int(self.is_compiling)} {self.pid}"

    @staticmethod
    def read(line: bytes) -> _Sign:
        number, patience, compiling, pid = line.decode().split()
        return _Sign(int(number), float(patience), compiling == "1", int(pid))


class Signs:
    """Of all ranks, as one of them sees them.

    Args:
        store: torchrun's, for the ranks of this start.
    """

    def __init__(self, store: Any, place: RankPlace) -> None:
        self._store, self._place = store.clone(), place  # a connection of its own: others wait in theirs
        self._count = 0
        self._known: dict[int, _Sign] = {}
        others = [rank for rank in range(place.num_ranks) if rank != place.rank]
        self._silent_s, self._idle_s = dict.fromkeys(others, 0.0), dict.fromkeys(others, 0.0)
        self._computed_s: dict[int, float] = {}  # by those of this machine

    def give(self, patience_s: float, *, is_compiling: bool = False) -> None:
        """Args: patience_s: after which nobody need wait for the next one."""
        self._count += 1
        self._store.set(_key(self._place.rank), _Sign(self._count, patience_s, is_compiling, os.getpid()).line())

    def look(self, elapsed_s: float) -> list[int]:
        """Ranks whose patience has run out, and that do not work all the same; all must have given a sign before.

        Args:
            elapsed_s: since the last look, as far as this process could look: not while it was stopped itself.
        """
        ranks = list(self._silent_s)
        found = self._store.multi_get([_key(rank) for rank in ranks]) if ranks else []
        for rank, sign in zip(ranks, map(_Sign.read, found), strict=True):
            is_new, before_s = sign != self._known.get(rank), self._computed_s.get(rank, 0.0)
            self._known[rank] = sign
            self._computed_s[rank] = cpu_seconds(sign.pid) if self._is_here(rank) else 0.0
            is_at_work = self._computed_s[rank] - before_s > _AT_WORK * elapsed_s
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + elapsed_s
            self._idle_s[rank] = 0.0 if is_new or is_at_work else self._idle_s[rank] + elapsed_s
        return [rank for rank in ranks if self._is_lost(rank, self._known[rank])]

    def _is_lost(self, rank: int, sign: _Sign) -> bool:
        longest_s = max(LONGEST_S, sign.patience_s)
        patience_s = longest_s if sign.is_compiling and not self._is_here(rank) else sign.patience_s
        return self._idle_s[rank] > patience_s or self._silent_s[rank] > longest_s

    @property
    def is_another_compiling(self) -> bool:
        return any(sign.is_compiling for sign in self._known.values())

    def gone(self) -> list[int]:
        """Other ranks of this machine whose processes have ended."""
        return [rank for rank, sign in self._known.items() if self._is_here(rank) and not is_running(sign.pid)]

    def end_here(self, silent: list[int]) -> None:
        """Kill those of this machine, which cannot end themselves; each tells where it is, if it still can. The first
        rank of the machine that is alive does it."""
        here = [rank for rank in range(self._place.num_ranks) if self._is_here(rank) and rank not in silent]
        mine = [self._known[rank].pid for rank in silent if self._is_here(rank)]
        if TRACEBACK_SIGNAL is None or self._place.rank != min(here) or not mine:
            return
        turns: list[tuple[tuple[int, ...], float]] = [((TRACEBACK_SIGNAL, signal.SIGCONT), _TELLING_S)]
        for numbers, pause_s in (*turns, ((signal.SIGKILL,), 0.0)):
            for pid in filter(is_running, mine):
                with contextlib.suppress(ProcessLookupError):
                    for number in numbers:
                        os.kill(pid, number)
            time.sleep(pause_s)

    def _is_here(self, rank: int) -> bool:
        first = self._place.rank - self._place.local_rank
        return first <= rank < first + self._place.num_local


def _key(rank: int) -> str:
    return f"sign of rank {rank}"
