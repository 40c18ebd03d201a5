"""How long blocks take: seconds = work / cards + bytes / link. Work and bytes follow from sizes alone.

Training goes by published speeds, or one measured matrix product, and an assumed link. Sampling, where a split chooses
between two ways of using several cards, goes by one product per card and the slowest link, both measured:

    blocks          f * (sum(t) + c)               t: what a card computes of a forward, by its share; f forwards
    with overlap    sum(t) + (f - 1) * max(t) + c  forwards (conds times pictures) follow each other through the cards
    tensor          f * max(t')                    t': its share of each block, and what every card computes whole

Copies c are the stream over each border, or with relay of every block, and with tensor all partial sums. What the host
takes to launch kernels is left out: CUDA graphs spare it where cards copy directly; elsewhere the link is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..families.comfy.native import NativeModel
from ..families.spec import BlockList
from ..families.tensor_plan import Shares, TensorPlan
from ..parallel.local.collectives import bytes_to_one
from ..parallel.local.shards import collectives_in
from ..parallel.placement import native_block_flops, native_list, products_of, tokens_seen
from .cards import MachineSpeed

# A step with this scheme over one in bf16: FLUX.2-dev on two H200 at 1024², docs/guides/quantization.md.
SCHEME_TIMES: Mapping[str, float] = {"none": 1.0, "fp8-compute": 0.78, "int8-compute": 0.81, "int8": 1.16, "fp8": 1.26}

# What a card of speed 1 is taken to sustain in bf16, and what reaches it over half a PCIe 4.0 slot.
ASSUMED_FLOPS_PER_S = 50e12
ASSUMED_LINK_BYTES_PER_S = 12e9

BLOCK_RATE = 0.8  # of a large matrix product's rate: FLUX.2, Wan and Qwen-Image on one card
GAIN = 0.9  # of blocks' time at most, or dividing is not worth what it forbids
NUM_TEXT_TOKENS = 512  # in sampling
_SQUARE_BYTES = 4  # of a sum of squares
_CHOICE_BYTES = 2 * (8 + 2)  # of two of several experts, as an index and a number each


@dataclass(frozen=True)
class DividedBlock:
    """What cards cannot share of a block's forward that they divide, and what they exchange.

    Args:
        whole_flops: of layers that every card computes whole.
        sent_bytes: of partial sums that a card sends each other card, in num_exchanges.
        width: of the stream through the block.
    """

    whole_flops: float
    sent_bytes: float = 0.0
    num_exchanges: int = 0
    width: int = 0


def divided_block(
    block: nn.Module,
    plan: TensorPlan | None,
    side: BlockList,
    num_tokens: tuple[int, int],
    num_cards: int,
    element_size: int,
) -> DividedBlock:
    """By sizes; works on meta tensors. num_tokens: of the picture and of the text, of one sample."""
    products = products_of(block, side, *num_tokens)
    if plan is None:
        return DividedBlock(sum(products.values()))
    sums: dict[str, float] = {}  # by where they are added up: several linears may share a sum
    whole_flops, width = 0.0, 0
    for name, module in block.named_modules():
        linear: Any = module
        divided = plan.find(name) if name in products else None
        at = plan.summed_in(name) or name
        tokens = tokens_seen(at, side, *num_tokens)
        if divided is None:
            whole_flops += products.get(name, 0.0)
        elif divided.by == "row":
            sums[at] = element_size * linear.out_features * tokens
            width = max(width, linear.out_features)
        elif divided.by == "gathered":
            sums[f"{name}, gathered"] = element_size * linear.out_features * tokens / num_cards
        if plan.is_norm(name) and module._parameters:
            sums[f"{name}, squares"] = _SQUARE_BYTES * tokens
        if plan.is_decided(name):
            sums[f"{name}, choices"] = _CHOICE_BYTES * tokens
    return DividedBlock(whole_flops, sum(sums.values()), len(collectives_in(block, plan)), width)


# ---- sampling: blocks or tensor


@dataclass(frozen=True)
class ForwardWork:
    """One forward.

    Args:
        flops: of all blocks. whole_flops, sent_bytes, num_exchanges: as of a DividedBlock, of all of them.
        stream_bytes: of activations between two blocks.
    """

    flops: float
    sent_bytes: float
    stream_bytes: float
    num_exchanges: int
    whole_flops: float = 0.0


def forward_work(
    model: nn.Module, layout: NativeModel, blocks: Mapping[str, tuple[TensorPlan, Shares]], num_tokens: int
) -> ForwardWork:
    """Of so many picture tokens beside the text's, in half precision. blocks: by name, how each is divided."""
    side, sizes = native_list(layout), (num_tokens, NUM_TEXT_TOKENS)
    found = [
        divided_block(model.get_submodule(name), plan, side, sizes, shares.num_devices, element_size=2)
        for name, (plan, shares) in blocks.items()
    ]
    return ForwardWork(
        flops=sum(native_block_flops(model, layout, list(blocks), *sizes)),
        sent_bytes=sum(each.sent_bytes for each in found),
        stream_bytes=2 * max(each.width for each in found) * (num_tokens + NUM_TEXT_TOKENS * layout.is_joint),
        num_exchanges=sum(each.num_exchanges for each in found),
        whole_flops=sum(each.whole_flops for each in found),
    )


def has_guidance(model: nn.Module) -> bool:
    """Whether a model is given the strength of its guidance as a number, so that nobody runs it twice for CFG."""
    return bool(getattr(getattr(model, "params", None), "guidance_embed", False))


@dataclass(frozen=True)
class Ways:
    """The two ways of one MODEL on several cards of this machine.

    Args:
        block_shares: of the blocks, that each card has. tensor_shares: of every block.
        can_overlap: whether forwards may follow each other through the cards. crossings: of the stream, per forward.
    """

    work: ForwardWork
    machine: MachineSpeed
    block_shares: Sequence[float]
    tensor_shares: Sequence[float]
    can_overlap: bool
    crossings: int

    def seconds(self, num_forwards: int) -> tuple[float, float]:
        """Of a step with so many forwards, by blocks and by tensor, which has them as one batch."""
        work, link, count = self.work, self.machine.bytes_per_s, len(self.block_shares)
        assert link is not None, "there are several cards"
        times = [share * whole for share, whole in zip(self.block_shares, self._card_s(work.flops), strict=True)]
        copies = self.crossings * work.stream_bytes / link
        following = max(times) if self.can_overlap else sum(times) + copies  # with overlap the others' are hidden
        divided, whole = self._card_s(work.flops - work.whole_flops), self._card_s(work.whole_flops)
        slowest = max(s * d + rest for s, d, rest in zip(self.tensor_shares, divided, whole, strict=True))
        sums = bytes_to_one(num_forwards * work.sent_bytes, work.num_exchanges, count) / link  # over a card's one slot
        return sum(times) + copies + (num_forwards - 1) * following, num_forwards * slowest + sums

    def prefers_tensor(self, counts: Sequence[int]) -> bool:
        """Whether dividing is faster for each of these numbers of forwards."""
        return all(tensor < GAIN * blocks for blocks, tensor in map(self.seconds, counts))

    def _card_s(self, flops: float) -> list[float]:
        return [flops / (rate * BLOCK_RATE) for rate in self.machine.flops_per_s]
