"""Blocks that several devices train together, replayed as CUDA graphs over all devices instead of launched by Python.

Of a block that is computed again for its backward, two graphs are recorded: its forward without gradients, and the
second forward with the backward behind it. Neither needs anything of the other, so their order is free. All devices'
threads come to the block's beginning; the first one's then launches the graph for all. Without graphs the threads meet
at every layer whose parts are summed, also in the backward, where Python's lock changes hands each time.

A graph does what was done when it was recorded, so a mistake would be a silently wrong gradient:

- It holds for inputs of the same shapes and for the same plain values among the arguments; of the transformer_options
  those count that the block looked up. A call that differs on one device is computed by all.
- Weights and the LoRA are read where they lie. If one has moved before a step, all is recorded anew.
- A graph is compared with what the block itself computes before it is used: outputs bit for bit, gradients but for
  sums in another order. If one differs or cannot be recorded, nothing is replayed any more, and the log says why.
- Blocks that draw random numbers, keep their activations, or have their inputs in host memory, are computed as ever.

A graph is recorded when the first device has had nothing to do at the beginning of two such calls in a row. Where the
devices are the limit, a replay would only take memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...patches.cuda_graph_block import Gradients, are_alike, copy_all
from ...patches.cuda_graph_memory import empty_like
from ...patches.cuda_graphs import cuda_graphs_fault
from ...patches.hooks import tensors_reached
from ...quantization.wrapped import plain_parts
from ..devices import has_peer_access, random_state
from ..offload.activations import ActivationOffload, version_of
from ..offload.block_call import BlockCall, module_of
from ..offload.recompute import has_drawn, recompute
from .divided_calls import Block, DividedCall, Given, Graph, Part, Recorder, Tensors
from .divided_graphs import same_bits
from .exchange import Exchange, Send
from .recorded_calls import OPTIONS, Unlike, key_of, reads_alike, switches
from .shards import BlockShard
from .workers import autocast_of

_log = logging.getLogger(__name__)
RECORDED_AFTER = 2  # calls at which the first device waited
_MOST_SHAPES = 4  # of one block that are recorded


_Todo = Literal["compute", "record", "replay"]


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
        # Where each device is, and whether its call fits.
        self._at: list[tuple[DividedCall, bool] | None] = [None] * self._size
        self._todo: _Todo = "compute"  # what all devices do with the call in hand
        self._before: Callable[[], bool] | None = None  # whether the first device has done the last block
        self._is_idle = False
        self._aside = Exchange(self._size, send)  # of a recording
        self.fault = ""  # why nothing is recorded any more
        self.num_replays = self.num_recorded = 0
        self.is_on = False
        self.release()

    def release(self) -> None:
        """Forget all recordings; none may be in flight."""
        self._calls: dict[Any, DividedCall] = {}
        self._places: list[dict[Any, Tensor]] = [{} for _ in range(self._size)]
        self._held: list[dict[int, tuple[Tensor, int | None]]] = [{} for _ in range(self._size)]
        self._at[:] = [None] * self._size
        self._recorder.release()

    def start_step(self) -> None:
        """To be called before every step, while no microbatch is in flight."""
        addresses = [
            (id(each), part.data_ptr(), each.requires_grad)
            for blocks in self._names
            for block in blocks
            for each in (*block.parameters(), *block.buffers())
            for part in plain_parts(each)
        ]
        if (self.fault and self._calls) or addresses != self._addresses:
            self.release()
        self._addresses, self.is_on = addresses, not self.fault

    def end_step(self, *, has_failed: bool = False) -> None:
        """Behind every step: what was copied to where graphs read is not held any more.

        Args: has_failed: one device may know a block that another has not computed, so all is recorded anew.
        """
        self.is_on, self._before = False, None
        if has_failed:
            self.release()
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
            before = random_state(device)
            output = recompute(block, args, device, store)
            part.learn(block, output, draws=has_drawn(device, before))
            return output
        tensors = tensors_reached(args)
        given = Given.of(block, device, args, tensors)
        found = _Recorded.apply(self, rank, call, given, *tensors, *part.trained.values())
        return found if part.has_form else found[0]

    def _call_for(self, name: str, block: Block, args: tuple[Any, ...]) -> DividedCall | None:
        """None if nobody can tell what it depends on."""
        needs = tuple(each.requires_grad for each in tensors_reached(args))
        others = dict(block.others) if isinstance(block, BlockCall) else {}
        others.pop(OPTIONS, None)
        try:
            key = name, key_of(args), key_of(others), needs, switches()
        except Unlike as reason:
            _log.debug("%s is not replayed as a CUDA graph: %s", name, reason)
            return None
        with self._making:
            if key not in self._calls:
                if sum(each.name == name for each in self._calls.values()) >= _MOST_SHAPES:
                    return None
                self._calls[key] = DividedCall(name, [Part() for _ in range(self._size)])
            return self._calls[key]

    def forward(self, rank: int, call: DividedCall, given: Given) -> tuple[Tensors, Tensor | None]:
        """What a block returns, and its generator's state before if it drew random numbers."""
        part, exchange, graph = call.parts[rank], self._exchange(), call.forward
        fits = call.read is None or reads_alike(call.read, given.options)
        if graph.replay is not None and fits:
            self._fill(rank, part.inputs, given.tensors)
        todo = self._begin(rank, exchange, call, graph, fits=fits)
        if todo == "replay":
            return self._replayed(rank, graph, part, given, part.outputs), None
        outputs, random = given.outputs()
        part.draws = part.draws or random is not None

        def prepare() -> None:
            self._prepare(rank, part, given)
            part.outputs = [self._place(rank, ("output", index), each) for index, each in enumerate(outputs)]

        if todo == "record":
            is_right = partial(_compare, part, given.tensors, same_bits, lambda: part.outputs, outputs)
            self._record(rank, exchange, call, graph, prepare, part.compute_forward, is_right)
        self._end(rank)
        return outputs, random

    def backward(
        self, rank: int, call: DividedCall, given: Given, random: Tensor | None, gradients: Gradients
    ) -> Gradients:
        """Of all inputs and what is trained. Args: random: what forward returned. gradients: of the outputs."""
        part, exchange, graph = call.parts[rank], self._exchange(), call.backward
        fits = call.read is None or reads_alike(call.read, given.options)
        if graph.replay is not None:
            fits = fits and [each is None for each in part.gradients] == [each is None for each in gradients]
            if fits:
                self._fill(rank, part.inputs, given.tensors)
                copy_all(part.gradients, gradients)
        todo = self._begin(rank, exchange, call, graph, fits=fits)
        if todo == "replay":
            return self._replayed(rank, graph, part, given, part.found)
        found = given.gradients(part.trained, gradients, random)

        def prepare() -> None:
            self._prepare(rank, part, given)
            part.gradients = self._places_of(rank, "gradient of output", gradients)
            part.found = self._places_of(rank, "gradient", found)
            copy_all(part.gradients, gradients)

        if todo == "record":
            is_right = partial(_compare, part, given.tensors, are_alike, lambda: part.found, found)
            self._record(rank, exchange, call, graph, prepare, part.compute_backward, is_right)
        self._end(rank)
        return found

    # ---- what both share

    def _begin(self, rank: int, exchange: Exchange, call: DividedCall, graph: Graph, *, fits: bool) -> _Todo:
        """All devices are here; the first one decides what they do, and launches a replay for all.

        Args: fits: this device's call to what was recorded.
        """
        self._recorder.arrive(rank)
        self._at[rank] = call, fits
        exchange.once(rank, f"{call.name} begins", partial(self._decide, call, graph))
        return self._todo

    def _decide(self, call: DividedCall, graph: Graph) -> None:
        if self._before is not None:  # else it is the step's first block, of which the last one's wait is taken
            self._is_idle = self._before()
        self._todo = "compute"
        if not all(at is not None and at[0] is call and at[1] for at in self._at):
            return
        if graph.replay is not None:
            self._todo = "replay"
            graph.replay.launch()
            self.num_replays += 1
            return
        graph.waited = graph.waited + 1 if self._is_idle else 0
        if graph.waited >= RECORDED_AFTER and not self.fault and not any(each.draws for each in call.parts):
            self._todo = "record"

    def _replayed(self, rank: int, graph: Graph, part: Part, given: Given, places: Gradients) -> Any:
        assert graph.replay is not None and part.given is not None
        graph.replay.follow(rank)
        if isinstance(given.block, BlockCall) and isinstance(part.given.block, BlockCall):
            given.block.take_form(part.given.block)
        copies = [None if each is None else empty_like(each) for each in places]
        copy_all(copies, places)
        self._end(rank)
        return copies

    def _end(self, rank: int) -> None:
        if rank == 0:
            self._before = self._recorder.mark()

    # ---- recording

    def _prepare(self, rank: int, part: Part, given: Given) -> None:
        if part.given is None:
            part.prepare(given, [self._place(rank, ("input", index), each) for index, each in enumerate(given.tensors)])
        self._fill(rank, part.inputs, given.tensors)

    def _record(
        self,
        rank: int,
        exchange: Exchange,
        call: DividedCall,
        graph: Graph,
        prepare: Callable[[], None],
        compute: Callable[[], None],
        is_right: Callable[[], bool],
    ) -> None:
        """Record what all devices compute, replay it, and keep it if all of them find the same as without.

        The devices meet in an exchange of its own, so that one that cannot go on ends the recording and no more.
        """
        name = f"recording {call.name}"
        exchange.once(rank, f"{name} begins", self._begin_recording)
        aside = self._aside
        try:
            if call.parts[rank].draws:
                raise RuntimeError("it draws random numbers")
            prepare()
            replay = self._recorder.record(rank, aside, compute)
            if rank == 0:
                call.note_options()
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
        call.parts[rank].agrees = is_right()
        exchange.once(rank, f"{name}, compared", partial(self._keep_if_right, call, graph))

    def _begin_recording(self) -> None:
        self._aside = Exchange(self._size, self._send)
        self._use(self._aside)

    def _end_recording(self, exchange: Exchange, call: DividedCall, graph: Graph) -> None:
        self._use(exchange)
        error = self._aside.error
        self._aside.forget()
        if error is not None:
            graph.replay = None
            self._give_up(f"recording {call.name} failed: {error}".partition("\n")[0])

    def _keep_if_right(self, call: DividedCall, graph: Graph) -> None:
        if not all(each.agrees for each in call.parts):
            graph.replay = None
            self._give_up(f"{call.name} gives something else when it is replayed")
            return
        if not self.num_recorded:
            _log.info(
                "GPUs wait for Python: blocks are recorded in these steps, and replayed as CUDA graphs from then on"
            )
        self.num_recorded += 1

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

    def _places_of(self, rank: int, role: str, likes: Gradients) -> Gradients:
        both = enumerate(likes)
        return [None if each is None else self._place(rank, (role, index), each.detach()) for index, each in both]

    @torch.no_grad()
    def _fill(self, rank: int, places: Tensors, tensors: Tensors) -> None:
        """Copy these to where a graph reads them; those that blocks share are copied once."""
        held = self._held[rank]
        for place, tensor in zip(places, tensors, strict=True):
            before = held.get(id(place))
            if before is None or before[0] is not tensor or before[1] != version_of(tensor):
                place.copy_(tensor)
                held[id(place)] = tensor, version_of(tensor)


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graphs: TrainingGraphs, rank: int, call: DividedCall, given: Given, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        outputs, random = graphs.forward(rank, call, given)
        ctx.call = graphs, rank, call, given._replace(tensors=()), random
        ctx.save_for_backward(*given.tensors)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs, rank, call, given, random = ctx.call
        found = graphs.backward(rank, call, given._replace(tensors=ctx.saved_tensors), random, gradients)
        return (None,) * 4 + tuple(found)


def _compare(
    part: Part,
    tensors: Tensors,
    alike: Callable[[Tensor, Tensor], bool],
    found: Callable[[], Gradients],
    expected: Gradients,
) -> bool:
    """Whether a replay gives what the block does, and has left its inputs as they were."""
    try:
        kept = all(same_bits(a, b.detach()) for a, b in zip(part.inputs, tensors, strict=True))
        both = zip(found(), expected, strict=True)
        return kept and all(
            a is b is None or (a is not None and b is not None and alike(a, b.detach())) for a, b in both
        )
    except Exception:  # such as too little memory
        _log.debug("a replay could not be compared", exc_info=True)
        return False
