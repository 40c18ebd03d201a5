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

With copies of the model in the place of trees, devices share out the rows of each microbatch (tokens.py). The LoRAs are
those of data_parallel.py then. Reasons: docs/decisions/0062-training-by-tokens.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ...patches.hooks import HookSet, map_tensors
from ..runner import MicroBatch, OneModel
from ..staged_copies import copies_between
from ..transfer import Arrivals, current_device
from .all_rows import CountedOnce
from .collectives import Collective, attach_collectives
from .data_parallel import DataParallel, Replica
from .lora_slices import LoraSlices
from .shards import BlockShard
from .thread_pool import ThreadPool
from .tokens import OneDeviceError, Rows, TokenParallel
from .workers import Coordinator

_log = logging.getLogger(__name__)
T = TypeVar("T")


class DividedModel(nn.Module):
    """Trees of shards or copies, one per device, called as one model: the output is the first device's, and the same on
    all.

    Args:
        trees: with their LoRAs, in the order of devices; each takes inputs from any device.
        shards: of each device, name of a block -> its part of it; () for copies.
        rows: of copies, whose rows the devices share out; attached.
    """

    def __init__(
        self,
        trees: Sequence[nn.Module],
        devices: Sequence[torch.device],
        shards: Sequence[Mapping[str, BlockShard]] = (),
        rows: TokenParallel | None = None,
    ) -> None:
        super().__init__()
        self.trees = nn.ModuleList(trees)
        self.devices = tuple(devices)
        self._rows = rows
        self._has_said_whole = False
        self._side_streams = copies_between(devices)
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

    def through(self, call: Callable[[nn.Module, torch.device], T], *, is_one_frame: bool = False) -> T:
        """What call(tree, device) returns on the main device, computed by all; inside `together` on this device alone.

        For models that are not called themselves, as those of ComfyUI.
        A sample whose rows cannot be shared out, every device computes whole; the loss of the first one counts.
        """
        rank = self._local.rank
        if rank is None:
            return self.together(lambda: self.through(call, is_one_frame=is_one_frame))[0]
        tree, device = self.trees[rank], self.devices[rank]
        if self._rows is None:
            return call(tree, device)
        plan = self._rows.plan
        rows = Rows(rank, (is_one_frame and plan.one_frame) or plan, self._rows.shares, self._find_group())
        self._rows.newest[rank] = rows
        try:
            with self._rows.on(rows):
                output = call(tree, device)
        except OneDeviceError as error:  # all devices find the same, at the same place
            del self._rows.newest[rank]
            if rank == 0 and not self._has_said_whole:
                self._has_said_whole = True
                _log.warning("a sample has %s: each device computes it whole, and others like it", str(error))
        if rank not in self._rows.newest:  # what the error held is free here
            output = call(tree, device)
        return output if rank == 0 else map_tensors(output, CountedOnce.apply)

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
            if self._rows is not None:
                self._rows.newest.clear()
            self._group = None
            self._running.release()

    def losses(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """After forward and backward, one microbatch after the other, into the gradients of every tree."""
        losses: list[torch.Tensor] = []
        prepared = [microbatches[0].prepare()] if microbatches else []
        for index, microbatch in enumerate(microbatches):
            given, following = prepared.pop(), microbatches[index + 1 : index + 2]
            beside = partial(prepared.extend, (each.prepare() for each in following))  # prepared in that thread
            losses.append(self.together(partial(microbatch.compute, given), beside)[0])
            del given
        return losses

    def _find_group(self) -> Collective:
        if self._group is None:
            raise RuntimeError(
                "a block that several devices compute together was called by itself; call the model, or run a step"
            )
        return self._group

    def _send(self, tensors: Sequence[torch.Tensor], rank: int, arrivals: Arrivals) -> Sequence[torch.Tensor]:
        return self._side_streams.copies(tensors, self.devices[rank], arrivals)


class TokenTraining(DataParallel):
    """Trains copies of a model that share out the rows of each microbatch; see Runner.

    Every copy has a part of the gradients, as under data parallelism, and its loss is the first one's alone.

    Args:
        model: of the replicas' models.
    """

    num_replicas = 1

    def __init__(self, model: DividedModel, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self.model = model

    def replica_for(self, index: int) -> tuple[nn.Module, torch.device]:
        return self.model, self.devices[0]

    def _losses(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        return self.model.losses(microbatches)


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
        try:
            losses = self.model.losses(microbatches)
            self._lora.bring_gradients()
        finally:
            self._lora.drop_gradients()
        return losses

    def sync(self) -> None:
        """Deal out the values of the LoRA."""
        self._lora.deal_out()


class _Local(threading.local):
    rank: int | None = None  # of the device whose thread this is
