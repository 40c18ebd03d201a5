"""Host memory that a card copies from by itself, beside what it computes.

torch's own pinned memory is rounded up to powers of two and kept after it is freed: blocks of 0.7 GB would take 1 GB
each. So ordinary memory is registered with the driver. It must be unregistered before it is freed, else the driver
would take whatever lies at its address later for the same memory and copy what was there before.
"""

from __future__ import annotations

import logging
import weakref

import torch

_log = logging.getLogger(__name__)


class PinnedBuffer:
    """Host memory that a CUDA card copies from by itself; ordinary memory for other devices, or where that fails.

    Args:
        is_wanted: False leaves it ordinary memory, e.g. since the last buffer could not be registered.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, is_wanted: bool = True) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.is_pinned = False
        if device.type == "cuda" and is_wanted and num_bytes:
            with torch.cuda.device(device):  # or the thread's first card would get a context, which takes memory there
                self.is_pinned = not int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), num_bytes, 0))
            if not self.is_pinned:
                _forget_last_error(device)
                _log.warning(
                    "%.2f GB of host memory could not be pinned (is a limit on locked memory set?); copies to %s will "
                    "be slower, results are the same",
                    num_bytes / 1e9,
                    device,
                )
        self._unregister = weakref.finalize(self, _unregister, self.tensor, device) if self.is_pinned else None
        if self._unregister is not None:
            self._unregister.atexit = False  # the driver may be gone by then, and takes the registration with it

    def close(self) -> None:
        """Let go of the memory; views of it stay what they are, no longer pinned. A second call is a no-op."""
        if self._unregister is not None:
            self._unregister()
        self.is_pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")


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
