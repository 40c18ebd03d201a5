"""How long blocks take: seconds = work / cards + bytes / link. Work and bytes follow from sizes alone.

A split chooses between three ways, of f forwards (conds times pictures):

    blocks          f * (sum(t) + c)               t: what a card computes of a forward, by its share
    with overlap    sum(t) + (f - 1) * max(t) + c  forwards follow each other through the cards
    tensor          f * (max(t') + c)              t': its share of each block, and what every card computes whole
    tokens          g * max(T) + h * (max(t) + c)  T: a whole forward; g rounds of one per card, h forwards remain

Copies c are the stream over each border, or with relay of every block; with tensor all partial sums; with tokens the
keys and values of the other cards' rows.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import nn

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import make_empty_transformer
from ..families.comfy.native import NativeModel
from ..families.spec import ModelFamily, Variant
from ..families.tensor_plan import BlockList, Shares, TensorPlan
from ..families.token_plan import TokenPlan, places, segments
from ..parallel.local.heads import groups_for
from ..parallel.local.shards import find_plan, shares_of
from ..parallel.placement import (
    attention_width,
    block_flops,
    block_names,
    blocks_with_lists,
    parameter_bytes,
    products_of,
    tokens_seen,
)
from ..system.telling import aligned
from .cards import PCIE_BYTES_PER_S, SHARE_OF_PEAK, SHARE_OF_PRODUCT, Card, MachineSpeed, machine_speed

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
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})(?:x([0-9]{1,4}))?")
_KEPT_BYTES = 1.7e9  # of a card, by its driver and by ComfyUI for computing
_BITS = (16, 8)

WayName = Literal["blocks", "tensor", "tokens"]


def key_bytes(block: nn.Module, keys: str, side: BlockList, num_tokens: tuple[int, int], element_size: int) -> float:
    """Of keys and values of all rows, in all attentions of a block that gather them, of one sample. keys: of BlockRows.
    num_tokens: of the picture and of the text. Works on meta tensors."""
    axes = (axis for place in places(keys) for axis in place.axis.split("/") if axis not in _FEW_ROWS)
    texts = (side.is_joint or not _TEXT_ROWS.isdisjoint(segments(axis)) for axis in axes)
    rows = sum(num_tokens[0] + num_tokens[1] * has_text for has_text in texts)
    return 2.0 * rows * attention_width(block, side) * element_size


def keys_of(blocks: Iterable[str], tokens: TokenPlan | None) -> dict[str, str]:
    """By the name of a block its keys, as of BlockRows; "" where nobody described them."""
    lists = tokens.blocks if tokens else {}
    return {name: lists[of].keys if (of := name.rpartition(".")[0]) in lists else "" for name in blocks}


@dataclass(frozen=True)
class ForwardWork:
    """One forward of all blocks; num_blocks is 0 for not known. whole_flops: of layers that every card computes whole
    where the cards divide blocks. sent_bytes: of partial sums that a card then sends each other card. stream_bytes: of
    activations between two blocks. key_bytes: of keys and values of all rows, in all attentions."""

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


class SampledBlock(NamedTuple):
    """A block and how it may be shared out. keys: as of BlockRows; "" where nobody described them."""

    block: nn.Module
    side: BlockList
    plan: TensorPlan | None = None
    keys: str = ""


def work_of(
    blocks: Sequence[SampledBlock], num_tokens: tuple[int, int], num_cards: int, sent_size: int = _SIXTEEN_BITS
) -> ForwardWork:
    """Of a forward, in half precision; works on meta tensors. num_tokens: as of key_bytes. sent_size: bytes of a number
    of partial sums, or of keys and values, that cards send."""
    flops = whole_flops = all_keys = sent_bytes = 0.0
    most_width = 0
    for block, side, plan, keys in blocks:
        flops += block_flops(block, side, *num_tokens)
        all_keys += key_bytes(block, keys, side, num_tokens, sent_size)
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
    """Of so many picture tokens beside the text's. blocks: how each is divided, if it is. sent_size: as of work_of."""
    side, keys = layout.linears, keys_of(blocks, tokens)
    sampled = [
        SampledBlock(model.get_submodule(name), side, how[0] if how else None, keys[name])
        for name, how in blocks.items()
    ]
    num_cards = max((len(how[1].heads) for how in blocks.values() if how), default=1)
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
    """The ways of one MODEL on several cards. block_shares: of the blocks, that each card has. tensor_shares: of every
    block; () if it cannot be divided. can_overlap: whether forwards may follow each other through the cards. crossings:
    of the stream, per forward. token_shares: relative ones of the rows; () if the class, the cards or the settings do
    not allow it. can_deal: whether each card may compute whole forwards where there are enough of them. groups: of
    heads, in which keys and values travel."""

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
        blocks, tensor, work = sum(times) + copies + (num_forwards - 1) * following, math.inf, self.work
        if self.tensor_shares:
            divided, whole = self._card_s(work.flops - work.whole_flops), self._card_s(work.whole_flops)
            slowest = max(s * d + rest for s, d, rest in zip(self.tensor_shares, divided, whole, strict=True))
            sums = num_forwards * work.sent_bytes * (len(times) - 1) / self._link  # over a card's one slot
            tensor = num_forwards * slowest + sums
        return StepSeconds(blocks, tensor, self._tokens_s(num_forwards))

    def _tokens_s(self, num_forwards: int) -> float:
        """Whole forwards are given out, one to each card, where nothing travels; the cards share each of the rest."""
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

    def fastest(self, counts: Sequence[int]) -> WayName:
        """Tokens where it gains over what it would be else, for each of these numbers of forwards."""
        steps = list(map(self.seconds, counts))
        if all(found.tensor < GAIN * found.blocks for found in steps):
            return "tokens" if all(found.tokens < TOKENS_GAIN * found.tensor for found in steps) else "tensor"
        return "tokens" if all(found.tokens < GAIN * found.blocks for found in steps) else "blocks"

    @property
    def _link(self) -> float:
        assert self.machine.bytes_per_s is not None, "there are several cards"
        return self.machine.bytes_per_s

    def _card_s(self, flops: float) -> list[float]:
        return [flops / (rate * BLOCK_RATE) for rate in self.machine.flops_per_s]


