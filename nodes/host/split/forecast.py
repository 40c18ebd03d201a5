"""What a split needs on each card, said before anything is loaded, and refused where it cannot work."""

from __future__ import annotations

import functools
import logging
from itertools import groupby
from typing import Any

import comfy.model_management as management
import torch
from comfy.patcher_extension import WrappersMP
from comfy.sampler_helpers import estimate_memory
from torch import nn

from ....planning.divided_work import count_tokens
from .attachments import ROOT, is_compiled
from .division_plan import Division
from .plan import GB, SplitPlan
from .tree import SplitTree, tree_of
from .ways import say_other_way

_log = logging.getLogger(__name__)


def weight_bytes(base: nn.Module, plan: SplitPlan) -> dict[torch.device, int]:
    """Bytes of weights per device of the plan, as stored."""
    root = base.get_submodule(ROOT)
    if plan.division is not None:
        return _divided_bytes(base, plan.division)
    sizes = {
        device: sum(int(management.module_size(root.get_submodule(name))) for name in plan.blocks_on(device))
        for device in plan.used_devices
    }
    sizes[plan.home] += int(management.module_size(base)) - sum(sizes.values())
    return sizes


def _divided_bytes(base: nn.Module, division: Division) -> dict[torch.device, int]:
    tree = tree_of(base)
    if tree is not None and tree.divided is not None:
        return tree.part_bytes()
    root = base.get_submodule(ROOT)
    rest = int(management.module_size(base)) - int(management.module_size(root))
    sizes = division.bytes_on(root)
    sizes[division.devices[0]] += rest
    return sizes


def describe_cards(base: nn.Module, plan: SplitPlan) -> list[str]:
    """One line per card: how much of the model it holds."""
    sizes = weight_bytes(base, plan)
    if plan.division is not None:
        return [f"{device} gets a part of every block, {size / GB:.2f} GB of weights" for device, size in sizes.items()]
    counts = {device: len(plan.blocks_on(device)) for device in sizes}
    return [f"{device} gets {counts[device]} blocks, {sizes[device] / GB:.2f} GB of weights" for device in sizes]


_EVIDENCE = {
    "read": (
        "this class was read, not run: its first step is computed a second time without overlap, by relay, and the run "
        "stops unless the two are the same bits"
    ),
    "outside": (
        "this class is in no ComfyUI that this pack is tested with; its public source was run once, split and whole, "
        "with the same bits. Turn verify on for the first run"
    ),
}


def log_plan(base: nn.Module, plan: SplitPlan) -> None:
    """What was decided, in one line, and one line per card."""
    what = f"{plan.layout.class_name}, {len(plan.placement.blocks)} blocks"
    if plan.division is not None:
        cards = ", ".join(map(str, plan.used_devices))
        for line in (f"{what}, each computed by {cards} together", *describe_cards(base, plan)):
            _log.info("split: %s", line)
        return
    runs = groupby(enumerate(plan.placement.devices), key=lambda each: each[1])
    numbers = [(device, [index for index, _ in run]) for device, run in runs]
    where = ", ".join(f"{indices[0]}-{indices[-1]} on {device}" for device, indices in numbers)
    what = f"{what}: {where}; {plan.transport}"
    for line in (f"{what}; overlap {'on' if plan.overlap else 'off'}", *describe_cards(base, plan)):
        _log.info("split: %s", line)
    if plan.layout.evidence in _EVIDENCE:
        _log.warning("split: %s: %s", plan.layout.class_name, _EVIDENCE[plan.layout.evidence])


