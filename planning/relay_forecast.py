"""Adds up what every card will hold of a model that was run whole (dry_run_whole.py) and whose activations are relayed.

Every block's output goes home, so home holds what the model and autograd hold between calls, wherever the blocks are:
skips of the way down, and their gradients on the way back. What a call keeps for its recomputation is on the call's
card. At home it is often the same storage as a skip, and counts once; another card has copies of its own. A block may
be several calls, and each of them is a moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..parallel.offload.activations import NUM_WAITING
from .dry_run import StepCost
from .dry_run_whole import CallCost, Storages, WholeCost
from .forecast import Forecaster, Moment, StagePlan


class RelayForecaster(Forecaster):
    """Adds up for any cut of one model; micro-batches follow one another, as relayed ones do."""

    cost: WholeCost

    def _computing(self, plan: StagePlan, gradients: int) -> Iterator[Moment]:
        calls = [call for call in self.cost.calls if plan.start <= call.block < plan.end]
        inputs, kept = _Inputs(self, plan), 0
        backwards = []
        later = 0 if gradients else sum(call.cost.lora for call in calls)
        for call in calls:
            name, is_spared = self.cost.names[call.block], call.block >= plan.first_spared
            inputs.add(call, is_spared=is_spared)
            around = call.before if plan.stage == 0 else {}
            work = call.cost.forward_kept if is_spared else call.cost.forward
            yield Moment(f"forward of {name}", inputs.held(around, num_near=NUM_WAITING + 1), kept, work, gradients)
            later -= 0 if gradients else call.cost.lora
            if call.is_trained:
                around = call.behind if plan.stage == 0 else {}
                work = _backward(call, is_home=plan.stage == 0, is_spared=is_spared)
                backwards.append(Moment(f"backward of {name}", inputs.held(around), kept, work, gradients + later))
            kept += call.cost.kept * is_spared
        if plan.stage == 0:
            yield from self._elsewhere(plan, inputs, kept, gradients)
        yield from backwards

    def _elsewhere(self, plan: StagePlan, inputs: _Inputs, kept: int, gradients: int) -> Iterator[Moment]:
        """What home holds while other cards compute, and of the tail."""
        for call in self.cost.calls:
            if call.block >= plan.end:
                name = self.cost.names[call.block]
                yield Moment(f"forward of {name}", inputs.held(call.before), kept, call.cost.outputs, gradients)
                yield Moment(f"backward of {name}", inputs.held(call.behind), kept, call.cost.outputs, gradients)
        yield Moment("last layers and loss", inputs.held(self.cost.at_end), kept, self.cost.tail, gradients)

    def _drawing_bytes(self, cost: StepCost, plan: StagePlan) -> int:
        assert isinstance(cost, WholeCost)
        is_home = plan.stage == 0
        mine = (call for call in cost.calls if is_home or plan.start <= call.block < plan.end)
        moments = []
        for call in mine:
            work = call.cost.forward if plan.start <= call.block < plan.end else call.cost.outputs
            moments.append(sum((call.before if is_home else call.away).values()) + work)
        return max(moments) if not is_home else max(*moments, sum(cost.at_end.values()) + cost.tail)


def _backward(call: CallCost, *, is_home: bool, is_spared: bool) -> int:
    """Peak of a call's backward. Gradients of its outputs are among what is alive at home; on another card they are
    copies that nobody else holds."""
    cost, is_held = call.cost, is_home and (call.is_part or not is_spared)
    work = (cost.backward_held if is_held else cost.backward) - call.gradient * is_home
    return work if is_spared else max(work, cost.forward_kept)


class _Inputs:
    """What the calls of a stage have kept for their recomputation so far."""

    def __init__(self, forecaster: RelayForecaster, plan: StagePlan) -> None:
        self._is_home, self._limit = plan.stage == 0, forecaster.settings.offload_from
        self._here: dict[int, int] = {}
        self._leaving: list[dict[int, int]] = []  # of each call, what waits in host memory

    def add(self, call: CallCost, *, is_spared: bool) -> None:
        if not call.is_trained:
            return
        leaving: dict[int, int] = {}
        for number, size in (call.at_home if self._is_home else call.away).items():
            leaves = self._limit is not None and call.away[number] >= self._limit and number not in call.shared
            (leaving if leaves and not is_spared else self._here)[number] = size
        self._leaving.append(leaving)

    def held(self, around: Storages, *, num_near: int = NUM_WAITING) -> int:
        """Bytes of these and of what is alive around the calls; those of the last num_near calls are on the card."""
        near = {number: size for call in self._leaving[-num_near:] for number, size in call.items()}
        return sum({**around, **self._here, **near}.values())
