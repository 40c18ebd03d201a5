"""Blocks or tensor: what a split with way auto takes, from what this machine's cards and links were measured at.

The choice is made when the MODEL is split, for weights lie differently then. The size of the latents and whether CFG is
used are not known there. So it is made for a usual size, and tensor must be faster both with CFG and without; a model
that is told its guidance has no CFG. In the first step of a run both are known, and a line says so if the other way
would have been faster.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import comfy.model_management as management

from ....events import first_line
from ....families.comfy.video import VIDEO_MODELS
from ....parallel.transfer import module_with_streams
from ....planning.divided_work import count_tokens, is_told_guidance, work_by_size
from ....planning.machine_speed import machine_speed
from ....planning.ways import GAIN, Ways
from .division import check_runnable
from .plan import SplitPlan, SplitRequest, card_budgets, plan_split
from .tree import SplitTree

_log = logging.getLogger(__name__)
_PICTURE_TOKENS = 4096  # of 1024 x 1024
_CLIP_TOKENS = 14040  # of 832 x 480, 33 frames


def plan_way(model: Any, request: SplitRequest) -> SplitPlan:
    """The plan of the way that was asked for, else of the faster one; a line in the log says why.

    Raises: ValueError as plan_split.
    """
    root = model.model.diffusion_model
    if request.way is not None:
        return plan_split(root, request)
    blocks = plan_split(root, dataclasses.replace(request, way="blocks"))
    try:
        tensor = _plan_tensor(model, request, blocks)
        ways = _compare(model, blocks, tensor)
    except (ValueError, RuntimeError) as error:
        _log.info("split: way auto takes blocks: %s", first_line(error))
        return blocks
    tokens = _CLIP_TOKENS if blocks.layout in VIDEO_MODELS else _PICTURE_TOKENS
    counts = (1,) if is_told_guidance(root) else (1, 2)
    takes_tensor = ways.prefers_tensor(tokens, counts)
    taken = "tensor" if takes_tensor else "blocks"
    forecasts = "; with CFG ".join(str(ways.seconds(tokens, count)) for count in counts)
    _log.info("split: way auto takes %s: at %d tokens %s", taken, tokens, forecasts)
    return dataclasses.replace(tensor if takes_tensor else blocks, ways=ways)


def say_other_way(tree: SplitTree, noise_shape: Any, num_conds: int) -> None:
    """Say that the other way would be faster for this run, if way auto took this one and it is forecast so."""
    ways, tokens = tree.plan.ways, count_tokens(tree.diffusion_model, noise_shape)
    count = int(noise_shape[0]) * num_conds
    if ways is None or tokens is None or not count:
        return
    found = ways.seconds(tokens, count)
    here, there, other = found.blocks, found.tensor, "tensor"
    if tree.plan.division is not None:
        here, there, other = there, here, "blocks"
    if there < GAIN * here:
        tree.say_once(f"split: for this run way {other} would be faster: {found}; it is chosen in the split node")


def _plan_tensor(model: Any, request: SplitRequest, blocks: SplitPlan) -> SplitPlan:
    """Raises: ValueError or RuntimeError saying why this MODEL, these cards or these settings need blocks."""
    asked = {
        "verify": request.verify,
        "offload off": not request.offload,
        "transport": request.transport is not None,
        "balance": request.balance != "memory",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"{name} is a setting of that way")
    if module_with_streams(*request.devices[:2]) is None:
        raise ValueError(f"{request.devices[0]} cannot copy beside what it computes")
    check_runnable((), model.model_options.get("transformer_options", {}), blocks.layout.patches_inside)
    if model.offload_device == model.load_device:
        raise ValueError("the weights of this MODEL stay on a card")
    size = int(management.module_size(model.model))
    if size > sum(room or 0 for room in card_budgets(request.devices, blocks.limit_bytes).values()):
        raise ValueError("the cards have no room for all weights")
    return plan_split(model.model.diffusion_model, dataclasses.replace(request, way="tensor"))


def _compare(model: Any, blocks: SplitPlan, tensor: SplitPlan) -> Ways:
    assert tensor.division is not None, "it was planned so"
    devices, divided = tensor.division.devices, tensor.division.blocks
    heads = [shares.heads for _, shares in divided.values()]
    work = work_by_size(model.model.diffusion_model, blocks.layout, divided)
    return Ways(
        work,
        machine_speed(devices),
        [len(blocks.blocks_on(device)) / len(blocks.placement.blocks) for device in devices],
        [max(each[rank] / sum(each) for each in heads) for rank in range(len(devices))],
        blocks.overlap,
    )
