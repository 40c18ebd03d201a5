"""Blocks that do not fit their card: their weights rest in host memory and pass through two slots on the card.

The equation. A micro-batch on a device with n swapped blocks takes max(computing all its blocks, copying n blocks
twice), once for the forward and once for the backward, as long as the swapped blocks are spread evenly among those that
stay (placement.py): while the blocks between two swapped ones compute, the next swapped one is copied. Copies go to the
card only. The base is frozen, so what a slot holds is dropped when another block needs the slot.

Slots. A device has two buffers of raw bytes, each as large as its largest swapped block, made once. A third would only
let copies run further ahead of a computation that they do not wait for. Parameters that view a slot are made once per
block and slot, with the type, shape and strides of the weights: plain tensors, FrozenLinear8's, and torchao's tensors,
which are taken apart and put together again. Before a block computes its slot's Parameters take the places of the
resting ones in `module._parameters`. The objects are exchanged, not their data: `.data =` cannot give a tensor subclass
other parts. Compiled blocks read their weights through the module and are not compiled anew.

Which block is copied when. A hook behind the bridge's own (the pipeline's turn on the stage has come) sees to it that
the block is in a slot, and starts copying the next one of its device into the other slot: the next higher in a forward,
the next lower while blocks are computed again for the backward. Nothing is evicted before its slot is needed, so where
a forward turns into its backward, or a backward into the next forward, the two blocks at the turn are there already: a
forward and a backward together copy 2 (n - 2) blocks.

Order on the card. The host runs far ahead. A copy runs on a stream of its own, which first waits for all that the
computing stream has been given: all kernels of the block that is evicted are among it. The computing stream waits for
the copy's event before the block. Buffers and streams stay until remove(), so the allocator need not be told who uses
them. Devices without streams copy at once.

Why a backward never reads evicted weights. A swapped block must be recomputed: its graph is made, used and dropped
within one visit. A call that would leave a graph behind is refused, which covers blocks that keep their activations,
and autocast, where torch's own checkpointing calls blocks with gradients. Besides, a slot's Parameters share its
buffer's version counter, so that autograd itself raises for a plain weight it saved and finds evicted.

Weights at rest. Frozen tensors of 64 KiB and more; the rest of a block, its LoRA, its buffers and anything that trains
stay on the card. What rests is in the module: names, state dict and sizes are as ever, and a call that passes by our
hook finds the block's slot, if it is still there, or raises for tensors on two devices. One buffer per block is
registered with the driver (pinned.py), as large as the block: buffers per layer could share pages of memory, which
cannot be registered twice. So loading takes host memory for what rests and for one block, while a layer goes to the
host as soon as it is final.

One thread at a time works on a device (pipeline.py), so nothing is locked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ...patches.hooks import HookSet, map_tensors
from ...quantization.wrapped import plain_parts, rebuilt, tensor_bytes
from ..devices import CPU, synchronize
from ..transfer import module_with_streams
from .pinned import PinnedBuffer, aligned
from .recompute import is_recomputing

_log = logging.getLogger(__name__)

NUM_SLOTS = 2
SMALLEST_BYTES = 2**16  # of a weight that rests: below, a copy costs more than the memory is worth


@dataclass(frozen=True)
class _Piece:
    """One plain tensor in a block's bytes."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Weight:
    """A weight that rests: whose it is, the Parameter at rest, and the pieces it is made of."""

    owner: nn.Module
    leaf: str
    resting: nn.Parameter
    pieces: tuple[_Piece, ...]

    def at(self, buffer: torch.Tensor) -> nn.Parameter:
        """A Parameter like the resting one that views buffer."""
        return _frozen(rebuilt(self.resting, iter([piece.view(buffer) for piece in self.pieces])))


@dataclass
class _Block:
    """A swapped block. found_on: where its weights were; host: all that rests, as a slot holds it."""

    module: nn.Module
    device: torch.device
    found_on: torch.device
    host: PinnedBuffer
    weights: list[_Weight]


class TakesSwap(Protocol):
    """A split model whose blocks may stream."""

    def take_swap(self, swap: BlockSwap | None) -> None:
        """Raises: ValueError if one of the swapped blocks keeps its activations."""


