"""Work of several cards, such as a block that each computes a part of, replayed as one CUDA graph for all cards.

Where kernels are short the cards wait for the host. A wrong replay would be a silently wrong picture, so a graph holds
for one set of shapes, of plain values, and of those transformer_options that the block looked up, and for weights at
the same addresses. When it is recorded the block also runs without, and every card must give the same bits. Else, or
with other people's code inside, or with gradients, nothing is recorded. Attributes of layers, and functions that blocks
call, are taken to stay as they were.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...patches.hooks import PLAIN, attributes_of, map_tensors, tensors_reached
from ..offload.recompute import put_back
from ..transfer import Versioned, version_of, with_version

_log = logging.getLogger(__name__)

OPTIONS = "transformer_options"
_MISSING = object()
_MOST_SHAPES = 4  # of one block, whose graphs are kept
# Recording takes as long as two forwards, and a replay spares half a forward at best: a call must have come this often
# one after the other while the cards waited for the host.
RECORDED_AFTER = 4
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, and those by name
Work = Callable[[], Any]
Run = Callable[[Sequence[Work]], Sequence[Any]]  # computes every rank's work in its thread; what each returns
# A card's part of a block, the card -> where its weights lie; None if they are not there, or not used as they are
Addresses = Callable[[nn.Module, torch.device], tuple[int, ...] | None]


@dataclass(eq=False)
class _Card:
    """What one card reads and writes in a graph."""

    inputs: list[torch.Tensor]  # where it reads
    written: list[int] = field(default_factory=list)  # numbers of those that it writes to
    outputs: list[int | torch.Tensor] = field(default_factory=list)  # the number of the input that it is, or its place

    def compute(self, part: Callable[..., Any], call: Call) -> None:
        """Compute on the inputs, and bring the outputs to where they are to lie. Raises: RuntimeError if that is where
        something else lies that the block wrote, or has another shape."""
        versions = [tensor._version for tensor in self.inputs]
        found = tensors_reached(part(*call[0], **call[1]))
        self.written = [index for index, each in enumerate(self.inputs) if each._version != versions[index]]
        for number, tensor in enumerate(found):
            same = [index for index, each in enumerate(self.inputs) if each is tensor]
            self.outputs[number] = same[0] if same else self.outputs[number]
        for place, tensor in zip(self.outputs, found, strict=True):
            if isinstance(place, int):
                continue
            if any(place is self.inputs[index] for index in self.written):
                raise RuntimeError("it returns something else in the shape of what it writes to")
            if place.shape != tensor.shape:
                raise RuntimeError("it returns another shape")
            place.copy_(tensor)


@dataclass(eq=False)
class _Graph:
    key: Any  # of the call
    addresses: list[tuple[int, ...]]  # of the weights
    cards: list[_Card]
    reads: list[dict[Any, Any]] = field(default_factory=list)  # by card the options that the block looked up
    outputs: list[Any] = field(default_factory=list)  # by card what it returns, with other tensors
    replay: Callable[[], None] = lambda: None


class Graphs:
    """The graphs of one model. Args: devices: by rank. make_recorder: makes a GraphRecorder, or a stand-in of it."""

    def __init__(self, devices: Sequence[torch.device], make_recorder: Callable[[], Any], addresses: Addresses) -> None:
        self._devices, self._make_recorder, self._addresses = tuple(devices), make_recorder, addresses
        self.fault, self.num_replays = "", 0  # why nothing is recorded any more
        self.release()

    def release(self) -> None:
        """Give back the memory of all graphs; they are recorded again when their blocks are computed."""
        self._recorder: Any = None
        self._graphs: dict[nn.Module, list[_Graph]] = {}
        self._waits: dict[nn.Module, dict[Any, int]] = {}  # key of a call -> how often the cards last waited for it
        self._staged: dict[Any, torch.Tensor] = {}  # what graphs read and write, by rank, role and layout
        self._are_idle = False  # the cards, while the host launches
        self.forget()

    def forget(self) -> None:
        """Of the forward that is over: what was copied to where graphs read."""
        self._before: Callable[[], bool] | None = None  # whether the first card has done the block before this one
        self._held: dict[int, tuple[torch.Tensor, int | None]] = {}  # by the copy's id: its source then

    @property
    def may_replay(self) -> bool:
        """Whether nothing runs in this thread that is told of operations, or changes what they do."""
        is_plain = not (self.fault or torch.is_grad_enabled() or watching_modes())
        return is_plain and not torch.is_autocast_enabled(self._devices[0].type)

    def outputs(
        self,
        blocks: Sequence[nn.Module],
        calls: Sequence[Call],
        parts: Sequence[Callable[..., Any]],
        run: Run,
        beside: Any = None,
        launch: Run | None = None,
    ) -> Sequence[Any]:
        """What each card's part of a block returns: replayed, or computed, and then perhaps recorded. Args: blocks:
        each card's part of the block, by rank. calls: of each. parts: how each is called. beside: what else a call
        depends on. launch: runs what is not recorded, if otherwise, so that replays pay always."""
        block, given = blocks[0], [tensors_reached(_arguments_of(call)) for call in calls]
        work = [partial(part, *args, **kwargs) for part, (args, kwargs) in zip(parts, calls, strict=True)]
        compute, waiting = partial(launch or run, work), list[str]()
        if self.fault:  # since the forward began
            return compute()
        try:
            key = self._key(calls, given, beside)
        except Unlike as reason:
            _log.debug("%s is not replayed as a CUDA graph: %s", type(block).__name__, reason)
            self.forget()
            return compute()
        graphs = (each for each in self._graphs.get(block, ()) if each.key == key)
        graph = next((each for each in graphs if all(map(_reads_alike, each.reads, map(_options_of, calls)))), None)
        if graph is None and self._waits.get(block, {}).get(key, 0) < RECORDED_AFTER:
            return self._computed(block, key, compute, launch is not None)
        found = [self._addresses(part, device) for part, device in zip(blocks, self._devices, strict=True)]
        addresses = [each for each in found if each is not None]
        if graph is not None and graph.addresses == addresses:
            return self._replayed(graph, given)
        if graph is not None:
            self._graphs[block].remove(graph)
            self._waits.pop(block, None)  # what moves at every forward would be recorded at every forward
        if graph is not None or len(addresses) < len(found):
            return self._computed(block, key, compute)

        held = self._graphs  # release makes another one
        try:
            with Versioned():  # ahead of the block, which may write to what it is given
                graph = _Graph(key, addresses, [self._card(rank, tensors) for rank, tensors in enumerate(given)])
        except Exception as error:  # such as too little memory: nothing was computed yet
            self._give_up(block, error)
            return compute()
        outputs = run([self._recording.looked_at(each, waiting) for each in work])
        try:
            if waiting:
                raise RuntimeError(f"{waiting[0]} waits for the card")
            if self._graphs is held:
                self._record(graph, calls, given, parts, run, outputs)
                if self._graphs is held:
                    self._keep(block, graph)
        except Exception as error:  # whatever cannot be recorded
            self._give_up(block, error)
        except BaseException:  # an interrupt: the memory pool of a recording that failed is not used again
            self.release()
            raise
        self.forget()
        return outputs

    def _card(self, rank: int, tensors: Sequence[torch.Tensor]) -> _Card:
        places = [self._place(rank, index, tensor) for index, tensor in enumerate(tensors)]
        self._fill(places, tensors)
        return _Card(places)

    def _give_up(self, block: nn.Module, error: Exception) -> None:
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

    def _computed(self, block: nn.Module, key: Any, compute: Callable[[], Any], pays: bool = False) -> Sequence[Any]:
        """Without a graph; it is counted whether the cards had nothing to do meanwhile, or a graph pays anyway."""
        before = self._before
        self.forget()  # the block may write to what graphs were given
        outputs = compute()
        if before is not None:  # else it is the forward's first block, of which the last one's wait is taken
            self._are_idle = before()
        waits = self._waits.setdefault(block, {})
        times = waits.pop(key, 0) + 1
        waits[key] = times if self._are_idle or pays else 0
        if len(waits) > _MOST_SHAPES:
            del waits[next(iter(waits))]
        self._before = self._recording.mark()
        return outputs

    @property
    def _recording(self) -> Any:
        if self._recorder is None:
            self._recorder = self._make_recorder()
        return self._recorder

    def _key(self, calls: Sequence[Call], given: Sequence[Sequence[torch.Tensor]], beside: Any) -> Any:
        values, shared = (beside, *(key_of(_arguments_of(call)) for call in calls)), []
        for device, tensors in zip(self._devices, given, strict=True):
            if any(tensor.device != device for tensor in tensors):
                raise Unlike("an input lies on another device")
            memory = [tensor.untyped_storage()._cdata for tensor in tensors]
            shared.append(tuple(map(memory.index, memory)))
        return values, tuple(shared), _switches()

    def _record(
        self,
        graph: _Graph,
        calls: Sequence[Call],
        given: Sequence[Sequence[torch.Tensor]],
        parts: Sequence[Callable[..., Any]],
        run: Run,
        expected: Sequence[Any],
    ) -> None:
        """Args: given: the tensors in each call, which the block may have changed. expected: what each card returned.
        Raises: RuntimeError if a replay would do something else, and whatever the block and the recorder raise."""
        wrote = [
            {index for index, pair in enumerate(zip(card.inputs, tensors, strict=True)) if not same_bits(*pair)}
            for card, tensors in zip(graph.cards, given, strict=True)
        ]
        watched = [WatchedOptions(_options_of(call)) for call in calls]
        with Versioned():
            likes = [self._staged_like(rank, tree, graph.cards[rank].inputs) for rank, tree in enumerate(expected)]
        graph.outputs, work = likes, []
        for card, like, part, call, options in zip(graph.cards, likes, parts, calls, watched, strict=True):
            card.outputs = [*tensors_reached(like)]
            args, named = put_back(_arguments_of(call), card.inputs)
            named = {**named, OPTIONS: options} if OPTIONS in call[1] else named
            work.append(partial(card.compute, part, (args, named)))
        graph.replay = self._recording.record(run, work)
        for card, shared, found in zip(graph.cards, graph.key[1], wrote, strict=True):
            if any(shared.count(shared[index]) > 1 for index in card.written):
                raise RuntimeError("it writes into memory that it is given twice")
            if not found <= set(card.written):
                raise RuntimeError("it writes into what it is given, and torch does not see it")
        read = [{name: dict.get(each, name, _MISSING) for name in each.read} for each in watched]
        if any(each.written for each in watched) or tensors_reached(read):
            raise RuntimeError(f"it changes the {OPTIONS}, or reads tensors there")
        graph.reads = [{name: _option_key(value) for name, value in each.items()} for each in read]
        graph.replay()
        for card, tree, tensors in zip(graph.cards, expected, given, strict=True):
            outputs = [card.inputs[each] if isinstance(each, int) else each for each in card.outputs]
            written = [(card.inputs[index], tensors[index]) for index in card.written]
            pairs = [*zip(outputs, tensors_reached(tree), strict=True), *written]
            if not all(same_bits(*pair) for pair in pairs):
                raise RuntimeError("a replay gives something else")

    def _staged_like(self, rank: int, tree: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """The tree, with tensors that all graphs of such shapes share and write to. An output lies where an input of
        its shape is read: blocks mostly hand it to the next one, which then need not be given it."""
        free, number = list(inputs), itertools.count()

        def place(tensor: torch.Tensor) -> torch.Tensor:
            role = "output", next(number)
            same = next((index for index, each in enumerate(free) if _layout(each) == _layout(tensor)), None)
            return self._place(rank, role, tensor) if same is None else free.pop(same)

        return map_tensors(tree, place)

    def _place(self, rank: int, role: Any, like: torch.Tensor) -> torch.Tensor:
        shape, strides, dtype = layout = _layout(like)
        key = rank, role, *layout
        if key not in self._staged:
            self._staged[key] = torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
        return self._staged[key]

    def _replayed(self, graph: _Graph, given: Sequence[Sequence[torch.Tensor]]) -> Sequence[Any]:
        for card, tensors in zip(graph.cards, given, strict=True):
            self._fill(card.inputs, tensors)
        graph.replay()
        self.num_replays += 1
        outputs = [self._taken(card, tensors) for card, tensors in zip(graph.cards, given, strict=True)]
        return [put_back(tree, found) for tree, found in zip(graph.outputs, outputs, strict=True)]

    def _fill(self, places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Copy these to where a graph reads them; those that blocks share are copied once in a forward."""
        for place, tensor in zip(places, tensors, strict=True):
            source, version = self._held.get(id(place), (None, None))
            if source is not tensor or version != version_of(tensor):
                place.copy_(tensor)
                self._held[id(place)] = tensor, version_of(tensor)

    def _taken(self, card: _Card, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a card returned, in memory of its own; what it wrote to is written into what was given."""
        for index in card.written:
            given[index].copy_(card.inputs[index])
            self._held.pop(id(card.inputs[index]), None)
        with Versioned():  # the next block knows them again by it, and what others wrote into them
            outputs = [with_version(given[each]) if isinstance(each, int) else each.clone() for each in card.outputs]
        for place, output in zip(card.outputs, outputs, strict=True):
            self._held[id(card.inputs[place] if isinstance(place, int) else place)] = output, version_of(output)
        return outputs


def watching_modes() -> int:
    """How many modes are told of each of torch's functions or operations, such as one that counts them."""
    return int(torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack())


def _arguments_of(call: Call) -> Call:
    args, kwargs = call
    return args, {name: value for name, value in kwargs.items() if name != OPTIONS}


def _options_of(call: Call) -> dict[Any, Any]:
    return call[1].get(OPTIONS) or {}


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Of a copy in which no two places share memory."""
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
        strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.shape, strides, tensor.dtype


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Where NaN is the same as NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class Unlike(Exception):
    """A value that cannot be compared with another one."""


def key_of(value: Any) -> Any:
    """What two values have in common if one can stand for the other, but for numbers in tensors. Raises: Unlike."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
            raise Unlike(f"it is given a {type(value).__name__}")
        return type(value), value.shape, value.stride(), value.dtype
    kind = type(value)
    if kind in PLAIN or value is _MISSING or isinstance(value, (torch.dtype, torch.device)):
        return kind, value
    if kind in (tuple, list):
        return kind, *map(key_of, value)
    if isinstance(value, dict):
        return kind, *((name, key_of(each)) for name, each in value.items())
    names = attributes_of(value)
    if not names:
        raise Unlike(f"it is given a {kind.__name__}")
    return kind, *((name, key_of(getattr(value, name, None))) for name in names)


def _noting(name: str) -> Any:
    """dict's method of this name, which notes the key that it is given, or all keys."""
    method = getattr(dict, name)

    def noted(self: WatchedOptions, *args: Any) -> Any:
        self.read.update({args[0]} - self.written if args else dict.keys(self) - self.written)
        return method(self, *args)

    return noted


class WatchedOptions(dict[Any, Any]):
    """Options that know which of them were read, also in their copies, and whether something was written. Args: read:
    where to note it; a copy shares it. A block may write into a copy that it has made."""

    def __init__(self, values: Mapping[Any, Any], read: set[Any] | None = None) -> None:
        super().__init__(values)
        self.read: set[Any] = set() if read is None else read
        self.written: set[Any] = set()

    def copy(self) -> WatchedOptions:
        made = WatchedOptions(dict(dict.items(self)), self.read)
        made.written = set(self.written)
        return made

    __copy__ = copy

    def __setitem__(self, name: Any, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"it takes things out of the {OPTIONS}, or puts several in")

    pop = popitem = setdefault = update = clear = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]


