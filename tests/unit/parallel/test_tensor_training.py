"""Blocks divided among cards that train together: losses and gradients of one card, the same bits in every run."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize(
    "settings", [{"checkpointing": False}, {"kept": 2}, {"offload": True}, {"count": 3}], ids=lambda each: str(each)
)
def test_without_recomputation_and_with_inputs_on_the_host_and_with_several_microbatches(settings):
    count = settings.get("count", 1)
    _assert_close(_divided("flux2", 2, **settings), _on_one_card("flux2", count))


def _largest_difference(found, expected):
    return max(
        float((found[name] - gradient).norm() / gradient.norm().clamp_min(1e-20)) for name, gradient in expected.items()
    )


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("flux1", "*.norm1.linear"),  # gathered
        ("flux1", "single_transformer_blocks.*.norm.linear"),
        ("flux1", "time_text_embed.*.linear_1"),  # whole, and its gradient comes through every block
        ("flux2", "x_embedder"),
        ("flux2", "norm_out.linear"),
        ("wan", "condition_embedder.text_embedder.linear_1"),
    ],
)
def test_a_lora_outside_the_divided_linears_gets_the_gradient_of_one_card(name, target):
    targets = (*FAMILIES[name].lora_targets, target)
    _assert_close(_divided(name, 3, targets=targets), _on_one_card(name, targets=targets))


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_weights_that_are_stored_in_8_bits_are_those_of_one_card(name, scheme):
    """Rounded whole and cut afterwards, so only the order of summation differs."""
    _assert_close(_divided(name, 2, scheme=scheme), _on_one_card(name, scheme=scheme))


@pytest.mark.parametrize("scheme", ["fp8-compute", "int8-compute"])
def test_products_in_8_bits_round_each_cards_features_by_themselves(scheme):
    """Rows of inputs are scaled per card, which rounds them otherwise than on one card, and no worse."""
    exact = _on_one_card("flux2")[1]
    one = _on_one_card("flux2", scheme=scheme)[1]
    found = _divided("flux2", 2, scheme=scheme, rotation=0)[1]
    for name, gradient in exact.items():
        noise = (one[name] - gradient).norm()
        assert (found[name] - gradient).norm() <= 2 * noise + 0.02 * gradient.norm(), name


@pytest.mark.parametrize("settings", [{}, {"scheme": "int8-compute", "rotation": 16}], ids=str)
def test_it_repeats_itself_bit_for_bit(settings):
    first, second = (_divided("wan", 3, 2, **settings) for _ in range(2))
    assert first[0] == second[0] and first[1].keys() == second[1].keys()
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())
