"""Modules whose parts travel with those of a later one: the bits of a meeting each, and readers that come too early."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from devicebridge.families.tensor_plan import Divided, TensorPlan
from devicebridge.parallel.local import exchange
from devicebridge.parallel.local.exchange import TokenChunks
from devicebridge.parallel.local.meetings import Early
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.unit.parallel.test_tensor_parallel import (
    HEADS,
    NEAR,
    WIDTH,
    Attention,
    difference,
    divide,
    in_turns,
    make_model,
    run,
    x,
)
from torch import nn

assert in_turns and x  # fixtures


class TwoOutputs(Attention):
    """As Qwen-Image's attention: the parts of the stream have linears of their own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.o_text = nn.Linear(WIDTH, WIDTH)
        self.reads_early, self.leaves_out, self.num_text = "", False, 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        q = self.norm_q(self.q(x))
        if self.reads_early == "norm":
            q = q * 1
        k = self.norm_k(self.k(x))
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, self.v(x)))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        image = self.o(found[:, self.num_text :])
        if self.reads_early == "sum":
            image = image * 1
        return image, found[:, : self.num_text] if self.leaves_out else self.o_text(found[:, : self.num_text])


class Joint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.attn = WIDTH, TwoOutputs()

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        image, text = self.attn(x)
        return x + torch.cat([text[..., :1].expand(-1, -1, WIDTH) if self.attn.leaves_out else text, image], dim=1)


BY_ITSELF = TensorPlan(
    linears=(
        *(Divided(f"attn.{name}", "column", ("heads",)) for name in "qkv"),
        Divided("attn.o", "row", ("heads",)),
        Divided("attn.o_text", "row", ("heads",)),
    ),
    num_heads="attn.num_heads",
    width="width",
    attributes={"attn.num_heads": "heads"},
    norms=("attn.norm_?",),
)
NORMS = dataclasses.replace(BY_ITSELF, together={"attn": ("norm_q", "norm_k")})
SUMS = dataclasses.replace(BY_ITSELF, together={"*": ("o", "o_text", "o_that_some_builds_have")})


def _letters(parallel: TensorParallel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each letter that is sent from now on."""
    sent: list[int] = []
    send = TensorParallel.send_parts
    monkeypatch.setattr(
        TensorParallel,
        "send_parts",
        lambda self, tensors, *args: sent.append(len(tensors)) or send(self, tensors, *args),
    )
    return sent


@pytest.mark.parametrize("plan", [SUMS, NORMS, BY_ITSELF])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_go_through_a_divided_model(size, plan, x) -> None:
    """As of nodes that guide by them; without inference mode."""
    model = make_model(Joint(), Joint())
    given = x.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(model(given).square().sum(), given)
    parallel = divide(model, size, plans=(plan,))
    for _ in range(2):  # the first compares the blocks
        given = x.clone().requires_grad_(True)
        with parallel.forward():
            output = model(given)
        (found,) = torch.autograd.grad(output.square().sum(), given)
        assert difference(found, expected) < NEAR


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("size", [2, 3, HEADS])
def test_parts_in_one_letter_are_the_bits_of_a_letter_each(size, mode, x, monkeypatch) -> None:
    outputs, letters = [], []
    for plan in (SUMS, NORMS, BY_ITSELF):
        model = make_model(Joint(), Joint())
        expected = model(x)
        parallel = divide(model, size, plans=(plan,))
        with monkeypatch.context() as patch:
            sent = _letters(parallel, patch)
            for _ in range(2):
                with mode(), parallel.forward():
                    outputs.append(model(x))
        letters.append(sent)
    assert all(torch.equal(each, outputs[0]) for each in outputs) and difference(outputs[0], expected) < NEAR
    pairs = 2 * 2 * size * (size - 1)  # of two blocks in two forwards
    assert [(len(sent), sum(sent)) for sent in letters] == [(3 * pairs, 4 * pairs)] * 2 + [(4 * pairs, 4 * pairs)]


@pytest.mark.parametrize(("num_text", "rows"), [(2, 10), (5, 10), (2, 4)])
@pytest.mark.parametrize("size", [2, 3])
def test_a_large_output_is_computed_by_chunks_unless_earlier_parts_travel_with_it(size, num_text, rows, x) -> None:
    """The image's is large, the text's, with which the image's travels, or both."""
    model = make_model(Joint(), Joint())
    for block in model.blocks:
        block.attn.num_text = num_text
    expected = model(x)
    parallel = divide(model, size, plans=(SUMS,), chunks=TokenChunks(4, 2, from_bytes=4 * rows * WIDTH))
    for _ in range(2):
        assert difference(run(parallel, model, x), expected) < NEAR


@pytest.mark.parametrize("size", [3, HEADS])
def test_parts_in_one_letter_may_be_added_slice_by_slice(size, x, monkeypatch) -> None:
    outputs = []
    for least, plan in ((0, SUMS), (4 * 2 * 3 * WIDTH, SUMS), (2**30, BY_ITSELF)):  # all, the image's, none
        monkeypatch.setattr(exchange, "SLICED_FROM_BYTES", least)
        model = make_model(Joint(), Joint())
        outputs.append(run(divide(model, size, plans=(plan,)), model, x))
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize(("reads", "plan"), [("norm", NORMS), ("sum", SUMS)])
def test_code_that_reads_an_output_too_early_is_found(reads, plan, x) -> None:
    model = make_model(Joint(), Joint())
    model.blocks[1].attn.reads_early = reads
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"mul reads a layer's output before another.*way 'blocks'"):
        run(divide(model, 2, plans=(plan,)), model, x)
    model = make_model(Joint(), Joint())
    model.blocks[1].attn.reads_early = reads
    assert difference(run(divide(model, 2, plans=(BY_ITSELF,)), model, x), expected) < NEAR


