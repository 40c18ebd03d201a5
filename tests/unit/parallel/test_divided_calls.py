"""Calls that are recorded in training, one device's at a time: losses and gradients of recompute.py in odd cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devicebridge.parallel.local import training_graphs
from devicebridge.parallel.local.exchange import Exchange
from devicebridge.parallel.local.recorded_calls import Unlike, key_of
from devicebridge.parallel.local.shards import BlockShard
from devicebridge.parallel.local.training_graphs import TrainingGraphs
from devicebridge.parallel.offload.block_call import BlockCall
from devicebridge.parallel.offload.recompute import recompute
from devicebridge.tests.stand_in_recorder import TogetherStandIn
from torch import nn

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.fails = False


class Scaled(Block):
    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        return (x * self.w * transformer_options["scale"]).sin()


class Two(Block):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fails:
            raise MemoryError("no room")
        return (x * self.w + y).sin(), (y * self.w).cos()


class Apart(Block):
    """Its second output depends on nothing that is trained."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * self.w).sin(), y.cos()


class Drawing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.w, 0.5)


def _hand_over(tensors: Any, rank: int, arrivals: Any) -> Any:
    return tensors


class Steps:
    """Steps of some blocks, computed again and recorded, or only computed again."""

    def __init__(self, *blocks: Block, is_recorded: bool = True) -> None:
        self.blocks, self.recorder, self._is_recorded = blocks, TogetherStandIn(), is_recorded
        shards = [{f"block {index}": BlockShard(block) for index, block in enumerate(blocks)}]
        in_use = [Exchange(1, _hand_over)]
        self.graphs = TrainingGraphs(shards, lambda: in_use[-1], in_use.append, _hand_over, self.recorder)

    def compute(self, block: Any, *args: Any) -> Any:
        return self.graphs.recompute(0, block, args, CPU) if self._is_recorded else recompute(block, args, CPU)

    def run(self, loss: Loss, count: int = 7) -> list[torch.Tensor]:
        """Losses and gradients."""
        torch.manual_seed(1)
        found = []
        for number in range(count):
            self.graphs.start_step()
            made = loss(self, number)
            self.recorder.cards_wait = True
            made.backward()
            found += [made.detach(), *(block.w.grad for block in self.blocks if block.w.grad is not None)]
            for block in self.blocks:
                block.w.grad = None
            self.graphs.end_step()
        return found


Loss = Callable[[Steps, int], torch.Tensor]


def inputs(number: int) -> list[torch.Tensor]:
    return list(torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(number)))


def of_two(steps: Steps, number: int) -> torch.Tensor:
    first, second = steps.compute(steps.blocks[0], *inputs(number))
    return (first + second).sum()  # type: ignore[no-any-return]


def run_both(make: Callable[[], tuple[Block, ...]], loss: Loss) -> Steps:
    """Compares, and returns the recorded steps."""
    recorded, plain = Steps(*make()), Steps(*make(), is_recorded=False)
    found, expected = recorded.run(loss), plain.run(loss)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    return recorded


@pytest.mark.parametrize("cards_wait", [True, False])
def test_a_call_with_other_options_is_computed(cards_wait: bool) -> None:
    """Also where the backward of one is recorded before any forward is."""

    def loss(steps: Steps, number: int) -> torch.Tensor:
        x, _ = inputs(number)
        for scale in (1.0, 3.0, 2.0):
            steps.recorder.cards_wait = cards_wait
            options = {"transformer_options": {"scale": scale}}
            x = steps.compute(BlockCall(steps.blocks[0], options, ("transformer_options",)), x)
        return x.sum()

    steps = run_both(lambda: (Scaled(),), loss)
    assert steps.graphs.num_replays and not steps.graphs.fault


def test_options_that_a_model_changes_between_blocks_are_those_of_the_call() -> None:
    def loss(steps: Steps, number: int) -> torch.Tensor:
        x, _ = inputs(number)
        options = {"scale": 1.0}
        for block in steps.blocks:
            x = steps.compute(BlockCall(block, {"transformer_options": options}, ("transformer_options",)), x)
        options["scale"] = 1.0  # as it was: recompute.py sees what is there in the backward
        return x.sum()

    steps = run_both(lambda: (Scaled(), Scaled(), Scaled()), loss)
    assert steps.graphs.num_replays > 12 and not steps.graphs.fault


def test_a_call_of_whose_outputs_others_have_gradients_is_computed() -> None:
    def loss(steps: Steps, number: int) -> torch.Tensor:
        given = [each.requires_grad_() for each in inputs(number)]
        x, _ = steps.compute(steps.blocks[0], *steps.compute(steps.blocks[0], *given))
        return x.sum()  # type: ignore[no-any-return]

    steps = run_both(lambda: (Two(),), loss)
    assert steps.graphs.num_replays and not steps.graphs.fault


def test_outputs_that_nothing_trained_leads_to_have_gradients() -> None:
    def loss(steps: Steps, number: int) -> torch.Tensor:
        (first, second), (x, y) = steps.blocks, inputs(number)
        x, y = steps.compute(second, x, steps.compute(first, x, y)[1])
        return (x + y).sum()

    run_both(lambda: (Apart(), Apart()), loss)


def test_random_numbers_are_the_same_in_the_second_forward() -> None:
    def loss(steps: Steps, number: int) -> torch.Tensor:
        return steps.compute(steps.blocks[0], inputs(number)[0]).sum()

    steps = run_both(lambda: (Drawing(),), loss)
    assert steps.recorder.num_recorded == 0


def test_a_block_whose_first_call_failed_is_learned_at_the_next() -> None:
    steps, plain = Steps(Two()), Steps(Two(), is_recorded=False)
    steps.blocks[0].fails = True
    steps.graphs.start_step()
    with pytest.raises(MemoryError):
        steps.compute(steps.blocks[0], *inputs(0))
    steps.graphs.end_step(has_failed=True)
    steps.blocks[0].fails = False
    found, expected = steps.run(of_two), plain.run(of_two)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected) == 14


@pytest.mark.parametrize("name", ["empty_like", "are_alike", "same_bits"])
def test_too_little_memory_for_a_recording_ends_recording_and_not_the_step(name, monkeypatch) -> None:
    def no_room(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(training_graphs, name, no_room)
        steps = run_both(lambda: (Two(),), of_two)
    assert steps.graphs.fault


@pytest.mark.parametrize("value", [[].append, torch.ones(1).add, "a".join], ids=["list", "tensor", "text"])
def test_methods_cannot_be_compared(value: Any) -> None:
    with pytest.raises(Unlike):
        key_of(value)
