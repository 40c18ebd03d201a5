"""Host memory that a card copies from and to by itself, beside what it computes.

torch's own pinned memory is rounded up to powers of two and kept after it is freed: blocks of 0.7 GB would take 1 GB
each. So ordinary memory is registered with the driver. It must be unregistered before it is freed, else the driver
would take whatever lies at its address later for the same memory and copy what was there before.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)
_PAGE = mmap.PAGESIZE
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card


class PinnedBuffer:
    """Pinned bytes; ordinary memory for devices other than accelerators, or where pinning fails.

    Args:
        is_wanted: False leaves it ordinary memory, e.g. since the last buffer could not be registered.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, is_wanted: bool = True) -> None:
        # Bytes at the start of whole pages that nothing else shares, since pages are what is registered. Torch pins
        # them itself for accelerators other than CUDA.
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.is_pinned = here is not None and here.type == device.type != "cuda"
        size = -(-num_bytes // _PAGE) * _PAGE
        memory = torch.empty(size + _PAGE, dtype=torch.uint8, device="cpu", pin_memory=self.is_pinned)
        start = -memory.data_ptr() % _PAGE
        self.tensor = memory[start : start + num_bytes]
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
        """Of all buffers, in use or not."""
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
        """Free for the next use, or freed after close."""
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