# ---- a step of sampling over cards that need not be here; nothing is loaded


@dataclass(frozen=True)
class SampledModel:
    """What is known of a model by its sizes. Blocks in execution order; bytes are of its weights in 16 bits."""

    name: str
    family: ModelFamily
    variant: Variant
    blocks: tuple[SampledBlock, ...]
    block_bytes: int
    other_bytes: int

    @classmethod
    def of(cls, info: CheckpointInfo, variant: Variant) -> SampledModel:
        """Raises: ValueError as block_names."""
        model, family = make_empty_transformer(info), info.family
        names = block_names(model, family)
        # Of families that diffusers builds text is a stream of the blocks, or attended to.
        own = "=txt+img" if any(each.is_joint for each in family.block_lists) else "=x"
        keys = keys_of(names, family.token_plan) if family.native else dict.fromkeys(names, own)
        blocks = tuple(
            SampledBlock(block, side, find_plan(family.tensor, block), keys[name])
            for name, (block, side) in zip(names, blocks_with_lists(model, family), strict=True)
        )
        sizes, rest = parameter_bytes(model, names, element_size=2)
        return cls(variant.name, family, variant, blocks, sum(sizes), rest)

    def weight_bytes(self, bits: int) -> float:
        """Of a file whose blocks are stored in so many bits."""
        return self.block_bytes * bits / 16 + self.other_bytes

    def can_divide(self, num_cards: int) -> bool:
        try:
            return all(each.plan and shares_of(each.block, each.plan, num_cards) for each in self.blocks)
        except ValueError:  # fewer heads than cards
            return False


