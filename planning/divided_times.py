"""How long a block takes that several cards compute together (tensor parallel), from how long one card takes for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ..families.spec import BlockList, ModelFamily
from ..parallel.local.collective import bytes_to_one
from ..parallel.local.shards import find_plan, meetings_in
from ..parallel.placement import blocks_with_lists, products_of, tokens_seen
from .block_times import ASSUMED_LINK_BYTES_PER_S, BlockTimes
from .cards import Card

# What Python takes on each card per operation that it launches, and per exchange between cards. The cards' threads
# share one lock, so all cards' launches add up. Operations and exchanges are counted, by dry runs and from the plans.
#
# LAUNCH_S: FLUX.1 at 512x512 in bf16 over two H200, where the host is the limit, with this pack's LoRA and its
# recomputation (benchmarks/results/train_step_flux1-512_2xh200_2026-11-22.json). A sample is 15105 launches with every
# block recomputed, 10583 with none. Two replicas took 28.1 and 25.4 us for each, a pipeline 29.6 and 29.5.
# EXCHANGE_S: what is left of 1.033 s of FLUX.2 at 512x512 in bf16 over two H200, all blocks recomputed, where the host
# was the limit (benchmarks/results/train_step_tensor_2xh200_2026-11-24.json). That is six times what an exchange takes
# without gradients, for in the backward autograd's threads meet as well. That machine's host was a slow one.
LAUNCH_S, EXCHANGE_S = 28e-6, 1.04e-3


@dataclass(frozen=True)
class DividedTimes:
    """Times of one of several cards: its share of the computation, and what it waits for the others' sums.

    Args:
        whole: of blocks that one card computes alone.
        cards: all of them.
        shares: theirs of every block, in proportion.
        exchanged: bytes of partial sums that a card sends each other one in a block's forward; its backward sends as
            many. [num_blocks]
        undivided: share of each block that every card computes whole. [num_blocks]
        num_exchanges: of a block's forward; its backward has as many. [num_blocks]
        launches: scheme -> operations of each block's forward and backward on one card. [num_blocks]
    """

    whole: BlockTimes
    cards: Sequence[Card]
    shares: Sequence[int]
    exchanged: Sequence[float]
    undivided: Sequence[float]
    num_exchanges: Sequence[int]
    launches: Callable[[str], Sequence[tuple[int, int]]]

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        forward, backward = self._computing(block, card, scheme)
        in_forward, in_backward = self._launching(block, scheme)
        return max(forward, in_forward), max(backward, in_backward)

    def _computing(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        forward, backward = self.whole.of(block, card, scheme)
        waiting = self._waiting(block, card)
        index = next(i for i, each in enumerate(self.cards) if each.device == card.device)
        share = self.shares[index] / sum(self.shares)
        share = self.undivided[block] + (1 - self.undivided[block]) * share
        return forward * share + waiting, backward * share + waiting

    def _launching(self, block: int, scheme: str) -> tuple[float, float]:
        meeting = self.num_exchanges[block] * EXCHANGE_S
        in_forward, in_backward = (
            len(self.cards) * (each * LAUNCH_S + meeting) for each in self.launches(scheme)[block]
        )
        return in_forward, in_backward

    def _waiting(self, block: int, card: Card) -> float:
        """Parts from all others arrive one after the other; the slowest link counts."""
        others = [other for other in self.cards if other.device != card.device]
        order = {each.device: index for index, each in enumerate(self.cards)}  # both ways are as fast
        pairs = [sorted((other, card), key=lambda each: order[each.device]) for other in others]
        links = [self.whole.between(*pair) or ASSUMED_LINK_BYTES_PER_S for pair in pairs]
        return bytes_to_one(self.exchanged[block], self.num_exchanges[block], len(self.cards)) / min(links)

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


def count_exchanges(model: nn.Module, family: ModelFamily) -> list[int]:
    """How often cards meet in each block's forward, in execution order. Works on meta tensors."""
    plans = [(block, find_plan(family.tensor, block)) for block, _ in blocks_with_lists(model, family)]
    return [0 if plan is None else len(meetings_in(block, plan)) for block, plan in plans]
