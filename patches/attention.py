"""Training without cuDNN's attention, whose gradients torch gets wrong.

Torch keeps the kernel that cuDNN planned for the layouts of q, k and v, and reuses it for every layout of the output's
gradient, without a word. It prefers that attention on cards for data centres alone; ComfyUI's attention has it before
others on all NVIDIA cards, by `sdpa_kernel`. Why so, and what it costs: docs/decisions/0009-gradients-of-attention.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

_SWITCH = "_set_sdp_use_cudnn"  # of torch._C: enable_cudnn_sdp and sdpa_kernel set it
# What torch had when each of those inside came: whether it used cuDNN's attention, and the function that says so.
_lock, _before = threading.Lock(), list[tuple[bool, Callable[[bool], None]]]()


@contextlib.contextmanager
def sound_attention() -> Iterator[None]:
    """Inside, torch does without cuDNN's attention in all threads, whoever asks for it; when the last one has left it
    is as before. Forwards and backwards must run inside. Inference needs nothing of it."""
    with _lock:
        own = torch.backends.cuda.cudnn_sdp_enabled(), getattr(torch._C, _SWITCH)
        _before.append(_before[0] if _before else own)
        _before[0][1](False)
        setattr(torch._C, _SWITCH, lambda is_on: None)
    try:
        yield
    finally:
        with _lock:
            allowed, switch = _before.pop()
            if not _before:
                setattr(torch._C, _SWITCH, switch)
                switch(allowed)
