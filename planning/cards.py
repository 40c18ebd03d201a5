"""The cards a training is planned for: those of this machine as they are now, or some that need not exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..parallel.devices import free_bytes, total_bytes
from ..quantization.kernel_choice import DeviceKernels
from ..quantization.quantize import BEST_FIRST, QuantizeSettings, refusal

_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}"
_COUNT = r"(?:(?P<count>[0-9]{1,6}) *[x×] *)?"
_CARD = re.compile(
    rf"{_COUNT}(?P<size>{_NUMBER}) *(?P<unit>GB|GiB)(?: *@ *(?P<speed>{_NUMBER}))?",
    re.IGNORECASE,
)
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
    """

    device: torch.device
    total_bytes: int
    usable_bytes: int
    speed: float = 1.0
    eight_bit: DeviceKernels | None = None
    refuses: frozenset[str] = frozenset()
    has_context: bool = False

    @property
    def name(self) -> str:
        return str(self.device)


def parse_cards(text: str) -> list[Card]:
    """Cards that need not exist: "24GB,12GB", "24GiB, 24GiB", several alike "2x24GB", or with relative speeds
    "2x24GB@1,12GB@0.5".

    Raises: ValueError that shows the part which is no card, or how many there are if these are too many.
    """
    cards: list[Card] = []
    for part in (part.strip() for part in text.split(",")):
        match = _CARD.fullmatch(part)
        if match is None or not float(match["size"]) or not float(match["speed"] or 1):
            raise ValueError(
                f'cards: {part!r} in {text!r} is no card; write its memory: "24GB,12GB", several alike as "2x24GB", '
                'with speeds "2x24GB@1,12GB@0.5"'
            )
        count = int(match["count"] or 1)
        if not 1 <= count <= _MAX_CARDS - len(cards):
            raise ValueError(
                f"cards: {part!r} in {text!r} adds {count} to {len(cards)} cards; add at least 1, and no more than "
                f"{_MAX_CARDS} in all"
            )
        size = int(float(match["size"]) * (2**30 if match["unit"].lower() == "gib" else 1e9))
        speed = float(match["speed"] or 1)
        first = len(cards)
        cards += [Card(torch.device("cuda", index), size, size, speed) for index in range(first, first + count)]
    return cards


def cards_of(devices: Sequence[torch.device]) -> list[Card] | None:
    """The cards of this machine as they are now, other programs' memory left out; None if torch cannot tell one's
    memory, or one is the CPU, for which nothing is planned."""
    cards = []
    for device in devices:
        total, free = total_bytes(device), free_bytes(device)
        if device.type == "cpu" or total is None or free is None:
            return None
        refuses = frozenset(s for s in BEST_FIRST if refusal(QuantizeSettings(s), [device]))
        cap = _cap_bytes(device, total)
        usable = min(free, cap)
        cards.append(Card(device, total, usable, _speed(device), None, refuses, has_context=True))
    slowest = min(card.speed for card in cards)
    return [replace(card, speed=card.speed / slowest) for card in cards]


def _cap_bytes(device: torch.device, total: int) -> int:
    """What torch.cuda.set_per_process_memory_fraction leaves to this process."""
    if device.type != "cuda" or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return total
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return cap - torch.cuda.memory_allocated(device)


def _speed(device: torch.device) -> float:
    """Multiprocessors: a first guess, right among cards of one generation."""
    if device.type != "cuda":
        return 1.0
    return float(torch.cuda.get_device_properties(device).multi_processor_count)
