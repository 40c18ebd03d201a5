"""Blocks that several devices train together, replayed as CUDA graphs over all devices instead of launched by Python.

Of a block that is computed again for its backward, two graphs are recorded: its forward without gradients, and the
second forward with the backward behind it. Neither needs anything of the other, so their order is free. All devices'
threads come to the block's beginning; the first one's then launches the graph for all. Without graphs the threads meet
at every layer whose parts are summed, also in the backward, where Python's lock changes hands each time.

A graph does what was done when it was recorded, so a mistake would be a silently wrong gradient:

- It holds for inputs of the same shapes and for the same plain values among the arguments; of the transformer_options
  those count that the block looked up.
- Weights and the LoRA are read where they lie. If one has moved before a step, all is recorded anew.
- A graph is compared with what the block itself computes before it is used: outputs bit for bit, gradients but for
  sums in another order. If one differs or cannot be recorded, nothing is replayed any more, and the log says why.
- Blocks that draw random numbers (dropout), keep their activations, or keep them in host memory, are not recorded.

A block is recorded when the first device has had nothing to do at its beginning in two steps. Where the devices are
the limit, a replay would only take memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ...patches.cuda_graph_block import Gradients, are_alike
from ...patches.cuda_graph_memory import empty_like
from ...patches.cuda_graphs import cuda_graphs_fault
from ...patches.hooks import map_tensors, tensors_reached
from ...quantization.wrapped import plain_parts
from ..devices import has_peer_access, random_state
from ..offload.activations import ActivationOffload, version_of
from ..offload.block_call import BlockCall, module_of
from ..offload.recompute import HandOut, recompute, second_forward
from .divided_graphs import reads_alike, same_bits
from .exchange import Exchange, Send
from .recorded_calls import MISSING, OPTIONS, Unlike, WatchedOptions, key_of, switches
from .shards import BlockShard
from .workers import autocast_of

_log = logging.getLogger(__name__)
RECORDED_AFTER = 2  # calls at which the first device waited
_MOST_SHAPES = 4  # of one block that are recorded
Block = nn.Module | BlockCall
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Replay:
    """Args: launch: done once, by the first device's thread, while all are there. follow: done by every thread behind
    it, with its rank."""

    launch: Callable[[], None]
    follow: Callable[[int], None]


class Recorder(Protocol):
    def record(self, rank: int, exchange: Exchange, compute: Callable[[], None]) -> Replay | None:
        """Called by every device's thread: records what all of them launch; the first one's is given the replay."""

    def arrive(self, rank: int) -> None:
        """This thread is where a graph may begin."""

    def mark(self) -> Callable[[], bool]:
        """Whether the first device has done all that was launched on it before this mark; asked without waiting."""


def why_not_replayed(devices: Sequence[torch.device]) -> str:
    """Why blocks that these devices divide cannot be CUDA graphs; "" if nothing speaks against it."""
    is_direct = all(has_peer_access(*pair) for pair in permutations(devices, 2))
    if not is_direct or len(set(devices)) < len(devices):
        return "it is not known that they copy to each other directly"
    return cuda_graphs_fault(devices, also_by_driver=True)


class TrainingGraphs:
    """The graphs of one model whose blocks are divided.

    Args:
        blocks: of each device, name of a block -> its part of it.
        exchange: of the run in hand. use: have it be another one.
        send: of new exchanges. recorder: of what these devices launch.
    """

    def __init__(
        self,
        blocks: Sequence[Mapping[str, BlockShard]],
        exchange: Callable[[], Exchange],
        use: Callable[[Exchange], None],
        send: Send,
        recorder: Recorder,
    ) -> None:
        self._size = len(blocks)
        self._names = [{shard.block: name for name, shard in each.items()} for each in blocks]
        self._exchange, self._use, self._send, self._recorder = exchange, use, send, recorder
        self._addresses: list[Any] = []
        self._making = threading.Lock()
        self._before: Callable[[], bool] | None = None  # whether the first device has done the last block
        self._is_idle = False
        self.fault = ""  # why nothing is recorded any more
        self.num_replays = 0
        self.is_on = False
        self.release()

    def release(self) -> None:
        """Forget all recordings; none may be in flight."""
        self._calls: dict[Any, _Call] = {}
        self._places: list[dict[Any, Tensor]] = [{} for _ in range(self._size)]
        self._held: list[dict[int, tuple[Tensor, int | None]]] = [{} for _ in range(self._size)]

    def start_step(self) -> None:
        """To be called before every step, while no microbatch is in flight."""
        addresses = [
            (part.data_ptr(), each.requires_grad)
            for blocks in self._names
            for block in blocks
            for each in (*block.parameters(), *block.buffers())
            for part in plain_parts(each)
        ]
        if self.fault or addresses != self._addresses:
            self.release()
        self._addresses, self.is_on = addresses, not self.fault

    def end_step(self) -> None:
        """Behind every step, also one that failed: what was copied to where graphs read is not held any more."""
        self.is_on, self._before = False, None
        for held in self._held:
            held.clear()

    def recompute(
        self,
        rank: int,
        block: Block,
        args: tuple[Any, ...],
        device: torch.device,
        store: ActivationOffload | None = None,
    ) -> Any:
        """As recompute.recompute, of the device with this rank."""
        name = self._names[rank].get(module_of(block))
        is_plain = torch.is_grad_enabled() and autocast_of(device.type) is None
        call = None
        if self.is_on and name is not None and store is None and is_plain:
            call = self._call_for(name, block, args)
        if call is None:
            return recompute(block, args, device, store)
        part = call.parts[rank]
        if not part.is_known:
            part.is_known = True
            before = random_state(device)
            output = recompute(block, args, device, store)
            part.draws = before is not None and not torch.equal(before, random_state(device))  # type: ignore[arg-type]
            part.has_form = isinstance(output, tuple)
            part.trained = {
                f"block.{key}": each for key, each in module_of(block).named_parameters() if each.requires_grad
            }
            return output
        tensors = tensors_reached(args)
        found = _Recorded.apply(self, rank, call, block, args, *tensors, *part.trained.values())
        return found if part.has_form else found[0]

    def _call_for(self, name: str, block: Block, args: tuple[Any, ...]) -> _Call | None:
        """None if nobody can tell what it depends on."""
        needs = tuple(each.requires_grad for each in tensors_reached(args))
        others = dict(block.others) if isinstance(block, BlockCall) else {}
        options = others.pop(OPTIONS, None) or {}
        try:
            key = name, key_of(args), key_of(others), needs, switches()
        except Unlike as reason:
            _log.debug("%s is not replayed as a CUDA graph: %s", name, reason)
            return None
        with self._making:
            if key not in self._calls:
                if sum(each.name == name for each in self._calls.values()) >= _MOST_SHAPES:
                    return None
                self._calls[key] = _Call(name, [_Part() for _ in range(self._size)])
            call = self._calls[key]
        return call if call.read is None or reads_alike(call.read, options) else None

    # ---- forward

    def forward(self, rank: int, call: _Call, block: Block, args: tuple[Any, ...], tensors: Tensors) -> Tensors:
        part, exchange = call.parts[rank], self._exchange()
        if call.forward.replay is not None:
            self._fill(rank, part.inputs, tensors)
        self._begin(rank, exchange, call, call.forward)
        if call.forward.state == "replayed":
            return self._replayed(rank, call.forward, part, block, part.outputs)
        outputs = tensors_reached(block(*args))
        if call.forward.state == "recorded":
            self._prepare(rank, part, block, args, tensors)
            part.outputs = [self._place(rank, ("output", index), each) for index, each in enumerate(outputs)]
            is_right = partial(_are_all, same_bits, part.outputs, outputs)
            self._record(rank, exchange, call, call.forward, partial(self._compute_forward, part), tensors, is_right)
        self._end(rank)
        return outputs

    def _prepare(self, rank: int, part: _Part, block: Block, args: tuple[Any, ...], tensors: Tensors) -> None:
        """What the graphs of a block compute, and where they read."""
        if part.block is None:
            part.inputs = [self._place(rank, ("input", index), each) for index, each in enumerate(tensors)]
            part.block, part.args = block, map_tensors(args, lambda _: _HOLE)
            if isinstance(block, BlockCall) and OPTIONS in block.others:
                part.watched = WatchedOptions(block.others[OPTIONS] or {})
                part.block = block.with_others({**block.others, OPTIONS: part.watched})
        self._fill(rank, part.inputs, tensors)

    def _compute_forward(self, part: _Part) -> None:
        assert part.block is not None
        _copy(part.outputs, tensors_reached(part.block(*_with(part.args, part.inputs))))

    # ---- backward

    def backward(
        self,
        rank: int,
        call: _Call,
        block: Block,
        args: tuple[Any, ...],
        tensors: Tensors,
        needs: Sequence[bool],
        gradients: Gradients,
    ) -> Gradients:
        """Args: args: with other tensors. needs: which of the inputs have gradients. gradients: of the outputs."""
        part, exchange = call.parts[rank], self._exchange()
        if call.backward.replay is not None:
            if [each is None for each in part.gradients] != [each is None for each in gradients]:
                raise RuntimeError(
                    f"other outputs of {call.name} have gradients than when its backward was recorded as a CUDA graph"
                )
            self._fill(rank, part.inputs, tensors)
            _copy(part.gradients, gradients)
        self._begin(rank, exchange, call, call.backward)
        if call.backward.state == "replayed":
            return self._replayed(rank, call.backward, part, block, part.found)
        found = _plain_backward(part, block, args, tensors, needs, gradients)
        if call.backward.state == "recorded":
            self._prepare(rank, part, block, args, tensors)
            part.gradients = self._places_of(rank, "gradient of output", gradients)
            part.found = self._places_of(rank, "gradient", found)
            _copy(part.gradients, gradients)
            compute, is_right = partial(_compute_backward, part, needs), partial(_are_all, are_alike, part.found, found)
            self._record(rank, exchange, call, call.backward, compute, tensors, is_right)
        self._end(rank)
        return found

    def _places_of(self, rank: int, role: str, likes: Gradients) -> Gradients:
        return [
            None if each is None else self._place(rank, (role, index), each.detach())
            for index, each in enumerate(likes)
        ]

    # ---- what both share

    def _begin(self, rank: int, exchange: Exchange, call: _Call, graph: _Graph) -> None:
        """All devices are here; the first one decides what they do, and launches a replay for all."""
        self._recorder.arrive(rank)
        exchange.once(rank, f"{call.name} begins", partial(self._decide, call, graph))

    def _decide(self, call: _Call, graph: _Graph) -> None:
        if graph.replay is not None:
            graph.state = "replayed"
            graph.replay.launch()
            self.num_replays += 1
            return
        if self._before is not None:  # else it is the step's first block, of which the last one's wait is taken
            self._is_idle = self._before()
        graph.waited = graph.waited + 1 if self._is_idle else 0
        can_record = not self.fault and not any(each.draws for each in call.parts)
        graph.state = "recorded" if can_record and graph.waited >= RECORDED_AFTER else "computed"

    def _replayed(self, rank: int, graph: _Graph, part: _Part, block: Block, places: Gradients) -> Any:
        assert graph.replay is not None
        graph.replay.follow(rank)
        if isinstance(block, BlockCall) and isinstance(part.block, BlockCall):
            block.take_form(part.block)
        copies = [None if each is None else empty_like(each) for each in places]
        _copy(copies, places)
        self._end(rank)
        return copies

    def _end(self, rank: int) -> None:
        if rank == 0:
            self._before = self._recorder.mark()

    def _record(
        self,
        rank: int,
        exchange: Exchange,
        call: _Call,
        graph: _Graph,
        compute: Callable[[], None],
        tensors: Tensors,
        is_right: Callable[[], bool],
    ) -> None:
        """Record what all devices compute, replay it, and keep it if all of them find the same as without.

        The devices meet in an exchange of its own, so that one that cannot go on ends the recording and no more.
        """
        name = f"recording {call.name}"
        exchange.once(rank, f"{name} begins", self._begin_recording)
        aside = self._aside
        try:
            replay = self._recorder.record(rank, aside, compute)
            if rank == 0:
                _note_options(call, call.parts[0].watched)
                graph.replay = replay
        except Exception as error:  # whatever cannot be recorded
            _log.debug("%s failed", name, exc_info=True)
            aside.abort(error)
        exchange.once(rank, f"{name} ends", partial(self._end_recording, exchange, call, graph))
        if graph.replay is None:
            return
        self._recorder.arrive(rank)
        exchange.once(rank, f"{name}, replayed", graph.replay.launch)
        graph.replay.follow(rank)
        part = call.parts[rank]
        part.agrees = is_right() and _are_all(same_bits, part.inputs, tensors)  # it must not write into its inputs
        exchange.once(rank, f"{name}, compared", partial(self._keep_if_right, call, graph))

    def _begin_recording(self) -> None:
        self._aside = Exchange(self._size, self._send)
        self._use(self._aside)

    def _end_recording(self, exchange: Exchange, call: _Call, graph: _Graph) -> None:
        self._use(exchange)
        error = self._aside.error
        self._aside.forget()
        if error is not None:
            graph.replay = None
            self._give_up(f"recording {call.name} failed: {error}".partition("\n")[0])

    def _keep_if_right(self, call: _Call, graph: _Graph) -> None:
        if not all(each.agrees for each in call.parts):
            graph.replay = None
            self._give_up(f"{call.name} gives something else when it is replayed")

    def _give_up(self, fault: str) -> None:
        if not self.fault:
            self.fault = fault
            _log.warning("blocks that several devices train together are not replayed as CUDA graphs: %s", fault)

    def _place(self, rank: int, role: Any, like: Tensor) -> Tensor:
        """One for all blocks; its values live from a copy to the next launch."""
        key = role, like.shape, like.stride(), like.dtype
        if key not in self._places[rank]:
            self._places[rank][key] = empty_like(like)
        return self._places[rank][key]

    @torch.no_grad()
    def _fill(self, rank: int, places: Tensors, tensors: Tensors) -> None:
        """Copy these to where a graph reads them; those that blocks share are copied once."""
        held = self._held[rank]
        for place, tensor in zip(places, tensors, strict=True):
            before = held.get(id(place))
            if before is None or before[0] is not tensor or before[1] != version_of(tensor):
                place.copy_(tensor)
                held[id(place)] = tensor, version_of(tensor)


def _plain_backward(
    part: _Part, block: Block, args: tuple[Any, ...], tensors: Tensors, needs: Sequence[bool], gradients: Gradients
) -> Gradients:
    """Of all inputs and what is trained, by the block itself; None for those without."""
    inputs = [each.detach().requires_grad_(flag) for each, flag in zip(tensors, needs, strict=True)]
    # Other leaves on the parameters' memory: what adds up a parameter's own gradient belongs to the stream on which it
    # was made, and may not be drawn into a recording on another.
    aliases: dict[str, Tensor] = {name: nn.Parameter(each.detach()) for name, each in part.trained.items()}
    with torch.enable_grad(), second_forward(inputs[0].device, None):
        found = tensors_reached(functional_call(_Called(block), aliases, _with(args, inputs)))
        both = zip(found, gradients, strict=True)
        pairs = [(output, given) for output, given in both if given is not None and output.requires_grad]
        # As recompute.py does it, so that sums are in the same order.
        seed = HandOut.apply([given for _, given in pairs], *(output for output, _ in pairs))
        del found, both, pairs
        torch.autograd.backward([seed], [seed.detach()])
    return [each.grad for each in (*inputs, *aliases.values())]


def _compute_backward(part: _Part, needs: Sequence[bool]) -> None:
    assert part.block is not None
    _copy(part.found, _plain_backward(part, part.block, part.args, part.inputs, needs, part.gradients))


def _are_all(alike: Callable[[Tensor, Tensor], bool], found: Gradients, expected: Gradients) -> bool:
    both = zip(found, expected, strict=True)
    return all(a is b is None or (a is not None and b is not None and alike(a, b.detach())) for a, b in both)


def _note_options(call: _Call, watched: WatchedOptions | None) -> None:
    """Raises: RuntimeError if a block depends on what cannot be compared."""
    if watched is None:
        return
    read = {name: key_of(dict.get(watched, name, MISSING)) for name in watched.read}
    if watched.written or tensors_reached([dict.get(watched, name) for name in read]):
        raise RuntimeError(f"it changes the {OPTIONS}, or reads tensors there")
    call.read = read


@dataclass(eq=False)
class _Part:
    """One device's part of a call.

    Args:
        is_known: it was computed once. draws: random numbers. has_form: it returns a tuple. trained: its parameters.
        block, args: what is recorded, with other tensors. watched: the options that it is given.
        inputs, outputs, gradients, found: where graphs read and write; gradients are those of the outputs.
        agrees: with what was replayed.
    """

    is_known: bool = False
    draws: bool = False
    has_form: bool = False
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    block: Block | None = None
    args: tuple[Any, ...] = ()
    watched: WatchedOptions | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: Gradients = ()
    found: Gradients = ()
    agrees: bool = False


@dataclass(eq=False)
class _Graph:
    """Args: waited: how often in a row the first device did. state: what all devices do with the call in hand."""

    replay: Replay | None = None
    waited: int = 0
    state: str = "computed"


@dataclass(eq=False)
class _Call:
    """Calls of one block that are alike but for the numbers in tensors. Args: read: options that it looked up."""

    name: str
    parts: list[_Part]
    forward: _Graph = field(default_factory=_Graph)
    backward: _Graph = field(default_factory=_Graph)
    read: dict[Any, Any] | None = None


class _Called(nn.Module):
    """A block as functional_call takes it."""

    def __init__(self, call: Block) -> None:
        super().__init__()
        self.block, self._call = module_of(call), (call,)

    def forward(self, *args: Any) -> Any:
        return self._call[0](*args)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: TrainingGraphs, rank: int, call: _Call, block: Block, args: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        own = tensors[: len(tensors) - len(call.parts[rank].trained)]
        ctx.call = graphs, rank, call, block, map_tensors(args, lambda _: _HOLE)
        ctx.needs = [each.requires_grad for each in own]
        outputs = graphs.forward(rank, call, block, args, own)
        ctx.save_for_backward(*own)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs, rank, call, block, args = ctx.call
        return (None,) * 5 + tuple(graphs.backward(rank, call, block, args, ctx.saved_tensors, ctx.needs, gradients))


_HOLE = torch.empty(0)  # stands where a tensor was


def _with(args: tuple[Any, ...], tensors: Tensors) -> tuple[Any, ...]:
    """The arguments, with these tensors in their places."""
    left = iter(tensors)
    return map_tensors(args, lambda _: next(left))  # type: ignore[no-any-return]


@torch.no_grad()
def _copy(targets: Gradients, sources: Gradients) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target is not None and source is not None:
            target.copy_(source)
