"""Threads that compute one thing together, one at a time, and hand each other what they have at common meetings.

Each thread issues the kernels of one device. Python runs one thread at a time anyway, and two threads that both want to
run hand the interpreter to and fro at every operation: measured, 60 microseconds for an operation that takes 12 alone
(docs/internals/experiments.md). So a token goes round, and only its holder runs. It is handed on at a meeting that not
all have reached. The devices meanwhile work through what was issued.

The holder goes on through a complete meeting up to the next one, so there is one change of threads per meeting.
What it brings is sent to the others at once, since a copy issued later would wait for all that was issued in between.
The copy goes beside the kernels of both devices, and the receiver waits for it where it uses it.

Everything here is read and written by the holder only, so nothing is locked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from ..transfer import Arrivals, settle

# A tensor, the rank it goes to, where to note that it is under way -> the copy there, not to be used before settle()
Send = Callable[[torch.Tensor, int, Arrivals], torch.Tensor]


@dataclass
class _Sent:
    """What a rank brought to a meeting. Args: name: of the meeting. copies: by rank."""

    name: str
    copies: list[tuple[torch.Tensor, Arrivals]] = field(default_factory=list)


class Exchange:
    """Meetings of a fixed number of threads, rank 0 holding the token first.

    Every thread comes to every meeting of a round, in the same order. A thread that cannot come ends all for all.

    Args:
        size: number of threads.
        send: issues the copy that another rank is given.
    """

    def __init__(self, size: int, send: Send) -> None:
        self.size = size
        self._send = send
        self._tokens: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(size)]
        self._num_reached = [0] * size
        self._needs: list[float] = [math.inf] * size  # a rank may go on when all have reached this many meetings
        self._sent: dict[tuple[int, int], _Sent] = {}  # by meeting and sender
        self.error: BaseException | None = None

    def begin_round(self) -> None:
        """Let every other rank run when its turn comes; for rank 0."""
        for rank in range(1, self.size):
            self._needs[rank] = 0

    def end_round(self, rank: int) -> None:
        """Come to the end of a round. Rank 0 waits for all others; they go on to wait for the next round.

        Raises: RuntimeError if a rank ended before another, and what `abort` was given.
        """
        self._reach(rank)
        if rank == 0:
            self._wait(rank)
        else:
            self._needs[rank] = math.inf
            self._hand_on(rank)

    def await_round(self, rank: int) -> None:
        """Wait for the first turn of a round, or for the end of all."""
        self._tokens[rank].get()

    def all(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every rank brought, by rank, copied to this one; waits for the last.

        Args:
            name: of the meeting; must be the same for all.
        Raises: RuntimeError if the ranks are at different places, and what `abort` was given.
        """
        number = self._num_reached[rank]
        self._sent[number, rank] = sent = _Sent(name)
        for to in range(self.size):
            arrivals: Arrivals = {}
            sent.copies.append((tensor if to == rank else self._send(tensor, to, arrivals), arrivals))
        self._reach(rank)
        self._wait(rank)
        parts = []
        for sender in range(self.size):
            brought = self._sent[number, sender]
            if brought.name != name:
                self._fail(f"one is at {brought.name}, one at {name}")
            part, arrivals = brought.copies[rank]
            settle(arrivals)
            parts.append(part)
        self._forget_before(min(self._num_reached) - 1)
        return parts

    def abort(self, error: BaseException) -> None:
        """End this and all further meetings by this error; the first one counts."""
        self.error = self.error or error
        for token in self._tokens:
            token.put(None)

    def _reach(self, rank: int) -> None:
        if self.error is not None:
            raise self.error
        self._num_reached[rank] += 1

    def _wait(self, rank: int) -> None:
        """Return when all have reached as many meetings as this rank."""
        if min(self._num_reached) < self._num_reached[rank]:
            self._needs[rank] = self._num_reached[rank]
            self._hand_on(rank)
            self._tokens[rank].get()
        if self.error is not None:
            raise self.error

    def _hand_on(self, rank: int) -> None:
        reached = min(self._num_reached)
        for each in (*range(rank + 1, self.size), *range(rank)):
            if self._needs[each] <= reached:
                self._needs[each] = math.inf  # until it waits again
                self._tokens[each].put(None)
                return
        self._fail("one is done with a block, another still computes it")

    def _fail(self, what: str) -> None:
        error = RuntimeError(f"devices that compute a block together are at different places: {what}")
        self.abort(error)
        raise error

    def _forget_before(self, number: int) -> None:
        for key in [key for key in self._sent if key[0] < number]:
            del self._sent[key]
