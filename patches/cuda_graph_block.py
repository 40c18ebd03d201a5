"""One block as two CUDA graphs, its forward and its backward: recorded, compared with the block itself, replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from .compile_blocks import Arguments, Forward
from .cuda_graph_memory import CardMemory, Constant, Slot
from .hooks import tensors_of

_log = logging.getLogger(__name__)
_MOST_OFF = 0.02  # of its length, between what was recorded and what was not; equal but for sums in another order
_HOLE = object()

Gradients = Sequence[Tensor | None]


class GraphedBlock:
    """The graphs of one block in one slot, for calls that are alike but for the tensors' values."""

    def __init__(self, card: CardMemory, slot: Slot, block: nn.Module, plain: Forward, arguments: Arguments) -> None:
        self._card, self._slot, self._block = card, slot, block
        self._plain = PlainBlock(block, plain)
        self._arguments, self._results = _filler(arguments), _filler(None)
        self._trained = trained_in(block)
        # Inputs: staged where they have a gradient, else constants of the slot, some of which are new to it.
        self._staged: dict[int, Tensor] = {}
        self._constants: dict[int, Constant] = {}
        self._new: set[int] = set()
        self._outputs: list[Tensor] = []  # staged
        self.has_gradient: list[bool] = []  # which outputs
        # Between the recordings of forward and backward.
        self._edges: list[GradientEdge | None] = []
        self._own: list[Tensor] = []
        self._aliases: dict[str, nn.Parameter] = {}
        self._forward: Callable[[], None] | None = None
        self._backward: Callable[[], None] | None = None
        self._gradients: Gradients = []  # staged: of the outputs
        self._found: Gradients = []  # staged: of the inputs and parameters

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """What the block returns for these inputs, with gradients."""
        return self._results(_Replayed.apply(self, *tensors, *self._trained.values()))

    # ---- recording and comparing

    def record_forward(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the block can be replayed; a card that has one which cannot records no more."""
        if not self._is_recorded(type(self._block).__name__, lambda: self._try_forward(tensors)):
            return False
        self._slot.calls[self._block] = self
        self._slot.num_open += any(self.has_gradient)
        self._slot.order.append((self._block, False))
        return True

    def _is_recorded(self, what: str, is_right: Callable[[], bool]) -> bool:
        try:
            if is_right():
                return True
            fault = f"{what} gives something else when it is replayed"
        except Exception as error:  # whatever cannot be recorded
            _log.debug("recording %s failed", what, exc_info=True)
            fault = f"recording {what} failed: {error}".partition("\n")[0]
        self._card.give_up(fault)
        return False

    def _try_forward(self, tensors: Sequence[Tensor]) -> bool:
        """Record and replay; whether that gives what the block gives."""
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                self._staged[index] = self._card.staged("input", index, tensor)
                continue
            self._constants[index], is_new = self._slot.constant_for(tensor)
            if is_new:
                self._new.add(index)
        expected = self._expected_outputs(tensors)
        self._fill(tensors)
        self._forward = self._card.record(self._compute_forward, self._slot.pool)
        self._forward()
        return all(map(are_alike, self._outputs, expected))

    def _expected_outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the block itself returns, without what a backward would need."""
        with self._card.recorder.aside(), torch.enable_grad():
            expected = self._call([each.detach().clone().requires_grad_(each.requires_grad) for each in tensors], {})
        self._results, found = _filler(expected), tensors_of(expected)
        self._outputs = [self._card.staged("output", i, each.detach()) for i, each in enumerate(found)]
        self.has_gradient = [each.requires_grad for each in found]
        return [each.detach() for each in found]

    def _record_backward(self, gradients: Gradients) -> Gradients:
        """Record, replay, and return what the block itself gives."""
        expected = self._plain_backward(gradients)
        what = f"the backward of {type(self._block).__name__}"
        if self._is_recorded(what, lambda: self._try_backward(gradients, expected)):
            self._slot.num_open -= 1
            self._slot.order.append((self._block, True))
            self._slot.pass_by(self._block, is_backward=True)
        return expected

    def _try_backward(self, gradients: Gradients, expected: Gradients) -> bool:
        outputs = zip(gradients, self.has_gradient, self._outputs, strict=True)
        self._gradients = [
            self._card.staged("gradient of output", index, output) if given is not None and has else None
            for index, (given, has, output) in enumerate(outputs)
        ]
        leaves = zip(expected, (*self._own, *self._aliases.values()), strict=True)
        self._found = [
            None if found is None else self._card.staged("gradient", index, leaf)
            for index, (found, leaf) in enumerate(leaves)
        ]
        self._backward = self._card.record(self._compute_backward, self._slot.pool)
        return all(map(are_alike, self._replay_backward(gradients), expected))

    def _plain_backward(self, gradients: Gradients) -> Gradients:
        """By the block itself, on what its forward was replayed with."""
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in self._own]
        with self._card.recorder.aside(), torch.enable_grad():
            aliases = aliases_of(self._trained)
            outputs = [each if each.requires_grad else None for each in tensors_of(self._call(inputs, aliases))]
            return _gradients_of(outputs, gradients, [*inputs, *aliases.values()])

    # ---- what is recorded

    def _compute_forward(self) -> None:
        with torch.enable_grad():
            self._own = [
                self._staged[index].clone().requires_grad_() if index in self._staged else self._constants[index].static
                for index in range(len(self._staged) + len(self._constants))
            ]
            self._aliases = aliases_of(self._trained)
            found = tensors_of(self._call(self._own, self._aliases))
        self._edges = [get_gradient_edge(each) if each.requires_grad else None for each in found]
        for staged, output in zip(self._outputs, found, strict=True):
            staged.copy_(output.detach())

    def _compute_backward(self) -> None:
        edges, leaves = self._edges, [*self._own, *self._aliases.values()]
        self._own, self._aliases, self._edges = [], {}, []  # what they hold is free for the recordings that follow
        copy_all(self._found, _gradients_of(edges, self._gradients, leaves))

    def _call(self, tensors: Sequence[Tensor], trained: Mapping[str, Tensor]) -> Any:
        """The block itself; trained stands in for its parameters."""
        args, kwargs = self._arguments(tensors)
        return functional_call(self._plain, dict(trained), args, kwargs)

    # ---- replaying

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert self._forward is not None
        self._slot.pass_by(self._block, is_backward=False)
        self._fill(tensors)
        self._forward()
        return [each.clone() for each in self._outputs]

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        """Bring what the forward is called with to where its graph reads it."""
        targets = list(self._staged.values())
        sources = [tensors[index].detach() for index in self._staged]
        for index, constant in self._constants.items():
            if index in self._new:
                # By its data: graphs that are being recorded have saved it and are not to see that it is written.
                targets.append(constant.static.data)
                sources.append(tensors[index])
                constant.set(tensors[index])
            elif not constant.is_of(tensors[index]):
                raise RuntimeError(
                    f"{type(self._block).__name__} was called with other tensors than when it was recorded as a CUDA "
                    'graph, where it shared them with an earlier block; train with train.cuda_graphs = "off"'
                )
        copy_all(targets, sources)

    def backward(self, gradients: Gradients) -> Gradients:
        """Of every input and every parameter; None for those that have none."""
        self._slot.let_go()
        if self._backward is None:
            return self._plain_backward(gradients) if self._card.fault else self._record_backward(gradients)
        self._slot.pass_by(self._block, is_backward=True)
        if [each is None for each in self._gradients] != [each is None for each in gradients]:
            raise RuntimeError(
                f"other outputs of {type(self._block).__name__} have gradients than when its backward was recorded as "
                'a CUDA graph; train with train.cuda_graphs = "off"'
            )
        return self._replay_backward(gradients)

    def _replay_backward(self, gradients: Gradients) -> Gradients:
        assert self._backward is not None
        copy_all(self._gradients, gradients)
        self._backward()
        found = [None if each is None else torch.empty_like(each) for each in self._found]
        copy_all(found, self._found)
        return found


