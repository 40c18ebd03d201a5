"""A block's calls in training that are alike but for the numbers in tensors; training_graphs.py records them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...patches.cuda_graph_block import Gradients
from ...patches.hooks import map_tensors, tensors_reached
from ..devices import random_state
from ..offload.block_call import BlockCall, module_of
from ..offload.recompute import HandOut, second_forward
from .exchange import Exchange
from .recorded_calls import MISSING, OPTIONS, WatchedOptions, key_of

Block = nn.Module | BlockCall
Tensors = Sequence[Tensor]
_HOLE = torch.empty(0)  # stands where a tensor was


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

    def release(self) -> None:
        """Give back the memory of what was recorded; no replay is in use any more."""


class Given(NamedTuple):
    """What one device's part of a block is called with.

    Args:
        args: with other tensors in the place of these. needs: which of the tensors have gradients.
        options: what the transformer_options were then; a model may change them between blocks.
    """

    block: Block
    device: torch.device
    args: tuple[Any, ...]
    tensors: Tensors
    needs: Sequence[bool]
    options: dict[Any, Any]

    @staticmethod
    def of(block: Block, device: torch.device, args: tuple[Any, ...], tensors: Tensors) -> Given:
        needs = [each.requires_grad for each in tensors]
        return Given(block, device, map_tensors(args, lambda _: _HOLE), tensors, needs, dict(options_of(block)))

    def outputs(self) -> tuple[list[Tensor], Tensor | None]:
        """Of the block itself, and its generator's state before if it draws random numbers; as in recompute.py."""
        before = random_state(self.device)
        found = tensors_reached(self.block(*_with(self.args, self.tensors)))
        after = random_state(self.device)
        draws = before is not None and after is not None and not torch.equal(before, after)
        return found, before if draws else None

    def gradients(
        self, trained: Mapping[str, nn.Parameter], gradients: Gradients, random: Tensor | None = None
    ) -> Gradients:
        """Of all inputs and what is trained, by the block itself; None for those without. As in recompute.py, so that
        sums are in the same order.

        Args:
            gradients: of the outputs. random: the generator's state before the forward, if that drew from it.
        """
        inputs = [each.detach().requires_grad_(flag) for each, flag in zip(self.tensors, self.needs, strict=True)]
        # Other leaves on the parameters' memory: what adds up a parameter's own gradient belongs to the stream on which
        # it was made, and may not be drawn into a recording on another.
        aliases: dict[str, Tensor] = {name: nn.Parameter(each.detach()) for name, each in trained.items()}
        with torch.enable_grad(), second_forward(self.device, random):
            found = tensors_reached(functional_call(_Called(self.block), aliases, _with(self.args, inputs)))
            both = zip(found, gradients, strict=True)
            pairs = [(output, given) for output, given in both if given is not None and output.requires_grad]
            seed = HandOut.apply([given for _, given in pairs], *(output for output, _ in pairs)) if pairs else None
            del found, both, pairs
            if seed is not None:
                torch.autograd.backward([seed], [seed.detach()])
        return [each.grad for each in (*inputs, *aliases.values())]


@dataclass(eq=False)
class Part:
    """One device's part of the calls.

    Args:
        is_known: it was computed once. draws: it has drawn random numbers. has_form: it returns a tuple.
        trained: its parameters, by their names in _Called.
        given: what is recorded. watched: the options that it is given.
        inputs, outputs, gradients, found: where graphs read and write; gradients are those of the outputs, found those
            of the inputs and of what is trained.
        agrees: with what was replayed.
    """

    is_known: bool = False
    draws: bool = False
    has_form: bool = False
    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    given: Given | None = None
    watched: WatchedOptions | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: Gradients = ()
    found: Gradients = ()
    agrees: bool = False

    def learn(self, block: Block, output: Any, *, draws: bool) -> None:
        """It was computed, and returned this."""
        named = module_of(block).named_parameters()
        self.trained = {f"block.{name}": each for name, each in named if each.requires_grad}
        self.draws, self.has_form, self.is_known = draws, isinstance(output, tuple), True

    def prepare(self, given: Given, inputs: list[Tensor]) -> None:
        """What is recorded: this call with these inputs."""
        block, self.inputs = given.block, inputs
        if isinstance(block, BlockCall) and OPTIONS in block.others:
            self.watched = WatchedOptions(given.options)
            block = block.with_others({**block.others, OPTIONS: self.watched})
        self.given = given._replace(block=block, tensors=inputs)

    def compute_forward(self) -> None:
        assert self.given is not None
        block, _, args, tensors, needs, _ = self.given
        inputs = [each.detach().requires_grad_(flag) for each, flag in zip(tensors, needs, strict=True)]
        copy_all(self.outputs, tensors_reached(block(*_with(args, inputs))))

    def compute_backward(self) -> None:
        assert self.given is not None
        copy_all(self.found, self.given.gradients(self.trained, self.gradients))


@dataclass(eq=False)
class Graph:
    """Args: waited: at how many calls in a row the first device had nothing to do."""

    replay: Replay | None = None
    waited: int = 0


@dataclass(eq=False)
class DividedCall:
    """Args: name: of the block. parts: by rank. read: the options that it looked up, once something is recorded."""

    name: str
    parts: list[Part]
    forward: Graph = field(default_factory=Graph)
    backward: Graph = field(default_factory=Graph)
    read: dict[Any, Any] | None = None

    def note_options(self) -> None:
        """Raises: RuntimeError if the first device's part depends on what cannot be compared."""
        watched = self.parts[0].watched
        if watched is None:
            return
        read = {name: key_of(dict.get(watched, name, MISSING)) for name in watched.read}
        if watched.written or tensors_reached([dict.get(watched, name) for name in read]):
            raise RuntimeError(f"it changes the {OPTIONS}, or reads tensors there")
        self.read = read


class _Called(nn.Module):
    """A block as functional_call takes it."""

    def __init__(self, call: Block) -> None:
        super().__init__()
        self.block, self._call = module_of(call), (call,)

    def forward(self, *args: Any) -> Any:
        return self._call[0](*args)


def options_of(block: Block) -> Mapping[Any, Any]:
    return (block.others.get(OPTIONS) or {}) if isinstance(block, BlockCall) else {}


def _with(args: tuple[Any, ...], tensors: Tensors) -> tuple[Any, ...]:
    """The arguments, with these tensors in their places."""
    left = iter(tensors)
    return map_tensors(args, lambda _: next(left))  # type: ignore[no-any-return]


@torch.no_grad()
def copy_all(targets: Gradients, sources: Gradients) -> None:
    """Nothing where either is None."""
    for target, source in zip(targets, sources, strict=True):
        if target is not None and source is not None:
            target.copy_(source)
