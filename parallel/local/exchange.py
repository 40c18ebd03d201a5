"""Where threads that compute one thing together hand each other what they have, each to all."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass
class _Step:
    """One meeting. Args: name: what met first called it."""

    name: str
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    num_taken: int = 0


class Exchange:
    """Meetings of a fixed number of threads, one after the other.

    Every thread comes to every meeting, in the same order. A thread that cannot come ends it for all.

    Args:
        size: number of threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._steps: dict[int, _Step] = {}
        self._next = [0] * size
        self._error: BaseException | None = None

    def all(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every thread brought, by rank; waits for the last one.

        Args:
            name: of the meeting; must be the same for all.
        Raises: RuntimeError if the threads are at different places, and what `abort` was given.
        """
        with self._changed:
            number = self._next[rank]
            self._next[rank] += 1
            step = self._steps.setdefault(number, _Step(name))
            if step.name != name and self._error is None:
                self._stop(RuntimeError(f"the devices are at different places: one at {step.name}, one at {name}"))
            step.parts[rank] = tensor
            if len(step.parts) == self.size:
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or len(step.parts) == self.size)
            if self._error is not None:
                raise self._error
            step.num_taken += 1
            if step.num_taken == self.size:
                del self._steps[number]
            return [step.parts[each] for each in range(self.size)]

    def abort(self, error: BaseException) -> None:
        """End this and all further meetings by this error; the first one counts."""
        with self._changed:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        self._error = self._error or error
        self._steps.clear()
        self._changed.notify_all()
