"""A thread for each further device of one forward whose blocks several devices compute together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ...patches.hooks import PLAIN, map_tensors
from ..transfer import current_device
from .collective import Collective, Send
from .recorded_calls import OPTIONS
from .thread_pool import Task, ThreadPool
from .workers import ThreadState

Work = Callable[[], Any]


class ForwardWorkers:
    """The ranks of one forward. Rank 0 is the thread that makes this, whose grad mode and the like the others take.

    Args:
        pool: whose threads they use.
        devices: by rank.
        send: see Collective.
    """

    def __init__(self, pool: ThreadPool, devices: Sequence[torch.device], send: Send) -> None:
        self._devices, self._state = tuple(devices), ThreadState(devices)
        self.collective = Collective(len(devices), send)
        self.current: nn.Module | None = None  # the block that is being computed
        # Two threads meet every 100 microseconds or so: a queue that is written in C costs a tenth of a condition.
        self._work: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in devices]
        self._results: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._tasks: list[Task] = []
        try:
            for rank, device in enumerate(devices[1:], start=1):
                task = pool.task(f"devicebridge-{device}", self._serve, rank)
                task.start()
                self._tasks.append(task)
        except BaseException:
            self.close()
            raise

    def run(self, block: nn.Module, work: Sequence[Work]) -> list[Any]:
        """What every rank's work returns, each computed in its rank's thread, by rank.

        Raises: the first error of a rank, which ends the others' collectives; the workers are of no further use then.
        """
        self.current = block
        for queue, each in zip(self._work[1:], work[1:], strict=True):
            queue.put(each)
        try:
            output = work[0]()
            self.collective.finish(0)
        except BaseException:
            self.collective.abort(RuntimeError("the block failed on another device"))
            self._take_results()
            raise
        others = self._take_results()
        error = self.collective.error  # the first one: what the others raised may follow from it
        if error is not None:
            del others
            try:
                raise error
            finally:
                del error  # or its traceback would keep this frame, and this frame the error
        return [output, *others]

    def _take_results(self) -> list[Any]:
        """What the other ranks returned; None of one that failed."""
        found = [results.get() for results in self._results[1:]]
        self.current = None
        return found

    def close(self) -> None:
        """End the workers, also in the middle of a block."""
        if self.current is not None:
            self.collective.abort(RuntimeError("the forward was ended"))
        for queue in self._work[1:]:
            queue.put(None)
        for task in self._tasks:
            task.join()
        self.collective.forget()
        self._results.clear()

    def _serve(self, rank: int) -> None:
        """Do work after work, up to the first error."""
        try:
            with self._state.taken_over(), current_device(self._devices[rank]):
                while (work := self._work[rank].get()) is not None:
                    output = work()
                    self.collective.finish(rank)
                    self._results[rank].put(output)
                    del work, output
        except BaseException as error:
            self.collective.abort(error)
            self._results[rank].put(None)


class GivenArguments:
    """What the other devices are given of a block's arguments in one forward.

    Args:
        give: a tensor, a rank -> the tensor as this rank may have it.
        num_devices: of the forward.
        per_device: names of arguments of which each device gets an object of its own.
    """

    def __init__(
        self, give: Callable[[int, torch.Tensor], torch.Tensor], num_devices: int, per_device: Sequence[str]
    ) -> None:
        self._give = [functools.partial(give, rank) for rank in range(num_devices)]
        self._per_device = per_device
        # By argument: a value, and what it is there.
        self._known: list[dict[Any, tuple[Any, Any]]] = [{} for _ in range(num_devices)]
        self._shared: dict[tuple[int, str], Any] = {}  # the objects of per_device

    def of(
        self, rank: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_known: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for a rank. It gets dicts of its own: a block may write into those it is handed.

        Args:
            is_known: whether nothing has been written into earlier arguments since they were looked through.
        """
        if not is_known:
            self._known[rank].clear()
        by_place = self._there(rank, "", dict(enumerate(args)))
        named = {name: value for name, value in kwargs.items() if name not in self._per_device}
        there = self._there(rank, "", named)
        for name in kwargs.keys() - named.keys():
            there[name] = self._shared.setdefault((rank, name), type(kwargs[name])())
        return tuple(by_place.values()), there

    def _there(self, rank: int, where: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Values on another device. A tuple, and what holds no tensor, is looked through once for all blocks that are
        given the same one: looking takes as long as a small block. Args: where: the dict that they are in."""
        known, give, there = self._known[rank], self._give[rank], {}
        for name, value in values.items():
            if type(value) in PLAIN:
                there[name] = value
            elif name == OPTIONS and isinstance(value, dict):
                there[name] = self._there(rank, OPTIONS, value)
            elif (before := known.get((where, name))) is not None and before[0] is value:
                there[name] = before[1]
            else:
                there[name] = map_tensors(value, give)
                if there[name] is value or type(value) is tuple:
                    known[where, name] = value, there[name]
        return there
