"""All cards of a split model train at once: micro-batches follow each other through the stages, forwards and backwards.

A stage is the run of blocks on one device; the first has the model's front as well, the last its tail and the loss. In
plain accumulation one micro-batch is in flight and one card computes. Here each stage follows an order of its own
(schedule.py), and all work at the same time.

Threads. Every micro-batch is carried by a host thread (a lane), since the model's forward is one function that only
a thread can leave in the middle. A lane works on a stage when the stage's order says so, and no two lanes are on one
stage at a time: one host thread per card issues kernels, and torch's backward engine has a thread per card of its own.
One thread for all cards would not do: every backward holds it until the last kernel is issued (measured on two H200: no
gain). The next lane's data is prepared on the host meanwhile, one lane at a time and two ahead at most.

A stage's graph ends at its border. What crosses and needs a gradient arrives as the copy of a detached tensor, and a
scalar stands where it left. After the stage's backward the copies' gradients go back to the stages that the tensors
came from, and are handed out there by a backward of the scalars. So stages run backward independently, every stage's
memory is free as soon as its own part is done, and the border itself holds no activations.

Equal numbers. Each device sees the forwards in the order of the micro-batches, and the backwards too. Random numbers of
a device are drawn, and a parameter's gradients summed, in the order of plain accumulation; recomputation puts the
device's generator back. Same kernels, same order: on kernels that repeat themselves the gradients are bitwise those of
plain accumulation. What may differ: a tensor that crosses to several devices and needs a gradient (LoRA on what makes
the modulation) sums its parts in another order.

Copies travel beside the kernels (lanes.py): issued while the lane is still on the stage that it leaves, so they wait
for no other lane's kernels. A device is made to wait for a copy when the lane goes on to it, and no sooner.

Devices follow each other in the order of the placement, each once; a model that returns to one is refused. When a lane
raises, the others are stopped where they next wait, no thread outlives the run, and gradients are as they happen to be:
the step is lost, drop them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..offload.recompute import HandOut
from .bridge import Bridge, device_switch
from .schedule import Work, num_held, plan_order
from .workers import (
    Pair,
    Stopped,
    ThreadState,
    copy_beside,
    make_task,
    raise_error_of,
    settle,
    stop_and_wait,
    wait_for,
)

T = TypeVar("T")
Trace = list[tuple[int, Work]]  # stage, what it worked on; in the order in which work began


@dataclass(frozen=True)
class MicroBatch(Generic[T]):
    """One micro-batch of a step.

    Args:
        prepare: work of the host alone, such as reading files; called in order, ahead of time.
        forward: one forward through the model, given what prepare returned -> the loss, a scalar on the last device,
            already divided by the number of micro-batches.
        is_alone: given what prepare returned, whether no other micro-batch may compute while this one does. For the
            first of its shape through compiled blocks: while torch compiles, it intercepts the modules of all threads.
    """

    prepare: Callable[[], T]
    forward: Callable[[T], torch.Tensor]
    is_alone: Callable[[T], bool] = lambda prepared: False


class Runner(Protocol):
    """Computes the micro-batches of a step over several devices: a Pipeline, or Replicas (replicas.py)."""

    def seat(self, index: int) -> tuple[nn.Module, torch.device] | None:
        """Which copy of the model the micro-batch of this index must run through, and its home; None for the only
        one."""

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """Forward and backward of every micro-batch, gradients added to the model's; the losses in order, detached."""

    def sync(self) -> None:
        """To be called whenever the model's trained values have changed."""


