"""A given MODEL of ComfyUI's, or a file, becomes a patcher of a split tree."""

from __future__ import annotations

import dataclasses
import logging
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.sd
import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from ....events import first_line
from ....parallel.transfer import module_with_streams
from ....planning.cards import machine_speed
from ....planning.times import LEAST_SHARE, WayName, Ways, forward_work, has_guidance
from .attachments import KEY, ROOT, check_divisible, check_runnable, is_compiled
from .model_copy import Origin, check_independent, copy_structure, follow_copy
from .patcher import become_split
from .plan import GB, SplitPlan, SplitRequest
from .sampling import prepare_with_forecast, run_overlapped
from .tensor import DividedPlan, plan_tensor
from .tokens import TokensPlan, plan_tokens, usual_tokens
from .tree import BlockPlan, SplitTree, plan_blocks, tree_of

_log = logging.getLogger(__name__)
_WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
_WRAPPERS = {WrappersMP.PREPARE_SAMPLING: prepare_with_forecast, WrappersMP.CALC_COND_BATCH: run_overlapped}


def split_model(model: Any, request: SplitRequest) -> Any:
    """A MODEL that computes as this one does, over several devices; the given one is only unloaded.
    Raises: ValueError or RuntimeError, before anything moves, if the model cannot be split so."""
    _check_splittable(model)
    plan = plan_split(model, request)
    # Its patchers leave their cards, so that the weights are as they were loaded.
    parts = [model.model, *(companion.model for companion in getattr(model, "companions", ()))]
    for loaded in list(management.current_loaded_models):
        if loaded.model is not None and any(loaded.model.model is part for part in parts):
            loaded.model_unload()
            management.current_loaded_models.remove(loaded)
    copied, copies = copy_structure(model.model)
    _log_plan(SplitTree(copied, plan, _origin_of(model)))
    split = model.clone(model_override=(copied, ({}, {}, {}, set())))
    if not hasattr(split, "companions"):  # the clone of a MODEL that is split already has become split by itself
        become_split(split)
    split.parent = None  # ComfyUI hands a dead patcher's place to its parent, which here is another model
    split.clone_base_uuid = uuid.uuid4()
    split.hook_backup = {}
    split.weight_inplace_update = False  # it would write into the storages shared with the given MODEL
    split.current_hooks = None
    # What earlier nodes attached works on the new tree, or is refused.
    held = {id(model.model), *map(id, model.model.get_submodule(ROOT).modules())}
    split.object_patches = {
        key: follow_copy(value, copies, held, f"the patch of {key}") for key, value in split.object_patches.items()
    }
    attached = {"": split.model_options, "a wrapper ": split.wrappers}
    attached |= {"a callback ": split.callbacks, "an injection ": split.injections}
    for what, registry in attached.items():
        for name, value in registry.items():
            check_independent(value, held, f"{what}{name!r}")
    return _with_wrappers(split)


def load_split_model(path: Path, weight_dtype: str, place: SplitRequest | torch.device | None) -> Any:
    """A file as a MODEL that never exists unsplit, or whole on a device; None: on ComfyUI's. Raises: as split_model."""
    device = place.devices[0] if isinstance(place, SplitRequest) else place
    options = _WEIGHT_DTYPES[weight_dtype] | ({"load_device": device} if device is not None else {})
    model = comfy.sd.load_diffusion_model(str(path), model_options=options)
    if not isinstance(place, SplitRequest):
        return model
    _log_plan(SplitTree(model.model, plan_split(model, place)))
    return _with_wrappers(become_split(model))


def describe_split(model: Any) -> tuple[str, list[tuple[str, int]]]:
    """One line: blocks and weights per device, for an unsplit model its device. And cards with numbers of blocks."""
    if (tree := tree_of(model.model)) is None:
        return f"whole model on {model.load_device}", []
    return "; ".join([*_describe_cards(tree), tree.plan.describe()]), tree.plan.num_blocks()


def _describe_cards(tree: SplitTree) -> list[str]:
    sizes = tree.weight_bytes()
    return [f"{device} gets {tree.plan.share_of(device)}, {sizes[device] / GB:.2f} GB of weights" for device in sizes]


def _log_plan(tree: SplitTree) -> None:
    plan, name = tree.plan, tree.plan.layout.class_name
    for line in (f"{name}, {len(plan.blocks)} blocks: {plan.describe()}", *_describe_cards(tree)):
        _log.info("split: %s", line)
    if plan.layout.evidence == "outside":
        _log.warning("split: %s is in no ComfyUI that this pack is tested with; turn verify on for the first run", name)


def _with_wrappers(split: Any) -> Any:
    for kind, wrapper in _WRAPPERS.items():
        split.remove_wrappers_with_key(kind, KEY)
        split.add_wrapper_with_key(kind, KEY, wrapper)
    return split


