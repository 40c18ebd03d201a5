"""Which device holds how much of a model: expert_mode_allocations of ComfyUI-MultiGPU, as a value of "balance"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..parallel.devices import find_device

_FORMS = 'memory, time, manual, "cuda:0,10gb;cuda:1,*", "cuda:0,60%;cuda:1,40%", "cuda:0,0.5;cuda:1,0.5", "3:1" and '
_FORMS += '"cuda:0;4;cuda:1" (a GPU computes, and another holds 4 GB for it)'
_LONGEST = 500  # characters; eight devices take some 150
_NUMBER = r"\d{1,12}(?:\.\d{1,6})?"
_VALUE = re.compile(rf"(?:({_NUMBER})\s*(gb?|mb?|kb?|b|%)?)?\s*(\*)?", re.ASCII)
_RATIO = re.compile(rf"{_NUMBER}(?:\s*:\s*{_NUMBER})+", re.ASCII)
_LENT = re.compile(rf"([^;,]+);\s*({_NUMBER})\s*;([^;]+)", re.ASCII)
_BYTES = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Allocation:
    """unit: of the amounts: "bytes", "%" of the model, or "fraction" of a device's memory.
    amounts: by device, in the order of the text. None, on one device at most, is the rest."""

    text: str
    unit: str
    amounts: Mapping[torch.device, float | None]

    @property
    def gpus(self) -> tuple[torch.device, ...]:
        """Those that get weights; the CPU's part is streamed."""
        return tuple(device for device, amount in self.amounts.items() if device != _CPU and amount != 0)

    def weights(self, model_bytes: int, device_bytes: Mapping[torch.device, int]) -> dict[torch.device, int]:
        """Bytes of weights by device, filled in the order of the text, whose sum is the model.
        A rest that no device was given is the CPU's; of fractions without a CPU, the first device's."""
        found, left = dict.fromkeys(self.amounts, 0), model_bytes
        rest = _CPU if self.unit == "bytes" or _CPU in found else next(iter(found))
        parts = sum(amount or 0 for amount in self.amounts.values())
        parts = max(parts, 100) if None in self.amounts.values() else parts
        for device, amount in self.amounts.items():
            rest = device if amount is None else rest
            units = {"bytes": 1.0, "%": model_bytes / parts, "fraction": device_bytes.get(device, 0)}
            found[device] = min(left, round((amount or 0) * units[self.unit]))
            left -= found[device]
        return found | {rest: found.get(rest, 0) + left}


def read_allocation(text: str, devices: Sequence[torch.device]) -> Allocation:
    """The allocation that a text says; devices: that a bare ratio such as 3:1 is about, in order.
    Raises: ValueError that shows the part which is not understood, and texts that are."""
    if len(text) > _LONGEST:
        raise _unread(text, text, f"it has more than {_LONGEST} characters")
    before, _, behind = (part.strip() for part in text.lower().partition("#"))
    expert = before or behind
    if found := _LENT.fullmatch(expert):
        expert = f"{found[1]},*;{found[3]},{found[2]}gb"
    elif _RATIO.fullmatch(expert):
        shares = expert.split(":")
        if len(shares) != len(devices):
            raise _unread(text, expert, f"it has {len(shares)} numbers, and there are {len(devices)} devices")
        expert = ";".join(f"{device},{share}%" for device, share in zip(devices, shares, strict=True))
    amounts: dict[torch.device, float | None] = {}
    units = set()
    for part in expert.removesuffix(";").split(";"):
        name, _, value = (each.strip() for each in part.partition(","))
        found = _VALUE.fullmatch(value)
        if not value or found is None or not re.fullmatch(r"[a-z]{2,12}(:\d{1,3})?", name, re.ASCII):
            raise _unread(text, part, "a part is a device, a comma, and a number with gb, mb or %, or *")
        number, unit = float(found[1] or 0), (found[2] or "")[:1]
        if number > 1 and not (unit or found[3]):
            raise _unread(text, part, f"without a unit {found[1]} is a share of the device's memory, and above 1")
        amount = None if found[3] else number * _BYTES.get(unit, 1)  # "5gb*" is the rest, as "*" is
        device, unit = find_device(name), "bytes" if unit in _BYTES else unit or "fraction"
        if device in amounts or (amount is None and None in amounts.values()):
            raise _unread(text, part, f"{device}, or the rest, has a part already")
        amounts[device] = amount
        units |= {unit} if amount is not None else set()
    allocation = Allocation(text, min(units, default="bytes"), amounts)
    if len(units) > 1:
        raise _unread(text, expert, f"it mixes {' and '.join(sorted(units))}")
    if not allocation.gpus:
        raise _unread(text, expert, "no GPU gets weights")
    return allocation


def _unread(text: str, part: str, why: str) -> ValueError:
    return ValueError(f"balance {text[:80]!r}: {part[:80]!r} is not understood: {why}. Understood are {_FORMS}")