class BlockSwap:
    """Handle of blocks whose weights rest in host memory; made by apply_block_swap, or before a model is loaded.

    A loader that knows it hands over every layer that is final (begin, finish); apply_block_split leaves its weights
    alone; attach() puts the slots and hooks in place.

    Args:
        places: fqn of each swapped block -> its device, in execution order.
        is_on_host: whether the loader puts large weights of these blocks into host memory; then remove() leaves them
            there.
    """

    def __init__(self, places: Mapping[str, torch.device], *, is_on_host: bool = False) -> None:
        self.places = dict(places)
        self._is_on_host = is_on_host
        self._model: nn.Module | None = None
        self._blocks: dict[str, _Block] = {}
        self._waiting: dict[str, set[str]] = {}
        self._resting: set[int] = set()
        self._can_pin = True
        self._split: TakesSwap | None = None
        self._hooks = HookSet()
        self._devices: list[_SwappedDevice] = []

    @property
    def num_copies(self) -> int:
        """Blocks that were copied to a card so far."""
        return sum(each.num_copies for each in self._devices)

    @property
    def host_bytes(self) -> int:
        """Of the buffers in host memory."""
        return sum(block.host.tensor.nbytes for block in self._blocks.values())

    @property
    def modules(self) -> frozenset[nn.Module]:
        """The swapped blocks."""
        return frozenset(block.module for block in self._blocks.values())

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is one at rest, in host memory where it belongs."""
        return id(parameter) in self._resting

    def found_on(self, module: nn.Module) -> torch.device | None:
        """Where the weights of a swapped block were found; None for another module."""
        return next((block.found_on for block in self._blocks.values() if block.module is module), None)

    # ---- while a model is loaded

    def begin(self, model: nn.Module, layers: Collection[str]) -> None:
        """These layers will be filled, each handed to finish once; what was taken of another model is dropped."""
        self._drop()
        self._model = model
        self._waiting = {name: set() for name in self.places}
        for layer in layers:
            name = self.block_of(layer)
            if name is not None:
                self._waiting[name].add(layer)

    def finish(self, layer: str) -> None:
        """Bring the large weights of a layer, which are final, to the host; a no-op outside swapped blocks."""
        name = self.block_of(layer)
        if name is None:
            return
        assert self._model is not None
        module = self._model.get_submodule(layer)
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.device != CPU and _can_rest(parameter):
                module._parameters[leaf] = _frozen(
                    rebuilt(parameter, (part.to(CPU) for part in plain_parts(parameter)))
                )
        self._waiting[name].discard(layer)
        if not self._waiting[name]:
            self._pack(name)

    def will_rest(self, fqn: str, num_bytes: int) -> bool:
        """Whether a frozen tensor of this name and size is one to rest in host memory."""
        return num_bytes >= SMALLEST_BYTES and self.block_of(fqn) is not None

    def block_of(self, fqn: str) -> str | None:
        """The swapped block that a module or parameter belongs to."""
        parts = fqn.split(".")
        names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        return next((name for name in names if name in self.places), None)

    @torch.no_grad()
    def _pack(self, name: str) -> None:
        """Bring a block's large weights into one buffer on the host, wherever they are."""
        assert self._model is not None
        module, device = self._model.get_submodule(name), self.places[name]
        found = list(_large_weights(module))
        layouts, size = _lay_out([parameter for _, _, parameter in found])
        host = PinnedBuffer(size, device, is_wanted=self._can_pin)
        self._can_pin = self._can_pin and (host.is_pinned or device.type != "cuda" or not size)
        found_on = CPU if self._is_on_host or not found else found[0][2].device
        block = self._blocks[name] = _Block(module, device, found_on, host, [])
        for (owner, leaf, parameter), pieces in zip(found, layouts, strict=True):
            for part, piece in zip(plain_parts(parameter), pieces, strict=True):
                piece.view(host.tensor).copy_(part)
            resting = _frozen(rebuilt(parameter, iter([piece.view(host.tensor) for piece in pieces])))
            owner._parameters[leaf] = resting
            block.weights.append(_Weight(owner, leaf, resting, pieces))
            self._resting.add(id(resting))

    def pack_all(self) -> None:
        """Bring the weights of all blocks to the host."""
        for name in self.places:
            self._pack(name)

    # ---- on the split model

    def move_rest(self, module: nn.Module, device: torch.device) -> None:
        """Bring everything of a swapped block that does not rest to its device; trained parameters are made anew."""
        for owner in module.modules():
            for leaf, parameter in owner._parameters.items():
                if parameter is not None and parameter.device != device and not self.holds(parameter):
                    moved = parameter.detach().to(device)
                    owner._parameters[leaf] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
            for leaf, buffer in owner._buffers.items():
                if buffer is not None and buffer.device != device:
                    owner._buffers[leaf] = buffer.to(device)

    def attach(self, split: TakesSwap) -> None:
        """Make the slots and have the blocks use them; LoRA that was attached to weights at rest moves to its card.

        Raises: ValueError if one of the blocks keeps its activations.
        """
        assert self._split is None and set(self._blocks) == set(self.places), "weights are brought to the host first"
        split.take_swap(self)
        self._split = split
        for device in dict.fromkeys(self.places.values()):
            blocks = [self._blocks[name] for name, place in self.places.items() if place == device]
            swapped = _SwappedDevice(device, blocks)
            self._devices.append(swapped)
            for index, block in enumerate(blocks):
                self.move_rest(block.module, device)
                self._hooks.just_before(block.module, _make_enter(swapped, index))
        _log.info(
            "%d blocks stream from host memory (%.2f GB, %s)",
            len(self._blocks),
            self.host_bytes / 1e9,
            "pinned" if all(block.host.is_pinned for block in self._blocks.values()) else "not pinned",
        )

    @torch.no_grad()
    def remove(self) -> None:
        """Take the hooks off and put the weights back where they were found; a second call is a no-op.

        What was found in host memory stays as it rests, no longer pinned.

        Raises: torch.OutOfMemoryError if a card has no room for its weights now.
        """
        self._hooks.remove()
        synchronize(dict.fromkeys(self.places.values()))  # the last copies read memory that is given back here
        for swapped in self._devices:
            swapped.close()
        self._devices.clear()
        for block in self._blocks.values():
            for weight in block.weights if block.found_on != CPU else ():
                parts = (part.to(block.found_on) for part in plain_parts(weight.resting))
                weight.owner._parameters[weight.leaf] = _frozen(rebuilt(weight.resting, parts))
        self._drop()
        if self._split is not None:
            self._split.take_swap(None)
            self._split = None

    def _drop(self) -> None:
        for block in self._blocks.values():
            block.weights.clear()
            block.host.close()
        self._blocks.clear()
        self._resting.clear()


