"""One stock MODEL over several cards: what was asked, what is possible, and the patcher that does it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...families.comfy.native import find_native
from ...families.spec import NativeModel
from ...parallel.block_lists import execution_order, find_block_lists, followers, placed_blocks, transport_for
from ...parallel.placement import Placement, check_budgets, native_block_flops, plan_manual, plan_placement
from .file_weights import load_over_file
from .model_copy import ModuleMap, Origin, check_independent, copy_structure, follow_copy
from .split_attachments import KEY, ROOT
from .split_batches import run_overlapped
from .split_forecast import log_plan, prepare_with_forecast, weight_bytes
from .split_patcher import become_split
from .split_plan import SplitPlan
from .split_tree import make_tree, tree_of

_log = logging.getLogger(__name__)
_GB = 1e9
_WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
WEIGHT_DTYPES = tuple(_WEIGHT_DTYPES)


@dataclass(frozen=True)
class SplitRequest:
    """How a user wants a MODEL split.

    Args:
        devices: in execution order; the first is home, where embedders, tail and the sampler's tensors are.
        balance: share out weights by bytes, computing time, or cut where split_at says.
        split_at: index of the first block of each device after the first; for manual.
        memory_limit_gb: decimal GB of weights each device may hold resident; () is as much as the host grants.
        transport: None takes the family's; relay is right for every model, stream for those that are known.
        overlap: let micro-batches of a batch use the cards at the same time where that is known to be right.
        offload: weights beyond a limit stay in host memory and are streamed at every use; else that is refused.
        verify: compute the first step of every run twice, the second time in the plainest way, and compare.
    """

    devices: tuple[torch.device, ...]
    balance: Literal["memory", "time", "manual"] = "memory"
    split_at: tuple[int, ...] = ()
    memory_limit_gb: tuple[float, ...] = ()
    transport: Literal["stream", "relay"] | None = None
    overlap: bool = True
    offload: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        if len(self.devices) < 2 or len(set(self.devices)) != len(self.devices):
            raise ValueError(
                f"a split needs two or more different devices; asked for {', '.join(map(str, self.devices)) or 'none'}"
            )
        if any(device.type == "cpu" for device in self.devices):
            raise ValueError(
                "a split is over GPUs, and the CPU was named too; with offload on, weights that no GPU holds stay in "
                "host memory by themselves"
            )
        if self.memory_limit_gb and len(self.memory_limit_gb) != len(self.devices):
            raise ValueError(
                f"memory_limit_gb gives {', '.join(map(str, self.memory_limit_gb))} for {len(self.devices)} devices "
                f"({', '.join(map(str, self.devices))}); give one number per device, or none"
            )
        if any(limit <= 0 for limit in self.memory_limit_gb):
            raise ValueError(f"memory_limit_gb {list(self.memory_limit_gb)}: every limit must be above 0")
        if self.balance == "manual" and not self.split_at:
            raise ValueError("balance manual needs split_at: the first block of each further device, such as 23")
        if self.balance != "manual" and self.split_at:
            raise ValueError(f"split_at {list(self.split_at)} belongs to balance manual, not {self.balance}")


def split_model(model: Any, request: SplitRequest) -> Any:
    """A MODEL that computes as this one does, its blocks spread over the devices; the given one is not touched.

    If the given MODEL is on a card now it is unloaded first, as the host's own multi-GPU nodes do. Weights move when a
    sampler loads the result.

    Raises: ValueError or RuntimeError, before anything moves, if the model cannot be split as asked.
    """
    _check_splittable(model)
    plan = plan_split(model.model.diffusion_model, request)
    log_plan(model.model, plan)
    _unload(model)
    copied, copies = copy_structure(model.model)
    make_tree(copied, plan, _origin_of(model))
    split = model.clone(model_override=(copied, ({}, {}, {}, set())))
    if tree_of(copied) is not None and not hasattr(split, "companions"):
        become_split(split)
    split.parent = None  # the host hands a dead patcher's place to its parent, which here is another model
    split.clone_base_uuid = uuid.uuid4()
    split.hook_backup = {}
    split.weight_inplace_update = False  # it would write into the storages shared with the given MODEL
    split.current_hooks = None
    _follow_patches(split, copies, model.model)
    return _finish(split)


def load_split_model(path: Path, weight_dtype: str, request: SplitRequest | None) -> Any:
    """Load a diffusion model file as a MODEL that never exists unsplit; request None loads it for one device.

    Raises: ValueError or RuntimeError as split_model; RuntimeError from the host for a file it does not know.
    """
    import comfy.memory_management
    import comfy.sd

    options = dict(_WEIGHT_DTYPES[weight_dtype])
    if request is None:
        return comfy.sd.load_diffusion_model(str(path), model_options=options)
    options["load_device"] = request.devices[0]
    origin = None
    if comfy.memory_management.aimdo_enabled:
        model = comfy.sd.load_diffusion_model(str(path), model_options=options)
    else:
        model, origin = load_over_file(path, options)
    plan = plan_split(model.model.diffusion_model, request)
    log_plan(model.model, plan)
    make_tree(model.model, plan, origin)
    return _finish(become_split(model))


def describe_split(model: Any) -> str:
    """One line: blocks and weights per device; for an unsplit model its device."""
    tree = tree_of(model.model)
    if tree is None:
        return f"whole model on {model.load_device}"
    sizes = weight_bytes(model.model, tree.plan)
    parts = [f"{device}: {len(tree.plan.blocks_on(device))} blocks, {sizes[device] / _GB:.2f} GB" for device in sizes]
    return f"{'; '.join(parts)} ({tree.plan.transport})"


def _finish(split: Any) -> Any:
    from comfy.patcher_extension import WrappersMP

    for kind, wrapper in (
        (WrappersMP.PREPARE_SAMPLING, prepare_with_forecast),
        (WrappersMP.CALC_COND_BATCH, run_overlapped),
    ):
        split.remove_wrappers_with_key(kind, KEY)
        split.add_wrapper_with_key(kind, KEY, wrapper)
    return split


# ---- planning


def plan_split(diffusion_model: nn.Module, request: SplitRequest) -> SplitPlan:
    """Decide where every block goes and how activations travel; reads sizes only.

    Raises: ValueError if the class has no blocks that can be found, the cuts are wrong or the limits are too small.
    """
    layout, is_described = _layout(diffusion_model)
    blocks = placed_blocks(diffusion_model, layout)
    leaders = followers(diffusion_model, layout)
    limit_bytes = {d: int(gb * _GB) for d, gb in zip(request.devices, request.memory_limit_gb, strict=False)}
    main = _place(diffusion_model, layout, blocks, leaders, request, limit_bytes)
    order = execution_order(diffusion_model, layout)
    placement = Placement(order, tuple(main.device_of(leaders.get(name, name)) for name in order), request.devices[0])
    transport = _transport(diffusion_model, layout, request, is_described)
    return SplitPlan(
        placement=placement,
        layout=layout,
        transport=transport,
        limit_bytes=limit_bytes,
        overlap=request.overlap and transport == "stream" and layout.can_overlap,
        is_described=is_described,
        verify=request.verify,
    )


def _layout(diffusion_model: nn.Module) -> tuple[NativeModel, bool]:
    layout = find_native(type(diffusion_model))
    if layout is not None:
        if layout.refusal:
            raise ValueError(f"{layout.class_name} cannot be split across GPUs: {layout.refusal}")
        return layout, True
    lists = find_block_lists(diffusion_model)
    name = type(diffusion_model).__name__
    _log.warning("split: %s is not a model we know; its blocks in %s are relayed", name, ", ".join(lists))
    return (
        NativeModel(
            class_name=name,
            module=type(diffusion_model).__module__,
            block_lists=lists,
            tail=(),
            transport="relay",
            can_overlap=False,
            note="not described; blocks found by their containers",
        ),
        False,
    )


def _transport(
    diffusion_model: nn.Module, layout: NativeModel, request: SplitRequest, is_described: bool
) -> Literal["stream", "relay"]:
    natural = transport_for(diffusion_model, layout)
    if request.transport in (None, natural):
        return natural
    if request.transport == "stream":
        why = "it is not described" if not is_described else layout.note
        raise ValueError(
            f"transport stream would give {layout.class_name} wrong pictures or errors ({why}); use auto or relay"
        )
    return "relay"


def _place(
    diffusion_model: nn.Module,
    layout: NativeModel,
    blocks: tuple[str, ...],
    leaders: Mapping[str, str],
    request: SplitRequest,
    limit_bytes: Mapping[torch.device, int],
) -> Placement:
    sizes, home_bytes = _sizes(diffusion_model, blocks, leaders)
    devices = request.devices
    budgets = _budgets(devices, limit_bytes)
    if request.balance == "manual":
        placement = plan_manual(blocks, devices, request.split_at)
        try:
            check_budgets(placement, sizes, home_bytes, budgets)
        except ValueError as error:
            _accept_streaming(error, request)
        return placement
    is_time = request.balance == "time"

    def plan(budget: Mapping[torch.device, int | None]) -> Placement:
        return plan_placement(
            blocks,
            devices,
            block_cost=native_block_flops(diffusion_model, layout, blocks) if is_time else sizes,
            home_cost=0.0 if is_time else home_bytes,
            block_bytes=sizes,
            home_bytes=home_bytes,
            budget_bytes=budget,
            capacity=() if is_time else list(budgets.values()),
        )

    try:
        return plan(budgets)
    except ValueError as error:
        _accept_streaming(error, request)
        return plan({})


def _accept_streaming(error: ValueError, request: SplitRequest) -> None:
    """Say what does not fit and will be streamed; with offload off that is refused."""
    if not request.offload:
        raise ValueError(f"{error}, or turn offload on") from error
    _log.warning("split: %s; what does not fit stays in host memory and is streamed at every step", error)


def _sizes(diffusion_model: nn.Module, blocks: tuple[str, ...], leaders: Mapping[str, str]) -> tuple[list[int], int]:
    """Bytes as stored of each placed block with its followers, and of everything else."""
    from comfy.model_management import module_size

    size = {name: int(module_size(diffusion_model.get_submodule(name))) for name in blocks}
    for follower, leader in leaders.items():
        size[leader] += int(module_size(diffusion_model.get_submodule(follower)))
    return list(size.values()), int(module_size(diffusion_model)) - sum(size.values())


def _budgets(
    devices: tuple[torch.device, ...], limit_bytes: Mapping[torch.device, int]
) -> dict[torch.device, int | None]:
    """Bytes of weights each card can hold beside what the host keeps for computing, and within the user's limit."""
    from comfy.model_management import get_total_memory, minimum_inference_memory

    rooms = {device: int(get_total_memory(device) - minimum_inference_memory()) for device in devices}
    return {device: min(room, limit_bytes.get(device, room)) for device, room in rooms.items()}


