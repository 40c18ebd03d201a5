"""Data parallel in one process: every device holds a copy of the whole model, and the microbatches are distributed.
Behind a step the first replica's device adds up gradients in the order of devices. Against one device they differ by
the order of summation, and dropout draws other masks. Reasons: docs/decisions/0010-replicas.md."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..devices import CPU
from ..runner import MicroBatch, Runner
from ..transfer import current_device
from .workers import Coordinator, Prefetch, StageOrder, ThreadPool, Work


@dataclass(frozen=True)
class Replica:
    """One copy of a model, all of it on device; the trained parameters are in the same order in every replica."""

    model: nn.Module
    device: torch.device
    parameters: tuple[nn.Parameter, ...]


class DataParallel(Runner):
    """Trains copies of a model on several devices; the first has the optimizer, and is what the outside knows. Raises:
    ValueError for two on one device, or one on the CPU, whose random numbers all threads share."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        devices = [replica.device for replica in replicas]
        if not devices or len(set(devices)) != len(devices) or CPU in devices:
            raise ValueError(
                f"replicas were asked for on {', '.join(map(str, devices)) or 'no device'}; give each a GPU of its own"
            )
        described = [[(p.shape, p.dtype) for p in replica.parameters] for replica in replicas]
        assert all(each == described[0] for each in described) and len({dtype for _, dtype in described[0]}) == 1
        self._replicas, self._pool, self.devices = tuple(replicas), ThreadPool(), tuple(devices)
        self.num_replicas = len(devices)
        self.sync()

    def replica_for(self, index: int) -> tuple[nn.Module, torch.device]:
        replica = self._replicas[index % len(self._replicas)]
        return replica.model, replica.device

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """See Runner; the losses are each on its replica's device."""
        try:
            self._drop_gradients()
            losses = self._losses(microbatches)
            self._add_up()
        finally:
            self._drop_gradients()
        return losses

    def _losses(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        parts = distributed(len(microbatches), len(self._replicas))
        run = Coordinator(self._pool, self.devices)
        order = StageOrder(run, [[Work(False, index) for index in indices] for indices in parts])

        def is_near(index: int) -> bool:
            num_before, stage = divmod(index, len(parts))  # of its replica
            return order.num_forwards[stage] >= num_before

        prefetch = Prefetch(run, microbatches, is_near)
        losses: dict[int, torch.Tensor] = {}

        def work(stage: int) -> None:
            with current_device(self.devices[stage]):  # for kernels that go by it
                for index in parts[stage]:
                    prepared = prefetch.take(index)
                    order.begin(stage, Work(False, index), microbatches[index].is_alone(prepared))
                    losses[index] = microbatches[index].compute(prepared)
                    order.finish(stage)
                    del prepared

        run.run([*(partial(work, stage) for stage in range(len(parts))), prefetch.work])
        return [losses[index] for index in range(len(microbatches))]

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the first replica's trained values to the others; after every change of them."""
        first, *others = self._replicas
        flat = torch.cat([parameter.detach().flatten() for parameter in first.parameters])
        for replica in others:
            for parameter, part in _parts(flat.to(replica.device), replica.parameters):
                parameter.copy_(part)

    def _drop_gradients(self) -> None:
        for parameter in itertools.chain.from_iterable(replica.parameters for replica in self._replicas[1:]):
            parameter.grad = None

    @torch.no_grad()
    def _add_up(self) -> None:
        first, *others = self._replicas
        for replica in others:
            gradients = {index: each.grad for index, each in enumerate(replica.parameters) if each.grad is not None}
            if gradients:
                flat = torch.cat([gradient.flatten() for gradient in gradients.values()]).to(first.device)
                for parameter, part in _parts(flat, [first.parameters[index] for index in gradients]):
                    parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)


def distributed(num_microbatches: int, num_replicas: int) -> list[range]:
    """Which microbatches of a step each replica computes. [num_replicas]"""
    return [range(index, num_microbatches, num_replicas) for index in range(num_replicas)]


def copy_model(
    model: nn.Module, device: torch.device, is_shared: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> nn.Module:
    """The same model, which has no hooks yet, on another device, bit for bit: no file is read again. Args: is_shared:
    of a tensor in host memory, whether both have it."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if is_shared(tensor):
                memo[id(tensor)] = tensor
                continue
            assert tensor.device != device, "a replica shares no tensor of a device with the model it was copied from"
            moved = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved
    return copy.deepcopy(model, memo)  # finds every tensor copied already


def _parts(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return ((each, part.view(each.shape)) for each, part in zip(parameters, parts, strict=True))