def _check_splittable(model: Any) -> None:
    base = getattr(model, "model", None)
    if not hasattr(base, "diffusion_model"):
        raise ValueError(f"this MODEL holds a {type(base).__name__}, no diffusion model")
    tree = tree_of(model.model)
    if tree is not None and not isinstance(tree.plan, BlockPlan):
        raise ValueError("this MODEL is split with way 'tokens' or 'tensor'; set way to 'blocks' in the node before")
    if model.get_additional_models_with_key("multigpu") or model.is_multigpu_base_clone:
        raise ValueError("this MODEL is replicated by 'MultiGPU CFG Split' and cannot be split as well; use one")
    compiled = ["the model" for _ in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile")]
    compiled += [key for key, value in model.object_patches.items() if is_compiled(value)]
    if compiled:
        found = f"torch.compile was applied to {compiled[0]} before the split, and cannot span several cards"
        raise ValueError(f"{found}; take it out, or compile single blocks with a node behind the split")


def _origin_of(model: Any) -> Origin:
    """The incoming model's weights, unpatched in host memory, while it is alive."""
    base, backup = weakref.ref(model.model), model.backup

    def find(name: str) -> torch.Tensor | None:
        if (source := base()) is not None:
            if name in backup:
                return backup[name].weight
            with suppress(AttributeError):
                return source.get_parameter(name)
        return None

    return find


def plan_split(model: Any, request: SplitRequest) -> SplitPlan:
    """The plan of the requested way, else of the one that is forecast to be the fastest; a line in the log says why.
    Auto goes by a usual size, and a way must be faster both with CFG and without; a model that is given its guidance as
    a number has none. Raises: ValueError as the planner of the way."""
    root = model.model.diffusion_model
    if request.way in ("tensor", "tokens"):
        return (plan_tensor if request.way == "tensor" else plan_tokens)(root, request)
    blocks = plan_blocks(root, request)
    if request.way == "blocks":
        return blocks
    plans: dict[WayName, SplitPlan] = {"blocks": blocks}
    makers: dict[WayName, Callable[..., SplitPlan]] = {"tensor": _tensor_for_auto, "tokens": _tokens_for_auto}
    refusals: list[str] = []
    try:
        _check_auto(model, request)
        for way, make in makers.items():
            try:
                plans[way] = make(model, request, blocks)
            except (ValueError, RuntimeError) as error:  # what to do is for who named that way
                refusals.append(f"not {way}: {first_line(error).partition('. ')[0]}")
        if len(plans) == 1:
            raise ValueError("; ".join(refusals))
        num_tokens = usual_tokens(blocks.layout)
        ways = compare_ways(root, plans, num_tokens)
    except (ValueError, RuntimeError) as error:
        _log.info("split: way auto takes blocks: %s", first_line(error))
        return blocks
    counts = (1,) if has_guidance(root) else (1, 2)
    taken, seconds = ways.fastest(counts), "; with CFG ".join(str(ways.seconds(count)) for count in counts)
    _log.info("split: way auto takes %s: at %d tokens %s", taken, num_tokens, "; ".join([seconds, *refusals]))
    return plans[taken]


def _check_auto(model: Any, request: SplitRequest) -> None:
    """Raises: ValueError saying why this MODEL, these cards or these settings need blocks."""
    own = {"offload off": not request.offload, "transport": request.transport, "balance": request.balance != "memory"}
    if found := next(filter(own.get, own), ""):
        raise ValueError(f"{found} is a setting of that way")
    if module_with_streams(*request.devices[:2]) is None:
        raise ValueError(f"{request.devices[0]} cannot copy beside what it computes")
    if model.offload_device == model.load_device:
        raise ValueError("the weights of this MODEL stay on a card")


def _tensor_for_auto(model: Any, request: SplitRequest, blocks: BlockPlan) -> DividedPlan:
    """Raises: ValueError or RuntimeError saying why this MODEL cannot be divided, or would stream."""
    check_divisible((), model.model_options.get("transformer_options", {}), blocks.layout.patches_inside)
    return plan_tensor(model.model.diffusion_model, dataclasses.replace(request, offload=False))


def _tokens_for_auto(model: Any, request: SplitRequest, blocks: BlockPlan) -> TokensPlan:
    """Raises: ValueError or RuntimeError saying why the cards cannot each run this MODEL, or would stream it."""
    attached = [f"the object patch of {key}" for key in model.object_patches if key.startswith(f"{ROOT}.")]
    attached += [f"the injection {key!r}" for key in model.injections if key != KEY]
    check_runnable(blocks.layout.class_name, model.model_options.get("transformer_options", {}), attached)
    plan = plan_tokens(model.model.diffusion_model, dataclasses.replace(request, offload=False))
    if not plan.tokens.blocks:
        raise ValueError(f"{blocks.layout.why_no_tokens}; one run with way 'tokens' looks for them")
    if plan.shares[0] * len(plan.shares) < LEAST_SHARE * sum(plan.shares):
        raise ValueError(f"{plan.main_device} is slower than the others, and computes alone what cannot be shared out")
    return dataclasses.replace(plan, may_run_alone=True)


def compare_ways(diffusion_model: nn.Module, plans: Mapping[WayName, Any], num_tokens: int) -> Ways:
    """What this machine's cards and links, as measured, make of each possible way for so many picture tokens."""
    blocks, tensor, tokens = plans["blocks"], plans.get("tensor"), plans.get("tokens")
    devices, placed, main = (tensor or tokens or blocks).devices, blocks.placement, blocks.main_device
    divided: Mapping[str, Any] = tensor.divided if tensor else dict.fromkeys(blocks.blocks)
    heads = [shares.heads for _, shares in tensor.divided.values()] if tensor else []
    rows, sent_size = tokens.tokens if tokens else None, 1 if blocks.request.exchange == "8-bit" else 2
    return Ways(
        forward_work(diffusion_model, blocks.layout, divided, num_tokens, rows, sent_size=sent_size),
        machine_speed(devices),
        [placed.num_blocks_on(device) / len(placed.blocks) for device in devices],
        [max(each[rank] / sum(each) for each in heads) for rank in range(len(devices))] if tensor else (),
        blocks.overlap,
        len(placed.runs()) if blocks.transport == "stream" else 2 * sum(device != main for device in placed.devices),
        tokens.shares if tokens else (),
        tokens is not None and tokens.overlap and blocks.layout.keeps_nothing,
        tokens.replayed_groups if tokens else 1,
    )
