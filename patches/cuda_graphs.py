"""Blocks that keep their activations, replayed as CUDA graphs: what Python issues once is launched as a whole after.

Why. Issuing one block's kernels, forwards and backwards, takes the host 2.7 ms where an H200 computes them in 4.4
(FLUX.2 at 512 pixels, compiled, fp8-compute); a pipeline's stages are threads of one process, whose Python runs under
one lock, so that two of them take 5.6 ms a block, and the cards wait (benchmarks/host_time.py,
docs/internals/experiments.md). A replay is one call, made without the lock.

How. The first time a block runs, its forward is recorded, and when its gradient arrives its backward; later calls copy
their inputs to where the graph reads them and launch it. Weights and LoRA are read where they lie, so that an optimizer
may change them; whether they still lie there is looked at before every step. What comes out is copied, nothing of the
graphs' own memory is handed out.

Memory. A graph writes where it wrote when it was recorded. So each micro-batch in flight on a card has a slot: graphs
of its own for every block, sharing one pool of memory that is laid out for the order in which they were recorded, all
forwards and then all backwards. They are replayed in that order or not at all: any other is refused. Inputs that no
gradient belongs to (modulation, rotary tables) are copied once per micro-batch and read by all blocks that get the same
tensor. As many slots are made as micro-batches turn out to be in flight.

What is recorded is compared, while it is recorded, with the same block not recorded, outputs and gradients. Where they
differ, or something cannot be recorded, the block's own results are used and nothing is recorded any more. A forward
runs as ever where its first block is called with other shapes than the first time, without gradients, or under
autocast; one whose later blocks deviate is refused in its backward. Random numbers are not for graphs: with dropout
they must not be applied.

The equation is the block's own: the same kernels on the same numbers. Parameters stand in the recorded graphs as
aliases, leaves of their own on the same memory, since the node that accumulates a parameter's gradient belongs to the
stream on which it was made, and may not be drawn into a recording on another.

Source of the idea: torch.cuda.make_graphed_callables, which wants all inputs before the first call, hands out the
memory that the next replay writes to, and holds every block's memory for itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..quantization.wrapped import plain_parts
from .compile_blocks import Arguments, Forward
from .hooks import tensors_of

_log = logging.getLogger(__name__)

Replay = Callable[[], None]

_MOST_SLOTS = 16  # micro-batches in flight on one card; more are a sign of forwards without a backward
_MOST_OFF = 0.02  # of its length, between what was recorded and what was not; equal but for sums in another order
_recording = threading.Lock()
_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


class Recorder(Protocol):
    """How one card records."""

    def make_pool(self) -> Any:
        """Memory that several recordings share."""

    def aside(self) -> AbstractContextManager[None]:
        """Inside, this thread launches where recordings are made; ordered with what it does before and after."""

    def record(self, compute: Callable[[], None], pool: Any) -> Replay:
        """What launches again all that compute launches."""

    def release(self) -> None:
        """Hand memory back that nobody needs any more."""


class CudaRecorder:
    """Recorder of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def make_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, compute: Callable[[], None], pool: Any) -> Replay:
        # A recording cannot take what is cached elsewhere, so it has to be free. One at a time: memory is handed back
        # on all cards, and none that records should notice.
        with _recording, self.aside():
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            # other threads allocate and copy meanwhile, on other cards
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                compute()
            except BaseException:
                with suppress(RuntimeError):  # of what was raised this one only says that there was something
                    graph.capture_end()
                self._end_allocation(pool)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._end_allocation(pool)
                raise
        return graph.replay

    def _end_allocation(self, pool: Any) -> None:
        """Tell the allocator that a recording which failed is over: up to torch 2.11 at least capture_end raises
        before it does, and no memory that crossed streams would be freed any more."""
        with suppress(RuntimeError):  # where it has
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
            torch._C._cuda_releasePool(self._device.index, pool)

    def release(self) -> None:
        torch.cuda.empty_cache()