# ---- slots


@dataclass(eq=False)
class _Slot:
    """Args: index: of the block it holds, None for none. is_bound: whether the block reads its weights here."""

    buffer: torch.Tensor
    index: int | None = None
    arrival: Any = None
    is_bound: bool = False
    parameters: dict[int, list[nn.Parameter]] = field(default_factory=dict)


class _SwappedDevice:
    """The swapped blocks of one device, in execution order, and its slots."""

    def __init__(self, device: torch.device, blocks: Sequence[_Block]) -> None:
        self.device = device
        self.num_copies = 0
        self._blocks = list(blocks)
        self._copier = _make_copier(device)
        size = max(block.host.tensor.nbytes for block in blocks)
        count = min(NUM_SLOTS, len(blocks))
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(count)]

    def enter(self, index: int, *, is_backward: bool) -> None:
        """Have the block's weights in place for what is computed from here on, and the next one's on their way."""
        ahead = index - 1 if is_backward else index + 1
        slot = self._slot_of(index)
        if slot is None:
            slot = next(each for each in self._slots if each.index != ahead)
            self._load(index, slot)
        self._copier.await_copy(slot.arrival)
        self._bind(slot)
        if 0 <= ahead < len(self._blocks) and self._slot_of(ahead) is None:
            self._load(ahead, next(each for each in self._slots if each is not slot))

    def close(self) -> None:
        """Let all weights rest and give the slots back."""
        for slot in self._slots:
            self._unbind(slot)
            slot.parameters.clear()
        self._slots.clear()

    def _slot_of(self, index: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.index == index), None)

    @torch.no_grad()
    def _load(self, index: int, slot: _Slot) -> None:
        """Copy a block into a slot; should that fail, the slot is empty."""
        self._unbind(slot)
        slot.index = None
        host = self._blocks[index].host.tensor
        slot.arrival = self._copier.copy(slot.buffer[: host.nbytes], host)
        slot.index = index
        self.num_copies += 1

    def _bind(self, slot: _Slot) -> None:
        if slot.is_bound:
            return
        assert slot.index is not None
        weights = self._blocks[slot.index].weights
        if slot.index not in slot.parameters:
            with torch.no_grad():
                slot.parameters[slot.index] = [weight.at(slot.buffer) for weight in weights]
        slot.is_bound = True  # first: an interrupt in between is undone with the rest
        for weight, parameter in zip(weights, slot.parameters[slot.index], strict=True):
            weight.owner._parameters[weight.leaf] = parameter

    def _unbind(self, slot: _Slot) -> None:
        if slot.is_bound:
            assert slot.index is not None
            for weight in self._blocks[slot.index].weights:
                weight.owner._parameters[weight.leaf] = weight.resting
            slot.is_bound = False


