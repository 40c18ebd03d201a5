"""Copies that share out the rows of each microbatch: losses and gradients of one card, the same bits in every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devicebridge.families.token_plan import TokenPlan
from devicebridge.parallel.local.tensor_training import TokenTraining
from devicebridge.parallel.runner import PlainAccumulation
from devicebridge.tests.emulated import CARDS, emulated_cards, factories_on_cards, on_cpu
from devicebridge.tests.token_cases import PLAN, WHOLE_TEXT, make_toy, make_training, microbatches
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")


def _plainly(num_steps: int = 1) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    toy = make_toy()
    losses = PlainAccumulation(toy, torch.device("cpu")).run(microbatches(toy, num_steps))
    return losses, {name: each.grad for name, each in toy.named_parameters() if each.grad is not None}


def _shared(num_cards: int, count: int = 1, plan: TokenPlan = PLAN, *, recomputes: bool = True) -> Any:
    with emulated_cards(4), factories_on_cards():
        training = make_training(make_toy(), CARDS[:num_cards], plan, recomputes=recomputes)
        losses = [on_cpu(loss) for loss in training.run(microbatches(training.model, count))]
        first, *others = training.model.trees
        assert all(parameter.grad is None for other in others for parameter in other.parameters())
        return losses, {name: on_cpu(each.grad).clone() for name, each in first.named_parameters()}


@pytest.mark.parametrize("plan", [PLAN, WHOLE_TEXT], ids=["text shared out", "text whole"])
@pytest.mark.parametrize(("num_cards", "recomputes"), [(2, True), (3, True), (3, False)])
def test_losses_and_gradients_are_those_of_one_card(num_cards: int, recomputes: bool, plan: TokenPlan) -> None:
    losses, expected = _plainly(2)
    found, gradients = _shared(num_cards, 2, plan, recomputes=recomputes)
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-12)
    for name, gradient in gradients.items():
        assert expected[name].abs().max() > 0
        assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_every_run_has_the_same_bits() -> None:
    first, second = _shared(3), _shared(3)
    assert all(map(torch.equal, first[0], second[0]))
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_copies_follow_the_first_one() -> None:
    with emulated_cards(2), factories_on_cards():
        training = make_training(make_toy(), CARDS[:2], PLAN, recomputes=True)
        training.run(microbatches(training.model, 1))
        first, second = training.model.trees
        with torch.no_grad():
            for each in first.parameters():
                each.sub_(0.1 * each.grad)
        training.sync()
        assert all(
            torch.equal(on_cpu(a), on_cpu(b)) for a, b in zip(first.parameters(), second.parameters(), strict=True)
        )


def _run(training: TokenTraining, **counts: int) -> None:
    training.run(microbatches(training.model, 1, **counts))


def test_a_sample_with_fewer_rows_than_cards_is_refused_by_the_settings_name() -> None:
    with emulated_cards(3), factories_on_cards():
        training = make_training(make_toy(), CARDS[:3], PLAN, recomputes=True)
        with pytest.raises(ValueError, match=r'parallel\.strategy = "tokens".*2 rows of txt for 3'):
            _run(training, num_text=2)
        _run(training)


class _Broken(nn.Module):
    def forward(self, *args: Any) -> Any:
        raise MemoryError("card full")


@pytest.mark.parametrize("at", ["blocks.1.mod", "last"])
def test_a_card_that_fails_ends_the_others(at: str) -> None:
    with emulated_cards(3), factories_on_cards():
        training = make_training(make_toy(), CARDS[:3], PLAN, recomputes=True)
        training.model.trees[1].set_submodule(at, _Broken())
        with pytest.raises(MemoryError, match="card full"):
            _run(training)
        assert not training.model._rows.newest  # nothing of a step is held
