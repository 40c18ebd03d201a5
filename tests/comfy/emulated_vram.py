"""ComfyUI's DynamicVRAM on emulated cards: its own patcher and layers, over a stand-in for comfy-aimdo.

comfy-aimdo hands out ranges of a card's addresses, and puts memory there when a layer asks for it (a fault). It may
take the memory away again, or have none; the layer then copies its weight for one use. Here a range is an emulated
tensor that a fault makes. Not emulated: pinned memory, reading straight from a file, streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import comfy.cli_args
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import comfy_aimdo.host_buffer
import comfy_aimdo.model_vbar
import comfy_aimdo.torch
import torch
from devicebridge.tests.emulated import CARDS

Range = tuple[Any, int, int]  # whose, address, bytes


@dataclass
class DynamicVram:
    """What happened. room: bytes that weights may take on a card; none given is all they want."""

    room: dict[torch.device, int] = field(default_factory=dict)
    faults: dict[torch.device, int] = field(default_factory=dict)  # weights that were given memory
    refused: dict[torch.device, int] = field(default_factory=dict)  # weights that were not
    ranges: list[_Vbar] = field(default_factory=list)

    def held(self, device: torch.device) -> int:
        return sum(each.loaded_size() for each in self.ranges if each.device == device)


class _Vbar:
    """Addresses of one card for one model."""

    def __init__(self, owner: DynamicVram, size: float, device: int) -> None:
        self._owner, self.device = owner, CARDS[device]
        self._end, self._number = 0, 0
        self._limit = float("inf")
        self.memory: dict[int, torch.Tensor] = {}
        self._signatures: dict[int, bytes] = {}
        owner.ranges.append(self)

    def alloc(self, num_bytes: int) -> Range:
        start = self._end
        self._end += (num_bytes + 511) // 512 * 512
        return self, start, num_bytes

    def fault(self, address: int, num_bytes: int) -> bytes | None:
        if address not in self.memory:
            room = min(self._limit, self._owner.room.get(self.device, float("inf")))
            counts = self._owner.faults if self.loaded_size() + num_bytes <= room else self._owner.refused
            counts[self.device] = counts.get(self.device, 0) + 1
            if counts is self._owner.refused:
                return None
            self.memory[address] = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            self._number += 1
            self._signatures[address] = self._number.to_bytes(8, "little")
        return self._signatures[address]

    def unpin(self, address: int, num_bytes: int) -> None:
        pass

    def loaded_size(self) -> int:
        return sum(each.nbytes for each in list(self.memory.values()))

    def free_memory(self, num_bytes: float) -> int:
        freed = 0
        while self.memory and freed < num_bytes:
            freed += self.memory.popitem()[1].nbytes
        return freed

    def prioritize(self, *args: Any) -> None:
        pass

    def set_watermark_limit(self, num_bytes: int) -> None:
        self._limit = num_bytes


class _HostBuffer:
    """Host memory for pinned copies, of which there are none."""

    def __init__(self, *args: Any) -> None:
        self.size = 0


def _as_tensor(range_: Range, device: torch.device) -> torch.Tensor:
    vbar, address, _ = range_
    memory: torch.Tensor = vbar.memory[address]
    return memory


class _Patcher(comfy.model_patcher.ModelPatcherDynamic):
    """ComfyUI's own. It sets the data of parameters beside submodules, which cannot become emulated tensors so."""

    def _load_list(self, for_dynamic: bool = False, default_device: torch.device | None = None) -> Any:
        for name, module in self.model.named_modules() if default_device is not None else ():
            own = dict(module.named_parameters(recurse=False))
            if len(own) < sum(1 for _ in module.named_parameters()):
                for leaf, parameter in own.items():
                    key = f"{name}.{leaf}".lstrip(".")
                    comfy.utils.set_attr_param(self.model, key, parameter.data.to(default_device))
        return super()._load_list(for_dynamic=for_dynamic)


@contextlib.contextmanager
def dynamic_vram() -> Iterator[DynamicVram]:
    """Inside, ComfyUI loads diffusion models with DynamicVRAM, as on NVIDIA by default."""
    found = DynamicVram()
    with (
        mock.patch.object(comfy.model_patcher, "CoreModelPatcher", _Patcher),
        mock.patch.object(comfy_aimdo.model_vbar, "ModelVBAR", lambda size, device: _Vbar(found, size, device)),
        mock.patch.object(comfy_aimdo.host_buffer, "HostBuffer", _HostBuffer),
        mock.patch.object(comfy_aimdo.torch, "aimdo_to_tensor", _as_tensor),
        mock.patch.object(comfy.cli_args.args, "disable_pinned_memory", True),
    ):
        yield found
