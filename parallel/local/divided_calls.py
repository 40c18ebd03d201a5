"""A block's calls in training that are alike but for the numbers in tensors; training_graphs.py records them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...patches.cuda_graph_block import Gradients, PlainBlock, aliases_of, copy_all, trained_in
from ...patches.hooks import map_tensors, tensors_reached
from ..devices import random_state
from ..offload.block_call import BlockCall, module_of
from ..offload.recompute import PLACE, fill, has_drawn, second_forward, seed_of
from .exchange import Exchange
from .recorded_calls import OPTIONS, WatchedOptions, keys_read

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
        options = dict(block.others.get(OPTIONS) or {}) if isinstance(block, BlockCall) else {}
        return Given(block, device, map_tensors(args, lambda _: PLACE), tensors, needs, options)

    def outputs(self) -> tuple[list[Tensor], Tensor | None]:
        """Of the block itself, and its generator's state before if it draws random numbers; as in recompute.py."""
        before = random_state(self.device)
        found = tensors_reached(self.block(*fill(self.args, self.tensors)))
        return found, before if has_drawn(self.device, before) else None

    def gradients(
        self, trained: Mapping[str, nn.Parameter], gradients: Gradients, random: Tensor | None = None
    ) -> Gradients:
        """Of all inputs and what is trained, by the block itself; None for those without. As in recompute.py, so that
        sums are in the same order.

        Args:
            gradients: of the outputs. random: the generator's state before the forward, if that drew from it.
        """
        inputs = [each.detach().requires_grad_(flag) for each, flag in zip(self.tensors, self.needs, strict=True)]
        aliases: dict[str, Any] = aliases_of(trained)
        with torch.enable_grad(), second_forward(self.device, random):
            plain = PlainBlock(module_of(self.block), self.block.__call__)
            found = tensors_reached(functional_call(plain, aliases, fill(self.args, inputs)))
            seed = seed_of(found, gradients)
        del found
        if seed is not None:
            torch.autograd.backward([seed], [seed.detach()])
        return [each.grad for each in (*inputs, *aliases.values())]


@dataclass(eq=False)
class Part:
    """One device's part of the calls.

    Args:
        is_known: it was computed once. draws: it has drawn random numbers. has_form: it returns a tuple.
        trained: its parameters, by their names in PlainBlock.
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
        self.trained = trained_in(module_of(block))
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
        copy_all(self.outputs, tensors_reached(block(*fill(args, inputs))))

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
        """Raises: RuntimeError if a part depends on what cannot be compared."""
        watched = [each.watched for each in self.parts if each.watched is not None]
        self.read = keys_read(watched) if watched else None
