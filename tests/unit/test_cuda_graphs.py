"""Replayed blocks: the numbers of plain ones, slots for what is in flight, and what is refused. Recordings are run anew
here; what only a card does is in tests/gpu/test_cuda_graphs_on_gpus.py."""

from __future__ import annotations

import contextlib

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.pipeline import Pipeline
from devicebridge.patches.cuda_graphs import apply_cuda_graphs
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.tiny_split import make_micro_batches, make_tiny_split

CPU = torch.device("cpu")


class RunsAnew:
    """A recorder for devices without graphs: a replay computes once more, from the tensors that a graph would read."""

    def __init__(self, device=CPU):
        self.num_recorded = self.num_replayed = self.num_released = 0

    def make_pool(self):
        return object()

    def aside(self):
        return contextlib.nullcontext()

    def record(self, compute, pool):
        self.num_recorded += 1

        def replay():
            self.num_replayed += 1
            compute()

        return replay

    def release(self):
        self.num_released += 1


def _graphed(split):
    handle = apply_cuda_graphs(split.kept_blocks, RunsAnew)
    handle.is_on = True
    return handle


def _steps(name, cards, count, *, kind=None, graphs=False, num_steps=3, **settings):
    """Losses and gradients of several steps, between which the LoRA changes."""
    with emulated_cards(4):
        model, split, lora = make_tiny_split(name, cards, **settings)
        handle = _graphed(split) if graphs else None
        found, slots = [], []
        for step in range(num_steps):
            batches = make_micro_batches(model, name, count)
            if handle is not None:
                handle.start_step()
            if kind is None:
                losses = []
                for batch in batches:
                    losses.append(batch.forward(batch.prepare()))
                    losses[-1].backward()
            else:
                losses = Pipeline(split.bridge, kind=kind).run(batches)
            gradients = {key: on_cpu(parameter.grad) for key, parameter in lora.parameters().items()}
            found.append(([on_cpu(loss.detach()) for loss in losses], gradients))
            for parameter in lora.parameters().values():
                with torch.no_grad():
                    parameter.add_(0.1 * (step + 1) * torch.ones_like(parameter))
                parameter.grad = None
        if handle is not None:
            assert handle.fault == ""
            slots = list(handle.num_slots.values())
            recorders = [card.recorder for card in handle._cards.values()]
            assert all(r.num_recorded > 0 and r.num_replayed > r.num_recorded for r in recorders)
            handle.remove()
        return found, slots


def _assert_equal(found, expected):
    for (losses, gradients), (others, other_gradients) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
        assert all(torch.equal(gradients[key], other_gradients[key]) for key in other_gradients)
        assert all(gradient.abs().sum() > 0 for gradient in other_gradients.values())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_losses_and_gradients_of_every_family_are_those_of_plain_blocks_bit_for_bit(name):
    settings = {"checkpointing": False}
    expected, _ = _steps(name, CARDS[:2], 4, **settings)
    found, slots = _steps(name, CARDS[:2], 4, kind="1f1b", graphs=True, **settings)
    _assert_equal(found, expected)
    assert slots == [3, 1]


@pytest.mark.parametrize(
    ("kind", "settings", "slots"),
    [
        (None, {"checkpointing": False}, [1, 1]),
        ("gpipe", {"checkpointing": False}, [4, 4]),
        ("1f1b", {"kept": (1, 2)}, [3, 1]),
        ("1f1b", {"kept": (0, 2)}, [1]),
    ],
    ids=str,
)
def test_any_schedule_and_any_number_of_kept_blocks(kind, settings, slots):
    expected, _ = _steps("flux2", CARDS[:2], 4, **settings)
    found, made = _steps("flux2", CARDS[:2], 4, kind=kind, graphs=True, **settings)
    _assert_equal(found, expected)
    assert made == slots
