"""Blocks divided among cards that train together: losses and gradients of one card, the same bits in every run."""

from __future__ import annotations

import pytest
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.runner import PlainAccumulation
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.shard_cases import make_divided
from devicebridge.tests.tiny_split import make_batches_for, make_tiny_split

pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")


def _on_one_card(name, count=1, **settings):
    with emulated_cards(4):
        model, split, lora = make_tiny_split(name, CARDS[:1], **settings)
        plain = PlainAccumulation(model, split.home)
        losses = [on_cpu(loss) for loss in plain.run(make_batches_for(plain.replica_for, name, count))]
        return losses, {key: on_cpu(value.grad) for key, value in lora.parameters().items()}


def _divided(name, num_cards, count=1, **settings):
    with emulated_cards(4):
        runner, lora = make_divided(name, CARDS[:num_cards], **settings)
        losses = [on_cpu(loss) for loss in runner.run(make_batches_for(runner.replica_for, name, count))]
        return losses, {key: on_cpu(value.grad).clone() for key, value in lora.parameters().items()}


def _assert_close(found, expected, tolerance=1e-5):
    for loss, other in zip(found[0], expected[0], strict=True):
        assert abs(loss - other) <= tolerance * abs(other)
    assert found[1].keys() == expected[1].keys() and len(expected[1]) > 8
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("num_cards", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_losses_and_gradients_are_those_of_one_card(name, num_cards):
    """4 heads on 3 cards are divided unevenly."""
    _assert_close(_divided(name, num_cards), _on_one_card(name))
