"""Blocks that several cards compute together, replayed as one CUDA graph for all cards instead of launched by Python.

The host launches every kernel of every card, and where kernels are short the cards wait for it. A block's call is
recorded when it has come several times with inputs of the same shapes, and the cards waited: all their kernels and the
copies between them. From then on what a card is given is copied to where the graph reads it, one launch replays the
block, and its outputs are copied before anybody has them.

A graph reads and does what it did when it was recorded, so a mistake would be a silently wrong picture:

- It holds for one set of shapes, and for the plain values among the arguments. Of the transformer_options those count
  that the block looked up; a block that writes there is not recorded.
- Weights are read where they lie. Before every replay their addresses are asked for; if one has moved, or something
  else than the weight is to be computed with, it is not replayed.
- What a block writes into its arguments is written into those of the replayed call, too.
- When it is recorded the block also runs without, and every card must give the same bits. If one does not, or if the
  block cannot be recorded, nothing is recorded for the model any more, and one line in the log says why.
- Nothing is recorded where other people's code may run between or inside blocks, and nothing with gradients.
- Attributes of layers, and functions that blocks call, are taken to stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ...patches.hooks import map_tensors, tensors_reached
from ..transfer import Versioned
from .bridge import version_of
from .forward_workers import Work
from .recorded_calls import OPTIONS, Unlike, WatchedOptions, key_of, keys_read, reads_alike, switches

_log = logging.getLogger(__name__)

_MOST_SHAPES = 4  # of one block, whose graphs are kept
# Recording takes as long as two forwards, and a replay spares half a forward at best: a call must have come this often
# one after the other while the cards waited for the host. Where they do not wait, a replay's copies would only take
# time.
RECORDED_AFTER = 4
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, and those by name
Run = Callable[[Sequence[Work]], Sequence[Any]]  # computes every rank's work in its thread; what each returns
Compute = Callable[[], Sequence[Any]]  # what each card returns
# A card's part of a block, the card -> where its weights lie; None if they are not there, or not used as they are
Addresses = Callable[[nn.Module, torch.device], tuple[int, ...] | None]


class Recorder(Protocol):
    def record(self, run: Run, work: Sequence[Work]) -> Callable[[], None]:
        """What replays all that every rank's work launches, each computed in its rank's thread by run."""

    def mark(self) -> Callable[[], bool]:
        """Whether the first card has done all that was launched on it before this mark; asked without waiting."""


@dataclass(frozen=True)
class _Asked:
    """A call to be recorded.

    Args: calls: of each card. given: the tensors in each, which the block may change. addresses: of the weights.
    """

    key: Any
    addresses: list[tuple[int, ...]]
    calls: Sequence[Call]
    given: Sequence[Sequence[torch.Tensor]]


@dataclass(eq=False)
class _Card:
    """What one card reads and writes in a graph.

    Args: inputs: where it reads. written: numbers of those that it writes to. outputs: each is the number of the input
    that it is, or where it lies.
    """

    inputs: list[torch.Tensor]
    written: list[int]
    outputs: list[int | torch.Tensor]

    def place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bring what the block returned to where it is to lie.

        Raises: RuntimeError if that is where something else lies that the block wrote, or has another shape.
        """
        for number, tensor in enumerate(tensors):
            same = [index for index, each in enumerate(self.inputs) if each is tensor]
            self.outputs[number] = same[0] if same else self.outputs[number]
        pairs = [pair for pair in zip(self.outputs, tensors, strict=True) if not isinstance(pair[0], int)]
        if any(place is self.inputs[index] for place, _ in pairs for index in self.written):
            raise RuntimeError("it returns something else in the shape of what it writes to")
        for place, tensor in pairs:
            if place.shape != tensor.shape:  # type: ignore[union-attr]
                raise RuntimeError("it returns another shape")
            place.copy_(tensor)  # type: ignore[union-attr]


@dataclass(eq=False)
class _Graph:
    """Args: key: of the call. reads: the options that the block looked up, and their keys. addresses: of its weights.
    output: what home returns, with other tensors."""

    key: Any
    reads: dict[Any, Any]
    addresses: list[tuple[int, ...]]
    cards: list[_Card]
    output: Any
    replay: Callable[[], None]


