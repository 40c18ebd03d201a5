"""The cards a training is planned for: those of this machine as they are now, or some that need not exist."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..events import first_line
from ..parallel.devices import device_title, free_bytes, total_bytes
from ..quantization.kernel_choice import DeviceKernels
from ..quantization.quantize import BEST_FIRST, QuantizeSettings, refusal
from .card_speeds import KINDS, SHARE_OF_PRODUCT, CardKind, kind_called, kind_of_size
from .machine_speed import machine_speed

_log = logging.getLogger(__name__)
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}"
_COUNT = r"(?:(?P<count>[0-9]{1,6}) *[x×] *)?"
_CARD = re.compile(
    rf"{_COUNT}(?P<size>{_NUMBER}) *(?P<unit>GB|GiB)(?: *@ *(?P<speed>{_NUMBER}))?",
    re.IGNORECASE,
)
_NAMED = re.compile(rf"{_COUNT}(?P<name>[A-Za-z0-9 -]+)")
_MAX_CARDS = 64  # more than a host has; a slip of the finger ends here


@dataclass(frozen=True)
class Card:
    """One device to plan for, whether it exists here or not.

    Args:
        usable_bytes: what tensors, the allocator's losses and a context that does not exist yet may take.
        speed: relative to the others.
        eight_bit: what it multiplies 8 bits with; None asks a card that exists.
        refuses: schemes that it cannot multiply in.
        has_context: whether CUDA has started on it, so that what is free is free of that already.
        kind: what is known of its model, if anything; is_assumed: of a card that was named by its memory alone.
        measured_flops_per_s: of a training, by a matrix product; 0 where that was not measured.
    """

    device: torch.device
    total_bytes: int
    usable_bytes: int
    speed: float = 1.0
    eight_bit: DeviceKernels | None = None
    refuses: frozenset[str] = frozenset()
    has_context: bool = False
    kind: CardKind | None = None
    is_assumed: bool = False
    measured_flops_per_s: float = 0.0

    @property
    def name(self) -> str:
        return str(self.device)

    @property
    def flops_per_s(self) -> float:
        """Operations per second of a training; 0 if unknown."""
        return self.measured_flops_per_s or (self.kind.flops_per_s if self.kind else 0.0)


def parse_cards(text: str) -> list[Card]:
    """Cards that need not exist: "24GB,12GB", "24GiB, 24GiB", several alike "2x24GB", with relative speeds
    "2x24GB@1,12GB@0.5", or by their model "2x3090", "RTX 4090, RTX 3090".

    Raises: ValueError that shows the part which is no card, or how many there are if these are too many.
    """
    cards: list[Card] = []
    for part in (part.strip() for part in text.split(",")):
        if named := _named_card(part, cards):
            cards += named
            continue
        match = _CARD.fullmatch(part)
        if match is None or not float(match["size"]) or not float(match["speed"] or 1):
            raise ValueError(
                f'cards: {part!r} in {text!r} is no card; write its memory: "24GB,12GB", several alike as "2x24GB", '
                'with speeds above 0 "2x24GB@1,12GB@0.5", or one of these models, such as "2x3090": '
                + ", ".join(kind.name for kind in KINDS)
            )
        count = int(match["count"] or 1)
        _check_count(part, count, cards)
        size = int(float(match["size"]) * (2**30 if match["unit"].lower() == "gib" else 1e9))
        speed = float(match["speed"] or 1)
        first = len(cards)
        kind = kind_of_size(size)
        cards += [
            Card(torch.device("cuda", index), size, size, speed, kind=kind, is_assumed=True)
            for index in range(first, first + count)
        ]
    return _with_speeds(cards)


def _check_count(part: str, count: int, cards: Sequence[Card]) -> None:
    if not 1 <= count <= _MAX_CARDS - len(cards):
        raise ValueError(
            f"cards: {part!r} adds {count} to {len(cards)} cards; add at least 1, and no more than {_MAX_CARDS} in all"
        )


def _named_card(part: str, before: Sequence[Card]) -> list[Card]:
    """Cards of a model, such as "2x3090"; [] for what names none."""
    match = _NAMED.fullmatch(part)
    kind = kind_called(match["name"]) if match else None
    if match is None or kind is None:
        return []
    count = int(match["count"] or 1)
    _check_count(part, count, before)
    size, refuses = kind.gib * 2**30, frozenset(() if kind.has_fp8 else ("fp8-compute",))
    first = len(before)
    return [
        Card(torch.device("cuda", index), size, size, refuses=refuses, kind=kind)
        for index in range(first, first + count)
    ]


def _with_speeds(cards: list[Card]) -> list[Card]:
    """Of cards whose speeds are all known, how fast each is relative to the slowest."""
    if any(card.is_assumed or not card.flops_per_s for card in cards):
        return cards
    slowest = min(card.flops_per_s for card in cards)
    return [replace(card, speed=card.flops_per_s / slowest) for card in cards]


def cards_of(devices: Sequence[torch.device]) -> list[Card] | None:
    """The cards of this machine as they are now, other programs' memory left out; None if torch cannot tell one's
    memory, or one is the CPU, for which nothing is planned. Speeds are published ones, else measured."""
    cards = []
    for device in devices:
        total, free = total_bytes(device), free_bytes(device)
        if device.type == "cpu" or total is None or free is None:
            return None
        refuses = frozenset(s for s in BEST_FIRST if refusal(QuantizeSettings(s), [device]))
        cap = _cap_bytes(device, total)
        usable = min(free, cap)
        kind = kind_called(device_title(device))
        cards.append(Card(device, total, usable, refuses=refuses, has_context=True, kind=kind))
    return _with_speeds(cards if all(card.kind for card in cards) else _measured(cards))


def _measured(cards: list[Card]) -> list[Card]:
    """All of them with measured speeds: a published one is on another scale. Cards of one model share a measurement."""
    titles = {device_title(card.device): card.device for card in cards}
    try:
        found = {title: machine_speed([device]).cards[0].flops_per_s for title, device in titles.items()}
    except RuntimeError as error:
        _log.warning("cards are taken for equally fast, for their speed cannot be measured: %s", first_line(error))
        return cards
    return [replace(c, measured_flops_per_s=SHARE_OF_PRODUCT * found[device_title(c.device)]) for c in cards]


def _cap_bytes(device: torch.device, total: int) -> int:
    """What torch.cuda.set_per_process_memory_fraction leaves to this process."""
    if device.type != "cuda" or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return total
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return cap - torch.cuda.memory_allocated(device)
