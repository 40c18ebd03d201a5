"""Training with copies of a model on several devices, which share out the rows (tokens) of each microbatch (tokens.py).
Every device runs forward, loss and backward through its copy. Reasons: docs/decisions/0062-training-by-tokens.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ...patches.hooks import map_tensors
from ..runner import MicroBatch
from ..transfer import current_device
from .collectives import Collective, uncounted
from .data_parallel import DataParallel, Replica
from .deriving import apart
from .tokens import OneDeviceError, Rows, RowsError, TokenParallel

_log = logging.getLogger(__name__)
T = TypeVar("T")


class TokenModel(nn.Module):
    """The copies of a model that share out rows, called as one: the output is the first device's, and the same on all.
    Args: is_derived: whether nobody wrote the plan of the rows. Then the first sample of each size is also computed
    whole, and compared: code may do something else where there are more rows."""

    def __init__(self, rows: TokenParallel, *, is_derived: bool = False) -> None:
        super().__init__()
        self.copies, self.devices = nn.ModuleList(rows.modules), rows.devices
        self._rows, self._is_derived, self._has_said_whole = rows, is_derived, False
        self._compared: dict[int, set[Hashable]] = {rank: set() for rank in range(len(self.devices))}
        self._here = _Here()

    def through(
        self, call: Callable[[nn.Module, torch.device], T], *, is_one_frame: bool = False, size: Hashable = None
    ) -> T:
        """What call(copy, device) returns on the main device, computed by all; inside `on_all` on this device alone.
        A sample whose rows cannot be shared out, every device computes whole; the loss of the first one counts. Raises:
        RowsError where derived rows have another result than one device."""
        if (rank := self._here.rank) is None:
            return self.on_all(lambda: self.through(call, is_one_frame=is_one_frame, size=size))[0]
        if self._is_derived and size not in self._compared[rank]:
            self._compare(rank, call, is_one_frame=is_one_frame)
            self._compared[rank].add(size)  # not of one that ran out of memory
        return self._through(rank, call, is_one_frame=is_one_frame)

    def _compare(self, rank: int, call: Callable[[nn.Module, torch.device], T], *, is_one_frame: bool) -> None:
        model, was_training = self.copies[rank], self.copies[rank].training
        model.eval()  # without dropout
        try:
            with torch.no_grad():
                found = self._through(rank, call, is_one_frame=is_one_frame)
                far = apart(found, call(model, self.devices[rank]))
        finally:
            model.train(was_training)
        if far > 1:
            raise RowsError(
                f"the tokens of {type(model).__name__} cannot be shared out: by rows that were derived a sample of "
                f"this size differs from one device's {far:.3g} times as much as rounding may; set parallel.strategy "
                'to "auto"'
            )

    def _through(self, rank: int, call: Callable[[nn.Module, torch.device], T], *, is_one_frame: bool) -> T:
        model, device, plan = self.copies[rank], self.devices[rank], self._rows.plan
        rows = Rows(rank, (is_one_frame and plan.one_frame) or plan, self._rows.shares, self._here.group)
        self._rows.newest[rank] = rows
        try:
            with self._rows.on(rows):
                output = call(model, device)
        except OneDeviceError as error:  # all devices find the same, at the same place
            del self._rows.newest[rank]
            if rank == 0 and not self._has_said_whole:
                self._has_said_whole = True
                _log.warning("a sample has %s: each device computes it whole, and others like it", str(error))
        if rank not in self._rows.newest:  # what the error held is free here
            output = call(model, device)
        return output if rank == 0 else map_tensors(output, uncounted)

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """What work() returns in a thread per device, in which this model is that device's copy. Raises: the first
        exception of a thread, and the others end."""

        def carry(rank: int, group: Collective) -> T:
            self._here.rank, self._here.group = rank, group
            try:
                with current_device(self.devices[rank]):  # for kernels that go by it
                    return work()
            finally:
                self._here.rank = None
                del self._here.group

        try:
            return self._rows.on_ranks([partial(carry, rank) for rank in range(len(self.devices))])
        finally:
            self._rows.newest.clear()


class _Here(threading.local):
    rank: int | None = None  # of a thread that is one's
    group: Collective


class TokenTraining(DataParallel):
    """Trains copies of a model that share out the rows of each microbatch, which each have a part of the gradients."""

    def __init__(self, model: TokenModel, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self.model, self.num_replicas = model, 1

    def replica_for(self, index: int) -> tuple[nn.Module, torch.device]:
        return self.model, self.devices[0]

    def _losses(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        # The next one is prepared while the devices still compute what they were launched.
        return [self.model.on_all(partial(each.compute, each.prepare()))[0] for each in microbatches]
