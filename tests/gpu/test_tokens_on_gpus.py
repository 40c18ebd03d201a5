"""Two cards that share out the rows of one forward, by each way that keys and values travel."""

import copy
import functools
from typing import Any

import pytest
import torch
from devicebridge.parallel.local.graph_recorder import graphs_on
from devicebridge.parallel.local.graphs import RECORDED_AFTER
from devicebridge.parallel.local.token_graphs import Replays
from devicebridge.parallel.local.tokens import TokenParallel
from devicebridge.parallel.staged_copies import SideStreams
from devicebridge.parallel.transfer import Send, Tensors
from devicebridge.tests.gpu.conftest import CARDS, NEEDS_TWO
from devicebridge.tests.unit.parallel.test_graphs import where
from devicebridge.tests.unit.parallel.test_tokens import HEADED
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, BLOCKS = 1024, 8, 6
pytestmark = NEEDS_TWO


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *, skip_reshape: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(attend(attention, q, k, v, HEADS, skip_reshape=True))


def warm_up(block: Block) -> None:
    """The first attentions of a process may take another kernel where two threads begin with them."""
    x = torch.zeros(1, 2048, WIDTH, device=CARDS[0]).half()
    Block.forward(block, x, lambda func, *args, **named: func(*args, **named))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, attend)
        return x


@pytest.mark.parametrize("exchange", ["full", "8-bit"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("copies", [SideStreams(), SideStreams(None, 2**18)])
def test_copies_beside_the_kernels_give_the_bits_of_copies_that_are_waited_for(copies, groups, exchange) -> None:
    torch.manual_seed(0)
    model = Model().half().requires_grad_(False)
    models = [copy.deepcopy(model).to(card) for card in CARDS]

    def beside(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        return copies.copies(tensors, CARDS[rank], arrivals)

    def waited_for(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        torch.cuda.synchronize(tensors[0].device)
        found = [each.cpu().to(CARDS[rank]) for each in tensors]
        torch.cuda.synchronize(CARDS[rank])
        return found

    def run(x: torch.Tensor, send: Send, groups: int, exchange: Any) -> list[torch.Tensor]:
        rows = TokenParallel(models, CARDS, HEADED, (3, 5), send, groups, exchange)
        rows.attach()
        try:
            calls = [functools.partial(each, x.to(card), rows.attend) for each, card in zip(models, CARDS, strict=True)]
            return rows.run(calls)
        finally:
            rows.remove()

    with torch.inference_mode():
        warm_up(models[0].blocks[0])
        for seed in range(8):
            x = torch.randn(1 + seed % 2, 2048, WIDTH, generator=torch.Generator().manual_seed(seed)).half()
            expected = run(x, waited_for, groups, exchange)
            for found, each in zip(run(x, beside, groups, exchange), expected, strict=True):
                assert torch.equal(found, each)
            if exchange == "8-bit":
                full = run(x, waited_for, groups, "full")[0]
                assert 0 < float((expected[0] - full).norm() / full.norm()) < 0.005


class Led(nn.Module):
    """Blocks that find attention in the options, as ComfyUI's do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Finding() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, transformer_options=transformer_options)
        return x


class Finding(Block):
    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        return super().forward(x, transformer_options["attend"])


def replayed(model: nn.Module, streams: SideStreams, groups: int, exchange: Any) -> tuple[Any, Any, Any]:
    """The graphs; what the ranks returned for several inputs with them, and without."""
    models = [copy.deepcopy(model).to(card) for card in CARDS]

    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        return streams.copies(tensors, CARDS[rank], arrivals)

    def attend(*args: Any, **named: Any) -> torch.Tensor:
        return rows.attend(*args, **named)

    rows = TokenParallel(models, CARDS, HEADED, (3, 5), send, groups, exchange)
    graphs, found = graphs_on(CARDS, streams, where), ([], [])
    assert graphs is not None
    rows.attach()
    try:
        with torch.inference_mode():
            warm_up(models[0].blocks[0])
            for seed in range(2 * RECORDED_AFTER + 6):
                x = torch.randn(1, 2048 + seed % 2, WIDTH, generator=torch.Generator().manual_seed(seed)).half()
                for each, replays in zip(found, (Replays(graphs, None), None), strict=True):
                    given = ((model, x.to(card), {"attend": attend}) for model, card in zip(models, CARDS, strict=True))
                    each.extend(rows.run([functools.partial(*of_rank) for of_rank in given], replays))
    finally:
        rows.remove()
    return graphs, *found


@pytest.mark.usefixtures("cards_wait")
@pytest.mark.parametrize("exchange", ["full", "8-bit"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("copies", [SideStreams, functools.partial(SideStreams, None, 2**18)])
def test_replayed_blocks_give_the_bits_of_launched_ones(copies, groups, exchange) -> None:
    """Over copies through host memory, too, which are in the graph. The first card has as many rows of two lengths."""
    torch.manual_seed(0)
    model = Led().half().requires_grad_(False)
    graphs, found, expected = replayed(model, copies(), groups, exchange)
    assert all(map(torch.equal, found, expected))
    assert graphs.num_replays >= 2 * BLOCKS and not graphs.fault, graphs.fault


class Waiting(Finding):
    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        return super().forward(x, transformer_options) * (1 + float(x.sum().isnan()))


class Refusing(Finding):
    """In a recording, in the middle of its computing."""

    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        before = torch.cat([x, x]).square()
        x = super().forward(x, transformer_options)
        if type(transformer_options) is not dict and x.device == CARDS[1]:
            raise RuntimeError("refused")
        return x + 0 * before[: len(x)]


@pytest.mark.usefixtures("cards_wait")
@pytest.mark.parametrize(("block", "fault"), [(Waiting, "waits for the card"), (Refusing, "refused")])
def test_a_block_that_cannot_be_recorded_is_launched(block, fault) -> None:
    torch.manual_seed(0)
    model = Led()
    model.blocks[2] = block()
    graphs, found, expected = replayed(model.half().requires_grad_(False), SideStreams(), 1, "full")
    assert all(map(torch.equal, found, expected)) and fault in graphs.fault, graphs.fault
