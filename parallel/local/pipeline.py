"""All cards of a split model train at once: microbatches follow each other through the stages, forwards and backwards.
A stage's graph ends at its border: what crosses and needs a gradient arrives as the copy of a detached tensor, and a
scalar stands where it left. Random numbers are drawn, and gradients summed, in the order of plain accumulation.
Reasons: docs/decisions/0007-pipelined-training.md."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..offload.recompute import HandOut
from ..runner import MicroBatch, Runner
from ..transfer import Arrivals, current_device, settle
from .bridge import Bridge, Traffic
from .workers import Coordinator, Prefetch, StageOrder, Work, num_held, plan_order


class Pipeline(Runner, Traffic):
    """Trains a bridged model, whose tail is on its last device, with several microbatches in flight."""

    def __init__(self, model: nn.Module, bridge: Bridge, *, ahead: int = 1) -> None:
        super().__init__(model, bridge.main_device)
        assert bridge.tail_device == bridge.devices[-1]
        self.bridge, self.ahead, self._local = bridge, ahead, _Local()
        self._stage_of = {device: stage for stage, device in enumerate(bridge.devices)}

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """See Runner. Raises: RuntimeError inside another run, and where devices do not follow each other."""
        sizes = len(self._stage_of), len(microbatches), self.ahead
        num_workers = num_held(*sizes)[0]
        with self.bridge.interleaved(self):
            run = Coordinator(self.bridge.pool, self.bridge.devices)
            order = StageOrder(run, plan_order(*sizes))
            prefetch = Prefetch(run, microbatches, lambda index: index - order.num_forwards[0] <= 1)
            losses: dict[int, torch.Tensor] = {}

            def work(first: int) -> None:
                for index in range(first, len(microbatches), num_workers):
                    losses[index] = self._carry(index, microbatches[index], order, prefetch)

            run.run([*(partial(work, first) for first in range(num_workers)), prefetch.work])
        return [losses[index] for index in range(len(microbatches))]

    def _carry(self, index: int, microbatch: MicroBatch[Any], order: StageOrder, prefetch: Prefetch) -> torch.Tensor:
        """Through all stages and back; the loss."""
        self._local.flight = flight = _Flight(index, order)
        try:
            loss = self._forward(flight, microbatch, prefetch)
            self._backward(flight)
            return loss
        finally:
            self._local.flight = None
            flight.borders.clear()  # an error's traceback holds the flight, and the state is saved before it is raised
            flight.arrivals.clear()
            self.bridge.end()  # whatever the forward left

    def _forward(self, flight: _Flight, microbatch: MicroBatch[Any], prefetch: Prefetch) -> torch.Tensor:
        prepared = prefetch.take(flight.index)
        flight.is_alone = microbatch.is_alone(prepared)
        flight.go_to(0)
        loss = microbatch.forward(prepared)
        last = len(self._stage_of) - 1
        if flight.stage != last:
            raise RuntimeError(
                f"the forward ended on {self.bridge.devices[flight.stage or 0]}, not on {self.bridge.devices[last]}: "
                "blocks were left out. Train without a pipeline"
            )
        flight.borders.append(_Border(last, loss))
        flight.leave()
        return loss.detach()

    def _backward(self, flight: _Flight) -> None:
        for stage, device in reversed(list(enumerate(self.bridge.devices))):
            flight.order.begin(stage, Work(True, flight.index), flight.is_alone)
            settle(flight.arrivals, device)
            own = (border for border in flight.borders if border.stage == stage)
            # A tensor that the later device had no use for has no gradient.
            starts = [border.start for border in own if border.goes_to is None or border.gradients]
            with current_device(device):  # for kernels that go by it
                if starts:
                    torch.autograd.backward(starts)
                    starts.clear()
                for border in flight.borders:  # gradients of what arrived on this stage go to where it came from
                    if border.arrived is not None and border.goes_to == stage:
                        gradient = self.bridge.side_streams.copy(border.arrived, border.start.device, flight.arrivals)
                        border.gradients.append(gradient)
                        border.arrived = None
            flight.borders = [border for border in flight.borders if border.stage != stage]
            flight.order.finish(stage)

    @property
    def arrivals(self) -> Arrivals | None:
        flight = self._local.flight
        return None if flight is None or flight.stage is None else flight.arrivals

    def arrive(self, device: torch.device) -> None:
        """Go on to the device's stage when its order says so; a no-op outside a worker's forward."""
        flight = self._local.flight
        if flight is None or flight.stage is None:
            return
        stage = self._stage_of[device]
        if stage != flight.stage:
            if stage != flight.stage + 1:
                raise RuntimeError(
                    f"the model goes from {self.bridge.devices[flight.stage]} to {device}; in a pipeline every device "
                    "follows the one before it, once. Train without a pipeline"
                )
            flight.leave()
            flight.go_to(stage)
        settle(flight.arrivals, device)  # another device is with another worker, which need not wait for ours

    def crossed(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """The copy; where tensor needs a gradient the graph ends here, and the copy begins another."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return copy
        gradients: list[torch.Tensor] = []
        start = HandOut.apply(gradients, tensor)
        border = _Border(self._stage_of[tensor.device], start, self._stage_of[copy.device], gradients)
        assert self._local.flight is not None, "it has arrivals"
        self._local.flight.borders.append(border)
        return _Arrival.apply(torch.empty(0, device=copy.device, requires_grad=True), border, copy)


@dataclass(eq=False)
class _Border:
    """Where a stage's backward starts."""

    stage: int
    start: torch.Tensor  # a scalar: the loss, or what stands for a tensor that crossed and hands out `gradients` there
    goes_to: int | None = None  # the stage with the tensor's copy; None for the loss
    gradients: list[torch.Tensor] = field(default_factory=list)
    arrived: torch.Tensor | None = None  # the copy's gradient, until it is sent back


class _Arrival(torch.autograd.Function):
    """The copy of a tensor that crossed: forwards the copy itself, backwards its gradient waits at the border."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, border: _Border, copy: torch.Tensor) -> torch.Tensor:
        ctx.border = border
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.border.arrived = grad
        return None, None, None


@dataclass
class _Flight:
    """One microbatch on its way."""

    index: int
    order: StageOrder
    is_alone: bool = False
    # Where its forward is; None while it waits for one, and in its backward, when what the bridge moves is not its own.
    stage: int | None = None
    borders: list[_Border] = field(default_factory=list)
    arrivals: Arrivals = field(default_factory=dict)

    def go_to(self, stage: int) -> None:
        """Begin its forward there when the stage's order says so."""
        self.order.begin(stage, Work(False, self.index), self.is_alone)
        self.stage = stage

    def leave(self) -> None:
        assert self.stage is not None
        self.order.finish(self.stage)
        self.stage = None


class _Local(threading.local):
    flight: _Flight | None = None
