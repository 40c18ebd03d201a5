"""The cards to plan for: those of this machine as they are now, or some that need not exist; and how fast they are."""

from __future__ import annotations

import json
import logging
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pydantic
import torch

from ..checkpoints.fingerprint import settings_fingerprint
from ..events import first_line
from ..parallel.devices import (
    device_module,
    device_title,
    free_bytes,
    has_peer_access,
    release_cached_memory,
    total_bytes,
)
from ..parallel.staged_copies import exchange_speed, product_speed
from ..quantization.quantize import SCHEMES, QuantizeSettings, Scheme, auto_schemes, refusal
from ..system.files import user_cache_folder, write_atomically

# FLUX.2-dev at 1024², bf16, blocks recomputed, on an H200: 1.866 s a step, 0.85 s at the peak (docs/benchmarks.md).
SHARE_OF_PEAK = 0.46
SHARE_OF_PRODUCT = 0.66  # the same, of the 690 * 10^12 per second that a large matrix product was measured at there

_log = logging.getLogger(__name__)
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]{0,6})?|\.[0-9]{1,6}"
_COUNT = r"(?:(?P<count>[0-9]{1,6}) *[x×] *)?"
_UNIT = "GB|GiB"
_CARD = re.compile(
    rf"{_COUNT}(?:(?P<size>{_NUMBER}) *(?P<unit>{_UNIT})(?: *@ *(?P<speed>{_NUMBER}))?"
    rf"|(?P<name>[A-Za-z0-9 -]+)(?:: *(?P<free>{_NUMBER}) *(?P<free_unit>{_UNIT}))?)",
    re.IGNORECASE,
)
_MAX_CARDS = 64  # more than a host has; a slip of the finger ends here
_FILLERS = re.compile(r"\b(nvidia|geforce|rtx|radeon|rx|amd)\b|[\s-]")
_NEAR = 0.05  # a size in GB stands for a card whose memory differs by no more
_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = 3  # of measurements; raise it when something else is measured
_Positive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


# What two cards are taken to send each other at once, each: over PCIe 4.0 x8 or x16, through host memory; and what the
# pack's copies were measured at over NVLink.
PCIE_BYTES_PER_S, NVLINK_BYTES_PER_S = 12e9, 300e9


class CardKind(NamedTuple):
    """A model of card. tera_per_s: its maker's dense operations in bf16 with sums in float32, of consumer cards twice
    the float32 rate. has_fp8: whether it multiplies in float8. link_bytes_per_s: of two of them, as usually built."""

    name: str
    tera_per_s: float
    gib: int
    has_fp8: bool
    link_bytes_per_s: float = PCIE_BYTES_PER_S

    @property
    def flops_per_s(self) -> float:
        """Operations per second of a training."""
        return self.tera_per_s * 1e12 * SHARE_OF_PEAK


# A bare size stands for the first card of that size.
KINDS = (
    CardKind("RTX 4090", 165.2, 24, True),
    CardKind("RTX 3090", 71.0, 24, False),
    CardKind("RTX 5090", 209.5, 32, True),
    CardKind("RTX 4080", 97.5, 16, True),
    CardKind("RTX 5080", 112.6, 16, True),
    CardKind("RTX 4060 Ti", 44.1, 16, True),
    CardKind("RTX 4070", 58.3, 12, True),
    CardKind("RTX 3080", 59.5, 10, False),
    CardKind("RTX 6000 Ada", 364.2, 48, True),
    CardKind("RTX A6000", 154.8, 48, False),
    CardKind("L40S", 362.0, 48, True),
    CardKind("H100", 989.0, 80, True, NVLINK_BYTES_PER_S),
    CardKind("A100", 312.0, 80, False, NVLINK_BYTES_PER_S),
    CardKind("H200", 989.0, 141, True, NVLINK_BYTES_PER_S),
    CardKind("RTX 3060", 25.5, 12, False),
    CardKind("RTX 4060", 30.2, 8, True),
    CardKind("RTX 3060 Ti", 32.4, 8, False),
    CardKind("RTX 3070", 40.6, 8, False),
    CardKind("RTX 3070 Ti", 43.5, 8, False),
    CardKind("RTX 3080 Ti", 68.2, 12, False),
    CardKind("RTX 3090 Ti", 80.0, 24, False),
    CardKind("RTX 4070 Super", 71.0, 12, True),
    CardKind("RTX 4070 Ti", 80.2, 12, True),
    CardKind("RTX 4070 Ti Super", 88.2, 16, True),
    CardKind("RTX 4080 Super", 104.4, 16, True),
    CardKind("RTX 5060", 38.4, 8, True),
    CardKind("RTX 5060 Ti", 47.4, 16, True),
    CardKind("RTX 5070", 61.7, 12, True),
    CardKind("RTX 5070 Ti", 87.9, 16, True),
)
_BY_NAME: Mapping[str, CardKind] = {_FILLERS.sub("", kind.name.lower()): kind for kind in KINDS}


