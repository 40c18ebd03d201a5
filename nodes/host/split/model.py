"""One of ComfyUI's MODELs over several cards: the given MODEL, or a file, becomes a patcher of a split tree."""

from __future__ import annotations

import uuid
import weakref
from pathlib import Path
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.sd
import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from .attachments import KEY, ROOT, is_compiled
from .batches import run_overlapped
from .file_weights import load_over_file
from .forecast import describe_cards, log_plan, prepare_with_forecast
from .model_copy import ModuleMap, Origin, check_independent, copy_structure, follow_copy
from .patcher import become_split
from .plan import SplitRequest
from .tree import make_tree, tree_of
from .ways import plan_way

_WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}


def split_model(model: Any, request: SplitRequest) -> Any:
    """A MODEL that computes as this one does, its blocks spread over the devices; the given one is not touched.

    If the given MODEL is on a card now it is unloaded first, as ComfyUI's own multi-GPU nodes do. Weights move when a
    sampler loads the result.

    Raises: ValueError or RuntimeError, before anything moves, if the model cannot be split as asked.
    """
    _check_splittable(model)
    plan = plan_way(model, request)
    log_plan(model.model, plan)
    _unload(model)
    copied, copies = copy_structure(model.model)
    make_tree(copied, plan, _origin_of(model))
    split = model.clone(model_override=(copied, ({}, {}, {}, set())))
    if not hasattr(split, "companions"):  # the clone of a MODEL that is split already has become split by itself
        become_split(split)
    split.parent = None  # ComfyUI hands a dead patcher's place to its parent, which here is another model
    split.clone_base_uuid = uuid.uuid4()
    split.hook_backup = {}
    split.weight_inplace_update = False  # it would write into the storages shared with the given MODEL
    split.current_hooks = None
    _follow_patches(split, copies, model.model)
    return _with_wrappers(split)


def load_split_model(path: Path, weight_dtype: str, request: SplitRequest | None) -> Any:
    """Load a diffusion model file as a MODEL that never exists unsplit; request None loads it for one device.

    Raises: ValueError or RuntimeError as split_model; RuntimeError from ComfyUI for a file it does not know.
    """
    options, origin = dict(_WEIGHT_DTYPES[weight_dtype]), None
    if request is not None:
        options["load_device"] = request.devices[0]
    if request is None or comfy.memory_management.aimdo_enabled:  # DynamicVRAM reads from the file by itself
        model = comfy.sd.load_diffusion_model(str(path), model_options=options)
    else:
        model, origin = load_over_file(path, options)
    if request is None:
        return model
    plan = plan_way(model, request)
    log_plan(model.model, plan)
    make_tree(model.model, plan, origin)
    return _with_wrappers(become_split(model))


def describe_split(model: Any) -> str:
    """One line: blocks and weights per device; for an unsplit model its device."""
    tree = tree_of(model.model)
    if tree is None:
        return f"whole model on {model.load_device}"
    way = tree.plan.transport if tree.plan.division is None else "each block computed by all of them"
    return f"{'; '.join(describe_cards(model.model, tree.plan))}; {way}"


def blocks_by_card(model: Any) -> list[tuple[str, int]]:
    """Card and number of blocks, in the order of the blocks; [] for an unsplit model. Of blocks that all cards compute
    together each has all."""
    tree = tree_of(model.model)
    if tree is None:
        return []
    if tree.plan.division is not None:
        return [(str(device), len(tree.plan.placement.blocks)) for device in tree.plan.used_devices]
    return tree.plan.placement.runs()


def _with_wrappers(split: Any) -> Any:
    for kind, wrapper in (
        (WrappersMP.PREPARE_SAMPLING, prepare_with_forecast),
        (WrappersMP.CALC_COND_BATCH, run_overlapped),
    ):
        split.remove_wrappers_with_key(kind, KEY)
        split.add_wrapper_with_key(kind, KEY, wrapper)
    return split


# ---- the incoming MODEL


def _check_splittable(model: Any) -> None:
    base = getattr(model, "model", None)
    if not hasattr(base, "diffusion_model"):
        raise ValueError(f"this MODEL holds a {type(base).__name__}, no diffusion model")
    tree = tree_of(model.model)
    if tree is not None and tree.divided is not None:
        raise ValueError(
            "this MODEL is split with way 'tensor' already: each card has a part of every weight. Connect the MODEL "
            "from before that split"
        )
    if model.get_additional_models_with_key("multigpu") or model.is_multigpu_base_clone:
        raise ValueError(
            "this MODEL is replicated by 'MultiGPU CFG Split'; splitting it as well is not possible. Use one of the two"
        )
    compiled = ["the model" for _ in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile")]
    compiled += [key for key, value in model.object_patches.items() if is_compiled(value)]
    if compiled:
        raise ValueError(
            f"torch.compile was applied to {compiled[0]} before the split. ComfyUI's TorchCompileModel compiles the "
            "whole model, and that cannot span several cards; take it out, or compile single blocks with a node behind "
            "the split"
        )


def _unload(model: Any) -> None:
    """Take every patcher of this model off its card, so that the weights are as they were loaded."""
    parts = [model.model, *(companion.model for companion in getattr(model, "companions", ()))]
    for loaded in list(comfy.model_management.current_loaded_models):
        patcher = loaded.model
        if patcher is not None and any(patcher.model is part for part in parts):
            loaded.model_unload()
            comfy.model_management.current_loaded_models.remove(loaded)


def _origin_of(model: Any) -> Origin:
    """The incoming model's weights, while it is alive and they are unpatched in host memory."""
    base, backup = weakref.ref(model.model), model.backup

    def find(name: str) -> torch.Tensor | None:
        source = base()
        if source is None:
            return None
        if name in backup:
            return backup[name].weight
        try:
            return source.get_parameter(name)
        except AttributeError:
            return None

    return find


def _follow_patches(split: Any, copies: ModuleMap, source: nn.Module) -> None:
    """Make what earlier nodes attached work on the new tree.

    Raises: ValueError for what holds on to the old one.
    """
    held = {id(source), *map(id, source.get_submodule(ROOT).modules())}
    split.object_patches = {
        key: follow_copy(value, copies, held, f"the patch of {key}") for key, value in split.object_patches.items()
    }
    for name, option in split.model_options.items():
        check_independent(option, held, f"{name!r}")
    registries = {"a wrapper": split.wrappers, "a callback": split.callbacks, "an injection": split.injections}
    for what, registry in registries.items():
        for kind, keyed in registry.items():
            check_independent(keyed, held, f"{what} {kind!r}")
