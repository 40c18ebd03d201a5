"""Block inputs in host memory: the same numbers, as many copies as theory says, a bounded number on the card."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel import lanes as lanes_module
from devicebridge.parallel import offload as offload_module
from devicebridge.parallel.block_split import apply_block_split
from devicebridge.parallel.offload import Offload
from devicebridge.parallel.pipeline import MicroBatch, Pipeline
from devicebridge.parallel.placement import Placement, block_names, plan_manual
from devicebridge.parallel.recompute import recompute
from devicebridge.tests.emulated import CARDS, EmulatedTensor, emulated_cards, live_bytes, on_cpu
from devicebridge.tests.streams import Clock, SimulatedMachine
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from devicebridge.training.config import LoraSettings
from torch import nn

CPU, HOME = torch.device("cpu"), CARDS[0]
pytestmark = pytest.mark.usefixtures("one_thread")


def _make(name, cards, *, offload, dropout=0.3, kept=()):
    family = FAMILIES[name]
    model = TINY[name].make_model(seed=0)
    names = block_names(model, family)
    cuts = [len(names) * (i + 1) // len(cards) for i in range(len(cards) - 1)]
    manual = plan_manual(names, list(cards), cuts)
    split = apply_block_split(
        model, family, Placement(manual.blocks, manual.devices, manual.home, tail=tuple(family.tail))
    )
    lora = apply_lora(model, family, LoraSettings(rank=2, alpha=3, dropout=dropout), seed=1)
    for parameter in lora.parameters().values():
        generator = torch.Generator().manual_seed(parameter.numel())
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1))
    model.train()
    model.enable_gradient_checkpointing(split.checkpoint)
    split.keep_activations(kept)
    if offload:
        split.offload_inputs(min_bytes=1)
    return model, split, lora


def _micro_batches(model, name, count, home=HOME):
    family, tiny = FAMILIES[name], TINY[name]

    def make(index):
        def forward(inputs):
            inputs = {k: v.to(home) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            output = model(**inputs, return_dict=False)[0]
            return family.read_prediction(output, tiny.make_latents(seed=index)).square().mean() / count

        return MicroBatch(lambda: tiny.make_inputs(seed=index), forward)

    return [make(index) for index in range(count)]


def _train(split, batches, kind):
    if kind is not None:
        return Pipeline(split.bridge, kind=kind, ahead=1).run(batches)
    losses = []
    for batch in batches:
        loss = batch.forward(batch.prepare())
        loss.backward()
        losses.append(loss.detach())
    return losses


def _step(name, num_cards, kind, *, offload, **settings):
    """Losses, gradients, random states; and the copies to and from the host while training."""
    with emulated_cards(4) as machine:
        model, split, lora = _make(name, CARDS[:num_cards], offload=offload, **settings)
        machine.copies.clear()
        losses = _train(split, _micro_batches(model, name, 4), kind)
        gradients = {key: on_cpu(parameter.grad) for key, parameter in lora.parameters().items()}
        states = [torch.lazy.get_rng_state(card) for card in CARDS[:num_cards]]
        return [on_cpu(loss) for loss in losses], gradients, states, machine.copies


@pytest.mark.parametrize(
    ("name", "num_cards", "kind", "kept"),
    [
        *((name, 2, "1f1b", ()) for name in sorted(FAMILIES)),
        ("flux2", 1, None, ()),
        ("flux2", 3, "gpipe", ()),
        ("flux2", 2, "1f1b", (1, 1)),
        ("wan", 2, None, ()),
    ],
)
def test_numbers_are_those_without(name, num_cards, kind, kept):
    expected = _step(name, num_cards, kind, offload=False, kept=kept)
    found = _step(name, num_cards, kind, offload=True, kept=kept)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert all(torch.equal(gradient, expected[1][key]) for key, gradient in found[1].items())
    assert all(gradient.abs().sum() > 0 for gradient in expected[1].values())
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2], strict=True))
    assert len(found[3]) > len(expected[3])


# ---- how much goes


class _Block(nn.Module):
    """Reads a stream, which it changes, and a table, which it does not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, table):
        return self.linear(x) + table


def _blocks(count, device=HOME):
    torch.manual_seed(0)
    return [_Block().to(device) for _ in range(count)]


def _forward(blocks, keeper, batch=3, device=HOME):
    x, table = torch.randn(batch, 8).to(device).requires_grad_(), torch.randn(batch, 8).to(device)
    for block in blocks:
        x = recompute(block, (x, table), device, keeper)
    return x.square().sum()


STREAM = 3 * 8 * 4  # bytes of x


def _to_and_fro(machine):
    out = [copy.num_bytes for copy in machine.copies if copy.source != CPU and copy.target == CPU]
    back = [copy.num_bytes for copy in machine.copies if copy.source == CPU and copy.target != CPU]
    return out, back


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7])
def test_one_forward_and_backward_copies_the_stream_and_never_what_blocks_share(num_blocks):
    """Of the last two blocks the inputs are on the card when the backward begins: one was not sent, one is there yet."""
    with emulated_cards(1) as machine:
        blocks, keeper = _blocks(num_blocks), Offload(min_bytes=1)
        for _ in range(2):
            loss = _forward(blocks, keeper)
            machine.copies.clear()
            loss = _forward(blocks, keeper)
            machine.copies[:2] = []  # x and the table
            loss.backward()
            out, back = _to_and_fro(machine)
            del loss
        assert out[-(num_blocks - 1) :] == [STREAM] * (num_blocks - 1) if num_blocks > 1 else True
        assert back == [STREAM] * max(0, num_blocks - 2)
