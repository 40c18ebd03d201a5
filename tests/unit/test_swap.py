"""Blocks whose weights stream from host memory: the numbers of a resident model, as few copies as theory has."""

from __future__ import annotations

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel import swap as swap_module
from devicebridge.parallel.pipeline import Pipeline
from devicebridge.parallel.placement import place_swapped, spread_swapped
from devicebridge.parallel.swap import apply_block_swap
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.unit.test_pipeline import _assert_equal, _gradients, _make, _micro_batches, _plainly, on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def tiny_weights_rest(monkeypatch):
    monkeypatch.setattr(swap_module, "SMALLEST_BYTES", 1024)


def _swapped(split, counts, kept=()):
    return apply_block_swap(split, list(place_swapped(split.placement, kept, counts)))


def _step(name, cards, count, swapped=(), *, kind=None, steps=1, kept=(), **settings):
    with emulated_cards(4):
        model, split, lora = _make(name, cards, kept=kept, **settings)
        if swapped:
            _swapped(split, swapped, kept)
        losses = []
        for _ in range(steps):
            batches = _micro_batches(model, name, count)
            losses += _plainly(batches) if kind is None else Pipeline(split.bridge, kind=kind, ahead=1).run(batches)
        states = [torch.lazy.get_rng_state(card) for card in cards]
        return [on_cpu(loss) for loss in losses], _gradients(lora), states


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("kind", [None, "1f1b"])
def test_losses_and_gradients(name, kind):
    _assert_equal(_step(name, CARDS[:2], 3, (2, 2), kind=kind), _step(name, CARDS[:2], 3))
