"""How long a block takes that several cards compute together (tensor parallel), from how long one card takes for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..families.spec import BlockList, ModelFamily
from ..parallel.local.shards import find_plan
from ..parallel.placement import blocks_with_lists, products_of, tokens_seen
from .block_times import ASSUMED_LINK_BYTES_PER_S, BlockTimes
from .cards import Card

# What Python takes to launch the kernels of one block on one card, forwards and backwards. The cards' threads share one
# lock, so all cards' launches add up. From a step of FLUX.2 at 512x512 whose cards waited for the host, with PEFT's
# layers and torch's checkpointing (docs/internals/experiments.md, 2026-11-23). Ours take less: the forecast errs
# towards other strategies.
HOST_FORWARD_S, HOST_BACKWARD_S = 0.002, 0.004


@dataclass(frozen=True)
class DividedTimes:
    """Times of one of several equal cards: its share of the computation, and what it waits for the others' sums.

    Args:
        whole: of blocks that one card computes alone.
        cards: all of them.
        exchanged: bytes of partial sums that a card sends each other one in a block's forward; its backward sends as
            many. [num_blocks]
        undivided: share of each block that every card computes whole. [num_blocks]
    """

    whole: BlockTimes
    cards: Sequence[Card]
    exchanged: Sequence[float]
    undivided: Sequence[float]

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        forward, backward = self.whole.of(block, card, scheme)
        count, waiting = len(self.cards), self._waiting(block, card)
        share = self.undivided[block] + (1 - self.undivided[block]) / count
        return (
            max(forward * share + waiting, count * HOST_FORWARD_S),
            max(backward * share + waiting, count * HOST_BACKWARD_S),
        )

    def _waiting(self, block: int, card: Card) -> float:
        """Parts from all others arrive one after the other; the slowest link counts."""
        others = [other for other in self.cards if other.device != card.device]
        order = {each.device: index for index, each in enumerate(self.cards)}  # both ways are as fast
        pairs = [sorted((other, card), key=lambda each: order[each.device]) for other in others]
        links = [self.whole.between(*pair) or ASSUMED_LINK_BYTES_PER_S for pair in pairs]
        return self.exchanged[block] * len(others) / min(links)

    def ends(self, card: Card, scheme: str) -> tuple[float, float]:
        return self.whole.ends(card, scheme)

    def link(self, card: Card) -> float:
        return self.whole.link(card)

    def between(self, source: Card, target: Card) -> float | None:
        return self.whole.between(source, target)


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
