"""What recomputed blocks keep is held in host memory meanwhile, instead of on their cards.

With gradient checkpointing a block keeps what it was called with until its backward: one hidden state per block and
micro-batch in flight. For video these are the largest part of a card (Wan at 480x832, 49 frames: 208 MB a block). Here
they go to pinned host memory while later blocks compute, and come back one block ahead of the backward. Numbers are the
same: what comes back are the same bytes in the same strides.

What goes. A tensor that two neighbouring blocks of a device are called with (modulation, rotary tables, text states
that nobody changes) is on the card anyway and stays. So the choice for a block is made when the next one of its device
was called: what both have in common stays, the rest goes. It is made by identity, on tensors that are both alive; a
model that hands on a new object each time has it copied, which costs time and nothing else. Small tensors, parameters,
and tensors with gaps between their elements stay.

What is on a card. `keep` is called after a block's forward. The newest block's tensors stay: they are the first that a
backward asks for. The ones before are being copied, and those before that are dropped. So at most NUM_WAITING blocks'
tensors are there besides those of the block at work, however many micro-batches the device holds: a later one pushes
out the last blocks of the one before. In a backward there is the block at work and one that arrives.

Streams. Every device has one for copies to the host and one for copies back. A copy out waits for the block that used
the tensor. The host runs far ahead of the card; so the tensor is not recorded on the copy's stream, which would leave
its memory unusable until the allocator sees the copy's end and let tensors pile up. Instead, one block later the
compute stream (not the host) waits for the copy, then the reference is dropped: whatever gets the memory next comes
later on the compute stream. For the way back memory is taken on the compute stream, too; the copy waits for the point
that stream has reached then, and the compute stream for the copy. A tensor dropped in between (an error) makes the
compute stream wait first.

The first block that a backward asks for waits for its copy unless it is the newest: the order of the micro-batches is
the schedule's, which is not known here. That is one copy per micro-batch and device.

Host memory. Buffers are kept for the next step, per device: as many as were needed at once. A smaller batch uses those
of a larger one, and those that have become too small are freed for a larger one. They are ordinary memory that is
registered with CUDA (pinned.py). Memory that cannot be pinned is refused: copies through ordinary memory would hold up
the host and all cards. After `close`, buffers are freed as soon as nothing uses them.

One backward per forward: what came back is given away. Under autocast torch's own checkpointing runs, and keeps all.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..transfer import module_with_streams
from .pinned import PinnedBuffer

_log = logging.getLogger(__name__)

MIN_BYTES = 2**20  # below, a copy costs more in launches than it frees
NUM_WAITING = 2  # blocks whose tensors are on a card besides those of the block at work: the newest, one on its way


class Offload:
    """Keeps the tensors of one split model's recomputed blocks; see recompute.py.

    Args:
        min_bytes: smaller tensors stay where they are.
    """

    def __init__(self, *, min_bytes: int = MIN_BYTES) -> None:
        self._min_bytes = min_bytes
        self._devices: dict[torch.device, _Device] = {}
        self._making = threading.Lock()
        self._is_closed = self._has_said = False

    def keep(
        self, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[Ticket | None, Sequence[torch.Tensor]]:
        """A ticket for the tensors that may leave the device, and the others, in order, which are the caller's to keep.

        Args:
            tensors: what a block of the device was called with; its forward has been issued.
        """
        parts = [_Part(tensor) if self._may_leave(tensor, device) else None for tensor in tensors]
        if not any(parts):
            return None, tensors
        store = self._of(device)
        ticket = Ticket(parts, store)
        store.queue(ticket)
        return ticket, [tensor for tensor, part in zip(tensors, parts, strict=True) if part is None]

    def pass_over(self, why: str) -> None:
        """Say once that something stays on its card."""
        if not self._has_said:
            _log.warning("block inputs stay on their cards: %s", why)
        self._has_said = True

    def close(self) -> None:
        """Free the buffers, those in use as soon as they are not; later ones are not kept either."""
        self._is_closed = True
        for device in self._devices.values():
            device.buffers.close()

    @property
    def host_bytes(self) -> int:
        """Held in host memory now, in use or not."""
        return sum(device.buffers.num_bytes for device in self._devices.values())

    def _of(self, device: torch.device) -> _Device:
        with self._making:
            if device not in self._devices:
                self._devices[device] = _Device(device)
                if self._is_closed:
                    self._devices[device].buffers.close()
            return self._devices[device]

    def _may_leave(self, tensor: torch.Tensor, device: torch.device) -> bool:
        if tensor.device != device or device.type in ("cpu", "meta") or isinstance(tensor, nn.Parameter):
            return False
        if tensor.numel() * tensor.element_size() < self._min_bytes:
            return False
        return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor) and _is_dense(tensor)


class Ticket:
    """What one call of a block was given: on its card, on the way, or in host memory."""

    def __init__(self, parts: list[_Part | None], device: _Device) -> None:
        self._parts = parts
        self._device = device
        self._compute = device.streams.compute()
        self._ready = device.streams.now()
        self._before: weakref.ref[Ticket] | None = None

    def bring(self, rest: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All tensors in order, ready for the compute stream; those of the block before start their way.

        Args:
            rest: what keep left to the caller.
        Raises: RuntimeError for the second time, and if one was changed in place since keep.
        """
        if self._parts is _GONE:
            raise RuntimeError(
                "this block's inputs came back from host memory for a backward that is over; run every backward once, "
                "without retain_graph, or train without offload_activations"
            )
        self._fetch()
        remaining = iter(rest)
        found = [next(remaining) if part is None else self._checked(part) for part in self._parts]
        self._let_go()
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch()
        return found

    # ---- for the device that it is queued on

    @property
    def is_over(self) -> bool:
        return self._parts is _GONE

    def follow(self, before: Ticket) -> None:
        """What both hold is on the card anyway."""
        self._before = weakref.ref(before)
        for part in self._present():
            for other in before._present():
                if part.card is other.card:
                    part.stays = other.stays = True

    def leave(self) -> None:
        """Start copying what goes to the host."""
        for part in self._present():
            if not part.stays and part.host is None:
                part.check()
                part.host = self._device.copy_out(part.flat(), self._ready)

    def drop(self) -> None:
        """Let what was copied go from the card, once the copies are done."""
        for part in self._present():
            if part.host is not None:
                part.check()
                self._device.streams.wait(part.host.used)
                part.card = None

    # ----

    def _present(self) -> list[_Part]:
        return [part for part in self._parts if part is not None and part.card is not None]

    def _fetch(self) -> None:
        for part in self._parts:
            if part is not None and part.card is None:
                assert part.host is not None
                self._device.copy_back(part, part.host)

    def _checked(self, part: _Part) -> torch.Tensor:
        assert part.card is not None
        part.check()
        return part.card

    def _let_go(self) -> None:
        """Give everything away; the compute stream waits for copies from and to the card's memory.

        autograd runs a backward on the stream of its forward, so that is the stream which goes on with the tensors.
        """
        parts, self._parts = self._parts, _GONE
        for part in parts:
            if part is not None and part.host is not None:
                if part.card is not None and self._compute is not None:
                    self._compute.wait_event(part.host.used)
                self._device.buffers.give(part.host)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._let_go()


