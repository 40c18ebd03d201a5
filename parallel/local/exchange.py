"""Where threads that compute one thing together hand each other what they have, each to all. So do greenlets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ..transfer import Arrivals, settle
from .device_workers import Queue

# A tensor, the rank it goes to, where to note that it is under way -> the copy there, not to be used before settle()
Send = Callable[[torch.Tensor, int, Arrivals], torch.Tensor]
# Name of the meeting, number of the round, the copy for the receiver, what it must wait for
_Letter = tuple[str, int, torch.Tensor | None, Arrivals]


class Exchange:
    """Meetings of a fixed number of threads, one after the other.

    Every thread comes to every meeting, in the same order. A thread that cannot come ends them for all. What a thread
    brings is sent at once: a copy issued later would wait for all that was issued in between. Meetings are in rounds: a
    thread that has finished one is at another place for those that still wait for it there.

    Args:
        size: number of threads.
        send: issues the copy that another rank is given.
        make_queue: of what one thread brings another.
    """

    def __init__(self, size: int, send: Send, make_queue: Callable[[], Queue] = SimpleQueue) -> None:
        self.size = size
        self._send = send
        self._boxes = [[make_queue() for _ in range(size)] for _ in range(size)]  # of _Letter, or None
        self._rounds = [0] * size  # that each thread has finished
        self._brought: list[list[torch.Tensor]] = [[] for _ in range(size)]  # and not yet collected
        self._errors: dict[str, BaseException] = {}  # "first", which setdefault keeps whoever comes at the same time

    def all(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every thread brought, by rank, on this one's device; waits for the last one.

        Args:
            name: of the meeting; must be the same for all.
        Raises: RuntimeError if the threads are at different places, and what `abort` was given.
        """
        self.bring(rank, name, tensor)
        return self.collect(rank, name)[0]

    def bring(self, rank: int, name: str, tensor: torch.Tensor) -> None:
        """Send what this thread has to all; waits for nobody. More may be brought before any is collected."""
        for to, box in enumerate(self._boxes[rank]):
            if to != rank:
                arrivals: Arrivals = {}
                box.put((name, self._rounds[rank], self._send(tensor, to, arrivals), arrivals))
        self._brought[rank].append(tensor)

    def collect(self, rank: int, name: str) -> list[list[torch.Tensor]]:
        """For each thing that this thread has brought, in order, what `all` returns. Raises: as `all`."""
        brought, self._brought[rank] = self._brought[rank], []
        return [[own if each == rank else self._from(each, rank, name) for each in range(self.size)] for own in brought]

    def sum(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What every thread brought, added in the order of ranks: the same bits for all, and in every run."""
        return functools.reduce(torch.add, self.all(rank, name, tensor))

    def finish(self, rank: int) -> None:
        """This thread comes to no further meeting of this round; waits for nobody."""
        for to, box in enumerate(self._boxes[rank]):
            if to != rank:
                box.put(("the end", self._rounds[rank], None, {}))
        self._rounds[rank] += 1

    def _from(self, sender: int, rank: int, name: str) -> torch.Tensor:
        letter: _Letter | None = self._boxes[sender][rank].get() if self.error is None else None
        while letter is not None and letter[1] < self._rounds[rank]:  # the end of an earlier round
            letter = self._boxes[sender][rank].get()
        if letter is not None and letter[0] != name:
            self.abort(RuntimeError(f"the devices are at different places: one at {letter[0]}, one at {name}"))
        error = self.error
        if error is not None:
            try:
                raise error
            finally:
                del error  # or its traceback would keep this frame, and this frame the error
        assert letter is not None and letter[2] is not None, "None comes with an error, the end under another name"
        settle(letter[3])
        return letter[2]

    @property
    def error(self) -> BaseException | None:
        """What `abort` was given first."""
        return self._errors.get("first")

    def abort(self, error: BaseException) -> None:
        """End this and all further meetings by this error; the first one counts."""
        self._errors.setdefault("first", error)
        for boxes in self._boxes:
            for box in boxes:
                box.put(None)

    def forget(self) -> None:
        """Let go of the error and of what nobody took, when no thread comes any more: they hold activations."""
        self._errors.clear()
        self._boxes.clear()
        self._brought.clear()


class TokenChunks:
    """Row-parallel layers, computed by chunks of tokens: a chunk's partial sum travels while the next is computed.

    Worth it where copies are slow. A matrix product of fewer rows may take another kernel, so on a card the last bits
    may differ from those of one product; all cards have the same bits all the same.

    Args:
        most: number of chunks. least_tokens: of a chunk; smaller products are no faster.
    """

    def __init__(self, most: int = 4, least_tokens: int = 512) -> None:
        self.most, self.least_tokens = most, least_tokens

    def bring_first(
        self, exchange: Exchange, rank: int, name: str, layer: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Compute and bring all chunks but the last one -> the arguments for the last one.

        The layer must compute each token alone, and is called by its forward.
        """
        if len(args) != 1 or args[0].ndim < 2:
            return args
        number = min(self.most, args[0].shape[-2] // self.least_tokens)
        *first, last = args[0].chunk(max(1, number), dim=-2)
        for chunk in first:
            exchange.bring(rank, name, layer.forward(chunk))
        return (last,)


def summed(chunks: list[list[torch.Tensor]]) -> torch.Tensor:
    """The sums of what `Exchange.collect` returned, chunks of tokens joined again."""
    sums = [functools.reduce(torch.add, parts) for parts in chunks]
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=-2)
