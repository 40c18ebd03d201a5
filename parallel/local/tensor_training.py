"""Training with every block divided among several devices, which compute each microbatch together (tensor parallel).

Every device has a tree of shards (shard_trees.py) and one worker, which runs the whole forward, loss and backward of a
microbatch through its tree. Their collectives are inside the blocks (collectives.py). Embedders, tail and loss
every device computes for itself, with the same bits.

A LoRA is held whole, each parameter by one of the devices, and the optimizer knows nothing else: what it starts from,
its state, clipping and files are those of one device. The trees have slices of it:

    around a column-parallel linear    A whole, its gradient the sum of all devices' parts; B's rows with the linear's
    around a row-parallel linear       A's columns with the linear's; B whole, its gradient the sum
    around any other                   both whole; every device has all of their gradient

`sync` deals the values out, and a step ends by bringing the gradients back. All sums are in the order of the devices,
so that a run repeats itself. Reasons: docs/decisions/0022-training-with-divided-blocks.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ...patches.hooks import HookSet
from ..runner import MicroBatch, OneModel
from ..transfer import Arrivals, SideStreams, current_device
from .collectives import Collective, attach_collectives
from .lora_slices import LoraSlices
from .shards import BlockShard
from .thread_pool import ThreadPool
from .workers import Coordinator

_log = logging.getLogger(__name__)
T = TypeVar("T")


class DividedModel(nn.Module):
    """Trees of shards, one per device, called as one model: the output is the first device's, and the same on all.

    Args:
        trees: with their LoRAs, in the order of devices; each takes inputs from any device.
        shards: of each device, name of a block -> its part of it.
    """

    def __init__(
        self,
        trees: Sequence[nn.Module],
        devices: Sequence[torch.device],
        shards: Sequence[Mapping[str, BlockShard]],
    ) -> None:
        super().__init__()
        self.trees = nn.ModuleList(trees)
        self.devices = tuple(devices)
        self._side_streams = SideStreams()
        self._pool = ThreadPool()
        self._local = _Local()
        self._group: Collective | None = None
        self._running = threading.Lock()
        self._hooks: list[HookSet] = [
            attach_collectives(each, rank, self._find_group) for rank, each in enumerate(shards)
        ]

    def remove(self) -> None:
        """Take off what makes the trees meet; a second call is a no-op."""
        for hooks in self._hooks:
            hooks.remove()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.through(lambda tree, device: tree(*args, **kwargs))

    def through(self, call: Callable[[nn.Module, torch.device], T]) -> T:
        """What call(tree, device) returns on the main device, computed by all; inside `together` on this device alone.

        For models that are not called themselves, as those of ComfyUI.
        """
        rank = self._local.rank
        if rank is None:
            return self.together(lambda: self.through(call))[0]
        return call(self.trees[rank], self.devices[rank])

    def together(self, work: Callable[[], T], beside: Callable[[], None] = lambda: None) -> list[T]:
        """What work() returns in a thread per device, in which this model is that device's tree.

        Args:
            beside: one more thread's work.
        Raises: the first exception of a thread, and the others end; RuntimeError inside another call.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this model computes something already; wait for it, runs do not nest")
        try:
            self._group = group = Collective(len(self.devices), self._send)
            found: dict[int, T] = {}

            def carry(rank: int) -> None:
                self._local.rank = rank
                try:
                    with current_device(self.devices[rank]):  # for kernels that go by it
                        found[rank] = work()
                    group.finish(rank)
                finally:
                    self._local.rank = None

            def at_end(index: int) -> None:  # also of one that never began: nobody may wait for it
                if index < len(self.devices) and index not in found:
                    group.abort(RuntimeError(f"{self.devices[index]} has ended"))

            run = Coordinator(self._pool, self.devices)
            try:
                run.run([*(partial(carry, rank) for rank in range(len(self.devices))), beside], at_end)
            finally:
                group.forget()
            return [found[rank] for rank in range(len(self.devices))]
        finally:
            self._group = None
            self._running.release()

    def _find_group(self) -> Collective:
        if self._group is None:
            raise RuntimeError(
                "a block that several devices compute together was called by itself; call the model, or run a step"
            )
        return self._group

    def _send(self, tensors: Sequence[torch.Tensor], rank: int, arrivals: Arrivals) -> Sequence[torch.Tensor]:
        return self._side_streams.copies(tensors, self.devices[rank], arrivals)


class TensorTraining(OneModel):
    """Trains a divided model; see Runner.

    Args:
        lora: of the model, already distributed.
    """

    def __init__(self, model: DividedModel, lora: LoraSlices) -> None:
        super().__init__(model, model.devices[0])
        self.model, self._lora = model, lora
        self.sync()

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """See Runner.

        Raises: RuntimeError inside another run, without autograd.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("this runner is for training; call the model itself for a forward without gradients")
        losses: list[torch.Tensor] = []
        prepared = [microbatches[0].prepare()] if microbatches else []
        try:
            for index, microbatch in enumerate(microbatches):
                given, following = prepared.pop(), microbatches[index + 1 : index + 2]
                beside = partial(prepared.extend, (each.prepare() for each in following))  # prepared in that thread
                losses.append(self.model.together(partial(microbatch.compute, given), beside)[0])
                del given
            self._lora.bring_gradients()
        finally:
            self._lora.drop_gradients()
        return losses

    def sync(self) -> None:
        """Deal out the values of the LoRA."""
        self._lora.deal_out()


class _Local(threading.local):
    rank: int | None = None  # of the device whose thread this is