@dataclass(frozen=True)
class SamplingForecast:
    """A model of one size (width, height, frames) on some cards. is_measured: whether speeds are this machine's."""

    model: SampledModel
    size: tuple[int, int, int]
    cards: tuple[Card, ...]
    machine: MachineSpeed
    is_measured: bool

    @cached_property
    def work(self) -> ForwardWork:
        return work_of(self.model.blocks, self.num_tokens, len(self.cards))

    @property
    def num_tokens(self) -> tuple[int, int]:
        width, height, frames = self.size
        return self.model.family.latent_of(self.model.variant).num_tokens(height, width, frames), NUM_TEXT_TOKENS

    @property
    def counts(self) -> tuple[int, ...]:
        """Forwards of a step: one, and two with CFG."""
        return (1, 2) if self.model.variant.training_guidance is None else (1,)

    def one_card(self, num_forwards: int) -> float:
        """Seconds of a step of the fastest card alone, whether it has room or not."""
        return num_forwards * self.work.flops / (max(self.machine.flops_per_s) * BLOCK_RATE)

    def held_bytes(self, way: WayName, bits: int) -> list[float]:
        """Weights that each card holds."""
        model, count, size = self.model, len(self.cards), self.model.weight_bytes(bits)
        if way == "blocks":
            rooms = [card.usable_bytes for card in self.cards]
            return [size * room / sum(rooms) for room in rooms]
        divided = (size - model.other_bytes) / count
        return [size] * count if way == "tokens" else [divided + model.other_bytes, *[divided] * (count - 1)]

    def streamed_bytes(self, way: WayName, bits: int) -> float:
        """Weights that the cards have no room for, which wait in host memory."""
        held = zip(self.held_bytes(way, bits), self.cards, strict=True)
        return sum(max(0.0, size - (card.usable_bytes - _KEPT_BYTES)) for size, card in held)

    def ways(self, bits: int | None = None) -> Ways:
        """Those that auto would look at with weights stored in so many bits; None: of any room. For several cards."""
        count, rooms, native = len(self.cards), [card.usable_bytes for card in self.cards], self.model.family.native
        # As a split plans them: blocks by memory, heads evenly, rows by speed.
        can_divide = self.model.can_divide(count) and not (bits and self.streamed_bytes("blocks", bits))
        can_share = all(each.keys for each in self.model.blocks) and not (bits and self.streamed_bytes("tokens", bits))
        return Ways(
            self.work,
            self.machine,
            [room / sum(rooms) for room in rooms],
            [1 / count] * count if can_divide else (),
            can_overlap=True,
            crossings=count,
            token_shares=self.machine.flops_per_s if can_share else (),
            can_deal=native is None or native.keeps_nothing,  # with the node's overlap, which is on by default
            groups=groups_for(min(self.machine.flops_per_s), self.machine.bytes_per_s or 1.0),
        )

    def taken(self, bits: int) -> WayName:
        """What way auto would take: that of the usual size, whatever is sampled then."""
        is_video = self.model.family.latent_of(self.model.variant).is_video
        num_tokens = CLIP_TOKENS if is_video else PICTURE_TOKENS, NUM_TEXT_TOKENS
        usual = work_of(self.model.blocks, num_tokens, len(self.cards))
        return replace(self.ways(bits), work=usual).fastest(self.counts)

    def _seconds(self, bits: int | None = None) -> dict[WayName, dict[int, float]]:
        """Of a step of so many forwards, by way; {} for one card."""
        steps = {count: self.ways(bits).seconds(count)._asdict() for count in self.counts if len(self.cards) > 1}
        possible: Any = [way for way, seconds in steps.get(1, {}).items() if seconds < math.inf]
        return {way: {count: each[way] for count, each in steps.items()} for way in possible}

    def verdict(self, bits: int) -> str:
        """ "8-bit file: way auto takes tokens, about 1.1 s per step, 1.7 times one card"."""
        alone, way = self.one_card(1), self.taken(bits) if len(self.cards) > 1 else "tokens"
        said = f"one card, about {alone:.2g} s per step"
        if len(self.cards) > 1:
            seconds = self._seconds()[way][1]
            said = f"way auto takes {way}, about {seconds:.2g} s per step, {alone / seconds:.2g} times one card"
        streamed = self.streamed_bytes(way, bits) / 1e9
        note = f"; {streamed:.3g} GB that do not fit are streamed from RAM at every step, which is not in it"
        return f"{bits}-bit file: {said}{note * bool(streamed)}"

    def describe(self) -> str:
        """The verdict for a 16-bit and an 8-bit file, what they go by, and a row per way."""
        width, height, frames = self.size
        cards = Counter(map(_name_of, self.cards))
        link = f", {self.machine.bytes_per_s / 1e9:.3g} GB/s each way between two" if self.machine.bytes_per_s else ""
        names = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in cards.items())
        clip, source = f", {frames} frames" * (frames > 1), "measured" if self.is_measured else "published speeds"
        basis = f"{self.model.name}, {width}x{height}{clip}; {names}: a forecast by {source}{link}"
        return "\n".join([*map(self.verdict, _BITS), basis, "", aligned(list(self._rows()))])

    def _rows(self) -> Iterator[list[str]]:
        sizes = (f"{bits}-bit weights, GB per card" for bits in _BITS)
        yield ["way", *("s per step" + " with CFG" * (n > 1) for n in self.counts), "times one card", *sizes]
        speeds, alone = self.machine.flops_per_s, {count: self.one_card(count) for count in self.counts}
        room = max(card.usable_bytes for card, speed in zip(self.cards, speeds, strict=True) if speed == max(speeds))
        steps: dict[Any, dict[int, float]] = {"one card": alone, **self._seconds()}
        for way, seconds in steps.items():
            row = [way, *(f"{each:.2g}" for each in seconds.values()), f"{alone[1] / seconds[1]:.2g}"]
            for bits in _BITS:
                whole = self.model.weight_bytes(bits)
                held = [whole] if seconds is alone else self.held_bytes(way, bits)
                has_room = whole <= room - _KEPT_BYTES if seconds is alone else not self.streamed_bytes(way, bits)
                own = sorted({round(size / 1e9, 1) for size in held}, reverse=True)
                row.append(" and ".join(f"{size:.1f}" for size in own) + " (no room)" * (not has_room))
            yield row

    def values(self) -> dict[str, Any]:
        """The same, for JSON."""
        several = _BITS if len(self.cards) > 1 else ()
        return {
            "model": self.model.name,
            "size": list(self.size),
            "cards": list(map(_name_of, self.cards)),
            "is_measured": self.is_measured,
            "link_bytes_per_s": self.machine.bytes_per_s,
            "one_card_s": {str(count): self.one_card(count) for count in self.counts},
            "files": {str(bits): {"taken": self.taken(bits), "seconds": self._seconds(bits)} for bits in several},
        }


