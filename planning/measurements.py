"""Measurements of this machine, each a JSON file in the user's cache folder under everything that could change it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from ..checkpoints.fingerprint import settings_fingerprint
from ..parallel.devices import device_module, total_bytes
from ..system.files import user_cache_folder, write_atomically

_log = logging.getLogger(__name__)

Key = Mapping[str, Any]


def describe_card(device: torch.device) -> dict[str, Any]:
    """What makes two cards alike."""
    found: dict[str, Any] = {"name": device.type, "total_bytes": total_bytes(device), "capability": None}
    module = device_module(device)
    if module is not None and hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        capability = [getattr(properties, name, None) for name in ("major", "minor")]
        found |= {"name": properties.name, "capability": capability}
        found["multiprocessors"] = getattr(properties, "multi_processor_count", None)
    return found


def describe_slot(device: torch.device) -> dict[str, Any]:
    """What makes a card this one, where it is."""
    found: dict[str, Any] = {"device": str(device), **describe_card(device)}
    module = device_module(device)
    if module is not None and hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        found |= {name: str(getattr(properties, name, "")) for name in ("uuid", "pci_domain_id", "pci_bus_id")}
    return found


_Kept = TypeVar("_Kept")


class CalibrationStore:
    """Measurements as files of a folder, each {"key": ..., "value": ...}."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, key: Key) -> Path:
        """Where a measurement of this key lies, or would."""
        return self._folder / f"{settings_fingerprint(key)[:24]}.json"

    def get(self, key: Key, kind: type[_Kept]) -> _Kept | None:
        """What was measured under exactly this key; None where there is nothing that can be read."""
        path = self.path_of(key)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            if entry["key"] != _plain(key):
                raise ValueError("it holds another key")
            return TypeAdapter(kind).validate_python(entry["value"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); it is measured again", path, str(error).splitlines()[0])
            return None

    def put(self, key: Key, value: Any) -> None:
        """Keep a measurement, a dataclass; where the disk refuses, it is measured again next time."""
        text = json.dumps({"key": key, "value": asdict(value)}, indent=2)
        try:
            write_atomically(self.path_of(key), text.encode("utf-8"))
        except OSError as error:
            _log.warning("a calibration is not kept: %s", error)


def _plain(key: Key) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(key))


def calibration_folder() -> Path:
    """Where measurements of this machine are kept."""
    return user_cache_folder() / "calibration"
