"""What a split needs on each card, said before anything is loaded, and refused where it cannot work."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from .split_tree import ROOT, SplitPlan, tree_of

_log = logging.getLogger(__name__)
_GB = 1e9


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
    """One line per card: blocks and weights, and how they are connected."""
    for device, size in weight_bytes(base, plan).items():
        limit = plan.limit_bytes.get(device)
        _log.info(
            "split: %s gets %d blocks, %.2f GB of weights%s",
            device,
            len(plan.blocks_on(device)),
            size / _GB,
            "" if limit is None else f" (limit {limit / _GB:.2f} GB)",
        )
    _log.info("split: %s, transport %s; %s", plan.layout.class_name, plan.transport, plan.layout.note)


def prepare_with_forecast(executor: Any, model: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around the host's loading for sampling: say what each card needs, refuse what cannot fit.

    Raises: ValueError for a compiled whole model; RuntimeError with the numbers if a card cannot hold what one step
    needs even with all of its weights streamed.
    """
    tree = tree_of(model.model)
    if tree is not None:
        _refuse_whole_compile(model)
        _forecast(model, tree.plan, noise_shape, conds)
    return executor(model, noise_shape, conds, *args, **kwargs)


def _forecast(model: Any, plan: SplitPlan, noise_shape: Any, conds: Any) -> None:
    from comfy.model_management import get_total_memory, is_device_cpu
    from comfy.sampler_helpers import estimate_memory

    _, activations = estimate_memory(model, noise_shape, conds)
    problems = []
    sizes = weight_bytes(model.model, plan)
    _recommend_replicas(plan, sum(sizes.values()), activations, conds)
    for device, size in sizes.items():
        if is_device_cpu(device):
            continue
        total, free = get_total_memory(device), model_free_bytes(device)
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
        if activations + streamed > total:
            problems.append(
                f"{device} has {total / _GB:.2f} GB in all, one step needs about {activations / _GB:.2f} GB for "
                f"activations and {streamed / _GB:.2f} GB for its largest layer"
            )
    if problems:
        raise RuntimeError(
            f"this size does not fit: {'; '.join(problems)}. Use a smaller picture, fewer frames or a smaller batch"
        )


def _recommend_replicas(plan: SplitPlan, weights: int, activations: float, conds: Any) -> None:
    """Say that a copy per card would be faster where that is so: with CFG, if every card holds the whole model."""
    from comfy.model_management import get_total_memory, minimum_inference_memory

    needed = weights + max(activations, minimum_inference_memory())
    has_cfg = sum(bool(cond) for cond in conds.values()) > 1
    if has_cfg and all(get_total_memory(device) > needed for device in plan.placement.used_devices):
        _log.info(
            "split: the whole model (%.2f GB) would fit each of these cards; for CFG, ComfyUI's 'MultiGPU CFG Split' "
            "keeps a copy on each and is faster",
            weights / _GB,
        )


def model_free_bytes(device: torch.device) -> float:
    """Bytes free on a card now, by the host's reckoning."""
    from comfy.model_management import get_free_memory

    return float(get_free_memory(device))


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


def _refuse_whole_compile(model: Any) -> None:
    from comfy.patcher_extension import WrappersMP

    keys = [key for key, value in model.object_patches.items() if hasattr(value, "_orig_mod")]
    for wrapper in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile"):
        for cell in wrapper.__closure__ or ():
            keys += list(cell.cell_contents) if isinstance(cell.cell_contents, dict) else []
    if ROOT in keys:
        raise ValueError(
            "torch.compile of the whole model cannot span several cards; compile block by block (keys such as "
            f"{ROOT}.blocks.0) or leave it out"
        )
