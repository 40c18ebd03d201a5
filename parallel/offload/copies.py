"""Copies between host memory and a device, beside what the device computes: streams, events and slots.

What is copied when is for its users to say: weights.py, activations.py and encoding/streamed_encoder.py.

Order. The host runs far ahead of the device, so streams wait for events and the host waits for none of them. Each
device has one stream for copies to it and one for copies to the host; it computes on its current stream. A copy waits
until nothing uses its target any more. The computing stream waits for a copy before it reads what arrives.

Memory. A tensor that a copy stream uses is not recorded there (record_stream): the allocator would keep its memory
until it sees the copy's end, and with the host far ahead tensors would pile up. Instead memory on the device is taken
and given back on the computing stream, which waits for the last copy before that.

Slots. A third slot would only let copies run further ahead of a computation that they do not wait for.

Devices without streams copy at once; their events are None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...quantization.weight_only import rebuilt
from ..transfer import module_with_streams

NUM_SLOTS = 2
_ALIGNMENT = 256  # bytes; what torch's allocator gives a tensor of its own


class CopyStreams:
    """The copy streams of a device, beside its current stream, which computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_with_streams(device, device)
        self._streams: list[Any] = [self._module.Stream(device) for _ in range(2)] if self._module is not None else []

    def computing(self) -> Any:
        """The current stream; None without streams."""
        return None if self._module is None else self._module.current_stream(self._device)

    def now(self) -> Any:
        """An event: all that the computing stream has been given so far is done."""
        return None if self._module is None else self.computing().record_event()

    def wait(self, event: Any) -> None:
        """Let what is computed from here on wait for an event."""
        if event is not None:
            self.computing().wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *after: Any) -> Any:
        """Copy to or from the host once these events have come; returns the event of the copy's end."""
        if self._module is None:
            target.copy_(source)
            return None
        stream = self._streams[target.device.type == "cpu"]
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


# ---- where tensors lie in a buffer


@dataclass(frozen=True)
class Piece:
    """One plain tensor in a buffer of bytes."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.end].view(self.dtype).view(self.shape)


def lay_out(tensors: Iterable[tuple[torch.Size, torch.dtype]], end: int = 0) -> tuple[list[Piece], int]:
    """Where tensors of these shapes and types lie in a buffer that is taken up to `end`, and the new end in bytes.

    Each begins as well aligned as a tensor that has its memory for itself.
    """
    pieces: list[Piece] = []
    for shape, dtype in tensors:
        pieces.append(Piece(-(-end // _ALIGNMENT) * _ALIGNMENT, shape, dtype))
        end = pieces[-1].end
    return pieces, end


# ---- slots


@dataclass(frozen=True)
class SlotTensor:
    """A module's tensor that is on the device only while it is in a slot."""

    owner: nn.Module
    leaf: str  # its name in the owner
    absent: torch.Tensor  # what the module has meanwhile
    pieces: Sequence[Piece]  # of the plain tensors that it is made of

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """A tensor like the absent one that views a buffer."""
        tensor = rebuilt(self.absent, iter([piece.view(buffer) for piece in self.pieces]))
        return nn.Parameter(tensor, requires_grad=False) if isinstance(self.absent, nn.Parameter) else tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Let the module have this one.

        Objects are exchanged, not their data: `.data =` cannot give a tensor subclass other parts.
        """
        own: Any = self.owner._parameters if self.leaf in self.owner._parameters else self.owner._buffers
        own[self.leaf] = tensor


@dataclass(eq=False)
class Slot:
    """A buffer on the device, and what it holds."""

    buffer: torch.Tensor
    index: int | None = None  # of the part whose bytes it has, or gets
    arrival: Any = None  # the event of the last copy into it
    used: Any = None  # the event after which nothing reads what it held
    is_bound: bool = False  # whether the part's modules read their tensors here
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by part, made once


class Slots:
    """Two buffers on a device, made once and as large as the largest part, through which the parts of a model pass."""

    def __init__(self, parts: Sequence[Sequence[SlotTensor]], num_bytes: int, device: torch.device) -> None:
        self.num_copies = 0
        self._parts = parts
        self._streams = CopyStreams(device)
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(min(NUM_SLOTS, len(parts)))]
        used = self._streams.now()  # their memory may have been another's until now
        self.slots = [Slot(buffer, used=used) for buffer in buffers]

    def find(self, index: int) -> Slot | None:
        """The slot that has a part."""
        return next((slot for slot in self.slots if slot.index == index), None)

    @torch.no_grad()
    def load(self, slot: Slot, index: int, host: torch.Tensor) -> None:
        """Copy the bytes of a part into a slot once what it held is used; should that fail, the slot is empty."""
        self.unbind(slot)
        slot.index = None
        slot.arrival = self._streams.copy(slot.buffer[: host.nbytes], host, slot.used)
        slot.index = index
        self.num_copies += 1

    def bind(self, slot: Slot) -> None:
        """Let the part's modules read their tensors in the slot; what is computed from here on waits for the copy."""
        self._streams.wait(slot.arrival)
        if slot.is_bound:
            return
        assert slot.index is not None
        tensors = self._parts[slot.index]
        if slot.index not in slot.views:
            with torch.no_grad():
                slot.views[slot.index] = [tensor.in_buffer(slot.buffer) for tensor in tensors]
        slot.is_bound = True  # first: an interrupt in between is undone with the rest
        for tensor, view in zip(tensors, slot.views[slot.index], strict=True):
            tensor.put(view)

    def unbind(self, slot: Slot) -> None:
        """The part's modules have their absent tensors again; a no-op for a slot that is not bound."""
        if slot.is_bound:
            assert slot.index is not None
            for tensor in self._parts[slot.index]:
                tensor.put(tensor.absent)
            slot.is_bound = False
            slot.used = self._streams.now()

    def clear(self) -> None:
        """Empty all slots."""
        for slot in self.slots:
            self.unbind(slot)
            slot.index = None

    def close(self) -> None:
        """Empty the slots and give their memory back; no copy may be under way."""
        self.clear()
        self.slots.clear()