class PlainBlock(nn.Module):
    """A block whose call is its forward of before, for functional_call."""

    def __init__(self, block: nn.Module, plain: Forward) -> None:
        super().__init__()
        self.block, self._forward = block, plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: GraphedBlock, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        outputs = graphs.forward(tensors)
        ctx.mark_non_differentiable(*(each for each, has in zip(outputs, graphs.has_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.graphs.backward(gradients))


def trained_in(block: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained of a block, by its names in PlainBlock."""
    return {f"block.{name}": each for name, each in block.named_parameters() if each.requires_grad}


def aliases_of(trained: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Other leaves on the parameters' memory: the node that accumulates a parameter's own gradient belongs to the
    stream on which it was made, and may not be drawn into a recording on another."""
    return {name: nn.Parameter(parameter.detach()) for name, parameter in trained.items()}


def _filler(tree: Any) -> Callable[[Sequence[Tensor]], Any]:
    """What makes the same tree with other tensors."""
    leaves, spec = tree_flatten(tree)
    kept = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def fill(tensors: Sequence[Tensor]) -> Any:
        left = iter(tensors)
        return tree_unflatten([next(left) if leaf is _HOLE else leaf for leaf in kept], spec)

    return fill


@torch.no_grad()
def copy_all(targets: Gradients, sources: Gradients) -> None:
    """All at once; nothing where the target is None."""
    pairs: list[Any] = [pair for pair in zip(targets, sources, strict=True) if pair[0] is not None]
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])


def _gradients_of(
    outputs: Sequence[Tensor | GradientEdge | None], gradients: Gradients, leaves: Sequence[Tensor]
) -> Gradients:
    """Of all leaves; None for those without.

    Args:
        outputs: or where they come from; None for those that need no gradient.
        gradients: None for those that have none.
    """
    both = zip(outputs, gradients, strict=True)
    pairs = [(output, given) for output, given in both if output is not None and given is not None]
    roots: list[Any] = [output for output, _ in pairs]
    wanted = [each for each in leaves if each.requires_grad]
    found = iter(torch.autograd.grad(roots, wanted, [given for _, given in pairs], allow_unused=True))
    return [next(found) if each.requires_grad else None for each in leaves]


def are_alike(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if torch.equal(found, expected):
        return True
    length = expected.float().norm()
    off = (found.float() - expected.float()).norm()
    return bool(off <= _MOST_OFF * length) or not bool(length.isfinite())
