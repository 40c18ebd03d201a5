"""What other nodes hang into a forward (ControlNet residuals, patches), made right for a model on several cards.

Their authors wrote for one device, the one the model is loaded on. So whatever they brought along lies there, at home:
a patch gets its tensors at home and what it returns goes back to where the block computes. A block replacement is
different: it calls the block, so it runs on the block's card with its arguments already there. ControlNet residuals
are taken out of their lists one by one between blocks; each travels to the card that has just computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from ...parallel.bridge import Bridge
from ...patches.hooks import map_tensors

if TYPE_CHECKING:
    from .split_tree import SplitPlan

_PASSED_BY = ("transformer_options", "control")
_RUNS_BETWEEN_BLOCKS = "dit"
_OPTION_KEYS = ("cond_or_uncond", "sample_sigmas", "sigmas")  # by these a dict is known to be transformer_options
_STREAM_KEYS = ("img", "txt", "x", "vx", "ax")


class _Residuals(list[Any]):
    """A list that hands out its tensors on the card whose block ran last."""

    bridge: Bridge

    def __getitem__(self, index: Any) -> Any:
        return self.bridge.move(super().__getitem__(index), self.bridge.current_device)

    def pop(self, index: SupportsIndex = -1) -> Any:
        return self.bridge.move(super().pop(index), self.bridge.current_device)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


def wrap_control(control: dict[str, Any], bridge: Bridge) -> dict[str, Any]:
    """A control dict whose lists follow the forward from card to card; the original is not modified."""
    return {key: _residuals(value, bridge) if isinstance(value, list) else value for key, value in control.items()}


def _residuals(values: list[Any], bridge: Bridge) -> _Residuals:
    residuals = _Residuals(values)
    residuals.bridge = bridge
    return residuals


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
    return guarded


def _patch(patch: Any, bridge: Bridge) -> Any:
    if isinstance(patch, tuple):  # forward_timestep_embed_patch: class of a UNet's layer, and who runs such a layer
        return (*patch[:-1], _at_home(patch[-1], bridge))
    return _at_home(patch, bridge)


def _replacement(name: str, key: Any, patch: Callable[..., Any], bridge: Bridge, plan: SplitPlan) -> Callable[..., Any]:
    if name != _RUNS_BETWEEN_BLOCKS:
        return _at_home(patch, bridge)  # replaces an attention inside a block
    block = _block_of_key(key, plan)
    if block is None:
        return patch
    device = plan.placement.device_of(block)
    leaves_on = plan.home if plan.transport == "relay" or block == plan.placement.blocks[-1] else device

    def on_the_blocks_card(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        def original_block(args: dict[str, Any]) -> Any:
            return bridge.move(extra["original_block"](args), device)

        output = patch(bridge.move(args, device), {**extra, "original_block": original_block})
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
    """The patch with its tensors at home; what it returns, and streams it changed in place, go back where they were."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from comfy.model_management import cuda_device_context

        device = _first_device((args, kwargs))
        if device is None or device == bridge.home:
            return patch(*args, **kwargs)
        home_args, home_kwargs = _moved((args, kwargs), bridge.home)
        with cuda_device_context(bridge.home):
            output = patch(*home_args, **home_kwargs)
        for stream, copied in zip(_streams(args), _streams(home_args), strict=True):
            stream.copy_(copied)
        return _moved(output, device)

    return run


def _streams(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The states a patch between blocks may write into: entries of its one dict of arguments."""
    return [
        value
        for arg in args
        if isinstance(arg, dict) and not _is_options(arg)
        for key, value in arg.items()
        if key in _STREAM_KEYS and isinstance(value, torch.Tensor)
    ]


def _moved(tree: Any, device: torch.device) -> Any:
    """A copy of tree whose tensors are on device; transformer_options stay the very same object."""
    if isinstance(tree, dict):
        if _is_options(tree):
            return tree
        return {key: value if key in _PASSED_BY else _moved(value, device) for key, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_moved(item, device) for item in tree)
    return map_tensors(tree, lambda tensor: tensor.to(device) if tensor.ndim or tensor.device.type != "cpu" else tensor)


def _is_options(value: dict[Any, Any]) -> bool:
    return any(key in value for key in _OPTION_KEYS)


def _first_device(tree: Any) -> torch.device | None:
    """Device of the first tensor that is not part of transformer_options."""
    if isinstance(tree, torch.Tensor):
        return tree.device
    if isinstance(tree, dict):
        tree = [] if _is_options(tree) else [value for key, value in tree.items() if key not in _PASSED_BY]
    if isinstance(tree, (tuple, list)):
        for item in tree:
            found = _first_device(item)
            if found is not None:
                return found
    return None