@pytest.mark.parametrize(("reads", "plan"), [("norm", NORMS), ("sum", SUMS)])
def test_beside_other_peoples_code_every_output_is_complete_at_once(reads, plan, x) -> None:
    """That code may read it, and may come when the blocks have been compared."""
    model = make_model(Joint(), Joint())
    expected = model(x)
    parallel = divide(model, 2, plans=(plan,))
    run(parallel, model, x)
    for own, others in parallel._shards.values():
        for shard in (own, *others):
            shard.block.attn.reads_early = reads
    parallel.runs_alone = False
    assert difference(run(parallel, model, x), expected) < NEAR


@pytest.mark.parametrize("rank", [0, 1])
def test_a_later_layer_that_is_not_computed_is_an_error(rank, x) -> None:
    model = make_model(Joint())
    parallel = divide(model, 2, plans=(SUMS,))
    expected = run(parallel, model, x)
    own, (other,) = parallel._shards[model.blocks[0]]
    attention = (own, other)[rank].block.attn
    attention.leaves_out = True
    with pytest.raises(RuntimeError, match="behind a later one was computed|different places"):
        run(parallel, model, x)
    attention.leaves_out = False
    assert torch.equal(run(parallel, model, x), expected)


@pytest.mark.parametrize("name", ["T", "mT", "data", "real"])
def test_attributes_with_an_outputs_values_are_not_read_too_early(name) -> None:
    output = torch.zeros(2, 3).as_subclass(Early)
    assert output.shape == (2, 3) and output.dtype == torch.float32 and output.requires_grad is False
    with pytest.raises(RuntimeError, match="before another layer is computed"):
        getattr(output, name)


def test_an_output_is_an_ordinary_tensor_once_it_is_complete() -> None:
    plain = torch.zeros(2, 3)
    early = plain.as_subclass(Early)
    assert early.shape == (2, 3) and early.dtype is torch.float32 and early.device == plain.device
    for read in (
        torch.neg,
        lambda x: x + 1,
        lambda x: x.view(-1),
        torch.Tensor.tolist,
        lambda x: torch.cat([plain, x]),
    ):
        with pytest.raises(RuntimeError, match="reads a layer's output before"):
            read(early)
    plain.fill_(3)
    early.is_complete = True
    assert torch.equal(early + 1, plain + 1) and type(early + 1) is torch.Tensor
    assert type(torch.cat([plain, early])) is torch.Tensor and type(early.chunk(2)[1]) is torch.Tensor
