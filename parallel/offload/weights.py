"""Weight offload: blocks that do not fit their card keep their weights in host memory and pass them through two slots.
The base is frozen, so nothing is copied back. Between visits a module has its host tensors: names, state dict and sizes
are as ever. A block has one pinned buffer: buffers per layer could share pages, which cannot be pinned twice."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...patches.hooks import HookSet, tensors_reached
from ..devices import CPU, synchronize
from ..placement import owner_of
from .copies import PinnedBuffer, Slots, SlotTensor, lay_out
from .recompute import is_recomputing

_log = logging.getLogger(__name__)

SMALLEST_BYTES = 2**16  # of a weight in host memory: below, a copy costs more than the memory is worth


@dataclass(frozen=True)
class _Block:
    """An offloaded block."""

    module: nn.Module
    host: PinnedBuffer  # their bytes, as a slot has them
    weights: list[SlotTensor]


class WeightOffload:
    """Handle of blocks, by fqn in execution order, whose weights are in host memory; made before a model is loaded."""

    def __init__(self, places: Mapping[str, torch.device]) -> None:
        self.places = dict(places)
        self._model: nn.Module | None = None
        self._blocks: dict[str, _Block] = {}
        self._waiting: dict[str, set[str]] = {}  # layers that are still to be filled, by block
        self._on_host: set[int] = set()  # ids of parameters
        self._owns_host, self._can_pin = True, True
        self._hooks, self._devices = HookSet(), list[_Device]()

    @property
    def num_copies(self) -> int:
        return sum(each.slots.num_copies for each in self._devices)

    @property
    def host_bytes(self) -> int:
        return sum(block.host.num_bytes for block in self._blocks.values())

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one in host memory, where it belongs."""
        return id(parameter) in self._on_host

    def begin(self, model: nn.Module, layers: Collection[str]) -> None:
        """These layers will be filled, each handed to finish once; what was taken of another model is dropped."""
        self._drop()
        self._model = model
        self._waiting = {name: set() for name in self.places}
        for layer in layers:
            if name := owner_of(layer, self.places):
                self._waiting[name].add(layer)

    def finish(self, layer: str) -> None:
        """Bring the large weights of a layer, which are final, to the host; a no-op outside offloaded blocks."""
        name = owner_of(layer, self.places)
        if not name:
            return
        assert self._model is not None
        module = self._model.get_submodule(layer)
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.device != CPU and _can_leave(parameter):
                module._parameters[leaf] = nn.Parameter(parameter.detach().to(CPU), requires_grad=False)
        self._waiting[name].discard(layer)
        if not self._waiting[name]:
            self._pack(name)

    def takes(self, fqn: str, num_bytes: int) -> bool:
        """Whether a frozen tensor of this name and size will be in host memory."""
        return num_bytes >= SMALLEST_BYTES and bool(owner_of(fqn, self.places))

    @torch.no_grad()
    def _pack(self, name: str) -> None:
        """Bring a block's large weights into one buffer on the host, wherever they are."""
        assert self._model is not None
        module, device = self._model.get_submodule(name), self.places[name]
        found = list(_large_weights(module))
        pieces, size = lay_out((parameter.shape, parameter.dtype) for _, _, parameter in found)
        host = PinnedBuffer(size, device, is_wanted=self._can_pin)
        self._can_pin = self._can_pin and (host.is_pinned or device.type != "cuda" or not size)
        block = self._blocks[name] = _Block(module, host, [])
        for (owner, leaf, parameter), piece in zip(found, pieces, strict=True):
            piece.view(host.tensor).copy_(parameter)
            on_host = SlotTensor(owner, leaf, parameter, piece).in_buffer(host.tensor)
            block.weights.append(SlotTensor(owner, leaf, on_host, piece))
            block.weights[-1].put(on_host)
            self._on_host.add(id(on_host))

    def of_copy(self, model: nn.Module, device: torch.device) -> WeightOffload:
        """The same blocks of a copy of the model on another device; the copy has the very tensors in host memory. This
        one owns them: attach both, and remove the copy's first."""
        other = WeightOffload(dict.fromkeys(self.places, device))
        other._on_host, other._owns_host = self._on_host, False
        for name, block in self._blocks.items():
            copied = model.get_submodule(name)
            owners = dict(zip(block.module.modules(), copied.modules(), strict=True))
            weights = [replace(weight, owner=owners[weight.owner]) for weight in block.weights]
            other._blocks[name] = _Block(copied, block.host, weights)
        return other

    def move_others(self, module: nn.Module, device: torch.device) -> None:
        """Bring the rest of an offloaded block to its device; trained parameters are made anew."""
        for owner in module.modules():
            for leaf, parameter in owner._parameters.items():
                if parameter is not None and parameter.device != device and not self.holds(parameter):
                    moved = parameter.detach().to(device)
                    owner._parameters[leaf] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
            for leaf, buffer in owner._buffers.items():
                if buffer is not None and buffer.device != device:
                    owner._buffers[leaf] = buffer.to(device)

    def attach(self) -> None:
        """Make the slots and have the blocks use them; LoRA that was attached to host tensors moves to its card."""
        assert not self._hooks and set(self._blocks) == set(self.places), "weights are brought to the host first"
        for device in dict.fromkeys(self.places.values()):
            blocks = [self._blocks[name] for name, place in self.places.items() if place == device]
            self._devices.append(_Device(device, blocks))
            for index, block in enumerate(blocks):
                self.move_others(block.module, device)
                self._hooks.just_before(block.module, torch.compiler.disable(partial(self._devices[-1].before, index)))
        kind = "pinned" if all(block.host.is_pinned for block in self._blocks.values()) else "not pinned"
        _log.info("%d blocks stream from host memory (%.2f GB, %s)", len(self._blocks), self.host_bytes / 1e9, kind)

    def remove(self) -> None:
        """Take the hooks off; the weights stay in host memory, no longer pinned. A second call is a no-op."""
        self._hooks.remove()
        synchronize(dict.fromkeys(self.places.values()))  # the last copies read memory that is given back here
        for each in self._devices:
            each.slots.close()
        self._devices.clear()
        self._drop()

    def _drop(self) -> None:
        for block in self._blocks.values():
            block.weights.clear()
            if self._owns_host:
                block.host.close()
        self._blocks.clear()
        self._on_host = set()


