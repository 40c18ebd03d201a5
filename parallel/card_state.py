"""What every card, and the host's memory, look like now, as far as the driver tells without being woken.

Asking torch for a card's free memory makes a context on it, which takes hundreds of MB of a card that nobody here may
use. So the driver's own library is asked (nvidia-ml, through torch), and torch only of cards this process works on.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .devices import available_devices, device_module


def describe_cards() -> list[dict[str, Any]]:
    """Per card its name, title, bytes in all, used by anybody and by this process, utilisation in percent and degrees
    Celsius; None for what is not told. At the end the host's memory, under the name "host"."""
    return [*(_describe(device) for device in available_devices()), _describe_host()]


def _describe(device: torch.device) -> dict[str, Any]:
    module: Any = device_module(device)
    found: dict[str, Any] = {"name": str(device), "title": "", "total": None, "used": None, "own": None}
    found |= {"utilisation": _ask(module, "utilization", device), "temperature": _ask(module, "temperature", device)}
    if not module.is_initialized():
        return found
    properties = module.get_device_properties(device)
    own = module.memory_reserved(device)
    return found | {
        "title": properties.name,
        "total": properties.total_memory,
        "own": own,
        "used": _used(module, device, works_here=own > 0),
    }


def _used(module: Any, device: torch.device, *, works_here: bool) -> int | None:
    used = _ask(module, "device_memory_used", device)
    if used is None and works_here:
        free, total = module.mem_get_info(device)
        used = total - free
    return used


def _ask(module: Any, name: str, device: torch.device) -> int | None:
    """A question to the driver's library, which may be missing or not know the card."""
    with contextlib.suppress(Exception):
        return int(getattr(module, name)(device))
    return None


def _describe_host() -> dict[str, Any]:
    import psutil  # comes with accelerate

    memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
    used = memory.total - memory.available
    values = {"total": memory.total, "used": used, "own": own, "utilisation": round(psutil.cpu_percent())}
    return {"name": "host", "title": "host memory", "temperature": None, **values}