class Pipeline:
    """Trains a bridged model with several micro-batches in flight; one step at a time per bridge.

    Args:
        bridge: of the model; attached, with its tail on the last device.
        ahead: see schedule.py.
        trace: takes what the stages work on, in order.
    Raises: ValueError if the model's tail is elsewhere.
    """

    def __init__(self, bridge: Bridge, *, ahead: int = 1, trace: Trace | None = None) -> None:
        if bridge.tail_device != bridge.devices[-1]:
            raise ValueError(
                f"the model's tail is on {bridge.tail_device}, a pipeline needs it on the last device, "
                f"{bridge.devices[-1]}; place it there before loading"
            )
        self.bridge = bridge
        self.ahead = ahead
        self.trace = trace
        self._stage_of = {device: stage for stage, device in enumerate(bridge.devices)}
        self._local = _Local()

    def seat(self, index: int) -> None:
        """There is one model."""

    def sync(self) -> None:
        """Nothing to do: there is one model."""

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """Forward and backward of every micro-batch, gradients added to the parameters'; the losses, detached.

        Raises: the first exception of a lane, after all have ended; RuntimeError inside another run, without autograd,
            and for a model that goes through its devices in another order.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("a pipeline is for training; call the model itself for a forward without gradients")
        order = plan_order(len(self._stage_of), len(microbatches), self.ahead)
        held = num_held(len(self._stage_of), len(microbatches), self.ahead)
        lanes = [_Lane(index, batch) for index, batch in enumerate(microbatches)]
        run = _Run(_Orders(order, self.trace), lanes, window=sum(held) + 2)
        with self.bridge.interleaved(self):
            self._run_in_threads(run)
        return [lane.loss for lane in run.lanes if lane.loss is not None]

    def _run_in_threads(self, run: _Run) -> None:
        state = ThreadState(self.bridge.devices)
        tasks = [make_task(self.bridge.crew, self._work, lane, run, state) for lane in run.lanes]
        try:
            for index, task in enumerate(tasks):
                wait_for(run.lanes[: max(0, index - run.window)], tasks[: max(0, index - run.window)])
                if run.orders.is_stopping:
                    break
                task.start()
            wait_for(run.lanes, tasks)
        except BaseException:  # KeyboardInterrupt while waiting, or no thread to be had
            stop_and_wait(run.orders.stop, run.lanes, tasks)
            run.error = None
            raise
        raise_error_of(run)

    def _work(self, lane: _Lane, run: _Run, state: ThreadState) -> None:
        try:
            with state.taken_over(), contextlib.ExitStack() as stack:
                stack.callback(self.bridge.end)  # whatever the lane left
                self._local.lane, self._local.orders = lane, run.orders
                self._forward(lane, run.orders)
                self._backward(lane, run.orders)
        except Stopped:
            pass
        except BaseException as error:
            run.fail(error)
        finally:
            self._local.lane = self._local.orders = None
            lane.forget()
            lane.ended.set()

    def _forward(self, lane: _Lane, orders: _Orders) -> None:
        with orders.host_turn(lane.index):
            prepared = lane.microbatch.prepare()
        lane.is_alone = lane.microbatch.is_alone(prepared)
        orders.begin(0, Work(False, lane.index), lane.is_alone)
        lane.stage = 0
        loss = lane.microbatch.forward(prepared)
        last = len(self._stage_of) - 1
        if lane.stage != last:
            raise RuntimeError(
                f"the forward ended on {self.bridge.devices[lane.stage]}, not on {self.bridge.devices[last]}: blocks "
                "were left out. Train without a pipeline"
            )
        lane.loss = loss.detach()
        lane.borders.append(_Border(last, loss))
        orders.finish(last)
        lane.stage = None

    def _backward(self, lane: _Lane, orders: _Orders) -> None:
        for stage in reversed(range(len(self._stage_of))):
            orders.begin(stage, Work(True, lane.index), lane.is_alone)
            settle(lane.arrivals, self.bridge.devices[stage])
            starts = [border.start for border in lane.borders if border.stage == stage and border.has_gradient]
            switch = device_switch(self.bridge.devices[stage])  # for kernels that go by the current device
            with contextlib.nullcontext() if switch is None else switch():
                if starts:
                    torch.autograd.backward(starts)
                    starts.clear()
                self._send_back(lane, stage)
            lane.borders = [border for border in lane.borders if border.stage != stage]
            orders.finish(stage)

    def _send_back(self, lane: _Lane, stage: int) -> None:
        """The gradients of what arrived on this stage, to where it came from."""
        for border in lane.borders:
            if border.arrived is None or border.goes_to != stage:
                continue
            gradient = copy_beside(self.bridge.side_streams, border.arrived, border.start.device, lane.arrivals)
            border.gradients.append(gradient)
            border.arrived = None

    # ---- what the bridge asks of whom its forwards take turns with

    def arrive(self, device: torch.device) -> None:
        """Go on to the device's stage when it is this lane's turn there; a no-op outside a lane's forward."""
        lane, orders = self._local.lane, self._local.orders
        if lane is None or orders is None or lane.stage is None:
            return
        stage = self._stage_of[device]
        if stage != lane.stage:
            if stage != lane.stage + 1:
                raise RuntimeError(
                    f"the model goes from {self.bridge.devices[lane.stage]} to {device}; in a pipeline every device "
                    "follows the one before it, once. Train without a pipeline"
                )
            orders.finish(lane.stage)
            lane.stage = None  # held by none while waiting
            orders.begin(stage, Work(False, lane.index), lane.is_alone)
            lane.stage = stage
        settle(lane.arrivals, device)  # another device is with another lane, which need not wait for ours

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on device which its current stream must not use before the next arrive or settle.

        Where tensor needs a gradient the graph ends here, and the copy begins another.
        """
        lane = self._local.lane
        if lane is None or lane.stage is None:
            return copy_beside(self.bridge.side_streams, tensor, device, None)
        copy = copy_beside(self.bridge.side_streams, tensor.detach(), device, lane.arrivals)
        if tensor.requires_grad and torch.is_grad_enabled():
            gradients: list[torch.Tensor] = []
            start = HandOut.apply(gradients, tensor)
            border = _Border(self._stage_of[tensor.device], start, self._stage_of[device], gradients)
            lane.borders.append(border)
            return _Arrival.apply(torch.empty(0, device=device, requires_grad=True), border, copy)
        return copy

    def settle(self) -> None:
        """Have the current streams wait for the copies this lane has under way."""
        lane = self._local.lane
        if lane is not None and lane.stage is not None:
            settle(lane.arrivals)


@dataclass(eq=False)
class _Border:
    """Where a stage's backward starts.

    Args:
        stage: whose graph it is.
        start: a scalar: the loss, or what stands for a tensor that crossed and hands out `gradients` there.
        goes_to: the stage with the tensor's copy; None for the loss.
        arrived: the copy's gradient, until it is sent back.
    """

    stage: int
    start: torch.Tensor
    goes_to: int | None = None
    gradients: list[torch.Tensor] = field(default_factory=list)
    arrived: torch.Tensor | None = None

    @property
    def has_gradient(self) -> bool:
        """Not for a tensor that the later device had no use for."""
        return self.goes_to is None or bool(self.gradients)


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


class _Lane:
    """One micro-batch on its way."""

    def __init__(self, index: int, microbatch: MicroBatch[Any]) -> None:
        self.index = index
        self.microbatch = microbatch
        self.is_alone = False
        self.stage: int | None = None  # held for a forward; then what the bridge moves is ours
        self.loss: torch.Tensor | None = None
        self.borders: list[_Border] = []
        self.arrivals: dict[Pair, Any] = {}
        self.ended = threading.Event()

    def forget(self) -> None:
        """Let go of everything but the loss."""
        del self.microbatch
        self.borders.clear()
        self.arrivals.clear()


class _Local(threading.local):
    lane: _Lane | None = None
    orders: _Orders | None = None


@dataclass
class _Run:
    """Args: window: how many lanes may be under way; more would only wait."""

    orders: _Orders
    lanes: list[_Lane]
    window: int
    error: BaseException | None = field(default=None)

    def fail(self, error: BaseException) -> None:
        """Remember the first error and end the run; what lanes raise while it ends is a consequence."""
        if not self.orders.is_stopping:
            self.error = error
        self.orders.stop()


class _Orders:
    """Lets every stage's work begin in its order. Waiting lanes hold nothing, so there is no deadlock as long as the
    orders of the stages agree, which plan_order sees to."""

    def __init__(self, orders: Sequence[Sequence[Work]], trace: Trace | None) -> None:
        self.is_stopping = False
        self._orders = orders
        self._position = [0] * len(orders)
        self._is_busy = [False] * len(orders)
        self._is_exclusive = False
        self._num_prepared = self._num_begun = 0
        self._trace = trace
        self._changed = threading.Condition()

    def begin(self, stage: int, work: Work, is_alone: bool) -> None:
        """Wait until this work is next on the stage, and with is_alone until no stage works; none begins meanwhile.

        Raises: Stopped if the run is to end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopping or self._is_next(stage, work, is_alone))
            if self.is_stopping:
                raise Stopped
            self._is_busy[stage], self._is_exclusive = True, is_alone
            if stage == 0 and not work.is_backward:
                self._num_begun += 1
                self._changed.notify_all()
            if self._trace is not None:
                self._trace.append((stage, work))

    def finish(self, stage: int) -> None:
        """The stage's work in hand is issued."""
        with self._changed:
            self._is_busy[stage] = self._is_exclusive = False
            self._position[stage] += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def host_turn(self, index: int) -> Any:
        """Inside, no other lane prepares; they come in the order of the micro-batches, with one waiting at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopping or self._may_prepare(index))
            if self.is_stopping:
                raise Stopped
        yield
        with self._changed:
            self._num_prepared += 1
            self._changed.notify_all()

    def _may_prepare(self, index: int) -> bool:
        return self._num_prepared == index and index - self._num_begun <= 1

    def stop(self) -> None:
        """Have every lane end where it next waits."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify_all()

    def _is_next(self, stage: int, work: Work, is_alone: bool) -> bool:
        is_free = not any(self._is_busy) if is_alone else not (self._is_busy[stage] or self._is_exclusive)
        return is_free and self._orders[stage][self._position[stage]] == work
