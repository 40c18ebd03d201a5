"""Blocks with experts, of which a gate chooses one per token, divided among cards: outputs of the whole. The experts'
partial sums are added up once, behind all of them. What the gate chooses must be the same everywhere."""

import dataclasses
from typing import Any

import pytest
import torch
from devicebridge.families.tensor_plan import TensorPlan
from devicebridge.families.tensor_plan import plan as plan_of
from devicebridge.parallel.local.collectives import Collective
from devicebridge.tests.unit.parallel.test_tensor_parallel import HEADS, WIDTH, difference, divide, make_model, run
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")
HIDDEN = 24
(PLAN,) = plan_of(
    features="ff.*.up", features_back="ff.*.down/ff", mlp="tail.up>tail.down",
    num_heads="num_heads", width="width", decided=("ff.gate",),
)  # fmt: skip


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Gate(nn.Module):
    """As HiDream's: of each token an expert, its weight, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        weights, experts = F.linear(x, self.weight).softmax(dim=-1).max(dim=-1)
        return experts, weights, None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared, self.gate = nn.ModuleList(Mlp() for _ in range(3)), Mlp(), Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights, _ = self.gate(x)
        rows = [self.experts[index](x[chosen == index]) for index in range(3)]
        y = torch.zeros_like(x)
        for index, each in enumerate(rows):
            y = y.masked_scatter((chosen == index)[..., None].expand_as(y), each)
        return y * weights[..., None] + self.shared(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.width = HEADS, WIDTH
        self.ff, self.tail = Experts(), Mlp()

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        x = x + self.ff(x)
        return x + self.tail(x)


X = torch.randn(2, 11, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_experts_are_summed_once_and_compute_what_the_whole_ones_do(size: int, monkeypatch) -> None:
    model, sent, post = make_model(Block(), Block()), list[str](), Collective.post
    expected = model(X)

    def noted(group: Collective, rank: int, name: str, tensors: Any, *others: Any, **more: Any) -> None:
        sent.extend([name] * (rank == 1 and len(tensors)))
        post(group, rank, name, tensors, *others, **more)

    monkeypatch.setattr(Collective, "post", noted)
    assert difference(run(divide(model, size, plans=(PLAN,)), model, X), expected) < 1e-5
    assert len(sent) == 2 * (2 + 2)  # of each block two sums, the choice and its weights


def test_all_cards_take_the_first_ones_choice() -> None:
    """Else a token would get half of one expert and half of another, and no card would notice."""

    def off(plan: TensorPlan) -> float:
        model = make_model(Block(), Block())
        expected, parallel = model(X), divide(model, 3, plans=(plan,))
        for _, (second, _) in parallel._shards.values():  # as a card of another kind where two are nearly alike
            second.block.ff.gate.weight.data.neg_()
        return difference(run(parallel, model, X), expected)

    assert off(PLAN) < 1e-5 and off(dataclasses.replace(PLAN, decided=())) > 0.01
