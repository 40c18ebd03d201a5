"""Regional compilation: every kind of transformer block is compiled once and reused for all blocks of its kind.

Only a block's forward is compiled, never the call around it: hooks that move activations between devices, gradient
checkpointing and LoRA bookkeeping stay Python and cause no graph break. Weights enter the graphs as inputs, so blocks
alike share one; torch compiles anew per device, per input shape, and once more for the first block, whose input needs
no gradient.

Shapes are compiled as they come (dynamic=False): graphs per bucket cost seconds. Their number is known beforehand, so
torch is given it as its limit, and a job that needs more than torch keeps is not compiled.

Attention without cuDNN. The compiler chooses strides of its own for what attention returns and gets back as gradient;
the backward of cuDNN's attention then reads past the end of its tensors (`compute_dot_do_o_specialized`, found with
compute-sanitizer on an H200, torch 2.11.0+cu130), which ends in an illegal memory access or goes unseen, as the
neighbours lie. So while blocks are compiled torch may not choose it, in this process; flash attention takes its place.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..families.spec import ModelFamily
from .eight_bit_kernels import fault

_log = logging.getLogger(__name__)

# Of one kind of block, device and shape, with some to spare: recomputed blocks run without gradients and once more with
# them, kept ones with them, all in evaluation without; the first block's input needs no gradient, the others' do.
_GRAPHS_PER_SHAPE = 8
_MOST_GRAPHS = 256  # per kind; torch keeps no more (accumulated_recompile_limit)


class CompiledBlocks:
    """Handle of apply_compile."""

    def __init__(self, blocks: Sequence[nn.Module], settings: ExitStack) -> None:
        self._blocks = list(blocks)
        self._settings = settings

    def remove(self) -> None:
        """Give every block its own forward back; a second call is a no-op."""
        for block in self._blocks:
            block.__dict__.pop("forward", None)
        self._blocks = []
        self._settings.close()


def compile_fault(devices: Sequence[torch.device]) -> str:
    """Why torch.compile cannot work on these devices; "" if nothing speaks against it."""
    for device in devices:
        if device.type == "cuda" and fault(device):
            return fault(device)
        if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
            return "no C++ compiler was found"
        if device.type not in ("cuda", "cpu"):
            return f"nothing is known of compiling for {device.type}"
    return "" if importlib.util.find_spec("torch._inductor") else "this build of torch has no compiler"


def apply_compile(model: nn.Module, family: ModelFamily, max_graphs: int = 64, **options: Any) -> CompiledBlocks:
    """Compile the forward of every block of a model, in place; the work is done at the first calls.

    Until remove() is called this process does without cuDNN's attention. Where torch takes the limit of graphs for the
    whole process only (before 2.13), it is raised until then, too.

    Args:
        max_graphs: that torch may keep per kind of block; beyond it a call raises. Torch's own limit of 8 is spent by
            two devices and two buckets.
        options: of torch.compile.
    """
    blocks = [block for each in family.block_lists for block in model.get_submodule(each.name).children()]
    settings = ExitStack()
    handle = CompiledBlocks(blocks, settings)
    settings.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
    torch.backends.cuda.enable_cudnn_sdp(False)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options = {"recompile_limit": max_graphs, **options}
    else:
        settings.enter_context(torch._dynamo.config.patch(recompile_limit=max_graphs))
    try:
        for block in blocks:
            block.forward = torch.compile(block.forward, **{"fullgraph": True, "dynamic": False, **options})
    except BaseException:
        handle.remove()
        raise
    return handle


def compile_if_possible(
    model: nn.Module, family: ModelFamily, devices: Sequence[torch.device], num_shapes: int
) -> CompiledBlocks | None:
    """apply_compile, or None and one line in the log that says why not.

    Args:
        num_shapes: different shapes of batches to come; 0 if nobody can tell.
    """
    max_graphs = _GRAPHS_PER_SHAPE * len(devices) * num_shapes
    reason = compile_fault(devices) or _count_fault(max_graphs, num_shapes)
    if reason:
        _log.warning("blocks are not compiled: %s", reason)
        return None
    _log.info("blocks are compiled for %d shapes of batches, at most %d graphs per kind", num_shapes, max_graphs)
    try:
        return apply_compile(model, family, max_graphs)
    except RuntimeError as error:  # a Python or a machine that torch.compile does not know
        _log.warning("blocks are not compiled: %s", error)
        return None


def _count_fault(max_graphs: int, num_shapes: int) -> str:
    if not num_shapes:
        return "captions of any length would each be compiled anew"
    if max_graphs <= _MOST_GRAPHS:
        return ""
    return (
        f"{num_shapes} shapes of batches would need up to {max_graphs} graphs per kind of block, torch keeps "
        f"{_MOST_GRAPHS}; use fewer resolutions, a larger bucket_step or batch_size 1"
    )
