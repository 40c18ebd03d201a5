"""Gathered linears of many blocks, joined in one meeting at the first of them, against a meeting in each block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devicebridge.parallel.local import ahead
from devicebridge.parallel.local.exchange import Exchange
from devicebridge.tests.unit.parallel.test_tensor_parallel import (
    NEAR,
    PLANS,
    WIDTH,
    Fused,
    Model,
    Separate,
    difference,
    divide,
    in_turns,
    make_model,
    run,
    x,
)
from torch import nn
from torch.nn import functional as F

assert in_turns and x  # fixtures

IN_EACH = tuple(
    dataclasses.replace(plan, linears=tuple(dataclasses.replace(each, of="") for each in plan.linears))
    for plan in PLANS
)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The meetings of home at which outputs are joined."""
    names: list[str] = []
    join = Exchange.all

    def note(self: Exchange, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        names.extend([name] if rank == 0 else [])
        return join(self, rank, name, tensor)

    monkeypatch.setattr(Exchange, "all", note)
    return names


class Given(Model):
    """Hands every block a vector of its own; takes and returns the stream alone."""

    vectors: list[torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for block, vec in zip(self.blocks, self.vectors, strict=True):
            x = F.layer_norm(block(x.clone(), vec), (WIDTH,))  # or the numbers overflow
        return x


def _given(vectors: list[torch.Tensor], *blocks: nn.Module) -> Given:
    model = make_model(*blocks or (Fused() for _ in vectors))
    model.__class__ = Given
    model.vectors = vectors  # type: ignore[assignment]
    return model  # type: ignore[return-value]


def _vectors(number: int) -> list[torch.Tensor]:
    return [torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(each)) for each in range(number)]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(("size", "weights"), [(2, ()), (2, (1.0, 3.0)), (3, ()), (4, ())])
def test_one_meeting_joins_the_same_bits_as_one_in_each_block(size, weights, mode, x, joined) -> None:
    outputs = []
    for plans in (PLANS, IN_EACH):
        model = make_model(Separate(), Fused(), Fused(), Separate(), Fused())
        expected = model(x)
        parallel = divide(model, size, weights, plans=plans)
        for _ in range(2):
            with mode(), parallel.forward():
                outputs.append(model(x))
    assert joined == 2 * ["modulation.lin of 3 blocks"] + 6 * ["modulation.lin"]
    assert all(torch.equal(each, outputs[0]) for each in outputs) and difference(outputs[0], expected) < NEAR


def test_a_block_that_is_given_another_vector_joins_its_own(x, joined) -> None:
    one, two = _vectors(2)
    model = _given([one, two, one, one.clone()])
    expected = model(x)
    assert difference(run(divide(model, 2), model, x), expected) < NEAR
    assert joined == ["modulation.lin of 4 blocks", "modulation.lin", "modulation.lin"]


def test_a_vector_that_was_written_to_is_another_one(x, joined) -> None:
    (vec,) = _vectors(1)
    model = _given([vec, vec, vec])
    parallel = divide(model, 2)
    outputs = []

    def write(module: nn.Module, args: Any) -> None:
        vec.mul_(0.5)

    for _ in range(2):
        vec.copy_(*_vectors(1))
        handle = model.blocks[1].register_forward_hook(lambda module, args, output: write(module, args))
        with torch.no_grad(), parallel.forward():
            outputs.append(model(x))
        handle.remove()
    whole = _given([_vectors(1)[0], _vectors(1)[0], 0.5 * _vectors(1)[0]])
    assert difference(outputs[0], whole(x)) < NEAR and torch.equal(*outputs)
    assert joined == 2 * ["modulation.lin of 3 blocks", "modulation.lin"]


def test_beside_other_peoples_code_every_block_joins_its_own(x, joined) -> None:
    """It may write to the vector, which has no version in inference mode."""
    model = make_model(Fused(), Fused())
    expected = model(x)
    parallel = divide(model, 2)
    parallel.runs_alone = False
    assert difference(run(parallel, model, x), expected) < NEAR
    assert joined == ["modulation.lin", "modulation.lin"]


def test_a_block_that_is_called_again_joins_its_own(x, joined) -> None:
    (vec,) = _vectors(1)
    model = _given([vec, vec, vec], Fused(), Fused())
    model.blocks.append(model.blocks[0])
    expected = model(x)
    parallel = divide(_two(model), 2)
    assert difference(run(parallel, model, x), expected) < NEAR
    assert joined == ["modulation.lin of 2 blocks", "modulation.lin"]


def _two(model: Given) -> nn.Module:
    """Its two blocks, once each."""
    found = nn.Module()
    found.blocks = model.blocks[:2]
    return found


def test_a_block_that_is_left_out_leaves_the_others_alone(x, joined) -> None:
    (vec,) = _vectors(1)
    model = _given([vec, vec, vec])
    parallel = divide(model, 2)
    del model.blocks[1], model.vectors[1]
    whole = _given([vec, vec, vec])
    del whole.blocks[1], whole.vectors[1]
    assert difference(run(parallel, model, x), whole(x)) < NEAR
    assert joined == ["modulation.lin of 3 blocks"]


def test_large_outputs_are_joined_in_each_block(x, joined, monkeypatch) -> None:
    """As for a vector per token: those of all blocks would be held until the forward ends."""
    model = make_model(Fused(), Fused())
    expected = model(x)
    parallel = divide(model, 2)
    monkeypatch.setattr(ahead, "_MOST_BYTES", 4 * 2 * 2 * 3 * WIDTH)
    assert difference(run(parallel, model, x), expected) < NEAR
    monkeypatch.setattr(ahead, "_MOST_BYTES", 4 * 2 * 2 * 3 * WIDTH - 1)
    assert difference(run(parallel, model, x), expected) < NEAR
    assert joined == ["modulation.lin of 2 blocks", "modulation.lin", "modulation.lin"]


class Half(Fused):
    """Takes half of the vector where it is told to."""

    is_half = False

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        shift, scale, gate = self.modulation(vec[:1] if self.is_half else vec)
        return x + gate * self.linear2(F.silu(self.linear1((x + shift) * scale)[..., : self.linear2.in_features]))


def test_a_linear_that_is_given_another_shape_joins_its_own(x, joined) -> None:
    """Its input does not follow from the vector alone; some shapes tell."""
    (vec,) = _vectors(1)
    outputs = []
    for linears in (PLANS[0].linears, IN_EACH[0].linears):
        model = _given([vec, vec, vec], Half(), Half(), Half())
        model.blocks[1].is_half = True
        parallel = divide(model, 2, plans=(dataclasses.replace(PLANS[0], block="Half", linears=linears),))
        outputs.append(run(parallel, model, x))
    assert torch.equal(*outputs) and joined[:2] == ["modulation.lin of 3 blocks", "modulation.lin"]


def test_the_argument_is_found_by_its_place_and_by_its_name() -> None:
    group = ahead.SameInput("vec", 1, [])
    (vec,) = _vectors(1)
    assert group.value((0,), {"vec": vec}) is vec and group.value((0, vec), {}) is vec
    assert group.value((0,), {}) is None and ahead.SameInput("c", None, []).value((vec,), {}) is None
