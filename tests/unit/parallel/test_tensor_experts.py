"""Blocks with experts, of which a gate chooses one per token, divided among cards: outputs of the whole.

The experts' partial sums are added up once, behind all of them. What the gate chooses must be the same everywhere.
"""

import copy
import dataclasses

import pytest
import torch
from devicebridge.families.tensor_plan import TensorPlan
from devicebridge.families.tensor_plan import plan as plan_of
from devicebridge.parallel.local.shards import BlockShard, divide_block, shares_of
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.placed import forward_of
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")
WIDTH, HIDDEN, HEADS, TOKENS = 16, 24, 4, 11
(PLAN,) = plan_of(
    features="ff.*.up", features_back="ff.*.down/ff", mlp="tail.up>tail.down",
    num_heads="num_heads", head_dim="head_dim", decided=("ff.gate",),
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
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.ff, self.tail = Experts(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ff(x)
        return x + self.tail(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return x


def _model() -> Model:
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def _input() -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def _divide(block: nn.Module, count: int, rank: int, plan: TensorPlan = PLAN) -> BlockShard:
    return divide_block(block, plan, shares_of(block, plan, (1.0,) * count), rank)


def _sampled(model, count, cards, change=lambda shard, rank: None, plan=PLAN):
    """The output, computed by so many cards. change: is made to each card's part of a block."""
    model, shards = copy.deepcopy(model).requires_grad_(False), {}
    for block in model.blocks:
        parts = [_divide(copy.deepcopy(block), count, rank, plan) for rank in range(1, count)]
        own = _divide(block, count, 0, plan)
        for rank, part in enumerate((own, *parts)):
            change(part, rank)
            part.block.to(CARDS[rank])
        shards[own.block] = own, parts
    bridge = TensorParallel(CARDS[:count], shards)
    bridge.attach()
    cards.copies.clear()
    with torch.no_grad(), forward_of(bridge):
        return on_cpu(model.to(CARDS[0])(_input().to(CARDS[0])))


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-9))  # an expert may have no token


@pytest.mark.parametrize("count", [2, 3, 4])
def test_experts_are_summed_once_and_compute_what_the_whole_ones_do(count: int) -> None:
    model = _model()
    with emulated_cards() as cards, torch.no_grad():
        found, expected = _sampled(model, count, cards), model(_input())
        sent = [copy for copy in cards.copies if (copy.source, copy.target) == (CARDS[1], CARDS[0])]
    assert _relative(found, expected) < 1e-5
    # Of each block two sums, the choice and its weights, and the output, which the first forward compares.
    assert len(sent) == 2 * (2 + 2 + 1)


def _bend_the_second_gate(shard: BlockShard, rank: int) -> None:
    """It chooses other experts, as a card of another kind does where two are nearly alike."""
    gate = shard.block.get_submodule("ff.gate")
    if rank == 1:
        gate.weight = nn.Parameter(-gate.weight, requires_grad=False)


def test_all_cards_take_the_first_ones_choice() -> None:
    """Else a token would get half of one expert and half of another, and no card would notice."""
    model, alone = _model(), dataclasses.replace(PLAN, decided=())
    with emulated_cards() as cards, torch.no_grad():
        found = _sampled(model, 3, cards, _bend_the_second_gate)
        wrong = _sampled(model, 3, cards, _bend_the_second_gate, alone)
        expected = model(_input())
    assert _relative(found, expected) < 1e-5 and _relative(wrong, expected) > 0.01
