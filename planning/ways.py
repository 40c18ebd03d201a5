"""Which of two ways of using several cards is faster for sampling: blocks one after the other, or each block divided.

Seconds of one step are work / cards + bytes / link, by one product and one link that were measured:

    blocks          f * sum(t)                     t: what a card computes of a forward, by its share; f forwards
    with overlap    sum(t) + (f - 1) * max(t)      forwards (conds times pictures) follow each other through the cards
    tensor          f * max(t')                    t': its share of each block, and what every card computes whole

Copies are the stream from card to card, and with tensor all partial sums. What the host takes to launch kernels is left
out: CUDA graphs spare it where cards copy to each other directly, and elsewhere the link is the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..parallel.local.collective import bytes_to_one
from .machine_speed import MachineSpeed

BLOCK_RATE = 0.8  # of a large matrix product's rate: FLUX.2, Wan and Qwen-Image on one card
GAIN = 0.9  # of blocks' time at most, or dividing is not worth what it forbids


@dataclass(frozen=True)
class Work:
    """One forward of one size.

    Args:
        flops: of all blocks. whole_flops: of layers that every card computes whole.
        sent_bytes: of partial sums that a card sends each other card. stream_bytes: of activations between two blocks.
        num_exchanges: of all blocks.
    """

    flops: float
    sent_bytes: float
    stream_bytes: float
    num_exchanges: float
    whole_flops: float = 0.0


@dataclass(frozen=True)
class WorkBySize:
    """What forwards of any number of tokens take; every value grows with their square at most.

    Args:
        step: tokens. given: the work of 0, 1 and 2 steps of picture tokens.
    """

    step: int
    given: tuple[Work, Work, Work]

    def at(self, num_tokens: int) -> Work:
        """Of so many picture tokens."""
        x = num_tokens / self.step
        weights = ((x - 1) * (x - 2) / 2, -x * (x - 2), x * (x - 1) / 2)
        values = zip(*(astuple(work) for work in self.given), strict=True)
        return Work(*(sum(w * value for w, value in zip(weights, each, strict=True)) for each in values))


@dataclass(frozen=True)
class Seconds:
    """Of one step, each way."""

    blocks: float
    tensor: float

    def __str__(self) -> str:
        return f"blocks about {self.blocks:.3g} s per step, tensor {self.tensor:.3g} s"


@dataclass(frozen=True)
class Ways:
    """The two ways of one MODEL on the cards of this machine.

    Args:
        block_shares: of the blocks, that each card has. tensor_shares: of every block.
        can_overlap: whether forwards may follow each other through the cards.
    """

    work: WorkBySize
    machine: MachineSpeed
    block_shares: Sequence[float]
    tensor_shares: Sequence[float]
    can_overlap: bool

    def seconds(self, num_tokens: int, num_forwards: int) -> Seconds:
        """Of a step with so many forwards of so many picture tokens."""
        work = self.work.at(num_tokens)
        return Seconds(self._blocks(work, num_forwards), self._tensor(work, num_forwards))

    def prefers_tensor(self, num_tokens: int, counts: Sequence[int]) -> bool:
        """Whether dividing is faster for each of these numbers of forwards."""
        found = [self.seconds(num_tokens, count) for count in counts]
        return all(each.tensor < GAIN * each.blocks for each in found)

    def _card_s(self, flops: float) -> list[float]:
        return [flops / (card.flops_per_s * BLOCK_RATE) for card in self.machine.cards]

    def _blocks(self, work: Work, count: int) -> float:
        times = [share * whole for share, whole in zip(self.block_shares, self._card_s(work.flops), strict=True)]
        crossing = max(work.stream_bytes / link.bytes_per_s for link in self.machine.links)
        computing = sum(times) + (count - 1) * max(times) if self.can_overlap else count * sum(times)
        return computing + len(times) * crossing  # from each card to the next, and home

    def _tensor(self, work: Work, count: int) -> float:
        """The forwards are one batch."""
        divided, whole = self._card_s(work.flops - work.whole_flops), self._card_s(work.whole_flops)
        times = zip(self.tensor_shares, divided, whole, strict=True)
        computing = max(count * (share * time + rest) for share, time, rest in times)
        return computing + max(self._copying(work, count, card) for card in range(len(whole)))

    def _copying(self, work: Work, count: int, card: int) -> float:
        """What a card waits for partial sums: all others' come over its one slot."""
        links = self.machine.links_of(card)
        arriving = bytes_to_one(count * work.sent_bytes, work.num_exchanges, len(links) + 1) / len(links)  # from each
        return sum(arriving / link.bytes_per_s for link in links)
