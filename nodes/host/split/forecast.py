"""What a split needs on each card, said before anything is loaded, and refused where it cannot work."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from .attachments import ROOT
from .plan import SplitPlan
from .tree import SplitTree, tree_of

_log = logging.getLogger(__name__)
_GB = 1e9
_RECOMMENDED = "a copy per card"


def weight_bytes(base: nn.Module, plan: SplitPlan) -> dict[torch.device, int]:
    """Bytes of weights per device of the plan, as stored."""
    from comfy.model_management import module_size

    root = base.get_submodule(ROOT)
    sizes = {
        device: sum(int(module_size(root.get_submodule(name))) for name in plan.blocks_on(device))
        for device in plan.placement.used_devices
    }
    sizes[plan.home] += int(module_size(base)) - sum(sizes.values())
    return sizes


def log_plan(base: nn.Module, plan: SplitPlan) -> None:
    """What was decided, in one line, and one line per card."""
    _log.info("split: %s", describe_plan(plan))
    for device, size in weight_bytes(base, plan).items():
        limit = plan.limit_bytes.get(device)
        _log.info(
            "split: %s gets %d blocks, %.2f GB of weights%s",
            device,
            len(plan.blocks_on(device)),
            size / _GB,
            "" if limit is None else f" (limit {limit / _GB:.2f} GB)",
        )


def describe_plan(plan: SplitPlan) -> str:
    """One line: class, which blocks where, transport, overlap."""
    placement = plan.placement
    runs: list[tuple[torch.device, int, int]] = []
    for index, device in enumerate(placement.devices):
        if runs and runs[-1][0] == device:
            runs[-1] = (device, runs[-1][1], index)
        else:
            runs.append((device, index, index))
    where = ", ".join(f"{start}-{end} on {device}" for device, start, end in runs)
    overlap = "on" if plan.overlap else "off"
    return f"{plan.layout.class_name}, {len(placement.blocks)} blocks: {where}; {plan.transport}; overlap {overlap}"


def prepare_with_forecast(executor: Any, model: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around the host's loading for sampling: say what each card needs, refuse what cannot fit.

    Raises: ValueError for a compiled whole model; RuntimeError with the numbers if a card cannot compute even with all
    of its weights streamed.
    """
    tree = tree_of(model.model)
    if tree is not None:
        _refuse_whole_compile(model, tree.plan)
        _forecast(model, tree, noise_shape, conds)
        tree.is_to_verify = tree.plan.verify
    return executor(model, noise_shape, conds, *args, **kwargs)


def _forecast(model: Any, tree: SplitTree, noise_shape: Any, conds: Any) -> None:
    from comfy.model_management import get_free_memory, get_total_memory, minimum_inference_memory
    from comfy.sampler_helpers import estimate_memory

    plan = tree.plan
    _, activations = estimate_memory(model, noise_shape, conds)
    problems = []
    sizes = weight_bytes(model.model, plan)
    _recommend_replicas(plan, sum(sizes.values()), activations, conds, tree.said)
    for device, size in sizes.items():
        total, free = get_total_memory(device), get_free_memory(device)
        limit = plan.limit_bytes.get(device)
        streamed = _largest_layer(model.model, plan, device)
        _log.info(
            "split: %s weights %.2f GB, activations about %.2f GB, free %.2f of %.2f GB, limit %s",
            device,
            size / _GB,
            activations / _GB,
            free / _GB,
            total / _GB,
            "none" if limit is None else f"{limit / _GB:.2f} GB",
        )
        if streamed + minimum_inference_memory() > total:
            problems.append(
                f"{device} has {total / _GB:.2f} GB in all; its largest layer takes {streamed / _GB:.2f} GB and "
                f"computing at least {minimum_inference_memory() / _GB:.2f} GB"
            )
        elif activations + streamed > total:  # the host's estimate is no bound, and context windows divide it
            _log.warning(
                "split: %s may run out of memory: ComfyUI expects one step to need %.2f GB beside the weights",
                device,
                activations / _GB,
            )
    if problems:
        raise RuntimeError(
            f"this model cannot run so, even streamed: {'; '.join(problems)}. Leave that card out of the split, use a "
            "smaller weight type, or free memory on it"
        )


def _recommend_replicas(plan: SplitPlan, weights: int, activations: float, conds: Any, said: set[str]) -> None:
    """Say that a copy per card would be faster where that is so: with CFG, if every card holds the whole model."""
    from comfy.model_management import get_total_memory, minimum_inference_memory

    needed = weights + max(activations, minimum_inference_memory())
    has_cfg = sum(bool(cond) for cond in conds.values()) > 1
    is_free = not plan.limit_bytes and all(get_total_memory(card) > needed for card in plan.placement.used_devices)
    if has_cfg and is_free and _RECOMMENDED not in said:
        said.add(_RECOMMENDED)
        _log.info(
            "split: the whole model (%.2f GB) would fit each of these cards; for CFG, ComfyUI's 'MultiGPU CFG Split' "
            "keeps a copy on each and is faster",
            weights / _GB,
        )


def _largest_layer(base: nn.Module, plan: SplitPlan, device: torch.device) -> int:
    root = base.get_submodule(ROOT)
    return max(
        (
            parameter.numel() * parameter.element_size()
            for name in plan.blocks_on(device)
            for parameter in root.get_submodule(name).parameters()
        ),
        default=0,
    )


def _refuse_whole_compile(model: Any, plan: SplitPlan) -> None:
    from comfy.patcher_extension import WrappersMP

    keys = [key for key, value in model.object_patches.items() if hasattr(value, "_orig_mod")]
    for wrapper in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile"):
        for cell in wrapper.__closure__ or ():
            keys += list(cell.cell_contents) if isinstance(cell.cell_contents, dict) else []
    if ROOT in keys:
        raise ValueError(
            "torch.compile of the whole model (ComfyUI's TorchCompileModel) cannot span several cards; take it out, or "
            f"use a node that compiles single blocks (such as {ROOT}.{plan.placement.blocks[0]}) behind the split"
        )