class GraphedBlocks:
    """Handle of apply_cuda_graphs.

    Args:
        is_on: whether calls are recorded and replayed from now on.
    """

    def __init__(
        self, blocks: Mapping[nn.Module, torch.device], make_recorder: Callable[[torch.device], Recorder]
    ) -> None:
        self._cards = {device: _Card(device, make_recorder(device)) for device in dict.fromkeys(blocks.values())}
        self._forwards: dict[nn.Module, Forward | None] = {}
        self._addresses: dict[nn.Module, list[tuple[int, bool]]] = {}
        self.is_on = False
        for block, device in blocks.items():
            self._attach(block, self._cards[device])

    @property
    def num_slots(self) -> dict[torch.device, int]:
        """Micro-batches that were in flight at once, at most."""
        return {device: len(card.slots) for device, card in self._cards.items()}

    @property
    def fault(self) -> str:
        """Why nothing is recorded any more; "" while all goes well."""
        return next((card.fault for card in self._cards.values() if card.fault), "")

    def start_step(self) -> None:
        """To be called before every step, while no micro-batch is in flight.

        Forgets recordings that an interrupted step left half way, and all where weights have moved.
        """
        addresses = {
            block: [
                (part.data_ptr(), each.requires_grad)
                for each in (*block.parameters(), *block.buffers())
                for part in plain_parts(each)
            ]
            for block in self._forwards
        }
        if self._addresses and addresses != self._addresses:
            self._forget()
        self._addresses = addresses
        for card in self._cards.values():
            card.start_step()

    def remove(self) -> None:
        """Give every block the forward back that it had and free the recordings; a second call is a no-op."""
        for block, before in self._forwards.items():
            if before is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = before
        self._forwards.clear()
        self._forget()
        self.is_on = False

    def _forget(self) -> None:
        for card in self._cards.values():
            card.forget()

    def _attach(self, block: nn.Module, card: _Card) -> None:
        plain: Forward = block.forward
        self._forwards[block] = block.__dict__.get("forward")
        card.expect(block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or card.fault or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return card.run(block, plain, args, kwargs)

        block.forward = forward


def cuda_graphs_fault(devices: Iterable[torch.device]) -> str:
    """Why blocks on these devices cannot be replayed; "" if nothing speaks against it."""
    for device in devices:
        if device.type != "cuda":
            return f"{device} is no CUDA device"
        if torch.version.hip is not None:
            return "nothing is known of graphs on AMD cards"
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            return f"graphs share memory of torch's own allocator, and {backend} is in use"
    return ""


def graph_if_possible(blocks: Mapping[nn.Module, torch.device]) -> GraphedBlocks | None:
    """apply_cuda_graphs, or None and one line in the log that says why not."""
    fault = cuda_graphs_fault(blocks.values()) if blocks else "none of them keeps its activations"
    if fault:
        _log.warning("blocks are not replayed as CUDA graphs: %s", fault)
        return None
    _log.info("%d blocks are recorded in the first step and replayed as CUDA graphs", len(blocks))
    return apply_cuda_graphs(blocks)


def apply_cuda_graphs(
    blocks: Mapping[nn.Module, torch.device], make_recorder: Callable[[torch.device], Recorder] = CudaRecorder
) -> GraphedBlocks:
    """Let these blocks be recorded and replayed while they train, in place, once the handle is switched on.

    Args:
        blocks: with their devices, in execution order. Each is called once per forward with positional or keyword
            arguments; its weights stay where they are, and it draws no random numbers. Of one device one call at a time
            runs, forwards of one micro-batch are not interrupted by others, and the backward goes through the blocks in
            reverse.
    """
    return GraphedBlocks(blocks, make_recorder)


# ---- one card


class _Card:
    """The slots of a device, and tensors through which all its recordings are given their inputs."""

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self.device, self.recorder = device, recorder
        self.slots: list[_Slot] = []
        self.fault = ""
        self._first: nn.Module | None = None
        self._active: _Slot | None = None
        self._kinds: dict[nn.Module, Any] = {}
        self._staging: dict[Any, torch.Tensor] = {}
        self._has_recorded = self._has_said = False

    def expect(self, block: nn.Module) -> None:
        """One of the card's blocks, in execution order."""
        self._first = self._first or block

    def start_step(self) -> None:
        if self.fault or not all(slot.is_at_rest for slot in self.slots):
            self.forget()
        if self._has_recorded:  # what blocks took beside their recordings
            self.recorder.release()
            self._has_recorded = False

    def forget(self) -> None:
        """All recordings; none may be in flight."""
        for slot in self.slots:
            slot.order.clear()  # calls refer back to their slot: their memory would wait for the garbage collector
        self.slots.clear()
        self._staging.clear()
        self._active = None

    def give_up(self, fault: str) -> None:
        """Record nothing more; what is recorded and in flight goes its way."""
        if not self.fault:
            self.fault = fault
            _log.warning("blocks on %s are no longer replayed as CUDA graphs: %s", self.device, fault)

    def run(self, block: nn.Module, plain: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        kind = _kind_of(leaves, spec, self.device)
        is_known = kind is not None and kind == self._kinds.setdefault(block, kind)
        slot = self._slot_for(block) if is_known else None
        if slot is None:
            if not self._has_said:
                self._has_said = True
                _log.info("some calls of blocks on %s cannot be replayed and run as ever", self.device)
            return plain(*args, **kwargs)
        self._active = slot
        tensors = tensors_of(leaves)
        call = slot.next_forward()
        if call is None:
            call = _Call(self, slot, block, plain, (args, kwargs))
            if not call.record_forward(tensors):
                return plain(*args, **kwargs)
            slot.add(call, is_backward=False)
        outputs = _Replayed.apply(call, len(tensors), *tensors, *call.parameters)
        return call.wrap(outputs)

    def _slot_for(self, block: nn.Module) -> _Slot | None:
        """The one whose micro-batch is on its way through this card's blocks; for the first block one at rest, else
        another. None where the blocks before this one were not recorded."""
        if block is not self._first:
            return self._active if self._active is not None and self._active.takes(block) else None
        for slot in self.slots:
            if slot.is_at_rest:
                slot.position = 0
                return slot
        if len(self.slots) == _MOST_SLOTS:
            self.give_up(f"more than {_MOST_SLOTS} micro-batches are in flight")
            return None
        self.slots.append(_Slot(self.recorder.make_pool()))
        return self.slots[-1]

    def staged(self, role: str, index: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor as this one, the same for all recordings; its values live from a copy to the next launch."""
        key = role, index, like.shape, like.stride(), like.dtype
        if key not in self._staging:
            self._staging[key] = _empty_like(like)
        return self._staging[key]

    def staged_row(self, num_values: int, dtype: torch.dtype) -> torch.Tensor:
        """So many values, the same for all recordings, as above."""
        key = num_values, dtype
        if key not in self._staging:
            self._staging[key] = torch.empty(num_values, dtype=dtype, device=self.device)
        return self._staging[key]

    def record(self, compute: Callable[[], None], slot: _Slot) -> Replay:
        self._has_recorded = True
        return self.recorder.record(compute, slot.pool)


def _kind_of(leaves: Sequence[Any], spec: TreeSpec, device: torch.device) -> Any:
    """Equal for calls that one recording serves; None for calls that none does."""
    parts: list[Any] = [spec]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.device != device:
                return None
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, _CONSTANTS):
            parts.append(leaf)
        else:
            return None
    may_cast = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return None if may_cast else parts


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides, unless places in it share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


# ---- one micro-batch in flight on a card


@dataclass
class _Constant:
    """An input that no gradient belongs to, as the recordings of a slot read it.

    Args:
        source, version: what it is a copy of, until the backward of its micro-batch begins.
    """

    static: torch.Tensor
    source: torch.Tensor | None = None
    version: int = 0

    @property
    def target(self) -> torch.Tensor:
        """To copy to: graphs that are being recorded have saved `static` and are not to see that it is written."""
        return self.static.data

    def set(self, source: torch.Tensor) -> None:
        self.source, self.version = source, source._version

    def is_of(self, source: torch.Tensor) -> bool:
        return self.source is source and self.version == source._version


@dataclass(eq=False)
class _Slot:
    """Recordings that share a pool, in the order in which they may be replayed.

    Args:
        order: (call, whether its backward). position: of the next.
    """

    pool: Any
    order: list[tuple[_Call, bool]] = field(default_factory=list)
    position: int = 0
    constants: list[_Constant] = field(default_factory=list)

    @property
    def is_at_rest(self) -> bool:
        """Whether its micro-batch has come back, or none is there."""
        return self.position in (0, len(self.order)) and self._is_whole

    @property
    def _is_whole(self) -> bool:
        return sum(1 if is_backward else -call.has_backward for call, is_backward in self.order) == 0

    def takes(self, block: nn.Module) -> bool:
        """Whether this block's forward comes next."""
        if self.position < len(self.order):
            call, is_backward = self.order[self.position]
            return not is_backward and call.block is block
        return not any(is_backward or call.block is block for call, is_backward in self.order)

    def next_forward(self) -> _Call | None:
        """The recording that comes next, of a block that it takes; None if there is none yet."""
        if self.position == len(self.order):
            return None
        return self.order[self.position][0]

    def add(self, call: _Call, *, is_backward: bool) -> None:
        """A recording at the end of the order, not yet replayed."""
        self.order.append((call, is_backward))

    def pass_by(self, call: _Call, *, is_backward: bool) -> None:
        """Go on behind this one.

        Raises: RuntimeError if another one comes next.
        """
        if self.position == len(self.order) or self.order[self.position] != (call, is_backward):
            raise RuntimeError(
                "blocks that are replayed as CUDA graphs came in another order than when they were recorded, so their "
                'memory may hold other numbers; train with train.cuda_graphs = "off"'
            )
        self.position += 1

    def constant_for(self, tensor: torch.Tensor) -> int:
        """Index of the constant that is a copy of this one now; a new one if there is none."""
        for index, constant in enumerate(self.constants):
            if constant.is_of(tensor):
                return index
        self.constants.append(_Constant(_empty_like(tensor)))
        return len(self.constants) - 1

    def let_go(self) -> None:
        """Of what the constants are copies of; their forward is over."""
        for constant in self.constants:
            constant.source = None


class _Form:
    """What a call's tensors, or a block's results, come wrapped in."""

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = tree_flatten(tree)
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same with these tensors."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._places, tensors, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, self._spec)


class _Call:
    """One block in one slot."""

    def __init__(self, card: _Card, slot: _Slot, block: nn.Module, plain: Forward, arguments: Arguments) -> None:
        self.block = block
        self._card, self._slot, self._plain = card, slot, plain
        self._arguments, self._results = _Form(arguments), _Form(None)
        self._owners = [
            (module, name)
            for module in block.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        trained = (module._parameters[name] for module, name in self._owners)
        self.parameters = list(dict.fromkeys(parameter for parameter in trained if parameter is not None))
        # inputs: staged where a gradient belongs to them, else constants of the slot, which are new to it or not
        self._staged: dict[int, torch.Tensor] = {}
        self._constants: list[tuple[int, int, bool]] = []
        self._outputs: list[torch.Tensor] = []
        self._has_gradient: list[bool] = []
        # between the recordings of forward and backward
        self._edges: list[GradientEdge | None] = []
        self._own: list[torch.Tensor] = []
        self._aliases: list[nn.Parameter] = []
        self._forward: Replay | None = None
        self._backward: Replay | None = None
        self._gradients: list[torch.Tensor | None] = []  # staged: of the outputs
        self._found: list[torch.Tensor | None] = []  # staged: of the inputs
        self._is_trained: list[bool] = []  # which parameters have a gradient
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    # ---- forward

    def record_forward(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it could be recorded and gives what the block gives; a card that could not records no more."""
        card = self._card
        try:
            for index, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    self._staged[index] = card.staged("input", index, tensor)
                else:
                    number = self._slot.constant_for(tensor)
                    is_new = self._slot.constants[number].source is None
                    self._constants.append((index, number, is_new))
                    self._slot.constants[number].set(tensor)
            with card.recorder.aside():
                expected = self._run_plain(tensors)
            expected = self._note_outputs(expected)
            self._fill(tensors)
            self._forward = card.record(self._compute_forward, self._slot)
            self._forward()
            is_right = all(map(_are_alike, self._outputs, expected))
        except Exception as error:  # whatever cannot be recorded
            _log.debug("recording a block failed", exc_info=True)
            card.give_up(f"recording {type(self.block).__name__} failed: {error}".partition("\n")[0])
            return False
        if not is_right:
            card.give_up(f"{type(self.block).__name__} gives something else when it is replayed")
        return is_right

    def _run_plain(self, tensors: Sequence[torch.Tensor]) -> Any:
        with torch.enable_grad():
            return self._call([each.detach().clone().requires_grad_(each.requires_grad) for each in tensors])

    def _call(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self._arguments.fill(tensors)
        return self._plain(*args, **kwargs)

    def _note_outputs(self, expected: Any) -> list[torch.Tensor]:
        """The tensors that the block returns, without what a backward would need."""
        self._results = _Form(expected)
        found = tensors_of(expected)
        self._outputs = [self._card.staged("output", i, each.detach()) for i, each in enumerate(found)]
        self._has_gradient = [each.requires_grad for each in found]
        return [each.detach() for each in found]

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bring what the forward is called with to where its recording reads it."""
        targets = list(self._staged.values())
        sources = [tensors[index].detach() for index in self._staged]
        for index, number, is_new in self._constants:
            constant = self._slot.constants[number]
            if is_new:
                targets.append(constant.target)
                sources.append(tensors[index])
                constant.set(tensors[index])
            elif not constant.is_of(tensors[index]):
                raise RuntimeError(
                    f"{type(self.block).__name__} was called with other tensors than when it was recorded as a CUDA "
                    'graph, where it shared them with an earlier block; train with train.cuda_graphs = "off"'
                )
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    @contextmanager
    def _aliased(self) -> Iterator[list[nn.Parameter]]:
        """Inside, the block's trained parameters are others on the same memory, of nobody else's graph."""
        aliases = {parameter: nn.Parameter(parameter.detach()) for parameter in self.parameters}
        before = [module._parameters[name] for module, name in self._owners]
        for (module, name), parameter in zip(self._owners, before, strict=True):
            assert parameter is not None
            module._parameters[name] = aliases[parameter]
        try:
            yield list(aliases.values())
        finally:
            for (module, name), parameter in zip(self._owners, before, strict=True):
                module._parameters[name] = parameter

    def _compute_forward(self) -> None:
        constants = {index: self._slot.constants[number].static for index, number, _ in self._constants}
        with torch.enable_grad(), self._aliased() as self._aliases:
            self._own = [
                self._staged[index].clone().requires_grad_() if index in self._staged else constants[index]
                for index in range(len(self._staged) + len(constants))
            ]
            found = tensors_of(self._call(self._own))
        self._edges = [get_gradient_edge(each) if each.requires_grad else None for each in found]
        for staged, output in zip(self._outputs, found, strict=True):
            staged.copy_(output.detach())

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert self._forward is not None
        self._slot.pass_by(self, is_backward=False)
        self._fill(tensors)
        self._forward()
        return [each.clone() for each in self._outputs]

    @property
    def has_backward(self) -> bool:
        """Not where nothing that it is called with or trains has a gradient."""
        return any(self._has_gradient)

    @property
    def without_gradient(self) -> list[int]:
        """Which outputs need none."""
        return [index for index, has in enumerate(self._has_gradient) if not has]

    def wrap(self, outputs: Sequence[torch.Tensor]) -> Any:
        """In the form in which the block returns them."""
        return self._results.fill(outputs)

    # ---- backward

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Of every input and every parameter; None for those that have none."""
        self._slot.let_go()
        if self._backward is None:
            return self._plain_backward(gradients) if self._card.fault else self._record_backward(gradients)
        self._slot.pass_by(self, is_backward=True)
        if [each is None for each in self._gradients] != [each is None for each in gradients]:
            raise RuntimeError(
                f"other outputs of {type(self.block).__name__} have gradients than when its backward was recorded as a "
                'CUDA graph; train with train.cuda_graphs = "off"'
            )
        return self._replay_backward(gradients)

    def _replay_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        assert self._backward is not None
        for staged, given in zip(self._gradients, gradients, strict=True):
            if staged is not None and given is not None:
                staged.copy_(given)
        self._backward()
        found = [None if each is None else each.clone() for each in self._found]
        return [*found, *self._parameters_of({dtype: flat.clone() for dtype, flat in self._flat.items()})]

    def _parameters_of(self, flat: dict[torch.dtype, torch.Tensor]) -> Iterator[torch.Tensor | None]:
        start = dict.fromkeys(flat, 0)
        for parameter, is_trained in zip(self.parameters, self._is_trained, strict=True):
            if not is_trained:
                yield None
                continue
            at = start[parameter.dtype]
            start[parameter.dtype] = at + parameter.numel()
            yield flat[parameter.dtype][at : at + parameter.numel()].view(parameter.shape)

    def _record_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Record, replay, and return what the block itself gives; a card where that is something else records no
        more."""
        card = self._card
        expected = self._plain_backward(gradients)
        try:
            self._gradients = [
                None if given is None or not has else card.staged("gradient of output", index, output)
                for index, (given, has, output) in enumerate(
                    zip(gradients, self._has_gradient, self._outputs, strict=True)
                )
            ]
            self._found = [
                None if found is None else card.staged("gradient of input", index, own)
                for index, (found, own) in enumerate(zip(expected, self._own, strict=False))
            ]
            self._is_trained = [each is not None for each in expected[len(self._own) :]]
            self._flat = self._make_flat(card)
            self._backward = card.record(self._compute_backward, self._slot)
            found = self._replay_backward(gradients)
            is_right = all(map(_are_alike, found, expected))
        except Exception as error:
            _log.debug("recording a block's backward failed", exc_info=True)
            card.give_up(f"recording the backward of {type(self.block).__name__} failed: {error}".partition("\n")[0])
            return expected
        self._slot.add(self, is_backward=True)
        self._slot.pass_by(self, is_backward=True)
        if not is_right:
            card.give_up(f"the backward of {type(self.block).__name__} gives something else when it is replayed")
        return expected

    def _plain_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """By the block itself, on what its forward was replayed with."""
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in self._own]
        with self._card.recorder.aside(), torch.enable_grad(), self._aliased() as aliases:
            outputs = [each if each.requires_grad else None for each in tensors_of(self._call(inputs))]
            return _gradients_of(outputs, gradients, inputs, aliases)

    def _make_flat(self, card: _Card) -> dict[torch.dtype, torch.Tensor]:
        """One row for the gradients of all parameters of a type."""
        sizes: dict[torch.dtype, int] = {}
        for parameter, is_trained in zip(self.parameters, self._is_trained, strict=True):
            if is_trained:
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return {dtype: card.staged_row(size, dtype) for dtype, size in sizes.items()}

    def _compute_backward(self) -> None:
        edges, own, aliases = self._edges, self._own, self._aliases
        self._own, self._aliases, self._edges = [], [], []  # what they hold is free for the recordings that follow
        found = _gradients_of(edges, self._gradients, own, aliases)
        for staged, gradient in zip(self._found, found, strict=False):
            if staged is not None:
                assert gradient is not None
                staged.copy_(gradient)
        for dtype, flat in self._flat.items():
            rows = [each.reshape(-1) for each in found[len(own) :] if each is not None and each.dtype is dtype]
            torch.cat(rows, out=flat)


def _gradients_of(
    outputs: Sequence[torch.Tensor | GradientEdge | None],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    trained: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Of all inputs and all that is trained; None for those without.

    Args:
        outputs: or where they come from; None for those that need no gradient.
        gradients: None for those that have none.
    """
    both = zip(outputs, gradients, strict=True)
    pairs = [(output, given) for output, given in both if output is not None and given is not None]
    roots: list[Any] = [output for output, _ in pairs]
    leaves = [each for each in (*inputs, *trained) if each.requires_grad]
    found = iter(torch.autograd.grad(roots, leaves, [given for _, given in pairs], allow_unused=True))
    return [next(found) if each.requires_grad else None for each in (*inputs, *trained)]


def _are_alike(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if torch.equal(found, expected):
        return True
    length = expected.float().norm()
    off = (found.float() - expected.float()).norm()
    return bool(off <= _MOST_OFF * length) or not bool(length.isfinite())


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors[:num_inputs])
        ctx.mark_non_differentiable(*(outputs[index] for index in call.without_gradient))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.call.backward(gradients))
