"""How long a block takes that several cards compute together (tensor parallel), from how long one card takes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..families.spec import BlockList, ModelFamily
from ..parallel.local.collective import bytes_to_one
from ..parallel.local.shards import find_plan, meetings_in
from ..parallel.placement import blocks_with_lists, products_of, tokens_seen
from .block_times import ASSUMED_LINK_BYTES_PER_S, BlockTimes
from .cards import Card


@dataclass(frozen=True)
class DividedTimes:
    """Times of one of several cards: work / cards + bytes / link.

    Args:
        whole: of blocks that one card computes alone.
        cards: all of them.
        shares: theirs of every block, in proportion.
        exchanged: bytes of partial sums that a card sends each other one in a block's forward; its backward sends as
            many. [num_blocks]
        undivided: share of each block that every card computes whole. [num_blocks]
        num_exchanges: of a block's forward; its backward has as many. [num_blocks]
    """

    whole: BlockTimes
    cards: Sequence[Card]
    shares: Sequence[int]
    exchanged: Sequence[float]
    undivided: Sequence[float]
    num_exchanges: Sequence[int]

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        index = next(i for i, each in enumerate(self.cards) if each.device == card.device)
        share = self.undivided[block] + (1 - self.undivided[block]) * self.shares[index] / sum(self.shares)
        sent = bytes_to_one(self.exchanged[block], self.num_exchanges[block], len(self.cards))
        forward, backward = (each * share for each in self.whole.of(block, card, scheme))
        return forward + sent / ASSUMED_LINK_BYTES_PER_S, backward + sent / ASSUMED_LINK_BYTES_PER_S


def exchanged_bytes(
    model: nn.Module, family: ModelFamily, num_image_tokens: int, num_text_tokens: int, element_size: int
) -> list[float]:
    """Of the partial sums of each block's forward for one sample, in execution order. Works on meta tensors."""
    return [
        _sums_of(block, each, family, num_image_tokens, num_text_tokens) * element_size
        for block, each in blocks_with_lists(model, family)
    ]


def _sums_of(block: nn.Module, side: BlockList, family: ModelFamily, num_image: int, num_text: int) -> float:
    plan = find_plan(family.tensor, block)
    if plan is None:
        return 0.0
    sums = {}
    for name, module in block.named_modules():
        divided = plan.find(name)
        if divided is not None and divided.by == "row" and isinstance(module, nn.Linear):
            at = plan.summed_in(name) or name
            sums[at] = module.out_features * tokens_seen(at, side, num_image, num_text)
    return sum(sums.values())


def undivided_shares(model: nn.Module, family: ModelFamily, num_image_tokens: int, num_text_tokens: int) -> list[float]:
    """Of the products with weights in each block, those that no card has a share of. Works on meta tensors."""
    found = []
    for block, side in blocks_with_lists(model, family):
        plan = find_plan(family.tensor, block)
        products = products_of(block, side, num_image_tokens, num_text_tokens)
        whole = sum(each for name, each in products.items() if plan is None or plan.find(name) is None)
        found.append(whole / max(sum(products.values()), 1.0))
    return found


def count_exchanges(model: nn.Module, family: ModelFamily) -> list[int]:
    """How often cards meet in each block's forward, in execution order. Works on meta tensors."""
    plans = [(block, find_plan(family.tensor, block)) for block, _ in blocks_with_lists(model, family)]
    return [0 if plan is None else len(meetings_in(block, plan)) for block, plan in plans]
