"""The workers of one forward whose blocks several devices compute together, and what each is given of a call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ...patches.hooks import PLAIN, map_tensors
from ..transfer import Arrivals
from .ahead import Ahead, Groups
from .device_workers import make_workers
from .exchange import Exchange, Tensors, TokenChunks
from .meetings import Meetings, Stays
from .recorded_calls import OPTIONS
from .thread_pool import ThreadPool


class Owner(Protocol):
    """See tensor_parallel.TensorParallel."""

    pool: ThreadPool
    in_turns: bool
    groups: Groups
    chunks: TokenChunks | None
    stays: Stays
    per_device: tuple[str, ...]

    @property
    def devices(self) -> tuple[torch.device, ...]: ...

    @property
    def knows_all(self) -> bool: ...

    def send_parts(self, tensors: Tensors, rank: int, arrivals: Arrivals) -> Tensors: ...

    def give(self, rank: int, tensor: torch.Tensor) -> torch.Tensor: ...


class ForwardWorkers:
    """Args: owner: of the forward, which is running."""

    def __init__(self, owner: Owner) -> None:
        devices, self._owner = owner.devices, owner
        self.workers = make_workers(owner.pool, devices, in_turns=owner.in_turns)
        self.exchange = Exchange(len(devices), owner.send_parts, self.workers.queue)
        self.meetings = Meetings(self.exchange, devices, Ahead(owner.groups), chunks=owner.chunks, stays=owner.stays)
        self.current: nn.Module | None = None  # the block that is being computed
        self.brought: list[Any] = [None] * len(devices)  # to something that is computed at home, and what came of it
        self.calls = [self.workers.queue() for _ in devices]
        self._results = [self.workers.queue() for _ in devices]
        self._give = [functools.partial(owner.give, rank) for rank in range(len(devices))]
        # By argument: a value, and what it is there.
        self._known: list[dict[Any, tuple[Any, Any]]] = [{} for _ in devices]
        self._shared: dict[tuple[int, str], Any] = {}  # the objects of per_device
        try:
            for rank in range(1, len(devices)):
                self.workers.start(rank, functools.partial(self._serve, rank))
        except BaseException:
            self.close()
            raise

    def given(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments for another device. It gets dicts of its own: a block may write into those it is handed."""
        if not self._owner.knows_all:  # other people's code may have written into what is known
            self._known[rank].clear()
        by_place = self._there(rank, "", dict(enumerate(args)))
        named = {name: value for name, value in kwargs.items() if name not in self._owner.per_device}
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

    def results(self) -> list[Any]:
        """What the other devices computed, by rank; None of one that failed, whose error the exchange knows."""
        return [results.get() for results in self._results[1:]]

    def close(self) -> None:
        """End the workers, also in the middle of a block."""
        if self.current is not None:
            self.exchange.abort(RuntimeError("the forward was ended"))
        for calls in self.calls[1:]:
            calls.put(None)
        self.workers.join()
        self.exchange.forget()
        self.meetings.forget()
        self._results.clear()

    def _serve(self, rank: int) -> None:
        """Compute block after block, up to the first error."""
        try:
            with self.workers.here(rank):
                while (call := self.calls[rank].get()) is not None:
                    block, args, kwargs = call
                    output = block(*args, **kwargs)
                    self.meetings.finish(rank)
                    self._results[rank].put(output)
                    del call, block, args, kwargs, output
        except BaseException as error:
            self.exchange.abort(error)
            self._results[rank].put(None)
