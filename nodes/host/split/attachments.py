"""What other nodes attached to a split MODEL, and what follows for the way a forward runs.

- ComfyUI calls some attachments through transformer_options, so each of their runs is seen: patches, replacements,
  wrappers, an attention override. options.py leads them to the right card.
- Others are inside the modules and run unseen: object patches, injections, forwards and hooks on a layer.
- Replaced methods of the diffusion model and exchanged lists of blocks may do anything between two blocks.

Any of them may keep state from call to call, so forwards are not interleaved beside them. ComfyUI's own bypass LoRA and
blocks compiled one by one keep none.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP
from torch import nn

from .model_copy import reachable

ROOT = "diffusion_model"
KEY = "devicebridge.split"

_STATEFUL_ENTRIES = ("control", "gligen", "hooks", "default", "additional_models")
_SEEN_ENTRIES = ("patches", "patches_replace")
_OVERRIDE = "optimized_attention_override"
# Entries of transformer_options that are looked at by name, or are ComfyUI's own and plain.
_KNOWN_ENTRIES = frozenset({*_SEEN_ENTRIES, _OVERRIDE, "wrappers", "callbacks", "model_patcher"})


# ---- inside the modules


def unseen_attachments(
    patcher: Any, diffusion_model: nn.Module, own_hooks: set[int], within: Collection[str] = ("",)
) -> Iterator[str]:
    """What was attached inside the diffusion model and runs without being seen, in words for the user.

    Args:
        patcher: the MODEL as it is loaded now, object patches and injections applied.
        own_hooks: ids of the hooks that belong to the split.
        within: names of modules of the diffusion model; only what is inside them, or may be.
    """

    def is_within(name: str) -> bool:
        return any(f"{name}.".startswith(f"{outer}." if outer else "") for outer in within)

    for key, value in patcher.object_patches.items():
        if key.startswith(f"{ROOT}.") and not is_compiled(value) and is_within(key.removeprefix(f"{ROOT}.")):
            yield f"the object patch of {key}"
    for key, injections in patcher.injections.items():
        if key != KEY and not all(_is_comfy_bypass(injection.inject) for injection in injections):
            yield f"the injection {key!r}"
    for name, module in diffusion_model.named_modules():
        if not name or is_compiled(module) or not is_within(name):
            continue
        if _has_own_forward(module):
            yield f"the replaced forward of {name}"
        if not own_hooks.issuperset((*module._forward_hooks, *module._forward_pre_hooks)):
            yield f"a hook on {name}"


def _has_own_forward(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    while _is_comfy_bypass(forward):
        forward = forward.__self__.original_forward  # type: ignore[union-attr]
    is_of_class = getattr(forward, "__func__", None) is type(module).forward  # put back by whoever replaced it
    return forward is not None and not is_of_class


def _is_comfy_bypass(function: Any) -> bool:
    return _module_of(function) == "comfy.weight_adapter.bypass"


def _module_of(value: Any) -> str:
    """The module whose code a function runs, whatever functools.wraps says; for any other object that of its class."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        return str(function.__globals__.get("__name__", ""))
    return type(value).__module__


def is_compiled(value: Any) -> bool:
    """Whether this is what torch.compile made of a module: it computes the same and keeps nothing."""
    return hasattr(value, "_orig_mod")


def replaced_methods(diffusion_model: nn.Module) -> list[str]:
    """Names of the class's methods that this one object has another function for; asked at every forward."""
    cls = type(diffusion_model)
    return [
        name
        for name, value in vars(diffusion_model).items()
        if callable(value)
        and not isinstance(value, nn.Module)
        and callable(getattr(cls, name, None))
        and getattr(value, "__func__", None) is not getattr(cls, name)
    ]


# ---- in the options of a forward


def seen_attachments(options: Mapping[str, Any]) -> list[str]:
    """What transformer_options bring that runs inside the forward, in words for the user."""
    found = [name for name in _SEEN_ENTRIES if any(options.get(name, {}).values())]
    if options.get(_OVERRIDE) is not None:
        found.append("an attention override")
    if any(options.get("wrappers", {}).get("diffusion_model", {}).values()):
        found.append("a wrapper around diffusion_model")
    return found


def holds_tensors(function: Any) -> bool:
    """Whether a function captured tensors, which lie on the main card."""
    return any(isinstance(part, (torch.Tensor, nn.Module)) for part in reachable(function))


# ---- what may notice that forwards are interleaved


def reason_against_overlap(model: Any, unseen: tuple[str, ...], conds: list[Any], options: Mapping[str, Any]) -> str:
    """Why micro-batches of this step must not be interleaved; "" if they may.

    Args:
        model: the BaseModel. unseen: what runs inside it. conds: of this step. options: model_options of this step.
    """
    return next(_reasons(model, unseen, conds, options), "")


def _reasons(model: Any, unseen: tuple[str, ...], conds: list[Any], options: Mapping[str, Any]) -> Iterator[str]:
    if torch.is_grad_enabled():
        yield "gradients are recorded"
    if unseen:
        yield f"{unseen[0]} may keep state from call to call"
    for name in replaced_methods(model.diffusion_model):
        yield f"another node replaced {name} of the model"
    for key, value in model.current_patcher.object_patches.items():
        is_known = isinstance(value, nn.Module) and _module_of(value).startswith(("comfy.", "comfy_extras."))
        if not key.startswith(f"{ROOT}.") and callable(value) and not is_known:
            yield f"the object patch of {key} may keep state from call to call"
    if "model_function_wrapper" in options:
        yield "a model function wrapper may keep state between them"
    yield from _reasons_in(options.get("transformer_options", {}))
    if model.current_patcher.get_all_callbacks(CallbacksMP.ON_PREPARE_STATE):
        yield "a callback of another node counts them"
    for entry in (entry for cond in conds for entry in cond or ()):
        yield from (f"a conditioning has {name}" for name in _STATEFUL_ENTRIES if name in entry)


def _reasons_in(options: Mapping[str, Any]) -> Iterator[str]:
    """What transformer_options say against overlap."""
    for name in _SEEN_ENTRIES:
        if any(options.get(name, {}).values()):
            yield f"{name} of another node may keep state between blocks"
    override = options.get(_OVERRIDE)
    if override is not None and not _is_comfy_attention(override):
        yield "an attention override of another node may keep state between calls"
    wrappers = options.get("wrappers", {})
    for kind in ("diffusion_model", "apply_model"):
        if any(wrappers.get(kind, {}).values()):
            yield f"a wrapper of another node around {kind} may keep state between them"
    if any(functions for key, functions in wrappers.get("calc_cond_batch", {}).items() if key != KEY):
        yield "a wrapper of another node counts on conditionings coming together"
    for name, value in options.items():
        if name not in _KNOWN_ENTRIES and any(callable(part) for part in _nearby(value)):
            yield f"transformer_options[{name!r}] of another node may keep state between blocks"


def _nearby(value: Any) -> Iterator[Any]:
    """value, and what is in it where it is a container."""
    yield value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for item in items:
        yield from _nearby(item)


def _is_comfy_attention(override: Any) -> bool:
    """Whether an override only chooses another of ComfyUI's own attention functions."""
    parts = [part for part in reachable(override) if callable(part) and not isinstance(part, type)]
    return len(parts) > 1 and all(_module_of(part).startswith("comfy.") for part in parts)
