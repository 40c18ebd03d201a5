"""What other nodes hang into a forward (ControlNet residuals, patches), made right for a model on several cards.

Their authors wrote for one device, the one the model is loaded on, so whatever they brought along lies there, at home:

- A patch gets its tensors at home, and what it returns goes back to where the block computes.
- A block replacement calls the block, so it runs on the block's card with its arguments brought there.
- What either writes into its arguments is carried back to where they came from (parallel/local/lend.py).
- It may write into whatever else it was ever given, at any time: beside such code no copy serves two calls (bridge.py).
- ControlNet residuals are taken out of their lists one by one between blocks; each travels to the card that has just
  computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from comfy.controlnet import ControlLora
from comfy.utils import set_attr_param

from ....parallel.local.bridge import Bridge
from ....parallel.local.lend import Lent
from ....parallel.transfer import current_device
from .attachments import KEY, holds_tensors
from .division import check_runnable
from .plan import SplitPlan

_PASSED_BY = ("transformer_options", "control")
_RUNS_BETWEEN_BLOCKS = "dit"
_OPTION_KEYS = ("cond_or_uncond", "sample_sigmas", "sigmas")  # by these a dict is known to be transformer_options


class _Residuals(list[Any]):
    """A list that hands out its tensors on the card whose block ran last."""

    def __init__(self, values: list[Any], bridge: Bridge) -> None:
        super().__init__(values)
        self.bridge = bridge

    def __getitem__(self, index: Any) -> Any:
        return self.bridge.move(super().__getitem__(index), self.bridge.current_device)

    def pop(self, index: SupportsIndex = -1) -> Any:
        return self.bridge.move(super().pop(index), self.bridge.current_device)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


def wrap_control(control: dict[str, Any], bridge: Bridge) -> dict[str, Any]:
    """A control dict whose lists follow the forward from card to card; the original is not modified."""
    return {key: _Residuals(value, bridge) if isinstance(value, list) else value for key, value in control.items()}


def bring_controls_home(conds: list[Any], home: torch.device) -> None:
    """Copy the weights that a Control-LoRA took from other cards: it computes on the main one."""
    for control in (entry.get("control") for cond in conds for entry in cond or ()):
        while control is not None:
            model = control.control_model if isinstance(control, ControlLora) else None
            for name, parameter in list(model.named_parameters()) if model is not None else ():
                if parameter.device not in (home, torch.device("cpu")):
                    set_attr_param(model, name, parameter.detach().to(home))
            control = control.previous_controlnet


def guard_options(options: dict[str, Any], bridge: Bridge, plan: SplitPlan) -> dict[str, Any]:
    """transformer_options whose patches work on any card; the original is not modified."""
    guarded = dict(options)
    if guarded.get("prefetch_dynamic_vbars"):
        guarded["prefetch_dynamic_vbars"] = False  # it would fetch the next block's weights to the home card
    if "patches" in guarded:
        guarded["patches"] = {
            name: [_patch(patch, bridge) for patch in patches] for name, patches in guarded["patches"].items()
        }
    if "patches_replace" in guarded:
        guarded["patches_replace"] = {
            name: {key: _replacement(name, key, patch, bridge, plan) for key, patch in patches.items()}
            for name, patches in guarded["patches_replace"].items()
        }
    if guarded.get("optimized_attention_override") is not None:
        guarded["optimized_attention_override"] = _override(guarded["optimized_attention_override"], bridge)
    around = guarded.get("wrappers", {}).get("diffusion_model")
    if around and plan.division is not None:  # ours comes last, around each forward that a wrapper runs
        own = functools.partial(_runnable, plan.layout.patches_inside)
        guarded["wrappers"] = {**guarded["wrappers"], "diffusion_model": {**around, KEY: [own]}}
    return guarded


def _runnable(inside: tuple[str, ...], executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward. Raises: RuntimeError for what a wrapper has attached inside blocks that all cards compute."""
    for options in (*args, *kwargs.values()):
        if isinstance(options, dict) and _is_options(options):
            check_runnable((), options, inside)
    return executor(*args, **kwargs)


def _patch(patch: Any, bridge: Bridge) -> Any:
    if isinstance(patch, tuple):  # forward_timestep_embed_patch: class of a UNet's layer, and who runs such a layer
        return (*patch[:-1], _at_home(patch[-1], bridge))
    return _at_home(patch, bridge)


def _override(override: Callable[..., Any], bridge: Bridge) -> Callable[..., Any]:
    """An attention override for any card: it runs where the block is, or at home if it brings tensors of its own."""
    # At home it is without container_function: ComfyUI then hands over the tensors themselves.
    return _at_home(override, bridge) if holds_tensors(override) else override


def _replacement(name: str, key: Any, patch: Callable[..., Any], bridge: Bridge, plan: SplitPlan) -> Callable[..., Any]:
    if name != _RUNS_BETWEEN_BLOCKS:
        return _at_home(patch, bridge)  # replaces an attention inside a block
    block = _block_of_key(key, plan)
    if block is None:
        return patch
    device = plan.placement.device_of(block)
    is_last = block == plan.placement.blocks[-1]

    def on_the_blocks_card(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        def original_block(args: dict[str, Any]) -> Any:
            return bridge.move(extra["original_block"](args), device)

        came_from = bridge.current_device
        lent = _lend(args, device)
        with current_device(device):
            output = patch(lent.value, {**extra, "original_block": original_block})
        lent.settle(came_from)
        leaves_on = bridge.home if is_last or bridge.transport == "relay" else device
        bridge.stay_on(leaves_on)  # a patch that skips the block has entered none
        return bridge.move(output, leaves_on)

    return on_the_blocks_card


def _block_of_key(key: Any, plan: SplitPlan) -> str | None:
    """Name of the block that ("double_block", 3) means; None for a key the class does not list."""
    if not isinstance(key, tuple) or len(key) < 2:
        return None
    block_list = plan.layout.replace_keys.get(key[0])
    return None if block_list is None else f"{block_list}.{key[1]}"


def _at_home(patch: Callable[..., Any], bridge: Bridge) -> Callable[..., Any]:
    """The patch with its tensors at home; what it returns, and what it wrote, goes back where its tensors were."""

    def run(*args: Any, **kwargs: Any) -> Any:
        device = _first_device((args, kwargs))
        if device is None or device == bridge.home:
            return patch(*args, **kwargs)
        lent = _lend([args, kwargs], bridge.home)
        with current_device(bridge.home):
            output = patch(*lent.value[0], **lent.value[1])
        lent.settle(device)
        return lent.returned(output, device)

    return run


def _lend(value: Any, device: torch.device) -> Lent:
    return Lent(value, device, is_passed=_is_options, passed_by=_PASSED_BY)


def _is_options(value: dict[Any, Any]) -> bool:
    return any(key in value for key in _OPTION_KEYS)


def _first_device(tree: Any) -> torch.device | None:
    """Device of the first tensor that is not part of transformer_options."""
    if isinstance(tree, torch.Tensor):
        return tree.device
    if isinstance(tree, dict):
        tree = [] if _is_options(tree) else [value for key, value in tree.items() if key not in _PASSED_BY]
    found = (_first_device(item) for item in tree) if isinstance(tree, (tuple, list)) else ()
    return next((device for device in found if device is not None), None)
