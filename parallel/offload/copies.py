"""Copies between host memory and a device, beside what the device computes: streams, events and slots. A tensor that a
copy stream uses is not recorded there (record_stream): tensors would pile up. Memory on the device is taken and given
back on the computing stream, which waits for the last copy before. Without streams events are None."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

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
    """Where tensors of these shapes and types lie in a buffer that is taken up to `end`, and the new end in bytes."""
    pieces: list[Piece] = []
    for shape, dtype in tensors:
        pieces.append(Piece(-(-end // _ALIGNMENT) * _ALIGNMENT, shape, dtype))
        end = pieces[-1].end
    return pieces, end


@dataclass(frozen=True)
class SlotTensor:
    """A module's tensor that is on the device only while it is in a slot."""

    owner: nn.Module
    leaf: str  # its name in the owner
    absent: torch.Tensor  # what the module has meanwhile
    piece: Piece

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """A tensor like the absent one that views a buffer."""
        tensor = self.piece.view(buffer)
        return nn.Parameter(tensor, requires_grad=False) if isinstance(self.absent, nn.Parameter) else tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Let the module have this one; objects are exchanged, not their data."""
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
        for slot in self.slots:
            self.unbind(slot)
            slot.index = None

    def close(self) -> None:
        """Empty the slots and give their memory back; no copy may be under way."""
        self.clear()
        self.slots.clear()


# ---- host memory that a card copies from and to by itself, beside what it computes. torch's own pinned memory is
# rounded up to powers of two and kept after it is freed. So ordinary memory is registered with the driver. It must be
# unregistered before it is freed, else the driver would take whatever lies at its address later for the same memory.

_log = logging.getLogger(__name__)
_PAGE = mmap.PAGESIZE
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card


class PinnedBuffer:
    """Pinned bytes; ordinary memory for devices other than accelerators, where pinning fails, or is not wanted."""

    def __init__(self, num_bytes: int, device: torch.device, *, is_wanted: bool = True) -> None:
        # Bytes at the start of whole pages that nothing else shares, since pages are what is registered. Torch pins
        # them itself for accelerators other than CUDA.
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.is_pinned = here is not None and here.type == device.type != "cuda"
        size = -(-num_bytes // _PAGE) * _PAGE
        memory = torch.empty(size + _PAGE, dtype=torch.uint8, device="cpu", pin_memory=self.is_pinned)
        start = -memory.data_ptr() % _PAGE
        # With a storage of its own: torch asks whether a storage's first byte is pinned.
        self.tensor = torch.from_numpy(memory.numpy()[start : start + num_bytes])
        self.used: Any = None  # the event after which no copy reads or writes the bytes; whoever copies sets it
        self._unregister: weakref.finalize[..., PinnedBuffer] | None = None
        if device.type == "cuda" and is_wanted and num_bytes:
            with torch.cuda.device(device):  # or the thread's first card would get a context, which takes memory there
                address = self.tensor.data_ptr()
                self.is_pinned = not int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
            if not self.is_pinned:
                _forget_last_error(device)
                message = "%.2f GB of host memory could not be pinned (is a limit on locked memory set?); copies to %s "
                _log.warning(message + "will be slower, results are the same", num_bytes / 1e9, device)
        if self.is_pinned and device.type == "cuda":
            self._unregister = weakref.finalize(self, _unregister, self.tensor, device)
            self._unregister.atexit = False  # the driver may be gone by then, and takes the registration with it

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    def close(self) -> None:
        """Let go of the memory; views of it stay what they are, no longer pinned. A second call is a no-op."""
        if self._unregister is not None:
            self._unregister()
        self.is_pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


class BufferPool:
    """Buffers that are kept for their next use: no more than the largest uses take at once, whatever sizes come."""

    def __init__(self, make: Callable[[int], PinnedBuffer]) -> None:
        self._make = make
        self._free: list[PinnedBuffer] = []
        self._all: weakref.WeakSet[PinnedBuffer] = weakref.WeakSet()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in self._all)

    def take(self, num_bytes: int) -> PinnedBuffer:
        """The smallest free one of at least so many bytes, else a new one in place of as many that are too small."""
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
        made = self._make(num_bytes)
        self._all.add(made)
        return made

    def give_back(self, buffer: PinnedBuffer) -> None:
        if not self._is_closed:
            self._free.append(buffer)

    def close(self) -> None:
        """Free the buffers, those in use as soon as nobody refers to them."""
        self._is_closed = True
        while self._free:
            self._free.pop().close()


def _unregister(tensor: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # a copy may be under way
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


def _forget_last_error(device: torch.device) -> None:
    """The runtime reports a failed call once more, to whoever launches a kernel next; let that be this one."""
    try:
        torch.zeros(1, device=device).add_(1)
    except RuntimeError:
        return
