"""Collectives between threads of one process, one thread per device: all-gather, all-reduce and a barrier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from ..transfer import Arrivals, settle

Tensors = Sequence[torch.Tensor]
# Tensors, the receiving rank, a place for the copies' events -> the copies, not to be used before settle(events)
Send = Callable[[Tensors, int, Arrivals], Tensors]
# Name of the collective, number of the round, the copies for the receiver, their events
_Message = tuple[str, int, Tensors, Arrivals]

# An all-reduce of at least so many bytes among three and more ranks is a reduce-scatter and an all-gather. That takes
# twice as many copies, which cost the host. The cards compute for longer than the host launches at such sizes.
SLICED_FROM_BYTES = 2**23


def bytes_to_one(parts_bytes: float, num_parts: float, size: int) -> float:
    """Bytes that one of `size` ranks receives in `num_parts` all-reduces. parts_bytes: of all parts of one rank."""
    is_sliced = size > 2 and parts_bytes >= num_parts * SLICED_FROM_BYTES
    return parts_bytes * (2 * (size - 1) / size if is_sliced else size - 1)


class Collective:
    """A group of ranks, each a thread, that call the same collectives in the same order.

    A rank that fails calls `abort`, which ends every collective of the group. A part is copied to its receivers as soon
    as it is given: a later copy would wait for all that was launched in between. Collectives belong to rounds, such as
    the calls of a block. A rank that finished a round is at a different place for ranks that still wait in it.

    Args:
        size: number of ranks.
        send: issues the copies for a receiving rank.
    """

    def __init__(self, size: int, send: Send) -> None:
        self.size = size
        self._send = send
        self._boxes: list[list[SimpleQueue[_Message | None]]] = [
            [SimpleQueue() for _ in range(size)] for _ in range(size)
        ]  # [sender][receiver]
        self._rounds = [0] * size  # finished, by rank
        self._errors: dict[str, BaseException] = {}  # "first": setdefault keeps one of two that come at the same time
        self.sliced_from_bytes = SLICED_FROM_BYTES

    def all_gather(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, by rank, on this rank's device.

        Args:
            tensor: any shape; other ranks may give other shapes.
            name: of the collective, equal on all ranks.
        Raises: RuntimeError if the ranks are in different collectives; the error that `abort` was given.
        """
        self._post(rank, name, (tensor,))
        return [tensor if each == rank else self._from(each, rank, name)[0] for each in range(self.size)]

    def all_reduce(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, added in the order of ranks: the same bits on all ranks, in every run.

        Args:
            tensor: the same shape on all ranks; it is not changed.
        Raises: as all_gather.
        """
        slices = self._slices(tensor)
        if not slices:
            return functools.reduce(torch.add, self.all_gather(rank, name, tensor))
        for to in range(self.size):
            if to != rank:
                self._post(rank, name, (slices[to],), to)
        parts = [slices[rank] if each == rank else self._from(each, rank, name)[0] for each in range(self.size)]
        gathered = self.all_gather(rank, f"{name}, reduced", functools.reduce(torch.add, parts))
        return torch.cat(gathered).view(tensor.shape)

    def _slices(self, tensor: torch.Tensor) -> Tensors:
        """Slices of the rows, one for each rank; () for a tensor that is reduced whole."""
        if self.size == 2 or tensor.ndim < 2 or tensor.nbytes < self.sliced_from_bytes:
            return ()
        return tensor.reshape(-1, tensor.shape[-1]).tensor_split(self.size)

    def finish(self, rank: int) -> None:
        """This rank has ended its round; waits for nobody."""
        self._post(rank, "the end", ())
        self._rounds[rank] += 1

    def _post(self, rank: int, name: str, tensors: Tensors, only: int | None = None) -> None:
        for to, box in enumerate(self._boxes[rank]):
            if to != rank and only in (None, to):
                events: Arrivals = {}
                box.put((name, self._rounds[rank], self._send(tensors, to, events) if tensors else (), events))

    def _from(self, sender: int, rank: int, name: str) -> Tensors:
        box = self._boxes[sender][rank]
        message = None if self._errors else box.get()
        while message is not None and message[1] < self._rounds[rank]:  # the end of an earlier round
            message = box.get()
        if message is None or message[0] != name or self._errors:
            self._fail(message, name)
        assert message is not None
        if message[3]:
            settle(message[3])
        return message[2]

    def _fail(self, message: _Message | None, name: str) -> None:
        if message is not None and message[0] != name:
            self.abort(RuntimeError(f"the devices are at different places: one at {message[0]}, one at {name}"))
        error = self.error
        assert error is not None, "None comes with an error"
        try:
            raise error
        finally:
            del error  # or its traceback would keep this frame, and this frame the error

    @property
    def error(self) -> BaseException | None:
        """The first error that `abort` was given."""
        return self._errors.get("first")

    def abort(self, error: BaseException) -> None:
        """End this and all further collectives by this error; the first one counts."""
        self._errors.setdefault("first", error)
        for boxes in self._boxes:
            for box in boxes:
                box.put(None)

    def forget(self) -> None:
        """Let go of the error and of messages that nobody took, which hold activations; no thread comes any more."""
        self._errors.clear()
        self._boxes.clear()