for _name in ("__getitem__", "get", "__contains__", "__iter__", "keys", "items", "values"):
    setattr(WatchedOptions, _name, _noting(_name))


def _option_key(value: Any) -> Any:
    """As key_of; a function, such as ComfyUI's own attention that a node chose, is itself."""
    return value if isinstance(value, FunctionType) else key_of(value)


def _reads_alike(read: Mapping[Any, Any], options: Mapping[Any, Any]) -> bool:
    """Whether the options that a block looked up are those of its recording. Args: read: of each its key then."""
    try:
        return all(_option_key(options.get(name, _MISSING)) == key for name, key in read.items())
    except Unlike:
        return False


_REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
_OF_PRODUCTS = ("allow_tf32", "fp32_precision", "allow_fp16_accumulation", *_REDUCTIONS)
_KERNELS = tuple(f"{name}_sdp_enabled" for name in ("flash", "mem_efficient", "cudnn", "math"))


def _switches() -> tuple[Any, ...]:
    """What torch keeps for the whole process and chooses kernels by; nodes switch it for one MODEL and back."""
    found: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    for owner, names in ((cuda.matmul, _OF_PRODUCTS), (cudnn, _OF_PRODUCTS[:2]), (cuda, _KERNELS)):
        for name in names:
            try:
                value = getattr(owner, name, None)
            except RuntimeError:  # this torch does not tell it beside its newer one
                value = None
            found.append(value() if callable(value) else value)
    return tuple(found)
