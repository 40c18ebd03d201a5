"""Data parallel in one process: every device holds a copy of the whole model, and the micro-batches are dealt out.

Where a model fits each card alone nothing needs to cross between cards while they compute, so this beats every split.
A step deals its micro-batches round robin. Each device has one host thread, which takes its micro-batches in their
order, forwards and backwards, into gradients of its own. When all are done, the first replica's device (home) adds up:

    gradient = ((home's sum + second's sum) + third's sum) + ...        one flat copy per device

clips, and steps the optimizer, which exists there only; sync() then copies the trained values to the others. Only LoRA
is trained, so both copies are small.

Equal numbers. Which replica has which micro-batch, and every order of summation, are fixed, so a run repeats itself bit
for bit on kernels that do, whatever the threads' timing. Against plain accumulation on one device the sums of some
micro-batches are made before they are added: the same up to the order of summation. Dropout is drawn from each device's
own generator, so masks are others than one device, or another number of them, would draw; all generators are saved.

Batches are prepared by the thread that calls run(), in order, one ahead of each device. While torch compiles it
intercepts the modules of all threads, hence MicroBatch.is_alone, as in a pipeline. When a thread raises, the others end
after the micro-batch they are at, no thread outlives the run, and the step is lost: drop the gradients.

Left for later: dealing by measured speed instead of in turns (seat() would say), and replicas that are pipelines over
several cards each (a Replica would have a Pipeline to hand its micro-batches to).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..devices import CPU
from .bridge import device_switch
from .pipeline import MicroBatch
from .thread_pool import Crew
from .workers import Stopped, ThreadState, make_task, raise_error_of, stop_and_wait, wait_for


@dataclass(frozen=True)
class Replica:
    """One copy of a model.

    Args:
        model: all of it on device.
        parameters: the trained ones, in the same order in every replica.
    """

    model: nn.Module
    device: torch.device
    parameters: tuple[nn.Parameter, ...]


class Replicas:
    """Trains copies of a model on several devices; their trained values are made equal at once.

    Args:
        replicas: the first has the optimizer, and is what the outside knows as the model.
    Raises: ValueError for two on one device, one on the CPU (whose random numbers all threads share), or copies that
        differ in what is trained.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        _refuse_unequal(replicas)
        self._replicas = tuple(replicas)
        self._running = threading.Lock()
        self._crew = Crew()
        self.sync()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(replica.device for replica in self._replicas)

    def seat(self, index: int) -> tuple[nn.Module, torch.device]:
        """Which copy the micro-batch of this index of a step must run through, and its device."""
        replica = self._replicas[index % len(self._replicas)]
        return replica.model, replica.device

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """Forward and backward of every micro-batch, gradients added to those of the first replica's parameters.

        Each forward goes through its seat's model. Returns the losses in the order of the micro-batches, detached, each
        on its device.

        Raises: the first exception, after all threads have ended; RuntimeError inside another run, without autograd.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("replicas are for training; call a model itself for a forward without gradients")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("these replicas compute a step already; wait for it, runs do not nest")
        try:
            self._drop_gradients()
            lanes = [_Lane(index, replica) for index, replica in enumerate(self._replicas[: len(microbatches)])]
            self._run_in_threads(lanes, microbatches)
            self._add_up()
        finally:
            self._drop_gradients()
            self._running.release()
        return [lanes[index % len(lanes)].losses[index // len(lanes)] for index in range(len(microbatches))]

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the first replica's trained values to the others; after every change of them."""
        home, *others = self._replicas
        flat = torch.cat([parameter.detach().flatten() for parameter in home.parameters])
        for replica in others:
            _for_each_part(flat.to(replica.device), replica.parameters, lambda parameter, part: parameter.copy_(part))

    def _drop_gradients(self) -> None:
        """Of all but the first."""
        for parameter in itertools.chain.from_iterable(replica.parameters for replica in self._replicas[1:]):
            parameter.grad = None

    @torch.no_grad()
    def _add_up(self) -> None:
        """Add the gradients of the others to those of the first, one device after the other."""
        home, *others = self._replicas
        for replica in others:
            with_gradient = [index for index, each in enumerate(replica.parameters) if each.grad is not None]
            if not with_gradient:
                continue
            gradients = [replica.parameters[index].grad for index in with_gradient]
            flat = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).to(home.device)
            del gradients
            for index in with_gradient:
                replica.parameters[index].grad = None
            _for_each_part(flat, [home.parameters[index] for index in with_gradient], _add_gradient)

    def _run_in_threads(self, lanes: Sequence[_Lane], microbatches: Sequence[MicroBatch[Any]]) -> None:
        gate, state = _Gate(), ThreadState(self.devices)
        tasks = [make_task(self._crew, self._work, lane, gate, state) for lane in lanes]
        try:
            try:
                for task in tasks:
                    task.start()
                _deal(lanes, microbatches, gate)
            except Exception as fault:  # of preparing, or no thread to be had
                gate.fail(fault)
            wait_for(lanes, tasks)
        except BaseException:  # KeyboardInterrupt
            stop_and_wait(gate.stop, lanes, tasks)
            gate.error = None
            raise
        raise_error_of(gate)

    def _work(self, lane: _Lane, gate: _Gate, state: ThreadState) -> None:
        switch = device_switch(lane.replica.device)  # for kernels that go by the current device
        try:
            with state.taken_over(), contextlib.nullcontext() if switch is None else switch():
                while (dealt := gate.next_of(lane)) is not None:
                    lane.losses.append(_forward_and_backward(*dealt, gate))
                    del dealt
        except Stopped:
            pass
        except BaseException as error:
            gate.fail(error)
        finally:
            lane.ended.set()