def _name_of(card: Card) -> str:
    """ "RTX 3090"; of a card that is known by its memory alone "RTX 4090, assumed from 24 GB"."""
    name = card.kind.name if card.kind else card.name
    return f"{name}, assumed from {card.total_bytes / 1e9:.0f} GB" if card.is_assumed else name


def forecast_sampling(model: SampledModel, size: str, cards: Sequence[Card]) -> SamplingForecast:
    """For cards that are here, or need not be; size as "1024x1024", or "832x480x33" with frames.
    Raises: ValueError that says what is wrong with it, or for a card whose speed nobody knows."""
    match, latent = _SIZE.fullmatch(size.strip().lower()), model.family.latent_of(model.variant)
    if match is None:
        raise ValueError(f"--sample {size!r} is no size; give width x height, such as 1024x1024, or 832x480x33 frames")
    width, height, frames = int(match[1]), int(match[2]), int(match[3] or 1)
    if min(width, height) < latent.size_multiple or frames < 1:
        raise ValueError(f"--sample {size}: {model.name} makes pictures of {latent.size_multiple} pixels and more")
    if frames > 1 and not latent.is_video:
        raise ValueError(f"--sample {size}: {model.name} makes pictures, no clips; leave out the x{frames}")
    is_measured, kinds = all(card.has_context for card in cards), [card.kind for card in cards if card.kind]
    if is_measured:
        machine = machine_speed([card.device for card in cards])
    else:
        if unknown := [card for card in cards if card.kind is None]:
            size_gb = f"{unknown[0].total_bytes / 1e9:.0f} GB"
            raise ValueError(
                f"cards: no card of {size_gb} is in the table of speeds; name the models, such as 2x3090 or 5090,4090"
            )
        product = SHARE_OF_PEAK / SHARE_OF_PRODUCT * 1e12  # of peaks, in a large matrix product
        link = min(kind.link_bytes_per_s for kind in kinds) if len(kinds) > 1 else None
        machine = MachineSpeed(tuple(kind.tera_per_s * product for kind in kinds), link, time.strftime("%Y-%m-%d"))
    return SamplingForecast(model, (width, height, frames), tuple(cards), machine, is_measured)
