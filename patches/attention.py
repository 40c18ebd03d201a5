"""Attention kernels whose gradient is right: all that torch has but cuDNN's.

cuDNN plans a kernel for tensors of one layout, and torch keeps the plan for the next call that looks alike. Its list of
what must be alike has the layouts of q, k and v, not the layout of the output's gradient. A model that calls attention
with q, k and v alike, but whose outputs go different ways, gets the plan of one way for the gradient of the other. In
FLUX.1 a single block joins attention's output with its MLP's, so that the gradient is a slice of wider rows; a double
block does not. Its backward then reads wrong rows, or past the end of its tensors: an illegal memory access, or a wrong
gradient and no word about it, as the neighbouring memory lies. So it is with compiled blocks, whose layouts the
compiler chooses.

Torch prefers cuDNN's attention on cards for data centres only (Hopper, Blackwell); elsewhere nothing changes. Flash
attention takes its place. Found with compute-sanitizer on H200 (`compute_dot_do_o_specialized`, torch 2.11.0+cu130 with
cuDNN 9.19). Source of the cause: pytorch's aten/src/ATen/native/cudnn/MHA.cpp (MHAParams); a change that adds the
layout, pull request 191576, was taken back in August 2026. Figures: docs/experiments.md, 2026-11-22.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def sound_attention() -> Iterator[None]:
    """Inside, torch chooses among kernels whose gradient is right; afterwards among those it could before.

    For the whole process, all threads and devices: forwards, which make the choice, must run inside. Inference needs
    none of this.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
