"""What a step of sampling would take over some cards, and which way auto of a split would take; by sizes and speeds.

Nothing is loaded. The cards need not be here: their speeds are then published ones, and their link is assumed.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import make_empty_transformer
from ..families.comfy.token_plans import plan_of
from ..families.spec import ModelFamily, Variant
from ..parallel.local.heads import groups_for
from ..parallel.local.shards import find_plan, shares_of
from ..parallel.placement import block_names, blocks_with_lists, parameter_bytes
from ..system.telling import aligned
from .cards import SHARE_OF_PEAK, SHARE_OF_PRODUCT, Card, MachineSpeed, machine_speed
from .times import (
    BLOCK_RATE,
    CLIP_TOKENS,
    NUM_TEXT_TOKENS,
    PICTURE_TOKENS,
    ForwardWork,
    SampledBlock,
    WayName,
    Ways,
    work_of,
)

_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})(?:x([0-9]{1,4}))?")
_KEPT_BYTES = 1.7e9  # of a card, by its driver and by ComfyUI for computing
_BITS = (16, 8)
_WAYS: tuple[WayName, ...] = ("blocks", "tensor", "tokens")


@dataclass(frozen=True)
class SampledModel:
    """What is known of a model by its sizes.

    Args:
        blocks: in execution order. block_bytes, other_bytes: of its weights in 16 bits.
    """

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
        rows = plan_of(family.native) if family.native else None
        # Of families that diffusers builds text is a stream of the blocks, or attended to.
        own = "=txt+img" if any(each.is_joint for each in family.block_lists) else "=x"

        def keys(name: str) -> str:
            of_list = rows.blocks.get(name.rpartition(".")[0]) if rows else None
            return of_list.keys if of_list else "" if family.native else own

        found = zip(names, blocks_with_lists(model, family), strict=True)
        blocks = tuple(
            SampledBlock(block, side, find_plan(family.tensor, block), keys(name)) for name, (block, side) in found
        )
        sizes, rest = parameter_bytes(model, names, element_size=2)
        return cls(variant.name, family, variant, blocks, sum(sizes), rest)

    def weight_bytes(self, bits: int) -> float:
        """Of a file whose blocks are stored in so many bits."""
        return self.block_bytes * bits / 16 + self.other_bytes

    def can_divide(self, num_cards: int) -> bool:
        try:
            for each in self.blocks:
                if each.plan is None:
                    return False
                shares_of(each.block, each.plan, (1.0,) * num_cards)
        except ValueError:  # fewer heads than cards
            return False
        return True


def parse_size(text: str, model: SampledModel) -> tuple[int, int, int]:
    """Width, height and frames of "1024x1024" or "832x480x33".

    Raises: ValueError that says what is wrong with it.
    """
    match, latent = _SIZE.fullmatch(text.strip().lower()), model.family.latent_of(model.variant)
    if match is None:
        raise ValueError(f"--sample {text!r} is no size; give width x height, such as 1024x1024, or 832x480x33 frames")
    width, height, frames = int(match[1]), int(match[2]), int(match[3] or 1)
    if min(width, height) < latent.size_multiple or frames < 1:
        raise ValueError(f"--sample {text}: {model.name} makes pictures of {latent.size_multiple} pixels and more")
    if frames > 1 and not latent.is_video:
        raise ValueError(f"--sample {text}: {model.name} makes pictures, no clips; leave out the x{frames}")
    return width, height, frames


@dataclass(frozen=True)
class SamplingForecast:
    """A model of one size on some cards.

    Args:
        size: width and height in pixels, and frames.
        machine: speeds of the cards and their link. is_measured: whether they are this machine's.
    """

    model: SampledModel
    size: tuple[int, int, int]
    cards: tuple[Card, ...]
    machine: MachineSpeed
    is_measured: bool

    @cached_property
    def work(self) -> ForwardWork:
        return work_of(self.model.blocks, self.num_tokens, len(self.cards))

    @cached_property
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
        model, count = self.model, len(self.cards)
        size = model.weight_bytes(bits)
        if way == "blocks":
            rooms = [card.usable_bytes for card in self.cards]
            return [size * room / sum(rooms) for room in rooms]
        divided = (size - model.other_bytes) / count
        return [size] * count if way == "tokens" else [divided + model.other_bytes, *[divided] * (count - 1)]

    def streamed_bytes(self, way: WayName, bits: int) -> float:
        """Weights that the cards have no room for, which wait in host memory."""
        held = zip(self.held_bytes(way, bits), self.cards, strict=True)
        return sum(max(0.0, size - (card.usable_bytes - _KEPT_BYTES)) for size, card in held)

    def has_room(self, way: WayName, bits: int) -> bool:
        return not self.streamed_bytes(way, bits)

    def ways(self, bits: int | None = None) -> Ways:
        """Those that auto would look at with weights stored in so many bits; None: of any room. There are several
        cards."""
        count, rooms, native = len(self.cards), [card.usable_bytes for card in self.cards], self.model.family.native
        # As a split plans them: blocks by memory, heads evenly, rows by speed.
        can_divide = self.model.can_divide(count) and (bits is None or self.has_room("blocks", bits))
        can_share = all(each.keys for each in self.model.blocks) and (bits is None or self.has_room("tokens", bits))
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

    # ---- in words

    def verdict(self, bits: int) -> str:
        """ "8-bit file: way auto takes tokens, about 1.1 s per step, 1.7 times one card"."""
        alone = self.one_card(1)
        if len(self.cards) == 1:
            way: WayName = "tokens"
            said = f"one card, about {alone:.2g} s per step"
        else:
            way = self.taken(bits)
            seconds = getattr(self.ways().seconds(1), way)
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
        return "\n".join([*map(self.verdict, _BITS), basis, "", aligned(self._rows())])

    def _rows(self) -> list[list[str]]:
        held = [f"{bits}-bit weights, GB per card" for bits in _BITS]
        rows = [["way", *("s per step" + " with CFG" * (n > 1) for n in self.counts), "times one card", *held]]
        fastest = max(self.machine.flops_per_s)
        rooms = [each for each, speed in zip(self.cards, self.machine.flops_per_s, strict=True) if speed == fastest]
        room = max(card.usable_bytes for card in rooms) - _KEPT_BYTES
        held_bytes = [self.model.weight_bytes(bits) for bits in _BITS]
        sizes = [f"{size / 1e9:.1f}" + " (no room)" * (size > room) for size in held_bytes]
        rows.append(["one card", *(f"{self.one_card(n):.2g}" for n in self.counts), "1", *sizes])
        for way in _WAYS if len(self.cards) > 1 else ():
            seconds = [getattr(self.ways().seconds(count), way) for count in self.counts]
            if seconds[0] == math.inf:
                continue
            rows.append([way, *(f"{each:.2g}" for each in seconds), f"{self.one_card(1) / seconds[0]:.2g}"])
            for bits in _BITS:
                own = sorted({round(size / 1e9, 1) for size in self.held_bytes(way, bits)}, reverse=True)
                no_room = " (no room)" * (not self.has_room(way, bits))
                rows[-1].append(" and ".join(f"{size:.1f}" for size in own) + no_room)
        return rows

    def values(self) -> dict[str, Any]:
        """The same, for JSON."""
        found: dict[str, Any] = {
            "model": self.model.name,
            "size": list(self.size),
            "cards": list(map(_name_of, self.cards)),
            "is_measured": self.is_measured,
            "link_bytes_per_s": self.machine.bytes_per_s,
            "one_card_s": {str(count): self.one_card(count) for count in self.counts},
            "files": {},
        }
        for bits in _BITS if len(self.cards) > 1 else ():
            seconds = {count: self.ways(bits).seconds(count)._asdict() for count in self.counts}
            found["files"][str(bits)] = {
                "taken": self.taken(bits),
                "seconds": {
                    way: {str(count): each[way] for count, each in seconds.items()}
                    for way in _WAYS
                    if seconds[1][way] < math.inf
                },
            }
        return found


def _name_of(card: Card) -> str:
    """ "RTX 3090"; of a card that is known by its memory alone "RTX 4090, assumed from 24 GB"."""
    name = card.kind.name if card.kind else card.name
    return f"{name}, assumed from {card.total_bytes / 1e9:.0f} GB" if card.is_assumed else name


def forecast_sampling(model: SampledModel, size: str, cards: Sequence[Card]) -> SamplingForecast:
    """For cards that are here, or need not be.

    Raises: ValueError for a size that is none, or a card whose speed nobody knows.
    """
    is_measured = all(card.has_context for card in cards)
    if is_measured:
        machine = machine_speed([card.device for card in cards])
    else:
        if unknown := [card for card in cards if card.kind is None]:
            size_gb = f"{unknown[0].total_bytes / 1e9:.0f} GB"
            raise ValueError(
                f"cards: no card of {size_gb} is in the table of speeds; name the models, such as 2x3090 or 5090,4090"
            )
        kinds = [card.kind for card in cards if card.kind]
        product = SHARE_OF_PEAK / SHARE_OF_PRODUCT * 1e12  # of peaks, in a large matrix product
        link = min(kind.link_bytes_per_s for kind in kinds) if len(kinds) > 1 else None
        machine = MachineSpeed(tuple(kind.tera_per_s * product for kind in kinds), link, time.strftime("%Y-%m-%d"))
    return SamplingForecast(model, parse_size(size, model), tuple(cards), machine, is_measured)
