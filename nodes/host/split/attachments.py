"""What other nodes attached to a split MODEL: seen where transformer_options bring it, and unseen inside the modules.

Any may keep state, so forwards are not interleaved beside it. What it writes is carried back (parallel/local/borrow).
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comfy import model_management
from comfy.controlnet import ControlLora
from comfy.patcher_extension import CallbacksMP
from comfy.utils import set_attr_param
from torch import nn
from torch.utils._pytree import tree_leaves

from ....families.comfy.native import PASSED_BY
from ....families.token_plan import TokenPlan
from ....parallel.local.borrow import Borrowed, Residuals
from ....parallel.local.bridge import Bridge
from ....parallel.local.tokens import HERE, RowsError
from ....parallel.transfer import current_device
from ....patches.changes import code_of, foreign_methods, replaced_methods
from .model_copy import reachable
from .plan import SplitPlan
from .shown_inputs import OVERRIDE

ROOT = "diffusion_model"
NO_PREFETCH = {"prefetch_dynamic_vbars": False}  # it would fetch the next block's weights to the main card
KEY = "devicebridge.split"

_STATEFUL_ENTRIES = ("control", "gligen", "hooks", "default", "additional_models")
_SEEN_ENTRIES = ("patches", "patches_replace")
_OPTION_KEYS = ("cond_or_uncond", "sample_sigmas", "sigmas")  # by these a dict is known to be transformer_options
# Entries of transformer_options that are looked at by name, or are ComfyUI's own and plain.
_KNOWN_ENTRIES = frozenset({*_SEEN_ENTRIES, OVERRIDE, "wrappers", "callbacks", "model_patcher"})

_ONLY_A_SHARE = (
    "each card of this split computes {}, and {} of another node works in or between the blocks, where it would see "
    "only those. Use way 'blocks' in the split node, or take that node out"
)
# Patches of ComfyUI's nodes that compute row by row: name, file, function -> classes that tell them the rank's rows.
_NAG = "NAGuidance.execute.<locals>.nag_attention_output_patch"
_ROW_BY_ROW = {("attn1_output_patch", "nodes_nag.py", _NAG): ("Flux", "Chroma", "HunyuanVideo")}
# By these names ComfyUI's classes call attention.
_CHOOSES = "optimized_attention_for_device"
_ATTENTION = (_CHOOSES, "optimized_attention", "optimized_attention_masked", "attention_pytorch", "attention_basic")
# In any thread: how many forwards need attention led to us at a place, ComfyUI's function there, and ours.
_LEADING, _num_led, _own = threading.Lock(), Counter[tuple[Any, str]](), dict[tuple[Any, str], tuple[Any, Any]]()


def unseen_attachments(patcher: Any, diffusion_model: nn.Module, own_hooks: set[int]) -> Iterator[tuple[str, str]]:
    """What was attached inside the diffusion model and runs unseen: the module's name, "" for anywhere, and words.
    patcher: the MODEL, with its object patches and injections applied. own_hooks: ids of the split's hooks."""
    for key, value in patcher.object_patches.items():
        if key.startswith(f"{ROOT}.") and not is_compiled(value):
            yield key.removeprefix(f"{ROOT}."), f"the object patch of {key}"
    for key, injections in patcher.injections.items():
        if key != KEY and not all(_is_comfy_bypass(injection.inject) for injection in injections):
            yield "", f"the injection {key!r}"
    for name, module in diffusion_model.named_modules():
        if not name or is_compiled(module):
            continue
        forward = module.__dict__.get("forward")
        while _is_comfy_bypass(forward):
            forward = forward.__self__.original_forward
        # The class's own was put back by whoever replaced it.
        if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
            yield name, f"the replaced forward of {name}"
        if not own_hooks.issuperset((*module._forward_hooks, *module._forward_pre_hooks)):
            yield name, f"a hook on {name}"


def _is_comfy_bypass(function: Any) -> bool:
    return code_of(function) == "comfy.weight_adapter.bypass"


def is_compiled(value: Any) -> bool:
    return hasattr(value, "_orig_mod")


