"""Pictures of a batch, each computed by one device with whole blocks, whose weights come from all devices.

Devices that compute a block together exchange activations in every block, and every one of them computes the norms of
all pictures. Where a batch has as many pictures for each device, such as the two conditionings of CFG, a device can
compute its own pictures alone. It has a part of the weights only. So the other devices' parts of a block come to it
while it computes the block before, as FSDP gathers them (https://arxiv.org/abs/2304.11277). Two blocks at a time are
whole, in memory that is kept for them.

What a device computes of its pictures are the bits of one device that computes a batch of these pictures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...patches.hooks import map_tensors
from ..devices import device_module
from ..transfer import CurrentStreams, SideStreams, Versioned, current_device, module_with_streams
from .divided_graphs import Call
from .shards import BlockShard
from .slices import Slice

# A layer of a device's part, the device, the type of the activations -> the layer's own weights as it would compute
# with them, by name, and what lets go of them.
Fetch = Callable[[nn.Module, torch.device, torch.dtype], tuple[dict[str, torch.Tensor], Callable[[], None]]]
_NUM_SLOTS = 2  # whole blocks that a device has at a time


@dataclass(frozen=True, eq=False)
class WholeBlock:
    """A block of which every device has a part.

    Args:
        shards: every device's, home's first. wholes: for every device, the modules of the whole block.
        pictures: names of its arguments whose tensors have a row for each picture.
    """

    shards: Sequence[BlockShard]
    wholes: Sequence[nn.Module]
    pictures: Sequence[str]


class _Beginning(nn.Module):
    """Stands before the first block, which is gathered while this is computed."""

    def forward(self, dtype: torch.dtype) -> None:
        pass


# Numbers of a device's weight, the slice that it is of the whole one (None: all of it), where it belongs.
_Piece = tuple[torch.Tensor, Slice | None, torch.Tensor]


class WholeBlocks:
    """Args: blocks: home's part of each, in execution order -> what belongs to it."""

    def __init__(self, devices: Sequence[torch.device], blocks: Mapping[nn.Module, WholeBlock], fetch: Fetch) -> None:
        self._devices, self._fetch = tuple(devices), fetch
        nothing = [_Beginning() for _ in self._devices]
        self.beginning: nn.Module = nothing[0]
        blocks = {self.beginning: WholeBlock([BlockShard(each) for each in nothing], nothing, ()), **blocks}
        self._blocks, order = blocks, list(blocks)
        self._behind = dict(zip(order, [*order[1:], None], strict=True))
        self._slot = {block: index % _NUM_SLOTS for index, block in enumerate(order)}
        self._parts_behind = {
            part.block: None if behind is None else blocks[behind].shards[rank].block
            for block, behind in self._behind.items()
            for rank, part in enumerate(blocks[block].shards)
        }
        self._names = {block: list(inspect.signature(block.forward).parameters) for block in order}
        # Of each block, for each device: layers with weights of its part, and the parameters of its whole block.
        self._layers = {
            block: [_layers(shard.block) for shard in known.shards] for block, known in self._blocks.items()
        }
        self._parameters = {
            block: [_parameters(whole) for whole in known.wholes] for block, known in self._blocks.items()
        }
        self._parameters_of = {
            part.block: parameters
            for block, by_device in self._parameters.items()
            for part, parameters in zip(blocks[block].shards, by_device, strict=True)
        }
        self._ready: list[nn.Module | None] = [None] * _NUM_SLOTS  # the block that each slot has whole
        self._places: dict[Any, torch.Tensor] = {}
        self._bound: dict[tuple[nn.Module, str], torch.Tensor] = {}  # which place a layer computes with
        self.num_bytes = _num_bytes(self._blocks.values())  # on each device, while whole blocks are there
        self.side_streams = SideStreams()  # between devices, and on each for what it has itself
        for device in self._devices:
            if (module := module_with_streams(device, device)) is not None:
                stream = module.Stream(device)
                self.side_streams.pairs[device, device] = stream, stream
        self.release()

    def part_behind(self, part: nn.Module) -> nn.Module | None:
        """A device's part of the block behind that of this part; None behind the last one."""
        return self._parts_behind[part]

    def addresses(self, part: nn.Module) -> tuple[int, ...]:
        """Where the device of this part has its block whole."""
        bound = (self._bound.get((layer, leaf)) for _, layer, leaf in self._parameters_of[part])
        return tuple(0 if each is None else each.data_ptr() for each in bound)

    def parts(self, block: nn.Module) -> list[nn.Module]:
        """Every device's part."""
        return [shard.block for shard in self._blocks[block].shards]

    def forget(self) -> None:
        """A forward begins or is over: weights may be others than they were."""
        self._ready = [None] * _NUM_SLOTS

    def release(self) -> None:
        """Give back the memory of whole blocks, of which some is the side streams'."""
        self.forget()
        for stream in (each for pair in self.side_streams.pairs.values() for each in pair):
            stream.wait_stream(device_module(stream.device).current_stream(stream.device))  # type: ignore[union-attr]
        self._places.clear()
        self._bound.clear()
        for by_device in self._parameters.values():
            for _, layer, leaf in (each for parameters in by_device for each in parameters):
                weight = layer._parameters[leaf]
                assert weight is not None, "it was found there"
                nothing = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
                layer._parameters[leaf] = nn.Parameter(nothing, requires_grad=False)

    # ---- pictures

    def first(self, block: nn.Module, pictures: Mapping[str, Any]) -> torch.Tensor | None:
        """The first of a call's arguments with pictures, which has a row for each."""
        found = pictures.get(self._blocks[block].pictures[0])
        return found if isinstance(found, torch.Tensor) and found.ndim else None

    def num_pictures(self, first: torch.Tensor, pictures: Mapping[str, Any], num_devices: int) -> int:
        """In these arguments of a call, of which the first has a row for each; 0 unless each of so many devices can
        have as many of them."""
        number = len(first)
        if number % num_devices:
            return 0
        rows: set[int] = set()

        def count(tensor: torch.Tensor) -> torch.Tensor:
            rows.add(len(tensor) if tensor.ndim else 0)
            return tensor

        map_tensors(pictures, count)
        return number if rows <= {number, 1} else 0

    def pictures(self, block: nn.Module, call: Call) -> dict[str, Any]:
        """The arguments with pictures, by name."""
        args, kwargs = call
        by_place = dict(zip(self._names[block], args, strict=False))
        given = ((name, kwargs.get(name, by_place.get(name))) for name in self._blocks[block].pictures)
        return {name: value for name, value in given if value is not None}

    def with_arguments(self, block: nn.Module, values: Mapping[str, Any], call: Call) -> Call:
        """The call with other values for arguments that it has."""
        args, kwargs = list(call[0]), dict(call[1])
        for name, value in values.items():
            if name in kwargs:
                kwargs[name] = value
            else:
                args[self._names[block].index(name)] = value
        return tuple(args), kwargs

    # ---- computing

    def begins_with(self, block: nn.Module) -> bool:
        """Whether this is the first block, and the beginning is to be computed, for it was not gathered yet."""
        return self._behind[self.beginning] is block and self._ready[self._slot[block]] is not block

    def make_ready(self, block: nn.Module, dtype: torch.dtype) -> bool:
        """Gather a block that was not gathered while the one before was computed. Args: dtype: of activations.

        Returns: whether this was done now. So it is for the beginning at every forward, although it has no weights.
        """
        if self._ready[self._slot[block]] is block and block is not self.beginning:
            return False
        self._gather(block, dtype)()
        return True

    def outputs(self, block: nn.Module, calls: Sequence[Call], dtype: torch.dtype, ranks: Sequence[int]) -> list[Any]:
        """What these devices return for their pictures, while the next block is gathered for all."""
        behind = self._behind[block]
        finish = None if behind is None else self._gather(behind, dtype)
        try:
            found = []
            for rank, (args, kwargs) in zip(ranks, calls, strict=True):
                with current_device(self._devices[rank]):
                    found.append(self._blocks[block].wholes[rank](*args, **kwargs))
        finally:
            if finish is not None:
                finish()
        return found

    def blank(self, block: nn.Module) -> None:
        """Have zeros where the block behind this one is gathered."""
        behind = self._behind[block]
        if behind is None:
            return
        self._ready[self._slot[behind]] = None
        for _, layer, leaf in (each for parameters in self._parameters[behind] for each in parameters):
            if (layer, leaf) in self._bound:
                _bytes_of(self._bound[layer, leaf]).zero_()

    def has_gathered(self, block: nn.Module, dtype: torch.dtype) -> bool:
        """Whether every device has the block behind this one; waits for the devices."""
        behind = self._behind[block]
        if behind is None:
            return True
        let_go: list[Callable[[], None]] = []
        try:
            weights = [
                self._weights(*each, dtype, let_go)
                for each in zip(self._layers[behind], range(len(self._devices)), strict=True)
            ]
            return all(
                _same_memory(of_place, of_weight.to(of_place.device))
                for target, parameters in enumerate(self._parameters[behind])
                for name, layer, leaf in parameters
                for source, part in _sources(self._blocks[behind].shards, weights, name, target)
                for of_place, of_weight in _cuts(self._bound[layer, leaf], weights[source][name], part)
            )
        finally:
            for each in let_go:
                each()

    def was_replayed(self, block: nn.Module) -> None:
        """What outputs does was done by a graph."""
        behind = self._behind[block]
        if behind is not None:
            self._ready[self._slot[behind]] = behind

    # ---- gathering

    def _gather(self, block: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
        """Begin to copy all parts of a block to every device, behind what the devices were given to do before.

        Returns: what has the devices wait for the copies, and lets go of what was copied.
        """
        number, known = self._slot[block], self._blocks[block]
        self._ready[number] = None
        let_go: list[Callable[[], None]] = []
        events: list[tuple[torch.device, Any]] = []
        weights: list[dict[str, torch.Tensor]] = []  # their memory is read until the devices have waited

        def finish() -> None:
            for device, event in events:
                device_module(device).current_stream(device).wait_event(event)  # type: ignore[union-attr]
            weights.clear()
            for each in let_go:
                each()

        try:
            for rank, layers in enumerate(self._layers[block]):
                weights.append(self._weights(layers, rank, dtype, let_go))
            for target, parameters in enumerate(self._parameters[block]):
                moved: dict[int, list[_Piece]] = {}
                for name, layer, leaf in parameters:
                    place = self._place(target, number, name, layer, leaf, weights)
                    for source, part in _sources(known.shards, weights, name, target):
                        moved.setdefault(source, []).append((weights[source][name], part, place))
                for source, pieces in moved.items():
                    self._move(source, target, number, pieces, events)
        except BaseException:
            finish()
            raise
        self._ready[number] = block
        return finish

    def _weights(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        rank: int,
        dtype: torch.dtype,
        let_go: list[Callable[[], None]],
    ) -> dict[str, torch.Tensor]:
        """A device's weights of a block by name."""
        found: dict[str, torch.Tensor] = {}
        device = self._devices[rank]
        with current_device(device):
            for name, layer in layers:
                own, release = self._fetch(layer, device, dtype)
                let_go.append(release)
                found |= {f"{name}.{leaf}".lstrip("."): weight for leaf, weight in own.items()}
        return found

    def _place(
        self,
        rank: int,
        number: int,
        name: str,
        layer: nn.Module,
        leaf: str,
        weights: Sequence[Mapping[str, torch.Tensor]],
    ) -> torch.Tensor:
        """Where a device has this weight whole. The layer computes with what is there."""
        known = layer._parameters[leaf]
        assert known is not None, "it was found there"
        dtypes = [each[name].dtype for each in weights if name in each]
        if len(set(dtypes)) != 1:
            raise LookupError(f"{name} is not there in one type")
        dtype = dtypes[0]
        place = self._kept((rank, number, name, known.shape, dtype), known.shape, dtype, rank)
        if self._bound.get((layer, leaf)) is not place:
            layer._parameters[leaf], self._bound[layer, leaf] = nn.Parameter(place, requires_grad=False), place
        return place

    def _kept(self, key: Any, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        if key not in self._places:
            with Versioned():
                self._places[key] = torch.empty(tuple(shape), dtype=dtype, device=self._devices[rank])
        return self._places[key]

    def _move(
        self, source: int, target: int, number: int, pieces: Sequence[_Piece], events: list[tuple[torch.device, Any]]
    ) -> None:
        """Copy pieces from one device to another one. Args: events: to be told those behind the copies, on both."""
        pair = self._devices[source], self._devices[target]
        module = module_with_streams(*pair)
        if module is None:
            self._copy(source, target, number, pieces)
            return
        streams = list(dict.fromkeys(self.side_streams.streams_of(pair, module)))
        with CurrentStreams(module, *streams) as before:
            for stream, current in zip(streams, before, strict=True):
                stream.wait_stream(current)
            try:
                self._copy(source, target, number, pieces)
            finally:  # also of those copies that were begun
                events += [(stream.device, stream.record_event()) for stream in streams]

    def _copy(self, source: int, target: int, number: int, pieces: Sequence[_Piece]) -> None:
        for index, (weight, part, place) in enumerate(pieces):
            if source != target and part is not None and part.dim != 0:  # one device's memory is copied as it lies
                key = "staged", source, target, number, index, weight.shape, weight.dtype
                weight = self._kept(key, weight.shape, weight.dtype, target).copy_(weight, non_blocking=True)
            for of_place, of_weight in _cuts(place, weight, part):
                wide_place, wide_weight = _wide(of_place, of_weight)
                wide_place.copy_(wide_weight, non_blocking=True)


def _num_bytes(blocks: Iterable[WholeBlock]) -> int:
    """Of all slots: blocks of each kind have memory of their own."""
    kinds = {
        tuple((name, weight.shape, weight.dtype) for name, weight in known.wholes[0].named_parameters()): known
        for known in blocks
    }
    sizes = (
        weight.nbytes * (1 + _is_staged(known, name))
        for known in kinds.values()
        for name, weight in known.wholes[0].named_parameters()
    )
    return _NUM_SLOTS * sum(sizes)


def _is_staged(known: WholeBlock, name: str) -> bool:
    part = known.shards[0].slices.get(name)
    return part is not None and part.dim != 0


def _sources(
    shards: Sequence[BlockShard], weights: Sequence[Mapping[str, torch.Tensor]], name: str, target: int
) -> Iterator[tuple[int, Slice | None]]:
    """From which devices a weight comes, and which slice of it each has; None for all of it."""
    if name in shards[0].slices:
        yield from ((source, shard.slices[name]) for source, shard in enumerate(shards))
    else:  # every device has it, or the first one, which adds it for all
        yield (target if name in weights[target] else 0), None


def _cuts(place: torch.Tensor, weight: torch.Tensor, part: Slice | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Where each piece of a device's weight belongs in the whole one, and the piece."""
    if part is None:
        yield place, weight
        return
    at = 0
    for first, last in part.ranges:
        yield place.narrow(part.dim, first, last - first), weight.narrow(part.dim, at, last - first)
        at += last - first


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, also in 8 bits."""
    return torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _wide(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same memory as numbers of 16 bytes where all of it consists of such: a card copies rows that lie apart number
    by number."""
    if all(each.is_contiguous() for each in tensors):
        return tensors
    try:
        wide = [each.view(torch.complex128) for each in tensors]
        return wide if all(each.data_ptr() % 16 == 0 for each in wide) else tensors
    except RuntimeError:  # odd sizes, or no memory of its own
        return tensors


def _layers(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those that have weights themselves."""
    return [
        (name, layer)
        for name, layer in block.named_modules()
        if any(each is not None for each in layer._parameters.values())
    ]


def _parameters(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Name of every parameter, the layer that has it, and its name there."""
    return [
        (f"{name}.{leaf}".lstrip("."), layer, leaf)
        for name, layer in module.named_modules()
        for leaf, parameter in layer._parameters.items()
        if parameter is not None
    ]