class _Device:
    """The offloaded blocks of one device, in execution order, and its slots."""

    def __init__(self, device: torch.device, blocks: Sequence[_Block]) -> None:
        self.blocks = blocks
        self.slots = Slots([block.weights for block in blocks], max(each.host.num_bytes for each in blocks), device)

    def before(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_backward = is_recomputing()
        given = (*block.parameters(), *tensors_reached((args, kwargs))) if torch.is_grad_enabled() else ()
        if not is_backward and any(tensor.requires_grad for tensor in given):
            raise RuntimeError(
                f"a {type(block).__name__} whose weights stream from host memory was called with gradients, outside of "
                "BlockSplit.checkpoint; its weights would be gone at the backward. Enable gradient checkpointing with "
                "the split's checkpoint, or keep this block's weights on its card"
            )
        self.enter(index, is_backward=is_backward)

    def enter(self, index: int, *, is_backward: bool) -> None:
        """Have the block's weights in place for what is computed from here on, and the next one's on their way."""
        ahead = index - 1 if is_backward else index + 1
        slot = self.slots.find(index)
        if slot is None:
            slot = next(each for each in self.slots.slots if each.index != ahead)
            self.slots.load(slot, index, self.blocks[index].host.tensor)
        self.slots.bind(slot)
        if 0 <= ahead < len(self.blocks) and self.slots.find(ahead) is None:
            other = next(each for each in self.slots.slots if each is not slot)
            self.slots.load(other, ahead, self.blocks[ahead].host.tensor)


def host_bytes_of(block: nn.Module) -> int:
    """What of a block would be in host memory; a slot for it is as large. Works on meta tensors."""
    return lay_out((parameter.shape, parameter.dtype) for _, _, parameter in _large_weights(block))[1]


def _large_weights(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What of a block can be in host memory: owner, name there, Parameter."""
    for owner in block.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and _can_leave(parameter):
                yield owner, leaf, parameter


def _can_leave(parameter: torch.Tensor) -> bool:
    """Whether a parameter is frozen, large, and its bytes can be copied as they lie."""
    return not parameter.requires_grad and parameter.nbytes >= SMALLEST_BYTES and parameter.is_contiguous()
