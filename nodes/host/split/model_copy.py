"""A second module tree over the same weights, loaded, patched and evicted by itself: ComfyUI keeps that on modules."""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

# Load state and recordings that ComfyUI (0.33 and later) leaves on modules; a new tree starts without them.
RUNTIME_STATE = frozenset(
    ("current_patcher", "devicebridge_split", "dynamic_patchers", "dynamic_pins", "dynamic_vbars")
    + ("current_weight_patches_uuid", "lowvram_patch_counter", "model_loaded_weight_memory", "model_lowvram")
    + ("model_offload_buffer_memory", "comfy_patched_weights", "prev_comfy_cast_weights")
    + ("weight_lowvram_function", "bias_lowvram_function", "_comfy_cross_step_state", "_comfy_graph")
    + ("_comfy_malloc_graph", "_compiled_prefetch_ring", "_pin_state", "_pins", "_prefetch")
    + ("_v", "_v_bias", "_v_block", "_v_block_faulted", "_v_signature", "_v_weight")
)
_SHARED_OBJECTS = ("model_config", "latent_format")  # descriptions, never changed after loading

_DEEPEST = 4  # functions and objects inside one another; containers do not count
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, type, types.ModuleType)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

ModuleMap = Mapping[int, nn.Module]  # id of a module of the old tree -> its counterpart in the new one
# Name of a parameter -> the unpatched weight in host memory, which unloading need not copy back; None if there is none.
Origin = Callable[[str], torch.Tensor | None]


def copy_structure(model: nn.Module) -> tuple[nn.Module, ModuleMap]:
    """New modules and Parameters over the same storages, without load state; the model must not be loaded anywhere.
    Raises: RuntimeError for a module with what cannot be copied; ValueError for a function that captured a layer."""
    copies = {id(module): module.__class__.__new__(module.__class__) for module in model.modules()}
    memo: dict[int, Any] = {id(each): nn.Parameter(alias(each), requires_grad=False) for each in model.parameters()}
    memo |= copies
    memo |= {id(buffer): buffer for buffer in model.buffers()}  # a move replaces a module's entry, never the tensor
    for shared in (model.__dict__[name] for name in _SHARED_OBJECTS if name in model.__dict__):
        memo[id(shared)] = shared
    for name, module in model.named_modules():
        state = {key: value for key, value in module.__dict__.items() if key not in RUNTIME_STATE}
        state |= {key: [] for key in ("weight_function", "bias_function") if key in state}  # they hold all patches
        name = name or type(model).__name__
        for key, value in state.items():
            function = value.func if isinstance(value, functools.partial) else value
            if isinstance(function, types.FunctionType):  # methods and a partial's arguments follow, closures cannot
                check_independent(function, memo, f"a change of {name}.{key}")
        try:
            state = copy.deepcopy(state, memo)
        except (TypeError, RuntimeError, NotImplementedError, AttributeError, copy.Error) as error:
            what = f"{name} ({type(module).__name__}) of this MODEL holds something that cannot be copied ({error})"
            raise RuntimeError(f"{what}. Load the file with 'Load Diffusion Model Across GPUs' instead") from error
        copies[id(module)].__dict__.update(state)
    if "current_patcher" in model.__dict__:
        copies[id(model)].__dict__["current_patcher"] = None
    return copies[id(model)], copies


def alias(tensor: torch.Tensor, *, is_copy: bool = False) -> torch.Tensor:
    """Another tensor over the same storage, or with is_copy over one of its own, with attributes of its own.
    ComfyUI-GGUF's weights give themselves back from detach() and clone(), and a patcher changes their attributes."""
    other = tensor.detach().clone() if is_copy else tensor.detach()
    if other is tensor:
        other = torch.Tensor.clone(tensor) if is_copy else torch.Tensor.detach(tensor)
        other.__dict__.update({name: copy.copy(value) for name, value in tensor.__dict__.items()})
    return other


def follow_copy(value: Any, copies: ModuleMap, held: Collection[int], what: str) -> Any:
    """The counterpart of a module of the old tree, or of its method. Raises: as check_independent for other values."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(value.__func__, copies[id(value.__self__)])
    check_independent(value, held, what)
    return value


def check_independent(value: Any, held: Collection[int], what: str) -> None:
    """Raises: ValueError for what captured a layer of the old tree, whose weights nobody loads. held: ids of layers."""
    for part in reachable(value):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if id(module) in held:
                found = f"applied to the MODEL before it was split and holds on to it ({type(module).__name__} layer)"
                raise ValueError(f"{what} was {found}. Put the split directly after the loader and that node after it")


def reachable(value: Any) -> Iterator[Any]:
    """value and all that containers, closures, arguments and attributes lead to from it; no module is entered."""
    seen: set[int] = set()
    waiting = deque([(value, 0)])  # nearest first, so that a part is opened at its smallest depth
    while waiting:
        part, depth = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, (nn.Module, *_PLAIN)):
            continue
        if isinstance(part, _CONTAINERS):
            waiting.extendleft((inner, depth) for inner in _parts(part))
        elif depth < _DEEPEST:
            waiting.extend((inner, depth + 1) for inner in _parts(part))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, _CONTAINERS):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = []
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a name bound later, or never
                cells.append(cell.cell_contents)
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    try:
        return list(object.__getattribute__(value, "__dict__").values())  # asks no __getattr__ of somebody else's
    except AttributeError:
        return []


def original_of(origin: Origin, name: str, like: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """The original of a parameter if it lies on this device with the same shape and type, else None."""
    found = origin(name)
    is_like = found is not None and (found.device, found.shape, found.dtype) == (device, like.shape, like.dtype)
    return alias(found) if found is not None and is_like else None