_GONE: list[_Part | None] = []


class _Part:
    """One tensor of a ticket.

    card: the tensor where it is on its card. host: the buffer that has a copy, or gets one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.card: torch.Tensor | None = tensor
        self.host: _Buffer | None = None
        self.stays = False
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._version = _version(tensor)

    def arrive(self, tensor: torch.Tensor) -> None:
        """It is on the card again once host.used has come."""
        self.card, self._version = tensor, _version(tensor)

    def flat(self) -> torch.Tensor:
        """The elements as they lie in memory."""
        assert self.card is not None
        return self.card.detach().as_strided((math.prod(self.size),), (1,))

    def check(self) -> None:
        """Raises: RuntimeError if the tensor on the card is not what it was."""
        assert self.card is not None
        if _version(self.card) != self._version:
            raise RuntimeError(
                f"a tensor {list(self.size)} that a block was called with was modified in place afterwards, so the "
                "block cannot be computed again; switch gradient checkpointing off for this model"
            )


class _Device:
    """Streams, buffers and the tickets that have something on the card and no copy or an unfinished one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = _Streams(device)
        self.buffers = _Buffers(device)
        self._queued: list[weakref.ref[Ticket]] = []

    def queue(self, ticket: Ticket) -> None:
        """Take in the newest: the one before starts to leave, those before that leave the card."""
        alive = [each for each in (ref() for ref in self._queued) if each is not None and not each.is_over]
        for old in alive[:-1]:
            old.drop()
        if alive:
            ticket.follow(alive[-1])
            alive[-1].leave()
        self._queued = [weakref.ref(each) for each in (*alive[-1:], ticket)]

    def copy_out(self, flat: torch.Tensor, ready: Any) -> _Buffer:
        """A buffer that gets the elements, after `ready`."""
        buffer = self.buffers.take(flat.numel() * flat.element_size())
        target = buffer.view(flat.numel(), flat.dtype)
        buffer.used = self.streams.copy(self.streams.leaving, target, flat, (ready, buffer.used))
        return buffer

    def copy_back(self, part: _Part, buffer: _Buffer) -> None:
        """The tensor on the card again."""
        tensor = torch.empty_strided(part.size, part.stride, dtype=part.dtype, device=self.device)
        flat = tensor.as_strided((math.prod(part.size),), (1,))
        after = self.streams.now(), buffer.used  # the memory may be in use until now
        buffer.used = self.streams.copy(self.streams.arriving, flat, buffer.view(flat.numel(), part.dtype), after)
        part.arrive(tensor)