def seen_attachments(options: Mapping[str, Any]) -> list[str]:
    """What transformer_options bring that runs inside the forward, in words for the user."""
    found = [name for name in _SEEN_ENTRIES if any(options.get(name, {}).values())]
    if foreign_attention(options.get(OVERRIDE)):
        found.append("an attention override")
    if any(options.get("wrappers", {}).get("diffusion_model", {}).values()):
        found.append("a wrapper around diffusion_model")
    return found


def holds_tensors(function: Any) -> bool:
    """Whether a function captured tensors, which lie on the main card."""
    return any(isinstance(part, (torch.Tensor, nn.Module)) for part in reachable(function))


def reasons_against_overlap(
    model: Any, unseen: Sequence[str], conds: list[Any], options: Mapping[str, Any]
) -> Iterator[str]:
    """Why micro-batches of this step must not be interleaved. model: the BaseModel. unseen: what runs inside it."""
    patcher, given = model.current_patcher, options.get("transformer_options", {})
    if torch.is_grad_enabled():
        yield "gradients are recorded"
    if patcher.current_hooks is not None:
        yield "the scheduled LoRA of the conditionings before is still in the weights"
    of_comfyui = (kind for kind in type(model).__mro__ if kind.__module__.startswith("comfy."))
    methods = *replaced_methods(model.diffusion_model), *replaced_methods(model), *foreign_methods(of_comfyui)
    found = [*unseen[:1], *(f"the replaced {each}" for each in methods)]
    for key, value in patcher.object_patches.items():
        is_known = isinstance(value, nn.Module) and code_of(value).startswith(("comfy.", "comfy_extras."))
        if not key.startswith(f"{ROOT}.") and callable(value) and not is_known:
            found.append(f"the object patch of {key}")
    for kind in type(model).__mro__:
        if not f"{kind.__module__}.".startswith(("comfy.", "torch.", "builtins.")):
            found.append(f"the class {kind.__name__} of {kind.__module__}")
    found += ["a model function wrapper"] * ("model_function_wrapper" in options)
    wrappers = given.get("wrappers", {})
    found += ["a wrapper around apply_model"] * any(wrappers.get("apply_model", {}).values())
    around = wrappers.get("calc_cond_batch", {}).items()
    found += ["a wrapper around all conditionings"] * any(functions for key, functions in around if key != KEY)
    found += seen_attachments(given)
    for name, value in given.items():
        code = (part for part in reachable(value) if callable(part) and not isinstance(part, type))
        if name not in _KNOWN_ENTRIES and any(True for _ in code):
            found.append(f"transformer_options[{name!r}]")
    found += ["a callback of another node"] * bool(patcher.get_all_callbacks(CallbacksMP.ON_PREPARE_STATE))
    yield from (f"{each} may keep state from call to call" for each in found)
    entries = (entry for cond in conds for entry in cond or ())
    yield from (f"a conditioning has {name}" for entry in entries for name in _STATEFUL_ENTRIES if name in entry)


def foreign_attention(function: Any) -> str:
    """Whose code this is; "" for None and for ComfyUI's own, which computes each head and each query by itself."""
    if function is None:
        return ""
    # Each call of attention asks for it. What holds anything else may change, so it is looked at anew.
    name = function.__name__ if isinstance(function, types.FunctionType) else ""
    is_of_module = name and getattr(sys.modules.get(code_of(function)), name, None) is function
    return (_known_attention if is_of_module else _foreign_attention)(function)


def _foreign_attention(function: Any) -> str:
    parts = [code_of(part) for part in reachable(function) if callable(part) and not isinstance(part, type)]
    return min((code for code in parts if not code.startswith("comfy.")), key=__name__.__eq__, default="")  # ours last


_known_attention = functools.lru_cache(maxsize=32)(_foreign_attention)


@functools.lru_cache(maxsize=128)
def _node_file(path: str) -> str:
    """The name of a file of ComfyUI's own nodes; "" for any other."""
    found, code = Path(path).resolve(), Path(model_management.__file__).resolve().parent.parent
    return found.name if found.parent == code / "comfy_extras" else ""