def kind_called(name: str) -> CardKind | None:
    """The kind of that name, such as "3090", "RTX 3090" or what torch calls the card; None for another."""
    plain = _FILLERS.sub("", name.lower())
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    words = name.lower().replace("-", " ").split()
    kind = next((kind for kind in KINDS if kind.name.lower() in words), None)  # "H100 80GB HBM3", but no "RTX 4090 D"
    is_on_bus = "pcie" in words or "mig" in words
    return kind._replace(link_bytes_per_s=PCIE_BYTES_PER_S) if kind and is_on_bus else kind


@dataclass(frozen=True)
class Card:
    """One device to plan for, whether it exists here or not. usable_bytes: for tensors, the allocator's losses and a
    context that does not exist yet. speed: relative to the others. refuses: schemes that it cannot multiply in.
    has_context: whether CUDA has started on it. kind: its model, if known. is_assumed: whether that is a guess from its
    memory. measured_flops_per_s: of a training; 0 where that was not measured."""

    device: torch.device
    total_bytes: int
    usable_bytes: int
    speed: float = 1.0
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

    @property
    def link_bytes_per_s(self) -> float:
        """From another such card and to it at once, as usually built."""
        return self.kind.link_bytes_per_s if self.kind else PCIE_BYTES_PER_S


def parse_cards(text: str) -> list[Card]:
    """Cards that need not exist: "24GB,12GB", several alike "2x24GiB", with relative speeds "2x24GB@1,12GB@0.5", or by
    their model "2x3090, RTX 4090", with what is free there "3090:23GiB".
    Raises: ValueError that shows the part which is no card, or how many there are if these are too many."""
    cards: list[Card] = []
    for part in (part.strip() for part in text.split(",")):
        card, match = None, _CARD.fullmatch(part)
        if match and match["name"] and (kind := kind_called(match["name"])):
            refuses, size = frozenset(() if kind.has_fp8 else ("fp8-compute",)), kind.gib * 2**30
            free = _bytes(match["free"], match["free_unit"]) if match["free"] else size
            card = Card(torch.device("cuda"), size, free, refuses=refuses, kind=kind) if 0 < free <= size else None
        elif match and match["size"] and float(match["size"]) and float(match["speed"] or 1):
            size = _bytes(match["size"], match["unit"])
            alike = (each for each in KINDS if any(abs(size / b / each.gib - 1) <= _NEAR for b in (2**30, 1e9)))
            kind = next(alike, None)
            card = Card(torch.device("cuda"), size, size, float(match["speed"] or 1), kind=kind, is_assumed=True)
        if match is None or card is None:
            raise ValueError(
                f'cards: {part!r} in {text!r} is no card; write its memory: "24GB,12GB", several alike as "2x24GB", '
                'with speeds above 0 "2x24GB@1,12GB@0.5", or one of these models, such as "2x3090", with '
                'what is free "3090:23GiB": ' + ", ".join(kind.name for kind in KINDS)
            )
        count, first = int(match["count"] or 1), len(cards)
        if not 1 <= count <= _MAX_CARDS - first:
            raise ValueError(
                f"cards: {part!r} adds {count} to {first} cards; add at least 1, and no more than {_MAX_CARDS} in all"
            )
        cards += [replace(card, device=torch.device("cuda", index)) for index in range(first, first + count)]
    return _with_speeds(cards)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * (2**30 if unit.lower() == "gib" else 1e9))


def _with_speeds(cards: list[Card]) -> list[Card]:
    """The cards, with how fast each is relative to the slowest if the speeds of all are known."""
    if any(card.is_assumed or not card.flops_per_s for card in cards):
        return cards
    slowest = min(card.flops_per_s for card in cards)
    return [replace(card, speed=card.flops_per_s / slowest) for card in cards]


