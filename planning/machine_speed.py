"""What this machine's cards and the links between them can do, measured once and then read from disk."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from ..checkpoints.fingerprint import settings_fingerprint
from ..parallel.devices import device_module, has_peer_access, release_cached_memory, total_bytes
from ..parallel.exchange_speed import exchange_speed, product_speed
from ..system.files import user_cache_folder, write_atomically

_log = logging.getLogger(__name__)
_VERSION = 2  # raise it when something else is measured
_STRICT = ConfigDict(extra="forbid")
_DRIVER = Path("/proc/driver/nvidia/version")
Key = Mapping[str, Any]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=_STRICT)
class CardSpeed:
    """flops_per_s: of a large matrix product in half precision."""

    name: str
    flops_per_s: Positive


@dataclass(frozen=True, config=_STRICT)
class ExchangeSpeed:
    """Two cards that send each other something at the same time.

    Args:
        cards: their places among those that were measured.
        bytes_per_s: that each of them sends in a large exchange.
        is_direct: whether they have access to each other's memory; None if torch cannot tell.
    """

    cards: tuple[int, int]
    bytes_per_s: Positive
    is_direct: bool | None


@dataclass(frozen=True, config=_STRICT)
class MachineSpeed:
    """All cards that were measured together, and the link of every two. date: YYYY-MM-DD."""

    cards: tuple[CardSpeed, ...]
    links: tuple[ExchangeSpeed, ...]
    elapsed_s: float
    date: str

    def __post_init__(self) -> None:
        if [link.cards for link in self.links] != list(combinations(range(len(self.cards)), 2)):
            raise ValueError("every two cards have one link")

    def links_of(self, card: int) -> list[ExchangeSpeed]:
        """Those of one card."""
        return [link for link in self.links if card in link.cards]

    def describe(self) -> list[str]:
        """A line per card and per link."""
        ways = {True: "direct", False: "through host memory", None: "torch cannot tell which way"}
        lines = [f"{card.name}: {card.flops_per_s / 1e12:.3g} TFLOP/s in half precision" for card in self.cards]
        for link in self.links:
            first, second = (self.cards[index].name for index in link.cards)
            speed = f"{link.bytes_per_s / 1e9:.3g} GB/s each way at once"
            lines.append(f"{first} and {second}: {speed}, {ways[link.is_direct]}")
        return lines


class SpeedStore:
    """Measurements of this machine as files of a folder, each {"key": ..., "value": ...}, under all that could change
    them.

    Args:
        folder: None takes that of the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or user_cache_folder() / "calibration"

    def path_of(self, key: Key) -> Path:
        """Where a measurement of this key lies, or would."""
        return self._folder / f"{settings_fingerprint(key)[:24]}.json"

    def get(self, key: Key) -> MachineSpeed | None:
        """What was measured under exactly this key; None where there is nothing that can be read."""
        path = self.path_of(key)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            if entry["key"] != json.loads(json.dumps(key)):  # as JSON gives it back
                raise ValueError("it holds another key")
            return TypeAdapter(MachineSpeed).validate_python(entry["value"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); it is measured again", path, str(error).splitlines()[0])
            return None

    def put(self, key: Key, value: MachineSpeed) -> None:
        """Keep a measurement; where the disk refuses, it is measured again next time."""
        text = json.dumps({"key": key, "value": asdict(value)}, indent=2)
        try:
            write_atomically(self.path_of(key), text.encode("utf-8"))
        except OSError as error:
            _log.warning("a measurement is not kept: %s", error)


def describe_slot(device: torch.device) -> dict[str, Any]:
    """What makes a card this one, where it is."""
    found: dict[str, Any] = {
        "device": str(device),
        "name": device.type,
        "total_bytes": total_bytes(device),
        "capability": None,
    }
    module = device_module(device)
    if module is not None and hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        capability = [getattr(properties, name, None) for name in ("major", "minor")]
        found |= {"name": properties.name, "capability": capability}
        found["multiprocessors"] = getattr(properties, "multi_processor_count", None)
        found |= {name: str(getattr(properties, name, "")) for name in ("uuid", "pci_domain_id", "pci_bus_id")}
    return found


def machine_key(devices: Sequence[torch.device]) -> Key:
    """Everything that the measurements depend on: the cards, where they are, who reaches whom, driver and torch."""
    return {
        "version": _VERSION,
        "machine": platform.node(),
        "cards": [describe_slot(device) for device in devices],
        "access": [[has_peer_access(source, target) for target in devices] for source in devices],
        "driver": _driver(),
        "torch": torch.__version__,
    }


def _driver() -> str:
    """The loaded kernel module's version on Linux, else the newest CUDA that the driver knows; "" for neither."""
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        ask = getattr(torch._C, "_cuda_getDriverVersion", None)
        return "" if ask is None else str(ask())


def machine_speed(devices: Sequence[torch.device], store: SpeedStore | None = None) -> MachineSpeed:
    """What these cards can do: as measured before with the same cards, links and driver, else measured now.

    Args:
        store: None takes the user's cache folder.
    Raises: what a card raises where it has no memory for the measurement.
    """
    store, key = store or SpeedStore(), machine_key(devices)
    found = store.get(key)
    if found is None:
        found = measure_machine(devices)
        store.put(key, found)
    return found


def measure_machine(devices: Sequence[torch.device]) -> MachineSpeed:
    """Takes some 150 MiB of each card, and well under a second on two GPUs."""
    start = time.perf_counter()
    with torch.inference_mode():
        cards = tuple(CardSpeed(str(device), product_speed(device)) for device in devices)
        links = tuple(_measure_link(devices, pair) for pair in combinations(range(len(devices)), 2))
    release_cached_memory()
    return MachineSpeed(cards, links, time.perf_counter() - start, time.strftime("%Y-%m-%d"))


def _measure_link(devices: Sequence[torch.device], pair: tuple[int, int]) -> ExchangeSpeed:
    one, other = (devices[index] for index in pair)
    return ExchangeSpeed(pair, exchange_speed(one, other), has_peer_access(one, other))
