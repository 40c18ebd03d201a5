"""How long blocks take: seconds = work / cards + bytes / link. Work and bytes follow from sizes alone.

Training goes by published speeds, or one measured matrix product, and an assumed link. Sampling, where a split chooses
between three ways of using several cards, goes by one product per card and the slowest link, measured where the cards
are here:

    blocks          f * (sum(t) + c)               t: what a card computes of a forward, by its share; f forwards
    with overlap    sum(t) + (f - 1) * max(t) + c  forwards (conds times pictures) follow each other through the cards
    tensor          f * (max(t') + c)              t': its share of each block, and what every card computes whole
    tokens          g * max(T) + h * (max(t) + c)  T: a whole forward; g rounds of one per card, h forwards remain

Copies c are the stream over each border, or with relay of every block; with tensor all partial sums; with tokens the
keys and values of the other cards' rows. What the host takes to launch kernels is left out: CUDA graphs spare it. Nor
is it counted that tokens may send while it computes: the
plain sum is what a slow link was measured at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from ..families.comfy.native import NativeModel
from ..families.spec import BlockList
from ..families.tensor_plan import Shares, TensorPlan
from ..families.token_plan import TokenPlan, places, segments
from ..parallel.placement import attention_width, block_flops, native_list, products_of, tokens_seen
from .cards import PCIE_BYTES_PER_S, MachineSpeed

# A step with this scheme over one in bf16: FLUX.2-dev on two H200 at 1024², docs/benchmarks.md. "stored" takes 1.3 to
# 2.0, by what the file has: GGUF Q8_0 and float8 little, Q4_K and rotated int8 most.
SCHEME_TIMES: Mapping[str, float] = {
    **{"none": 1.0, "fp8-compute": 0.78, "int8-compute": 0.81},
    **{"int8": 1.4, "fp8": 1.4, "stored": 2.0},
}

# What a card of speed 1 is taken to sustain in bf16, and what reaches it over half a PCIe 4.0 slot.
ASSUMED_FLOPS_PER_S = 50e12
ASSUMED_LINK_BYTES_PER_S = PCIE_BYTES_PER_S

# A kernel's launch in a training's forward, with what a LoRA adds: SDXL at 512² on an H200, which took 0.676 s for
# three forwards of so many kernels, nearly all of it launching (docs/benchmarks.md).
KERNEL_S = 0.676 / (3 * 4945)

BLOCK_RATE = 0.8  # of a large matrix product's rate: FLUX.2, Wan and Qwen-Image on one card
# Of a card's time and of what travels, by groups of heads: Wan and FLUX.2 on two H200 over links of 10 to 39 GB/s.
GROUPS_TIME, SEEN_BY_GROUPS = 1.06, 0.5
GAIN = 0.9  # of blocks' time at most, or dividing is not worth what it forbids
TOKENS_GAIN = 0.97  # of tensor's time at most; FLUX.1 on two H200, which is 0.96, took 1.02 to 1.08 of tensor's
LEAST_SHARE = 0.75  # of an equal share: no card that has less is waited for, but given rows of every forward
NUM_TEXT_TOKENS = 512  # in sampling
PICTURE_TOKENS = 4096  # of 1024 x 1024; a split is made before the size is known
CLIP_TOKENS = 14040  # of 832 x 480, 33 frames
_SQUARE_BYTES = 4  # of a sum of squares
_CHOICE_BYTES = 2 * (8 + 2)  # of two of several experts, as an index and a number each
_SIXTEEN_BITS = 2  # bytes of a number that is computed with, whatever the weights are stored in
_TEXT_ROWS = frozenset(("txt", "y", "crop"))  # segments of token plans
_FEW_ROWS = ("-", "a")  # keys that stay where they are; sound beside a clip

WayName = Literal["blocks", "tensor", "tokens"]


def key_bytes(block: nn.Module, keys: str, side: BlockList, num_tokens: tuple[int, int], element_size: int) -> float:
    """Of keys and values of all rows, in all attentions of a block that gather them. Works on meta tensors.

    Args:
        keys: as of BlockRows. num_tokens: of the picture and of the text, of one sample.
    """
    axes = (axis for place in places(keys) for axis in place.axis.split("/") if axis not in _FEW_ROWS)
    texts = (side.is_joint or not _TEXT_ROWS.isdisjoint(segments(axis)) for axis in axes)
    rows = sum(num_tokens[0] + num_tokens[1] * has_text for has_text in texts)
    return 2.0 * rows * attention_width(block, side) * element_size


def keys_of(blocks: Iterable[str], tokens: TokenPlan | None) -> dict[str, str]:
    """By the name of a block its keys, as of BlockRows; "" where nobody described them."""
    lists = tokens.blocks if tokens else {}
    return {name: lists[of].keys if (of := name.rpartition(".")[0]) in lists else "" for name in blocks}


# ---- sampling: blocks, tensor or tokens


@dataclass(frozen=True)
class ForwardWork:
    """One forward.

    Args:
        flops: of all blocks. whole_flops: of layers that every card computes whole where the cards divide blocks.
        sent_bytes: of partial sums that a card then sends each other card.
        stream_bytes: of activations between two blocks.
        key_bytes: of keys and values of all rows, in all attentions. num_blocks: 0 for not known.
    """

    flops: float
    sent_bytes: float
    stream_bytes: float
    whole_flops: float = 0.0
    key_bytes: float = 0.0
    num_blocks: int = 0

    def block_s(self, machine: MachineSpeed) -> float:
        """Seconds that the slowest card computes of a block whose rows the cards share equally."""
        flops = self.flops / max(self.num_blocks, 1) / len(machine.flops_per_s)
        return flops / (min(machine.flops_per_s) * BLOCK_RATE)


@dataclass(frozen=True)
class SampledBlock:
    """A block and how it may be shared out. keys: as of BlockRows; "" where nobody described them."""

    block: nn.Module
    side: BlockList
    plan: TensorPlan | None = None
    keys: str = ""


def work_of(
    blocks: Sequence[SampledBlock], num_tokens: tuple[int, int], num_cards: int, sent_size: int = _SIXTEEN_BITS
) -> ForwardWork:
    """Of a forward, in half precision. By sizes; works on meta tensors.

    Args:
        num_tokens: of the picture and of the text, of one sample. sent_size: bytes of a number that cards send: of
            partial sums, or of keys and values.
    """
    flops = whole_flops = all_keys = sent_bytes = 0.0
    most_width = 0
    for each in blocks:
        block, plan, side = each.block, each.plan, each.side
        flops += block_flops(block, side, *num_tokens)
        all_keys += key_bytes(block, each.keys, side, num_tokens, sent_size)
        products, width = products_of(block, side, *num_tokens), 0
        sums: dict[str, float] = {}  # by where they are added up: several linears may share a sum
        for name, module in block.named_modules() if plan else ():
            assert plan is not None
            linear: Any = module
            divided = plan.find(name) if name in products else None
            at = plan.summed_in(name) or name
            tokens = tokens_seen(at, side, *num_tokens)
            if divided is None:
                whole_flops += products.get(name, 0.0)
            elif divided.by == "row":
                sums[at] = sent_size * linear.out_features * tokens
                width = max(width, linear.out_features)
            elif divided.by == "gathered":
                sums[f"{name}, gathered"] = sent_size * linear.out_features * tokens / num_cards
            if plan.is_norm(name) and module._parameters:
                sums[f"{name}, squares"] = _SQUARE_BYTES * tokens
            if plan.is_decided(name):
                sums[f"{name}, choices"] = _CHOICE_BYTES * tokens
        whole_flops += 0.0 if plan else sum(products.values())
        sent_bytes += sum(sums.values())
        most_width = max(most_width, width or attention_width(block, side))
    rows = num_tokens[0] + num_tokens[1] * any(each.side.is_joint for each in blocks)
    stream, num_blocks = _SIXTEEN_BITS * most_width * rows, len(blocks)
    return ForwardWork(flops, sent_bytes, stream, whole_flops, all_keys, num_blocks)


def forward_work(
    model: nn.Module,
    layout: NativeModel,
    blocks: Mapping[str, tuple[TensorPlan, Shares] | None],
    num_tokens: int,
    tokens: TokenPlan | None = None,
    sent_size: int = _SIXTEEN_BITS,
) -> ForwardWork:
    """Of so many picture tokens beside the text's.

    Args:
        blocks: by name, how each is divided, if it is. tokens: where the class has rows. sent_size: as of work_of.
    """
    side, keys = native_list(layout), keys_of(blocks, tokens)
    sampled = [
        SampledBlock(model.get_submodule(name), side, how[0] if how else None, keys[name])
        for name, how in blocks.items()
    ]
    num_cards = max((how[1].num_devices for how in blocks.values() if how), default=1)
    return work_of(sampled, (num_tokens, NUM_TEXT_TOKENS), num_cards, sent_size)


def has_guidance(model: nn.Module) -> bool:
    """Whether a model is given the strength of its guidance as a number, so that nobody runs it twice for CFG."""
    return bool(getattr(getattr(model, "params", None), "guidance_embed", False))


class StepSeconds(NamedTuple):
    """Of a step, by each way; infinite where there are no shares for it."""

    blocks: float
    tensor: float
    tokens: float = math.inf

    def __str__(self) -> str:
        """ "blocks about 0.543 s per step, tensor 0.284 s, tokens 0.271 s"."""
        others = (f", {name} {s:.3g} s" for name, s in self._asdict().items() if name != "blocks" and s < math.inf)
        return f"blocks about {self.blocks:.3g} s per step" + "".join(others)


@dataclass(frozen=True)
class Ways:
    """The ways of one MODEL on several cards.

    Args:
        block_shares: of the blocks, that each card has. tensor_shares: of every block; () if it cannot be divided.
        can_overlap: whether forwards may follow each other through the cards. crossings: of the stream, per forward.
        token_shares: relative ones of the rows; () if the class, the cards or the settings do not allow it.
        can_deal: whether each card may compute whole forwards where there are enough of them.
        groups: of heads, in which keys and values travel.
    """

    work: ForwardWork
    machine: MachineSpeed
    block_shares: Sequence[float]
    tensor_shares: Sequence[float]
    can_overlap: bool
    crossings: int
    token_shares: Sequence[float] = ()
    can_deal: bool = False
    groups: int = 1

    def seconds(self, num_forwards: int) -> StepSeconds:
        """Of a step with so many forwards. Tensor has them as one batch."""
        times = [share * whole for share, whole in zip(self.block_shares, self._card_s(self.work.flops), strict=True)]
        copies = self.crossings * self.work.stream_bytes / self._link
        following = max(times) if self.can_overlap else sum(times) + copies  # with overlap the others' are hidden
        blocks = sum(times) + copies + (num_forwards - 1) * following
        return StepSeconds(blocks, self._tensor_s(num_forwards), self._tokens_s(num_forwards))

    def _tensor_s(self, num_forwards: int) -> float:
        work, count = self.work, len(self.block_shares)
        if not self.tensor_shares:
            return math.inf
        divided, whole = self._card_s(work.flops - work.whole_flops), self._card_s(work.whole_flops)
        slowest = max(s * d + rest for s, d, rest in zip(self.tensor_shares, divided, whole, strict=True))
        sums = num_forwards * work.sent_bytes * (count - 1) / self._link  # over a card's one slot
        return num_forwards * slowest + sums

    def _tokens_s(self, num_forwards: int) -> float:
        """Whole forwards are dealt out, one to each card, where nothing travels; the cards share each of the rest."""
        if not self.token_shares:
            return math.inf
        wholes, count, total = self._card_s(self.work.flops), len(self.token_shares), sum(self.token_shares)
        shares = [share / total for share in self.token_shares]
        # A card gets the others' rows over its one slot, and sends its own to each of them.
        travelling = max(max(1 - share, share * (count - 1)) for share in shares) * self.work.key_bytes / self._link
        one = max(share * whole for share, whole in zip(shares, wholes, strict=True))
        one = one + travelling if self.groups == 1 else GROUPS_TIME * one + SEEN_BY_GROUPS * travelling
        is_dealt = self.can_deal and min(shares) * count >= LEAST_SHARE
        rounds, remaining = divmod(num_forwards, count) if is_dealt else (0, num_forwards)
        return rounds * max(wholes) + remaining * one

    def prefers_tensor(self, counts: Sequence[int]) -> bool:
        """Whether dividing is faster than blocks for each of these numbers of forwards."""
        return all(found.tensor < GAIN * found.blocks for found in map(self.seconds, counts))

    def fastest(self, counts: Sequence[int]) -> WayName:
        """Tokens where it gains over what it would be else, for each of these numbers of forwards."""
        otherwise: WayName = "tensor" if self.prefers_tensor(counts) else "blocks"
        gain = GAIN if otherwise == "blocks" else TOKENS_GAIN  # beside blocks tokens forbid as much as tensor does
        gains = all(found.tokens < gain * getattr(found, otherwise) for found in map(self.seconds, counts))
        return "tokens" if gains else otherwise

    @property
    def _link(self) -> float:
        assert self.machine.bytes_per_s is not None, "there are several cards"
        return self.machine.bytes_per_s

    def _card_s(self, flops: float) -> list[float]:
        return [flops / (rate * BLOCK_RATE) for rate in self.machine.flops_per_s]
