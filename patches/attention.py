"""Training without cuDNN's attention, whose gradients torch gets wrong.

Torch keeps the kernel that cuDNN planned for the layouts of q, k and v, and reuses it for every layout of the output's
gradient, without a word. It prefers that attention on cards for data centres alone. Why so, and what it costs there:
docs/decisions/0009-gradients-of-attention.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_lock, _before = threading.Lock(), list[bool]()  # what torch had when each of those inside came


@contextlib.contextmanager
def sound_attention() -> Iterator[None]:
    """Inside, torch does without cuDNN's attention in all threads; when the last one has left it is as before. Forwards
    and backwards must run inside. Inference needs nothing of it."""
    with _lock:
        _before.append(torch.backends.cuda.cudnn_sdp_enabled() if not _before else _before[0])
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            allowed = _before.pop()
            if not _before:
                torch.backends.cuda.enable_cudnn_sdp(allowed)
