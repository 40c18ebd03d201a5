"""What stands for the recorder of CUDA graphs where there are none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from devicebridge.parallel.local.divided_calls import Replay
from devicebridge.parallel.local.divided_graphs import Addresses, DividedGraphs
from devicebridge.parallel.local.exchange import Exchange
from devicebridge.parallel.local.tensor_parallel import TensorParallel


class StandIn:
    """Computes anew what it was given to record; recording leaves its inputs as they were.

    `launched` has each replay.
    """

    def __init__(self, owner: list[DividedGraphs]) -> None:
        self.owner, self.num_recorded, self.cards_wait = owner, 0, True
        self.launched: list[str] = []

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        staged = self.owner[0]._staged
        before = {key: tensor.clone() for key, tensor in staged.items()}
        compute()
        for key, tensor in before.items():
            staged[key].data.copy_(tensor)
        self.num_recorded += 1
        return lambda: self.launch(compute)

    def launch(self, compute: Callable[[], None]) -> None:
        self.launched.append("replay")
        compute()

    def mark(self) -> Callable[[], bool]:
        return lambda: self.cards_wait


def replaying(parallel: TensorParallel, addresses: Addresses) -> tuple[DividedGraphs, StandIn]:
    """Have the blocks replayed, as TensorParallel.replay does on cards."""
    owner: list[DividedGraphs] = []
    recorder = StandIn(owner)
    module: Any = sys.modules[type(parallel).__module__]  # ComfyUI loads the pack under a name of its own
    owner.append(module.DividedGraphs(parallel.devices, lambda: recorder, addresses))
    parallel.graphs = owner[0]
    return owner[0], recorder


class TogetherStandIn:
    """As StandIn, for devices with a thread each."""

    def __init__(self) -> None:
        self.num_recorded, self.cards_wait = 0, True
        self.fails_on: int | None = None  # rank
        self._parts: dict[int, Callable[[], None]] = {}

    def arrive(self, rank: int) -> None:
        pass

    def release(self) -> None:
        pass

    def mark(self) -> Callable[[], bool]:
        return lambda: self.cards_wait

    def record(self, rank: int, exchange: Exchange, compute: Callable[[], None]) -> Replay | None:
        exchange.once(rank, "begins", self._begin)
        if rank == self.fails_on:
            raise RuntimeError(f"device {rank} cannot be recorded")
        parts = self._parts
        parts[rank] = compute
        compute()
        return Replay(lambda: None, lambda each: parts[each]()) if rank == 0 else None

    def _begin(self) -> None:
        self.num_recorded += 1
        self._parts = {}
