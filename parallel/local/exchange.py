"""Where threads that compute one thing together hand each other what they have, each to all. So do greenlets."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from queue import SimpleQueue
from typing import NamedTuple

import torch

from ..transfer import Arrivals, settle
from .device_workers import Queue

Tensors = Sequence[torch.Tensor]
# Tensors, the rank they go to, where to note that they are under way -> their copies, not to be used before settle()
Send = Callable[[Tensors, int, Arrivals], Tensors]
# Name of the meeting, number of the round, the copies for the receiver, what it must wait for
_Letter = tuple[str, int, Tensors, Arrivals]

# From how many bytes on a sum is made slice by slice. That takes twice as many copies, which cost the host, and where
# parts are as large as this it has time: then the cards compute for longer than it launches.
SLICED_FROM_BYTES = 2**23


def bytes_to_one(parts_bytes: float, num_parts: float, size: int) -> float:
    """That come to one of so many threads for the sums of so many parts; parts_bytes: of all parts of one thread."""
    is_sliced = size > 2 and parts_bytes >= num_parts * SLICED_FROM_BYTES
    return parts_bytes * (2 * (size - 1) / size if is_sliced else size - 1)


class Exchange:
    """Meetings of a fixed number of threads, one after the other.

    Every thread comes to every meeting, in the same order. A thread that cannot come ends them for all. What a thread
    brings is sent at once: a copy issued later would wait for all that was issued in between. Meetings are in rounds: a
    thread that has finished one is at another place for those that still wait for it there.

    Of three and more threads each would send a large part of a sum to all others. Instead each adds up one slice of the
    tokens, of which it is sent all parts, and sends the others the sum: 2 (n - 1) / n times the part, not n - 1 times.

    Args:
        size: number of threads.
        send: issues the copies that another rank is given.
        make_queue: of what one thread brings another.
    """

    def __init__(self, size: int, send: Send, make_queue: Callable[[], Queue] = SimpleQueue) -> None:
        self.size = size
        self._send = send
        self._boxes = [[make_queue() for _ in range(size)] for _ in range(size)]  # of _Letter, or None
        self._outgoing = [
            [(to, box) for to, box in enumerate(boxes) if to != rank] for rank, boxes in enumerate(self._boxes)
        ]
        self._rounds = [0] * size  # that each thread has finished
        self.sliced_from_bytes = SLICED_FROM_BYTES
        self._brought: list[list[_Brought]] = [[] for _ in range(size)]  # and not yet collected
        self._errors: dict[str, BaseException] = {}  # "first", which setdefault keeps whoever comes at the same time

    def all(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every thread brought, by rank, on this one's device; waits for the last one.

        Args:
            name: of the meeting; must be the same for all.
        Raises: RuntimeError if the threads are at different places, and what `abort` was given.
        """
        self._post(rank, name, (tensor,))
        return [tensor if each == rank else self._from(each, rank, name)[0] for each in range(self.size)]

    def bring(self, rank: int, name: str, *parts: torch.Tensor) -> None:
        """Send this thread's parts of sums to all; waits for nobody. More may be brought before any is collected."""
        slices = [self._slices(part) for part in parts] if self.size > 2 else []
        if not any(slices):
            self._post(rank, name, parts)
        for to, _ in self._outgoing[rank] if any(slices) else ():
            self._post(rank, name, [cut[to] if cut else part for part, cut in zip(parts, slices, strict=True)], to)
        self._brought[rank].append(_Brought(parts, slices))

    def collect(self, rank: int, name: str, into: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor]:
        """The sums of the parts that all have brought, in order, each added in the order of ranks: the same bits for
        all, and in every run. Raises: as `all`.

        Args:
            into: where to write each sum; None, or nothing, for a new tensor.
        """
        brought, self._brought[rank] = self._brought[rank], []
        places = iter(into or [None] * sum(len(each.parts) for each in brought))
        targets = [[next(places) for _ in each.parts] for each in brought]
        if self.size == 2:  # most often; without lists of ranks
            sums: list[torch.Tensor] = []
            for (parts, _), wanted in zip(brought, targets, strict=True):
                theirs = self._from(1 - rank, rank, name)
                first, second = (parts, theirs) if rank == 0 else (theirs, parts)
                sums += [_sum(each, place) for *each, place in zip(first, second, wanted, strict=True)]
            return sums
        added = [self._added(rank, name, own, wanted) for own, wanted in zip(brought, targets, strict=True)]
        return [
            each
            for own, sums, wanted in zip(brought, added, targets, strict=True)
            for each in self._whole(rank, name, own, sums, wanted)
        ]

    def _added(
        self, rank: int, name: str, brought: _Brought, into: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Sums of what all brought, of the slices this thread's, which it sends to all."""
        own = [cut[rank] if cut else part for part, cut in brought.with_slices()]
        by_rank = [own if each == rank else self._from(each, rank, name) for each in range(self.size)]
        places = [None if cut else place for (_, cut), place in zip(brought.with_slices(), into, strict=True)]
        sums = [_sum(parts, place) for *parts, place in zip(*by_rank, places, strict=True)]
        if any(brought.slices):
            self._post(rank, f"{name}, added", [each for each, cut in zip(sums, brought.slices, strict=True) if cut])
        return sums

    def _whole(
        self,
        rank: int,
        name: str,
        brought: _Brought,
        sums: list[torch.Tensor],
        into: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """The sums, those of slices joined with what all others send."""
        if not any(brought.slices):
            return sums
        own = [each for each, cut in zip(sums, brought.slices, strict=True) if cut]
        by_rank = [own if each == rank else self._from(each, rank, f"{name}, added") for each in range(self.size)]
        joined = iter(zip(*by_rank, strict=True))
        return [
            _joined(next(joined), part, place) if cut else each
            for each, (part, cut), place in zip(sums, brought.with_slices(), into, strict=True)
        ]

    def _slices(self, part: torch.Tensor) -> Tensors:
        """Of tokens, one for each thread; () if the part is small."""
        if part.ndim < 2 or part.nbytes < self.sliced_from_bytes:
            return ()
        return part.reshape(-1, part.shape[-1]).tensor_split(self.size)

    def sum(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What every thread brought, added up as in `collect`."""
        if self.size != 2:
            self.bring(rank, name, tensor)
            return self.collect(rank, name)[0]
        self._post(rank, name, (tensor,))
        (other,) = self._from(1 - rank, rank, name)
        return torch.add(tensor, other) if rank == 0 else torch.add(other, tensor)

    def once(self, rank: int, name: str, work: Callable[[], None]) -> None:
        """When all threads are here the first one does the work, while the others wait for it.

        Raises: as `all`, and in the first thread what work raises.
        """
        if rank != 0:
            self._post(rank, name, (), only=0)
            self._from(0, rank, name)
            return
        for each in range(1, self.size):
            self._from(each, 0, name)
        work()
        self._post(0, name, ())

    def finish(self, rank: int) -> None:
        """This thread comes to no further meeting of this round; waits for nobody."""
        self._post(rank, "the end", ())
        self._rounds[rank] += 1

    def _post(self, rank: int, name: str, tensors: Tensors, only: int | None = None) -> None:
        number = self._rounds[rank]
        for to, box in self._outgoing[rank]:
            if only is None or to == only:
                arrivals: Arrivals = {}
                box.put((name, number, self._send(tensors, to, arrivals) if tensors else (), arrivals))

    def _from(self, sender: int, rank: int, name: str) -> Tensors:
        letter: _Letter | None = None if self._errors else self._boxes[sender][rank].get()
        while letter is not None and letter[1] < self._rounds[rank]:  # the end of an earlier round
            letter = self._boxes[sender][rank].get()
        if letter is None or letter[0] != name or self._errors:
            self._fail(letter, name)
        if letter[3]:  # type: ignore[index]
            settle(letter[3])  # type: ignore[index]
        return letter[2]  # type: ignore[index]

    def _fail(self, letter: _Letter | None, name: str) -> None:
        if letter is not None and letter[0] != name:
            self.abort(RuntimeError(f"the devices are at different places: one at {letter[0]}, one at {name}"))
        error = self.error
        assert error is not None, "None comes with an error"
        try:
            raise error
        finally:
            del error  # or its traceback would keep this frame, and this frame the error

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
        self._outgoing.clear()
        self._brought.clear()


class _Brought(NamedTuple):
    """Parts of sums, and of those that are large their slices, by rank."""

    parts: Tensors
    slices: Sequence[Tensors]

    def with_slices(self) -> list[tuple[torch.Tensor, Tensors]]:
        return list(zip_longest(self.parts, self.slices, fillvalue=()))  # type: ignore[arg-type]


def _sum(parts: Tensors, into: torch.Tensor | None) -> torch.Tensor:
    *first, last = parts
    return torch.add(functools.reduce(torch.add, first), last, out=into) if first else last


def _joined(slices: Tensors, part: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """A sum of the form of its parts."""
    place = None if into is None else into.view(-1, part.shape[-1])
    joined = torch.cat(list(slices), out=place)
    return joined.view(part.shape) if into is None else into


class TokenChunks:
    """Row-parallel layers, computed by chunks of tokens: a chunk's partial sum travels while the next is computed.

    Worth it where copies take long. A matrix product of fewer rows may take another kernel, so on a card the last bits
    may differ from those of one product; all cards have the same bits all the same.

    Args:
        most: number of chunks. least_tokens: of a chunk; smaller products are no faster.
        from_bytes: of a layer's output; smaller ones are computed at once.
    """

    def __init__(self, most: int = 4, least_tokens: int = 512, from_bytes: int = 0) -> None:
        self.most, self.least_tokens, self.from_bytes = most, least_tokens, from_bytes

    def tokens(self, x: torch.Tensor, features: int) -> int:
        """In a chunk, for a layer with this input and so many output features; 0: it is computed at once."""
        is_large = x.numel() // max(1, x.shape[-1]) * features * x.itemsize >= self.from_bytes
        number = min(self.most, x.shape[-2] // self.least_tokens) if x.ndim > 1 and is_large else 1
        return math.ceil(x.shape[-2] / number) if number > 1 else 0

    def bring(
        self,
        exchange: Exchange,
        rank: int,
        name: str,
        layer: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        *,
        tokens: int,
        is_called_once: bool,
    ) -> torch.Tensor:
        """Compute a layer by chunks of so many tokens and bring each; the layer must compute each token alone.

        Args:
            is_called_once: compute all tokens at once and bring the chunks of that: a layer whose weights are not on
                the card copies them at every call.
        Returns: a place for the whole output, which nobody has written to.
        """
        computed = layer(x).split(tokens, dim=-2) if is_called_once else map(layer, x.split(tokens, dim=-2))
        for chunk in computed:
            exchange.bring(rank, name, chunk)
        return chunk.new_empty(*x.shape[:-1], chunk.shape[-1])