def check_runnable(class_name: str, options: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Refuse what other nodes would do where each card has a share of the tokens. options: transformer_options.
    others: what is attached elsewhere, in words for the user. Raises: RowsError that names it."""
    found = []
    for name, patch in ((name, patch) for name, each in options.get("patches", {}).items() for patch in each):
        is_function = isinstance(patch, types.FunctionType)
        file, function = (_node_file(patch.__code__.co_filename), patch.__qualname__) if is_function else ("", "")
        if class_name not in _ROW_BY_ROW.get((name, file, function), ()):
            found.append(f"the patch {name!r} by {code_of(patch)}")
    found += [f"the replacement {name!r}" for name, keyed in options.get("patches_replace", {}).items() if keyed]
    if found := [*found, *others]:
        raise RowsError(_ONLY_A_SHARE.format("some of the tokens", found[0]))
    check_attention(options.get(OVERRIDE))


def check_attention(function: Callable[..., Any] | None) -> None:
    """Raises: RowsError for attention that nobody knows to compute row by row."""
    if code := foreign_attention(function):
        raise RowsError(
            f"each card of this split attends from some of the tokens, and the attention of {code} may read across "
            "them. Use way 'blocks' in the split node, one of ComfyUI's own kinds of attention (Model Attention "
            "Backend, or a start option), or take that node out"
        )


def check_divisible(unseen: Sequence[str], options: Mapping[str, Any], inside: Sequence[str]) -> None:
    """Refuse what other nodes would do inside a block, where each card has some of the heads. unseen: such in words.
    options: transformer_options. inside: names of patches that run in a block. Raises: RuntimeError that names it."""
    patches, replaced = options.get("patches", {}), options.get("patches_replace", {})
    found = [*unseen, *(f"the patch {name!r}" for name in inside if patches.get(name))]
    found += [f"the replacement {name!r}" for name, keyed in replaced.items() if keyed and name != "dit"]
    if code := foreign_attention(options.get(OVERRIDE)):
        found.append(f"the attention override of {code}")
    if found:
        raise RuntimeError(_ONLY_A_SHARE.format("some of the attention heads", found[0]))


def package_of(kind: type) -> str:
    """The package that a class is defined in, else its module, as the beginning of the names of modules there."""
    return f"{kind.__module__.rpartition('.')[0] or kind.__module__}."


def attention_of(model: nn.Module, *, is_wide: bool = False) -> dict[tuple[Any, str], Any]:
    """What this class's modules call attention, by Python's module and name. is_wide: also comfy.ldm.flux.math, say."""
    named = set(sys.modules) if is_wide else {type(each).__module__ for each in model.modules()}
    packages = ("comfy.ldm.", package_of(type(model)))
    modules = [sys.modules[name] for name in sorted(named) if f"{name}.".startswith(packages) and name in sys.modules]
    return {(each, name): getattr(each, name) for each in modules for name in _ATTENTION if hasattr(each, name)}


@contextmanager
def led_by_name(model: nn.Module, plan: TokenPlan | None = None) -> Iterator[None]:
    """Inside, what this class's modules call attention goes through the forward that the thread is a rank of, if any;
    a no-op for a plan whose blocks pass options, which lead to it. The last to leave puts ComfyUI's functions back."""
    places = [] if plan is not None and plan.passes_options else list(attention_of(model))
    with _LEADING:
        for module, name in places:
            if not _num_led[module, name]:
                function = getattr(module, name)
                choice = lambda *args, choose=function, **kwargs: _led(choose(*args, **kwargs))  # noqa: E731
                ours = choice if name == _CHOOSES else _led(function)
                _own[module, name] = function, ours
                setattr(module, name, ours)
            _num_led[module, name] += 1
    try:
        yield
    finally:
        with _LEADING:
            for module, name in places:
                _num_led[module, name] -= 1
                if not _num_led[module, name]:
                    function, ours = _own.pop((module, name))
                    if getattr(module, name, None) is ours:
                        setattr(module, name, function)


def _led(function: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*args: Any, **kwargs: Any) -> Any:
        parallel = HERE.parallel
        if parallel is None or parallel.plan.passes_options:  # then the override of its options leads to us
            return function(*args, **kwargs)
        return override_of(parallel)(function, *args, **kwargs)

    return attend


def override_of(rows: Any, chosen: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """An attention override that leads to a TokenParallel. chosen: the user's. Raises: as check_attention."""

    def attend(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        check_attention(function)
        return rows.attend(function if chosen is None else functools.partial(chosen, function), *args, **kwargs)

    return attend


def wrap_control(bridge: Bridge, control: dict[str, Any]) -> dict[str, Any]:
    """A control dict whose residuals travel, when they are taken out, to the card that has just computed."""

    def move(value: Any) -> Any:
        return bridge.move(value, bridge.current_device)

    return {key: Residuals(value, move) if isinstance(value, list) else value for key, value in control.items()}


def bring_controls_to_main(conds: list[Any], main: torch.device) -> None:
    """Copy the weights that a Control-LoRA took from other cards: it computes on the main one."""
    for control in (entry.get("control") for cond in conds for entry in cond or ()):
        while control is not None:
            model = control.control_model if isinstance(control, ControlLora) else None
            for name, parameter in list(model.named_parameters()) if model is not None else ():
                if parameter.device not in (main, torch.device("cpu")):
                    set_attr_param(model, name, parameter.detach().to(main))
            control = control.previous_controlnet


def guard_options(options: Mapping[str, Any], bridge: Bridge, plan: SplitPlan) -> dict[str, Any]:
    """transformer_options whose patches work on any card; the original is not modified."""
    guarded, override = {**options, **NO_PREFETCH}, options.get(OVERRIDE)

    def on_main(patch: Any) -> Any:
        # forward_timestep_embed_patch is a tuple: class of a UNet's layer, and who runs such a layer
        return (*patch[:-1], _on_main(patch[-1], bridge)) if isinstance(patch, tuple) else _on_main(patch, bridge)

    if "patches" in guarded:
        guarded["patches"] = {name: list(map(on_main, patches)) for name, patches in guarded["patches"].items()}
    if "patches_replace" in guarded:
        guarded["patches_replace"] = {
            name: {key: _replacement(name, key, patch, bridge, plan) for key, patch in patches.items()}
            for name, patches in guarded["patches_replace"].items()
        }
    if override is not None and holds_tensors(override):  # any other runs where the block is
        guarded[OVERRIDE] = _on_main(override, bridge)  # without container_function: ComfyUI hands over tensors then
    return guarded


def _replacement(name: str, key: Any, patch: Callable[..., Any], bridge: Bridge, plan: SplitPlan) -> Callable[..., Any]:
    if name != "dit":
        return _on_main(patch, bridge)  # replaces an attention inside a block
    # A key is ("double_block", 3); one that the class does not list is left alone.
    block_list = plan.layout.replace_keys.get(key[0]) if isinstance(key, tuple) and len(key) > 1 else None
    if block_list is None:
        return patch
    block = f"{block_list}.{key[1]}"
    device, is_last = plan.device_of(block), block == plan.blocks[-1]

    def on_the_blocks_card(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        def original_block(args: dict[str, Any]) -> Any:
            return bridge.move(extra["original_block"](args), device)

        came_from = bridge.current_device
        borrowed = Borrowed(args, device, is_passed=is_options, passed_by=PASSED_BY)
        with current_device(device):
            output = patch(borrowed.value, {**extra, "original_block": original_block})
        borrowed.settle(came_from)
        leaves_on = bridge.main_device if is_last or bridge.transport == "relay" else device
        bridge.stay_on(leaves_on)  # a patch that skips the block has entered none
        return bridge.move(output, leaves_on)

    return on_the_blocks_card


def _on_main(patch: Callable[..., Any], bridge: Bridge) -> Callable[..., Any]:
    """The patch with its tensors on the main card; what it returns or writes goes back to where they were."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args, {name: value for name, value in kwargs.items() if name not in PASSED_BY}
        leaves = tree_leaves(given, lambda each: isinstance(each, dict) and is_options(each))
        device = next((each.device for each in leaves if isinstance(each, torch.Tensor)), bridge.main_device)
        if device == bridge.main_device:
            return patch(*args, **kwargs)
        borrowed = Borrowed([args, kwargs], bridge.main_device, is_passed=is_options, passed_by=PASSED_BY)
        with current_device(bridge.main_device):
            output = patch(*borrowed.value[0], **borrowed.value[1])
        borrowed.settle(device)
        return borrowed.returned(output, device)

    return run


def is_options(value: dict[Any, Any]) -> bool:
    """Whether a dict is somebody's transformer_options."""
    return any(key in value for key in _OPTION_KEYS)