def prepare_with_forecast(executor: Any, model: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around ComfyUI's loading for sampling: say what each card needs, refuse what cannot fit.

    Raises: ValueError for a compiled whole model; RuntimeError with the numbers if a card cannot compute even with all
    of its weights streamed.
    """
    tree = tree_of(model.model)
    if tree is not None:
        _refuse_whole_compile(model, tree.plan)
        _forecast(model, tree, noise_shape, conds)
        tree.is_to_verify = tree.plan.verify or not tree.is_verified
    return executor(model, noise_shape, conds, *args, **kwargs)


def _forecast(model: Any, tree: SplitTree, noise_shape: Any, conds: Any) -> None:
    plan, minimum, problems = tree.plan, management.minimum_inference_memory(), []
    _, activations = estimate_memory(model, noise_shape, conds)
    sizes = weight_bytes(model.model, plan)
    # A run that is refused has no first step: what waits for one must not hold the tree, which holds it.
    tree.advise = functools.partial(
        _advise, noise_shape=noise_shape, weights=sum(sizes.values()), working=max(activations, minimum)
    )
    for device, size in sizes.items():
        total, free = management.get_total_memory(device), management.get_free_memory(device)
        streamed = _largest_layer(tree, device)
        limit = f"{plan.limit_bytes[device] / GB:.2f} GB" if device in plan.limit_bytes else "none"
        room = f"free {free / GB:.2f} of {total / GB:.2f} GB, limit {limit}"
        needs = f"weights {size / GB:.2f} GB, activations about {activations / GB:.2f} GB"
        _log.info("split: %s %s, %s", device, needs, room)
        if streamed + minimum > total:
            problems.append(
                f"{device} has {total / GB:.2f} GB in all; its largest layer takes {streamed / GB:.2f} GB and "
                f"computing at least {minimum / GB:.2f} GB"
            )
        elif activations + streamed > total:  # ComfyUI's estimate is no bound, and context windows divide it
            told = f"ComfyUI expects one step to need {activations / GB:.2f} GB beside the weights"
            _log.warning("split: %s may run out of memory: %s", device, told)
    if problems:
        raise RuntimeError(
            f"this model cannot run so, even streamed: {'; '.join(problems)}. Leave that card out of the split, use a "
            "smaller weight type, or free memory on it"
        )


def _advise(tree: SplitTree, num_conds: int, noise_shape: Any, weights: int, working: float) -> None:
    """Say what would be faster for a run. How many conds a step computes is known in its first step only: samplers are
    given a negative one that they leave out at cfg 1."""
    say_other_way(tree, noise_shape, num_conds)
    _recommend_cfg_split(tree, noise_shape, num_conds, weights, working)


def _recommend_cfg_split(tree: SplitTree, noise_shape: Any, num_conds: int, weights: int, working: float) -> None:
    """Say that a copy per card would be faster where that is so: with CFG, if every card holds the whole model."""
    plan = tree.plan
    has_room = all(management.get_total_memory(card) > weights + working for card in plan.used_devices)
    if num_conds > 1 and has_room and not plan.limit_bytes:
        tree.say_once(
            f"split: the whole model ({weights / GB:.2f} GB) would fit each of these cards; for CFG, ComfyUI's "
            f"'MultiGPU CFG Split' keeps a copy on each and is faster{_copies_forecast(tree, noise_shape, num_conds)}"
        )


def _copies_forecast(tree: SplitTree, noise_shape: Any, num_conds: int) -> str:
    """Seconds with a copy per card beside those of both ways; "" where the machine was not measured."""
    ways, tokens = tree.plan.ways, count_tokens(tree.diffusion_model, noise_shape)
    if ways is None or tokens is None:
        return ""
    batch = int(noise_shape[0])
    found = ways.seconds(tokens, num_conds * batch)
    return f": about {ways.copies_s(tokens, num_conds, batch):.3g} s per step; {found}"


def _largest_layer(tree: SplitTree, device: torch.device) -> int:
    """Bytes of the largest weight in the card's blocks, or in its parts of blocks."""
    parameters = (each for block in tree.blocks_on(device).values() for each in block.parameters())
    return max((each.nbytes for each in parameters), default=0)


def _refuse_whole_compile(model: Any, plan: SplitPlan) -> None:
    keys = [key for key, value in model.object_patches.items() if is_compiled(value)]
    for wrapper in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile"):
        for cell in wrapper.__closure__ or ():
            keys += list(cell.cell_contents) if isinstance(cell.cell_contents, dict) else []
    if ROOT in keys:
        raise ValueError(
            "torch.compile of the whole model (ComfyUI's TorchCompileModel) cannot span several cards; take it out, or "
            f"use a node that compiles single blocks (such as {ROOT}.{plan.placement.blocks[0]}) behind the split"
        )