def cards_of(devices: Sequence[torch.device]) -> list[Card] | None:
    """The cards of this machine as they are now; None if one is the CPU, or torch cannot tell its memory."""
    cards = []
    for device in devices:
        total, free = total_bytes(device), free_bytes(device)
        if device.type == "cpu" or total is None or free is None:
            return None
        if device.type == "cuda":
            cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
            free = min(free, cap - torch.cuda.memory_allocated(device))
        refuses = frozenset(s for s in SCHEMES if refusal(QuantizeSettings(s), [device]))
        kind = kind_called(device_title(device))
        cards.append(Card(device, total, min(free, total), refuses=refuses, has_context=True, kind=kind))
    if not all(card.kind for card in cards):  # a published speed is on another scale, so all are measured
        titles = {device_title(device): device for device in devices}  # cards of one model share a measurement
        try:
            found = {title: SHARE_OF_PRODUCT * machine_speed([each]).flops_per_s[0] for title, each in titles.items()}
            cards = [replace(card, measured_flops_per_s=found[device_title(card.device)]) for card in cards]
        except RuntimeError as error:
            reason = first_line(error)
            _log.warning("cards are taken for equally fast, for their speed cannot be measured: %s", reason)
            return cards
    return _with_speeds(cards)


def able_schemes(cards: Sequence[Card], types: Mapping[str, int] | None = None) -> list[Scheme]:
    """Schemes that every card can do, the best first. types: of a file's quantized tensors; see auto_schemes."""
    return auto_schemes(types or {}, [each for each in SCHEMES if all(each not in card.refuses for card in cards)])


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class MachineSpeed:
    """Each card in a large product in half precision, and what two send each other at once over the slowest link, each;
    None for one card. date: YYYY-MM-DD."""

    flops_per_s: tuple[_Positive, ...]
    bytes_per_s: _Positive | None
    date: str

    def __post_init__(self) -> None:
        if (self.bytes_per_s is None) != (len(self.flops_per_s) == 1):
            raise ValueError("several cards have a link, and one card has none")


def machine_speed(devices: Sequence[torch.device]) -> MachineSpeed:
    """As measured before with the same cards and links, else now. Raises: what a card without memory raises."""
    kept = kept_speed(devices)
    if (found := kept.read()) is None:
        kept.write(found := measure_machine(devices))
    return found  # type: ignore[no-any-return]


class Kept:
    """A file of a value that was measured or proved here, of a kind for pydantic. key: all that it depends on."""

    def __init__(self, prefix: str, key: Mapping[str, Any], kind: Any) -> None:
        self._prefix, self._kind = prefix, kind
        self._key = json.loads(json.dumps(key))  # as JSON gives it back

    @property
    def path(self) -> Path:
        return user_cache_folder() / "calibration" / f"{self._prefix}{settings_fingerprint(self._key)[:24]}.json"

    def read(self) -> Any:
        """None where nothing is kept, or nothing that can be used."""
        try:
            entry = json.loads(self.path.read_bytes())
            if entry["key"] == self._key:
                return pydantic.TypeAdapter(self._kind).validate_python(entry["value"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); it is made again", self.path, first_line(error))
        return None

    def write(self, value: Any) -> None:
        plain = pydantic.TypeAdapter(self._kind).dump_python(value, mode="json")
        try:
            write_atomically(self.path, json.dumps({"key": self._key, "value": plain}, indent=2).encode("utf-8"))
        except OSError as error:
            _log.warning("%s is not kept: %s", self.path, error)


def measure_machine(devices: Sequence[torch.device]) -> MachineSpeed:
    """Takes some 150 MiB of each card, and well under a second on two GPUs."""
    with torch.inference_mode():
        products = tuple(map(product_speed, devices))
        links = [exchange_speed(one, other) for one, other in combinations(devices, 2)]
    release_cached_memory()
    return MachineSpeed(products, min(links, default=None), time.strftime("%Y-%m-%d"))


def kept_speed(devices: Sequence[torch.device]) -> Kept:
    """The file of these cards' measurement, which depends on them, on who reaches whom, driver and torch."""
    cards = [
        [str(device), total_bytes(device), str(getattr(device_module(device), "get_device_properties", str)(device))]
        for device in devices
    ]
    access = [[has_peer_access(source, target) for target in devices] for source in devices]
    try:
        driver = _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):  # of another system or maker: the newest CUDA that the driver knows
        driver = str(getattr(torch._C, "_cuda_getDriverVersion", str)())
    own = {"machine": platform.node(), "driver": driver, "torch": torch.__version__, "version": _VERSION}
    return Kept("", own | {"cards": cards, "access": access}, MachineSpeed)