class _Streams:
    """The copy streams of a device and its compute stream, the current one; without streams all is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_with_streams(device, device)
        self.leaving, self.arriving = (self._module.Stream(device) if self._module else None for _ in range(2))

    def compute(self) -> Any:
        return None if self._module is None else self._module.current_stream(self._device)

    def now(self) -> Any:
        """An event: what the compute stream has been given so far."""
        return None if self._module is None else self.compute().record_event()

    def wait(self, event: Any) -> None:
        """Have the compute stream wait."""
        if event is not None:
            self.compute().wait_event(event)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: Sequence[Any]) -> Any:
        """Copy on a stream after these events; returns the event of its end."""
        if self._module is None:
            target.copy_(source)
            return None
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


class _Buffers:
    """Host memory for copies of one device, kept for the next step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[_Buffer] = []
        self._all: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._all)

    def take(self, num_bytes: int) -> _Buffer:
        """The smallest free one of at least so many bytes, else a new one in place of as many bytes that are too small.

        So no more is held than the largest batches take at once, in whatever order sizes come.
        """
        free = sorted(self._free, key=lambda buffer: buffer.num_bytes)
        found = next((each for each in free if each.num_bytes >= num_bytes), None)
        if found is not None:
            self._free.remove(found)
            return found
        num_closed = 0
        while free and num_closed < num_bytes:
            too_small = free.pop()
            self._free.remove(too_small)
            num_closed += too_small.num_bytes
            too_small.close()
            self._all.discard(too_small)
        made = _Buffer(num_bytes, self._device)
        self._all.add(made)
        return made

    def give(self, buffer: _Buffer) -> None:
        """Free for the next copy."""
        if not self._is_closed:
            self._free.append(buffer)

    def close(self) -> None:
        self._is_closed = True
        while self._free:
            self._free.pop().close()


class _Buffer:
    """Pinned bytes. used: the event after which nobody reads or writes them."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.used: Any = None
        self._pinned = PinnedBuffer(num_bytes, device)
        if device.type == "cuda" and not self._pinned.is_pinned:
            raise RuntimeError(
                f"offload_activations needs {num_bytes / 1e6:.0f} MB more of pinned host memory, and the driver gave "
                'none; free host memory, or set train.offload_activations to "off"'
            )

    def view(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._pinned.tensor[: count * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Wait for its last copy and free it; a second call is a no-op."""
        if self.used is not None:
            self.used.synchronize()
            self.used = None
        self._pinned.close()


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, in any order of the dims, and each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
