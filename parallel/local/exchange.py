"""Where threads that compute one thing together hand each other what they have, each to all."""

from __future__ import annotations

from queue import SimpleQueue

import torch


class Exchange:
    """Meetings of a fixed number of threads, one after the other.

    Every thread comes to every meeting, in the same order. A thread that cannot come ends them for all.

    Args:
        size: number of threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Two threads meet every 100 microseconds or so: a queue that is written in C costs a tenth of a condition.
        self._boxes: list[list[SimpleQueue[tuple[str, torch.Tensor] | None]]] = [
            [SimpleQueue() for _ in range(size)] for _ in range(size)
        ]
        self._error: BaseException | None = None

    def all(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every thread brought, by rank; waits for the last one.

        Args:
            name: of the meeting; must be the same for all.
        Raises: RuntimeError if the threads are at different places, and what `abort` was given.
        """
        for to, box in enumerate(self._boxes[rank]):
            if to != rank:
                box.put((name, tensor))
        return [tensor if each == rank else self._from(each, rank, name) for each in range(self.size)]

    def _from(self, sender: int, rank: int, name: str) -> torch.Tensor:
        found = self._boxes[sender][rank].get() if self._error is None else None
        if found is not None and found[0] != name:
            self.abort(RuntimeError(f"the devices are at different places: one at {found[0]}, one at {name}"))
        if self._error is not None:
            raise self._error
        assert found is not None, "None comes with an error"
        return found[1]

    def abort(self, error: BaseException) -> None:
        """End this and all further meetings by this error; the first one counts."""
        self._error = self._error or error
        for boxes in self._boxes:
            for box in boxes:
                box.put(None)
