"""One model over several devices: every block computes where its weights are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...families.spec import ModelFamily
from ...patches.hooks import HookSet
from ..block_lists import called_modules, parts_of_tail, transport_for
from ..offload.activations import MIN_BYTES, ActivationOffload
from ..offload.recompute import BlockCall, module_of, recompute
from ..placement import Placement, block_names
from .bridge import Bridge

Recompute = Callable[[nn.Module | BlockCall, tuple[Any, ...], torch.device, ActivationOffload | None], Any]


class BlockSplit:
    """Handle of a model split over devices; made by apply_block_split."""

    def __init__(self, model: nn.Module, family: ModelFamily, placement: Placement) -> None:
        self.placement = placement
        self.model = model
        self._called = {name: called_modules(model, family, name) for name in placement.blocks}
        self.bridge = Bridge(
            {module: device for name, device in placement.items() for module in self._called[name]},
            placement.main_device,
            tail=parts_of_tail(model, family)[0],
            tail_device=placement.tail_device,
            transport="stream" if family.native is None else transport_for(model, family.native),
            passed_by=() if family.native is None else family.native.passed_by,
        )
        self._family = family
        self._kept: frozenset[nn.Module] = frozenset()
        self.offload: ActivationOffload | None = None
        self.recompute: Recompute = recompute
        self._hooks = HookSet()

    @property
    def main_device(self) -> torch.device:
        return self.placement.main_device

    def attach(self) -> None:
        self._hooks.before(self.model, self._start)
        self.bridge.attach()
        if self.bridge.tail_device != self.main_device:
            # What the tail reads past its modules goes there, too. Else a pipeline's last stage would run backwards
            # through the first, whose graph is another microbatch's or has been used.
            native, modules = self._family.native, dict(self.model.named_modules())
            for name, index in self._family.read_by_tail.items():
                if name in modules:
                    self._hooks.after(modules[name], lambda *call, index=index: self._bring_part(index, call[-1]))
                else:
                    self._hooks.around_method(self.model, name, functools.partial(self._bring_result, index))
            for name, arguments in ({} if native is None else native.tail_arguments).items():
                self._hooks.around_method(self.model, name, functools.partial(self._bring_arguments, arguments))
        self._hooks.after(self.model, lambda *call: self.bridge.move(call[-1], self.bridge.tail_device))
        self._hooks.after(self.model, lambda *call: self.bridge.end(), also_on_error=True)

    def remove(self) -> None:
        """Take the hooks off; a second call is a no-op."""
        self._hooks.remove()
        self.bridge.remove()
        self.bridge.end()
        self.stop_offload()

    def checkpoint(self, block: nn.Module | BlockCall, *args: Any) -> Any:
        """Run a block without keeping its activations; for diffusers' enable_gradient_checkpointing. torch's own looks
        for devices among the arguments. Before the first block of a device these are elsewhere, so dropout would be
        drawn anew and the gradient silently wrong."""
        module = module_of(block)
        device = self.bridge.blocks[module]
        moved = self.bridge.bring(args, device) if self._hooks else args
        return block(*moved) if module in self._kept else self.recompute(block, moved, device, self.offload)

    def offload_inputs(self, *, min_bytes: int = MIN_BYTES) -> None:
        """Let what recomputed blocks keep wait in host memory, from the next forward on; see activations.py."""
        self.stop_offload()
        self.offload = ActivationOffload(self.bridge.devices, min_bytes=min_bytes)

    def stop_offload(self) -> None:
        if self.offload is not None:
            self.offload.close()
        self.offload = None

    def keep_activations(self, num_blocks: Sequence[int]) -> None:
        """Let checkpoint recompute all but the last blocks of each device, whose memory its backward frees first.
        num_blocks: as check_kept_and_offloaded allows; () keeps none. [num_devices]"""
        kept: list[str] = []
        for device, count in zip(self.bridge.devices, num_blocks, strict=bool(num_blocks)):
            names = [name for name, place in self.placement.items() if place == device]
            kept += names[len(names) - count :]
        self._kept = frozenset(module for name in kept for module in self._called[name])

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.bridge.end()  # torch calls no hook of ours when KeyboardInterrupt ends a forward
        self.bridge.begin()
        return self.bridge.move((args, kwargs), self.main_device)

    def _bring_result(
        self, index: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        native = self._family.native
        # What the method of the tail will be given too: there it is found, so that no copy waits for later work.
        for name in () if native is None else itertools.chain(*native.tail_arguments.values()):
            if name in kwargs:
                self.bridge.send(kwargs[name], self.bridge.tail_device)
        return self._bring_part(index, own(*args, **kwargs))

    def _bring_part(self, index: int, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """What was returned, with the tail's part of it there. Of diffusers' models what needs no gradient stays: their
        own forward brings it."""
        native = self._family.native
        if native is None and not output[index].requires_grad:
            return output
        bring = self.bridge.move if native is not None and native.mixes_early else self.bridge.send
        return (*output[:index], bring(output[index], self.bridge.tail_device), *output[index + 1 :])

    def _bring_arguments(
        self, names: Collection[str], own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        brought = {name: self.bridge.move(kwargs[name], self.bridge.tail_device) for name in names if name in kwargs}
        return own(*args, **{**kwargs, **brought})


def apply_block_split(model: nn.Module, family: ModelFamily, placement: Placement) -> BlockSplit:
    """Hook a model whose blocks are where the placement says, the rest on the main device: one forward runs over all.
    Its output is on the placement's tail device. Several threads may call it at once."""
    assert placement.blocks == block_names(model, family), "it is planned for this model"
    split = BlockSplit(model, family, placement)
    split.attach()
    return split
