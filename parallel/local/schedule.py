"""Which microbatch a stage works on when: the plans, and the policies that make workers keep to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..runner import MicroBatch
from .workers import Coordinator


@dataclass(frozen=True)
class Work:
    """One entry of a stage's order."""

    is_backward: bool
    microbatch: int


def num_held(num_stages: int, num_microbatches: int, ahead: int = 0) -> list[int]:
    """How many microbatches each stage holds between forward and backward. Args: ahead: what all but the last hold
    besides, which fills the gaps that uneven stages leave. [num_stages]"""
    last = num_stages - 1
    held = [num_stages - stage + (ahead if stage < last else 0) for stage in range(num_stages)]
    return [min(count, num_microbatches) for count in held]


def plan_order(num_stages: int, num_microbatches: int, ahead: int = 0) -> list[list[Work]]:
    """Every stage's order in a pipeline of 1f1b (PipeDream-Flush in Megatron-LM, arXiv 2104.04473): as many forwards as
    it may hold, then backwards and forwards alternately, then backwards. [num_stages][2 * num_microbatches]"""
    orders = []
    for held in num_held(num_stages, num_microbatches, ahead):
        order = [Work(False, index) for index in range(held)]
        for index in range(num_microbatches):
            order.append(Work(True, index))
            if held + index < num_microbatches:
                order.append(Work(False, held + index))
        orders.append(order)
    return orders


class StageOrder:
    """Lets every stage's work begin in its order, and one that must be alone when no stage works."""

    def __init__(self, run: Coordinator, orders: Sequence[Sequence[Work]]) -> None:
        self._run = run
        self._orders = orders
        self._position = [0] * len(orders)
        self._busy: set[int] = set()
        self._is_exclusive = False
        self.num_forwards = [0] * len(orders)

    def begin(self, stage: int, work: Work, is_alone: bool) -> None:
        """Wait until this work is next on the stage, and with is_alone until no stage works; none begins meanwhile.
        Raises: Stopped if the run is to end."""
        with self._run.when(
            lambda: (
                not (self._busy if is_alone else stage in self._busy or self._is_exclusive)
                and self._orders[stage][self._position[stage]] == work
            )
        ):
            self._busy.add(stage)
            self._is_exclusive = is_alone
            self.num_forwards[stage] += not work.is_backward

    def finish(self, stage: int) -> None:
        with self._run.changing():
            self._busy.remove(stage)
            self._is_exclusive = False
            self._position[stage] += 1


class Prefetch:
    """Prepares the microbatches of a step in order, ahead of the workers, where they are near to their forward."""

    def __init__(
        self, run: Coordinator, microbatches: Sequence[MicroBatch[Any]], may_prepare: Callable[[int], bool]
    ) -> None:
        self._run, self._microbatches, self._may_prepare = run, microbatches, may_prepare
        self._prepared: dict[int, Any] = {}

    def work(self) -> None:
        for index, microbatch in enumerate(self._microbatches):
            with self._run.when(lambda index=index: self._may_prepare(index)):  # type: ignore[misc]
                pass
            prepared = microbatch.prepare()
            with self._run.when():
                self._prepared[index] = prepared
            del prepared

    def take(self, index: int) -> Any:
        """What prepare returned, to be asked for once. Raises: Stopped if the run is to end."""
        with self._run.when(lambda: index in self._prepared):
            return self._prepared.pop(index)
