"""Activation offload: what recomputed blocks keep is in host memory until their backward, instead of on their cards. It
goes while later blocks compute, and comes back one block ahead of the backward, with the same bytes and strides.
Reasons: docs/decisions/0008-blocks-from-host-memory.md."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..transfer import version_of
from .copies import BufferPool, CopyStreams, PinnedBuffer

MIN_BYTES = 2**20  # below, a copy costs more in launches than it frees
NUM_WAITING = 2  # blocks whose tensors are on a card besides those of the block at work: the newest, one on its way


class ActivationOffload:
    """A store for the inputs of one split model's recomputed blocks; see recompute.py."""

    def __init__(self, devices: Sequence[torch.device], *, min_bytes: int = MIN_BYTES) -> None:
        self._min_bytes = min_bytes
        self._devices = {device: _Device(device) for device in devices}

    def keep(
        self, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[Handle | None, Sequence[torch.Tensor]]:
        """A handle of those tensors that may leave the device, and the others, in order, which are for the caller."""
        inputs = [_Input(tensor) if self._may_leave(tensor, device) else None for tensor in tensors]
        if not any(inputs):
            return None, tensors
        handle = Handle(inputs, self._devices[device])
        self._devices[device].queue(handle)
        return handle, [tensor for tensor, each in zip(tensors, inputs, strict=True) if each is None]

    def close(self) -> None:
        """Free the host memory, what is in use as soon as it is not; later buffers are not kept either."""
        for device in self._devices.values():
            device.pool.close()

    @property
    def host_bytes(self) -> int:
        return sum(device.pool.num_bytes for device in self._devices.values())

    def _may_leave(self, tensor: torch.Tensor, device: torch.device) -> bool:
        if tensor.device != device or device.type in ("cpu", "meta") or isinstance(tensor, nn.Parameter):
            return False
        if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor) or tensor.nbytes < self._min_bytes:
            return False
        expected = 1  # its elements must fill one piece of memory, in any order of the dims, and each once
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Handle:
    """What one call of a block was given: on its card, on the way, or in host memory."""

    def __init__(self, inputs: list[_Input | None], device: _Device) -> None:
        self._inputs, self._device = inputs, device
        self._computing, self._ready = device.streams.computing(), device.streams.now()
        self._before: weakref.ref[Handle] | None = None

    def fetch(self, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tensors in order, ready for the computing stream; those of the block before start their way back. Raises:
        RuntimeError for the second time, and if one was changed in place since keep."""
        if self.is_over:
            raise RuntimeError(
                "this block's inputs came back from host memory for a backward that is over; run every backward once, "
                "without retain_graph, or train without offload_activations"
            )
        self._bring_back()
        remaining = iter(others)
        found = [next(remaining) if each is None else each.checked() for each in self._inputs]
        self._let_go()
        before = None if self._before is None else self._before()
        if before is not None:
            before._bring_back()
        return found

    @property
    def is_over(self) -> bool:
        return self._inputs is _OVER

    def follow(self, before: Handle) -> None:
        """What both hold is on the card anyway."""
        self._before = weakref.ref(before)
        for each in self._on_card():
            for other in before._on_card():
                if each.card is other.card:
                    each.stays = other.stays = True

    def leave(self) -> None:
        for each in self._on_card():
            if not each.stays and each.host is None:
                flat, streams = _flat(each.checked()), self._device.streams
                each.host = buffer = self._device.pool.take(flat.nbytes)
                buffer.used = streams.copy(_elements(buffer, flat), flat, self._ready, buffer.used)

    def drop(self) -> None:
        """Let what was copied go from the card, once the copies are done."""
        for each in self._on_card():
            if each.host is not None:
                each.checked()
                self._device.streams.wait(each.host.used)
                each.card = None

    def _on_card(self) -> list[_Input]:
        return [each for each in self._inputs if each is not None and each.card is not None]

    def _bring_back(self) -> None:
        for each in self._inputs:
            if each is not None and each.card is None:
                assert each.host is not None
                streams = self._device.streams
                tensor = torch.empty_strided(each.size, each.stride, dtype=each.dtype, device=self._device.device)
                flat, now = _flat(tensor), streams.now()  # until then its memory may be in use
                each.host.used = streams.copy(flat, _elements(each.host, flat), now, each.host.used)
                each.arrive(tensor)

    def _let_go(self) -> None:
        """Give everything away; the computing stream waits for copies from and to the card's memory. autograd runs a
        backward on the stream of its forward, so that is the stream which goes on with the tensors."""
        inputs, self._inputs = self._inputs, _OVER
        for each in inputs:
            if each is not None and each.host is not None:
                if each.card is not None and self._computing is not None:
                    self._computing.wait_event(each.host.used)
                self._device.pool.give_back(each.host)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._let_go()


_OVER: list[_Input | None] = []


class _Input:
    """One tensor of a handle. card: it, where it is on its card. host: the buffer that has a copy, or gets one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.host: PinnedBuffer | None = None
        self.stays = False
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.card: torch.Tensor | None
        self.arrive(tensor)

    def arrive(self, tensor: torch.Tensor) -> None:
        """It is on the card, if it was copied once host.used has come."""
        self.card, self._version = tensor, version_of(tensor)

    def checked(self) -> torch.Tensor:
        """The tensor on the card. Raises: RuntimeError if it is not what it was."""
        assert self.card is not None
        if version_of(self.card) != self._version:
            raise RuntimeError(
                f"a tensor {list(self.size)} that a block was called with was modified in place afterwards, so the "
                "block cannot be computed again; switch gradient checkpointing off for this model"
            )
        return self.card


class _Device:
    """Streams, host memory, and the handles that have something on the card and no copy or an unfinished one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, CopyStreams(device)
        self.pool = BufferPool(functools.partial(_make_buffer, device=device))
        self._queued: list[weakref.ref[Handle]] = []

    def queue(self, handle: Handle) -> None:
        """Take in the newest: the one before starts to leave, those before that leave the card."""
        alive = [each for each in (ref() for ref in self._queued) if each is not None and not each.is_over]
        for old in alive[:-1]:
            old.drop()
        if alive:
            handle.follow(alive[-1])
            alive[-1].leave()
        self._queued = [weakref.ref(each) for each in (*alive[-1:], handle)]


def _make_buffer(num_bytes: int, device: torch.device) -> PinnedBuffer:
    buffer = PinnedBuffer(num_bytes, device)
    if device.type == "cuda" and not buffer.is_pinned:
        raise RuntimeError(
            f"offload_activations needs {num_bytes / 1e6:.0f} MB more of pinned host memory, and the driver gave "
            'none; free host memory, or set train.offload_activations to "off"'
        )
    return buffer


def _elements(buffer: PinnedBuffer, flat: torch.Tensor) -> torch.Tensor:
    """The buffer's bytes as elements like these."""
    return buffer.tensor[: flat.nbytes].view(flat.dtype)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((math.prod(tensor.shape),), (1,))