def _make_enter(swapped: _SwappedDevice, index: int) -> Callable[..., None]:
    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_backward = is_recomputing()
        if torch.is_grad_enabled() and not is_backward and _has_graph(block, args, kwargs):
            raise RuntimeError(
                f"a {type(block).__name__} whose weights stream from host memory was called with gradients, outside of "
                "BlockSplit.checkpoint or under autocast; its weights would be gone at the backward. Enable gradient "
                "checkpointing with the split's checkpoint, without autocast, or do not swap this block"
            )
        swapped.enter(index, is_backward=is_backward)

    return torch.compiler.disable(enter)  # type: ignore[no-any-return]


def _has_graph(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with gradients would leave a graph behind."""
    found: list[bool] = [parameter.requires_grad for parameter in block.parameters()]

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.requires_grad)
        return tensor

    map_tensors((args, kwargs), look)
    return any(found)


class _Copier:
    """Copies at once; for devices without streams."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Returns what await_copy takes."""
        target.copy_(source)

    def await_copy(self, arrival: Any) -> None:
        """Let what is computed from here on wait for a copy."""


class _StreamCopier(_Copier):
    """Copies on a stream of its own, behind what the current one has been given so far."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def await_copy(self, arrival: Any) -> None:
        self._module.current_stream(self._device).wait_event(arrival)


def _make_copier(device: torch.device) -> _Copier:
    module = module_with_streams(device, device)
    return _Copier() if module is None else _StreamCopier(module, device)


# ---- tensors


def resting_bytes(block: nn.Module) -> int:
    """What of a block would rest in host memory; a slot for it is as large. Works on meta tensors."""
    return _lay_out([parameter for _, _, parameter in _large_weights(block)])[1]


def _large_weights(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """What of a block can rest: owner, name there, Parameter."""
    for owner in block.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None and _can_rest(parameter):
                yield owner, leaf, parameter


def _can_rest(parameter: torch.Tensor) -> bool:
    """Whether a parameter is frozen, large, and its bytes can be copied as they lie."""
    if parameter.requires_grad:
        return False
    return tensor_bytes(parameter) >= SMALLEST_BYTES and all(part.is_contiguous() for part in plain_parts(parameter))


def _lay_out(parameters: Sequence[nn.Parameter]) -> tuple[list[tuple[_Piece, ...]], int]:
    """Where the parts of each parameter lie in one buffer, and its size in bytes."""
    layouts, size = [], 0
    for parameter in parameters:
        pieces = []
        for part in plain_parts(parameter):
            pieces.append(_Piece(aligned(size), part.numel() * part.element_size(), part.dtype, part.shape))
            size = pieces[-1].start + pieces[-1].num_bytes
        layouts.append(tuple(pieces))
    return layouts, size


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