# ---- the incoming MODEL


def _check_splittable(model: Any) -> None:
    if not hasattr(getattr(model, "model", None), "diffusion_model"):
        raise ValueError(f"this MODEL holds a {type(getattr(model, 'model', None)).__name__}, no diffusion model")
    if model.get_additional_models_with_key("multigpu") or model.is_multigpu_base_clone:
        raise ValueError(
            "this MODEL is replicated by 'MultiGPU CFG Split'; splitting it as well is not possible. Use one of the two"
        )
    for what, key in _compiled(model):
        raise ValueError(
            f"{what} was applied to {key} before the split. ComfyUI's TorchCompileModel compiles the whole model, and "
            "that cannot span several cards; take it out, or compile single blocks with a node behind the split"
        )


def _compiled(model: Any) -> list[tuple[str, str]]:
    from comfy.patcher_extension import WrappersMP

    found = [("torch.compile", "the model") for _ in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile")]
    return found + [
        ("torch.compile", key) for key, value in model.object_patches.items() if hasattr(value, "_orig_mod")
    ]


def _unload(model: Any) -> None:
    """Take every patcher of this model off its card, so that the weights are as they were loaded."""
    import comfy.model_management as management

    parts = [model.model, *(companion.model for companion in getattr(model, "companions", ()))]
    for loaded in list(management.current_loaded_models):
        patcher = loaded.model
        if patcher is not None and any(patcher.model is part for part in parts):
            loaded.model_unload()
            management.current_loaded_models.remove(loaded)


def _origin_of(model: Any) -> Origin:
    """The incoming model's weights, while it is alive and they are unpatched in host memory."""
    import weakref

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

    return Origin(find)


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