def num_dealt(num_microbatches: int, num_replicas: int) -> list[int]:
    """How many micro-batches of a step each replica computes. [num_replicas]"""
    return [len(range(index, num_microbatches, num_replicas)) for index in range(num_replicas)]


def copy_model(model: nn.Module, device: torch.device) -> nn.Module:
    """The same model on another device, bit for bit: no file is read again and nothing is rounded again.

    One tensor after the other is copied; model is left alone. It has no hooks yet and nothing that refers to it.
    """
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            assert tensor.device != device, "a replica shares no tensor with the model it was copied from"
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved
    return copy.deepcopy(model, memo)  # finds every tensor copied already


def _deal(lanes: Sequence[_Lane], microbatches: Sequence[MicroBatch[Any]], gate: _Gate) -> None:
    for index, microbatch in enumerate(microbatches):
        lane = lanes[index % len(lanes)]
        if not gate.wait_for_room(lane):
            return
        gate.hand_to(lane, (microbatch, microbatch.prepare()))
    gate.close()


def _forward_and_backward(microbatch: MicroBatch[Any], prepared: Any, gate: _Gate) -> torch.Tensor:
    with gate.computing(microbatch.is_alone(prepared)):
        loss = microbatch.forward(prepared)
        loss.backward()
        return loss.detach()


def _add_gradient(parameter: nn.Parameter, part: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = part.clone()
    else:
        parameter.grad.add_(part)


def _for_each_part(flat: torch.Tensor, parameters: Sequence[nn.Parameter], use: Any) -> None:
    """Call use(parameter, its part of the flat buffer) for each."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        use(parameter, part.view(parameter.shape))


def _refuse_unequal(replicas: Sequence[Replica]) -> None:
    devices = [replica.device for replica in replicas]
    if not devices or len(set(devices)) != len(devices) or CPU in devices:
        raise ValueError(
            f"replicas were asked for on {', '.join(map(str, devices)) or 'no device'}; give each a GPU of its own"
        )
    described = [[(tuple(p.shape), p.dtype) for p in replica.parameters] for replica in replicas]
    if any(each != described[0] for each in described) or len({dtype for _, dtype in described[0]}) != 1:
        raise ValueError(
            f"the replicas on {', '.join(map(str, devices))} do not train the same parameters of one type; attach the "
            "same LoRA to each"
        )


class _Lane:
    """One device's share of a step."""

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
        self.replica = replica
        self.losses: list[torch.Tensor] = []
        self.dealt: tuple[MicroBatch[Any], Any] | None = None
        self.ended = threading.Event()


class _Gate:
    """Hands prepared micro-batches to lanes, lets one compute alone, and ends a run.

    Waits have a limit, since some can be interrupted only when they end.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._is_stopping = self._is_closed = self._is_exclusive = False
        self._num_computing = 0
        self._changed = threading.Condition()

    def wait_for_room(self, lane: _Lane) -> bool:
        """Until the lane has begun what it was given last; False if the run is to end."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._is_stopping or lane.dealt is None, timeout=0.2):
                pass
            return not self._is_stopping

    def hand_to(self, lane: _Lane, dealt: tuple[MicroBatch[Any], Any]) -> None:
        """The lane's next one."""
        with self._changed:
            lane.dealt = dealt
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will be dealt."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def next_of(self, lane: _Lane) -> tuple[MicroBatch[Any], Any] | None:
        """What the lane computes next, None when all is dealt.

        Raises: Stopped if the run is to end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._is_closed or lane.dealt is not None)
            if self._is_stopping:
                raise Stopped
            dealt, lane.dealt = lane.dealt, None
            self._changed.notify_all()
            return dealt

    @contextlib.contextmanager
    def computing(self, is_alone: bool) -> Iterator[None]:
        """Inside, no other lane computes if is_alone, and none that must be alone otherwise.

        Raises: Stopped if the run is to end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._may_compute(is_alone))
            if self._is_stopping:
                raise Stopped
            self._num_computing += 1
            self._is_exclusive = is_alone
        try:
            yield
        finally:
            with self._changed:
                self._num_computing -= 1
                self._is_exclusive = False
                self._changed.notify_all()

    def _may_compute(self, is_alone: bool) -> bool:
        return not self._is_exclusive and not (is_alone and self._num_computing)

    def fail(self, error: BaseException) -> None:
        """Remember the first error and end the run."""
        with self._changed:
            if not self._is_stopping:
                self.error = error
            self._is_stopping = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Have every lane end before its next micro-batch."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