class DividedGraphs:
    """The graphs of one divided model.

    Args:
        devices: home first.
        make_recorder: makes what records on these devices.
        addresses: see Addresses.
    """

    def __init__(
        self, devices: Sequence[torch.device], make_recorder: Callable[[], Recorder], addresses: Addresses
    ) -> None:
        self._devices = tuple(devices)
        self._make_recorder, self._addresses = make_recorder, addresses
        self.fault = ""  # why nothing is recorded any more
        self.num_replays = 0
        self.release()

    def release(self) -> None:
        """Give back the memory of all graphs; they are recorded again when their blocks are computed."""
        self._recorder: Recorder | None = None
        self._graphs: dict[nn.Module, list[_Graph]] = {}
        # Keys of calls, and how often the cards waited for them.
        self._seen: dict[nn.Module, list[tuple[Any, int]]] = {}
        self._staged: dict[Any, torch.Tensor] = {}
        self._are_idle = False  # the cards, while the host launches
        self.forget()

    def forget(self) -> None:
        """Of the forward that is over: what was copied to where graphs read."""
        self._before: Callable[[], bool] | None = None  # whether the first card has done the block before this one
        self._held: dict[int, tuple[torch.Tensor, int | None]] = {}  # by the copy's id: its source then

    def outputs(
        self, blocks: Sequence[nn.Module], calls: Sequence[Call], parts: Sequence[Callable[..., Any]], run: Run
    ) -> Sequence[Any]:
        """What each card's part of a block returns: replayed, or computed, and then perhaps recorded.

        Args:
            blocks: each card's part of the block, the main card's first. calls: of each. parts: how each is called.
        """
        block, given = blocks[0], [_inputs(call) for call in calls]

        def compute() -> Sequence[Any]:
            return run([partial(part, *args, **kwargs) for part, (args, kwargs) in zip(parts, calls, strict=True)])

        try:
            key = self._key(calls, given)
        except Unlike as reason:
            _log.debug("%s is not replayed as a CUDA graph: %s", type(block).__name__, reason)
            self.forget()
            return compute()
        options = options_of(calls[0])
        graphs = (each for each in self._graphs.get(block, ()) if each.key == key)
        graph = next((each for each in graphs if reads_alike(each.reads, options)), None)
        if graph is None and self._waits(block, key) < RECORDED_AFTER:
            return self._computed(block, key, compute)
        addresses = self._where(blocks)
        if graph is not None and graph.addresses == addresses:
            return self._replayed(graph, given)
        if graph is not None:
            self._graphs[block].remove(graph)
            self._seen.pop(block, None)  # what moves at every forward would be recorded at every forward
        if graph is not None or addresses is None:
            return self._computed(block, key, compute)
        return self._computed_and_recorded(block, _Asked(key, addresses, calls, given), parts, compute, run)

    def _computed_and_recorded(
        self, block: nn.Module, asked: _Asked, parts: Sequence[Callable[..., Any]], compute: Compute, run: Run
    ) -> Sequence[Any]:
        """As computed; for the next time it is recorded."""
        graphs = self._graphs  # release makes another one
        try:
            with Versioned():
                inputs = [self._staged_inputs(rank, tensors) for rank, tensors in enumerate(asked.given)]
        except Exception as error:  # such as too little memory: nothing was computed yet
            self._not_recorded(block, error)
            return compute()
        outputs = compute()
        try:
            if self._graphs is graphs:
                graph = self._record(asked, inputs, parts, run, outputs)
                if self._graphs is graphs:
                    self._keep(block, graph)
        except Exception as error:  # whatever cannot be recorded
            self._not_recorded(block, error)
        self.forget()
        return outputs

    def _not_recorded(self, block: nn.Module, error: Exception) -> None:
        _log.debug("recording %s failed", type(block).__name__, exc_info=True)
        self.release()
        self.fault = f"recording {type(block).__name__} failed: {error}".partition("\n")[0]
        _log.warning("blocks that several cards compute are not replayed as CUDA graphs: %s", self.fault)

    def _keep(self, block: nn.Module, graph: _Graph) -> None:
        graphs = self._graphs.setdefault(block, [])
        graphs.append(graph)
        if len(graphs) > _MOST_SHAPES:
            del graphs[0]
            cards = [card for each in self._graphs.values() for graph in each for card in graph.cards]
            used = {id(place) for card in cards for place in (*card.inputs, *card.outputs)}
            self._staged = {key: place for key, place in self._staged.items() if id(place) in used}

    def _waits(self, block: nn.Module, key: Any) -> int:
        """How often the cards last waited one call after the other."""
        return next((count for each, count in self._seen.get(block, ()) if each == key), 0)

    def _computed(self, block: nn.Module, key: Any, compute: Compute) -> Sequence[Any]:
        """Without a graph; it is counted whether the cards had nothing to do meanwhile."""
        before = self._before
        self.forget()  # the block may write to what graphs were given
        outputs = compute()
        if before is not None:  # else it is the forward's first block, of which the last one's wait is taken
            self._are_idle = before()
        times = self._waits(block, key) + 1 if self._are_idle else 0
        seen = [known for known in self._seen.get(block, ()) if known[0] != key]
        self._seen[block] = [*seen, (key, times)][-_MOST_SHAPES:]
        self._before = self._recording.mark()
        return outputs

    @property
    def _recording(self) -> Recorder:
        if self._recorder is None:
            self._recorder = self._make_recorder()
        return self._recorder

    def _key(self, calls: Sequence[Call], given: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Args: given: the tensors in each call."""
        values, shared = key_of(arguments_of(calls[0])), []
        for device, tensors in zip(self._devices, given, strict=True):
            if any(tensor.device != device for tensor in tensors):
                raise Unlike("an input lies on another device")
            memory = [tensor.untyped_storage()._cdata for tensor in tensors]
            shared.append(list(map(memory.index, memory)))
        return values, shared, switches()

    def _where(self, parts: Sequence[nn.Module]) -> list[tuple[int, ...]] | None:
        found = [self._addresses(part, device) for part, device in zip(parts, self._devices, strict=True)]
        return None if any(each is None for each in found) else [each for each in found if each is not None]

    # ---- recording

    def _record(
        self,
        asked: _Asked,
        inputs: Sequence[list[torch.Tensor]],
        parts: Sequence[Callable[..., Any]],
        run: Run,
        expected: Sequence[Any],
    ) -> _Graph:
        """Args: inputs: what each card was given, where graphs read it. expected: what each card returned.

        Raises: RuntimeError if a replay would do something else, and whatever the block and the recorder raise.
        """
        watched = [WatchedOptions(options_of(call)) for call in asked.calls]
        staged = [_call_with(*each) for each in zip(asked.calls, inputs, watched, strict=True)]
        wrote = [_different(places, tensors) for places, tensors in zip(inputs, asked.given, strict=True)]
        with Versioned():
            both = enumerate(zip(expected, inputs, strict=True))
            output = [self._staged_like(rank, tree, tensors) for rank, (tree, tensors) in both]
        cards = [_Card(places, [], [*tensors_reached(tree)]) for places, tree in zip(inputs, output, strict=True)]

        def compute(rank: int) -> None:
            card, (args, kwargs) = cards[rank], staged[rank]
            versions = [tensor._version for tensor in card.inputs]
            found = tensors_reached(parts[rank](*args, **kwargs))
            card.written = [index for index, each in enumerate(card.inputs) if each._version != versions[index]]
            card.place(found)

        replay = self._recording.record(run, [partial(compute, rank) for rank in range(len(cards))])
        for card, shared, found in zip(cards, asked.key[1], wrote, strict=True):
            if any(shared.count(shared[index]) > 1 for index in card.written):
                raise RuntimeError("it writes into memory that it is given twice")
            if not set(found) <= set(card.written):
                raise RuntimeError("it writes into what it is given, and torch does not see it")
        reads = keys_read(watched)
        replay()
        for card, tree, tensors in zip(cards, expected, asked.given, strict=True):
            outputs = [card.inputs[each] if isinstance(each, int) else each for each in card.outputs]
            written = [card.inputs[index] for index in card.written]
            given = [tensors[index] for index in card.written]
            if _different([*outputs, *written], [*tensors_reached(tree), *given]):
                raise RuntimeError("a replay gives something else")
        return _Graph(asked.key, reads, asked.addresses, cards, output[0], replay)

    def _staged_like(self, rank: int, tree: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """The tree, with tensors that all graphs of such shapes share and write to. An output lies where an input of
        its shape is read: blocks mostly hand it to the next one, which then need not be given it."""
        free, number = list(inputs), iter(range(2**31))

        def place(tensor: torch.Tensor) -> torch.Tensor:
            wanted, role = _layout(tensor), ("output", next(number))
            same = next((index for index, each in enumerate(free) if _layout(each) == wanted), None)
            return self._place(rank, role, tensor) if same is None else free.pop(same)

        return map_tensors(tree, place)

    def _place(self, rank: int, role: Any, like: torch.Tensor) -> torch.Tensor:
        shape, strides, dtype = layout = _layout(like)
        key = rank, role, *layout
        if key not in self._staged:
            self._staged[key] = torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
        return self._staged[key]

    # ---- replaying

    def _staged_inputs(self, rank: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where graphs are to read these, filled."""
        places = [self._place(rank, index, tensor) for index, tensor in enumerate(tensors)]
        self._fill(places, tensors)
        return places

    def _fill(self, places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Copy these to where a graph reads them; those that blocks share are copied once in a forward."""
        for place, tensor in zip(places, tensors, strict=True):
            if not self._has(place, tensor):
                place.copy_(tensor)
                self._holds(place, tensor)

    def _replayed(self, graph: _Graph, given: Sequence[Sequence[torch.Tensor]]) -> Sequence[Any]:
        pairs = list(zip(graph.cards, given, strict=True))
        for card, tensors in pairs:
            self._fill(card.inputs, tensors)
        graph.replay()
        self.num_replays += 1
        outputs = [self._taken(card, tensors) for card, tensors in pairs]
        left = iter(outputs[0])
        return [map_tensors(graph.output, lambda _: next(left)), *outputs[1:]]

    def _taken(self, card: _Card, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a card returned, in memory of its own; what it wrote to is written into what was given."""
        for index in card.written:
            given[index].copy_(card.inputs[index])
            self._holds(card.inputs[index], given[index])
        with Versioned():  # the next block knows them again by it
            outputs = [given[each] if isinstance(each, int) else each.clone() for each in card.outputs]
        for place, output in zip(card.outputs, outputs, strict=True):
            if not isinstance(place, int):
                self._holds(place, output)
        return outputs

    def _has(self, place: torch.Tensor, tensor: torch.Tensor) -> bool:
        held = self._held.get(id(place))
        return held is not None and held[0] is tensor and held[1] == version_of(tensor)

    def _holds(self, place: torch.Tensor, source: torch.Tensor) -> None:
        self._held[id(place)] = source, version_of(source)


def arguments_of(call: Call) -> Call:
    """All but the options."""
    args, kwargs = call
    return args, {name: value for name, value in kwargs.items() if name != OPTIONS}


def options_of(call: Call) -> dict[Any, Any]:
    return call[1].get(OPTIONS) or {}


def _inputs(call: Call) -> list[torch.Tensor]:
    return tensors_reached(arguments_of(call))


def _call_with(call: Call, tensors: Sequence[torch.Tensor], options: dict[Any, Any]) -> Call:
    """The call with these tensors, and with these options if it has any."""
    left = iter(tensors)
    args, named = map_tensors(arguments_of(call), lambda _: next(left))
    return args, {**named, OPTIONS: options} if OPTIONS in call[1] else named


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Of a copy in which no two places share memory."""
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
        strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.shape, strides, tensor.dtype


def _different(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of those that have other bits."""
    return [index for index, pair in enumerate(zip(found, expected, strict=True)) if not same_bits(*pair)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Where NaN is the same as NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
