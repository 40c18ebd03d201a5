"""A toy with a front, two streams and a tail, whose copies share out the rows of each sample; for cards of any kind."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from devicebridge.families.token_plan import BlockRows, TokenPlan
from devicebridge.parallel.local.data_parallel import Replica
from devicebridge.parallel.local.token_training import TokenModel, TokenTraining
from devicebridge.parallel.local.tokens import HERE, TokenParallel
from devicebridge.parallel.offload.recompute import checkpoint_calls, recompute
from devicebridge.parallel.runner import MicroBatch
from torch import nn

PLAN = TokenPlan({"blocks": BlockRows("img=img@1 txt=txt@1 pe=txt+img@1", "attn=txt+img")}, out="0=img@1")
WHOLE_TEXT = TokenPlan(PLAN.blocks, out="", tail="last=img@1", whole=("txt",), released="img")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if HERE.parallel is None:
            return attention(q, k, v)
        return HERE.parallel.attend(attention, q, k, v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mod = Attention(), nn.Linear(6, 6)

    def forward(self, img: torch.Tensor, txt: torch.Tensor, pe: torch.Tensor, vec: torch.Tensor) -> Any:
        both = torch.cat([txt, img], 1)
        both = both + self.attn(both + pe) * self.mod(vec)
        return both[:, txt.shape[1] :], both[:, : txt.shape[1]]


class Toy(nn.Module):
    """What makes vec is read by all blocks and by the tail, so a part of its gradient is each rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.vec = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, img: torch.Tensor, txt: torch.Tensor, **of_blocks: Any) -> torch.Tensor:
        vec = self.vec(txt.mean(1, keepdim=True))
        pe = torch.linspace(-1, 1, txt.shape[1] + img.shape[1], dtype=img.dtype, device=img.device)[None, :, None]
        img = self.front(img)
        for block in self.blocks:
            img, txt = block(img, txt, pe=pe, vec=vec, **of_blocks)
        return self.last(img * vec)


def make_toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double()


def make_training(
    toy: Toy, cards: Sequence[torch.device], plan: TokenPlan, *, recomputes: bool, copies: Sequence[nn.Module] = (),
    shares: Sequence[float] = (),
) -> TokenTraining:  # fmt: skip
    """Every parameter is trained that needs gradients. copies: on the cards, where they are made already."""
    copies = copies or [copy.deepcopy(toy).to(card) for card in cards]
    rows = TokenParallel(copies, cards, plan, shares or (1.0,) * len(cards))
    rows.attach()
    for card, each in zip(cards, copies, strict=True):
        checkpoint_calls(each.blocks if recomputes else (), partial(_again, card), ())
    replicas = [
        Replica(each, card, tuple(p for p in each.parameters() if p.requires_grad))
        for each, card in zip(copies, cards, strict=True)
    ]
    return TokenTraining(TokenModel(rows), replicas)


def _again(card: torch.device, block: Any, *args: Any) -> Any:
    return recompute(block, args, card)


def microbatches(model: nn.Module, count: int, num_image: int = 11, num_text: int = 5) -> list[MicroBatch[Any]]:
    def forward(index: int, given: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        img, txt, target = (
            torch.randn(2, length, width, generator=generator, dtype=torch.float64)
            for length, width in ((num_image, 6), (num_text, 6), (num_image, 2))
        )

        def of_one(one: nn.Module, device: torch.device) -> torch.Tensor:
            return one(img.to(device), txt.to(device))

        found = model.through(of_one) if isinstance(model, TokenModel) else of_one(model, torch.device("cpu"))
        return (found - target.to(found.device)).square().mean() / count

    return [MicroBatch(lambda: None, partial(forward, index)) for index in range(count)]
