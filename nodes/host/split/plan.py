"""What a user wants of a split, and what is decided from it, from sizes alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import comfy.model_management as management
import torch
from torch import nn

from ....families.comfy.native import PASSED_BY, NativeModel, Transport
from ....families.comfy.registry import find_native, path_of
from ....parallel.block_lists import find_block_lists
from ....parallel.local.collectives import Exchange
from ....parallel.placement import ratio
from ...allocation import Allocation

_log = logging.getLogger(__name__)
GB = 1e9


@dataclass(frozen=True)
class SplitRequest:
    """How a user wants a MODEL split; the sockets of nodes/split.py say what each is."""

    devices: tuple[torch.device, ...]  # in execution order; the main one first, with all but the blocks
    balance: Literal["memory", "time", "manual"] | Allocation = "memory"
    split_at: tuple[int, ...] = ()  # index of the first block of each device after the first; for manual
    memory_limit_gb: tuple[float, ...] = ()  # decimal, of resident weights, by device; () is as much as ComfyUI grants
    transport: Transport | None = None  # None: as the model's row says
    overlap: bool = True
    offload: bool = True
    verify: bool = False
    way: Literal["blocks", "tokens", "tensor"] | None = "blocks"  # None: as the forecast says
    shares: tuple[float, ...] = ()  # of way tokens; () for equal shares of devices of one kind, else by speed
    exchange: Exchange = "full"

    def __post_init__(self) -> None:
        names, balance, limits = ", ".join(map(str, self.devices)), self.balance, list(self.memory_limit_gb)
        if len(self.devices) < 2 or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a split needs two or more different devices; asked for {names or 'none'}")
        if any(device.type == "cpu" for device in self.devices):
            raise ValueError("a split is over GPUs; leave out cpu: with offload on, host memory holds what no GPU does")
        if limits and (len(limits) != len(self.devices) or min(limits) <= 0):
            raise ValueError(f"memory_limit_gb {limits}: give one above 0 for each of {names}, or none")
        if self.shares and self.way != "tokens":
            raise ValueError(f"shares are of way tokens, and way is {self.way or 'auto'}; set way to tokens")
        is_share = all(0 < share < math.inf for share in self.shares)
        if self.shares and (len(self.shares) != len(self.devices) or not is_share):
            raise ValueError(f"shares {ratio(self.shares)}: give one above 0 for each of {names}, such as 3:5 for two")
        if isinstance(balance, Allocation):
            said = f"balance {balance.text!r} gives weights to {', '.join(map(str, balance.gpus))}"
            if set(balance.gpus) != set(self.devices):
                raise ValueError(f"{said}, and devices are {names}")
            if self.way in ("tokens", "tensor"):
                raise ValueError(f"{said} by blocks, and with way {self.way} every device has all blocks")
            if limits:
                raise ValueError(f"{said}, and memory_limit_gb says how much, too; empty one of the two")
        if balance == "manual" and not self.split_at and not self.shares:
            needed = "shares, such as 3:5" if self.way == "tokens" else "split_at: each further device's first block"
            raise ValueError(f"balance manual with way {self.way or 'auto'} needs {needed}")
        if self.split_at and (balance != "manual" or self.way in ("tokens", "tensor")):
            of = f"balance manual and blocks, not to balance {balance} and way {self.way or 'auto'}"
            raise ValueError(f"split_at {list(self.split_at)} belongs to {of}")

    def allotted(self, model_bytes: int) -> tuple[SplitRequest, list[int]]:
        """The request, with an allocation's limits where the host keeps a part, and bytes by device; [] without one."""
        if not isinstance(self.balance, Allocation):
            return self, []
        totals = {device: int(management.get_total_memory(device)) for device in self.devices}
        sizes = list(map(self.balance.weights(model_bytes, totals).__getitem__, self.devices))
        limits = tuple(max(size, 1) / GB for size in sizes) if sum(sizes) < model_bytes else ()
        return replace(self, balance="memory", memory_limit_gb=limits), sizes

    @property
    def limit_bytes(self) -> dict[torch.device, int]:
        """Of weights that each device may hold; absent is unlimited."""
        return {d: int(gb * GB) for d, gb in zip(self.devices, self.memory_limit_gb, strict=False)}

    def card_budgets(self) -> dict[torch.device, int]:
        """Bytes of weights that each card can hold beside what ComfyUI keeps for computing, and within its limit."""
        limits, kept = self.limit_bytes, management.minimum_inference_memory()
        usable = {device: int(management.get_total_memory(device) - kept) for device in self.devices}
        return {device: min(size, limits.get(device, size)) for device, size in usable.items()}


def find_streamed(request: SplitRequest, sizes: Mapping[torch.device, int], instead: str) -> None:
    """Name devices that would hold more bytes than they may. Raises: ValueError with offload off, and instead."""
    budgets = request.card_budgets()
    said = "{} would hold {:.2f} GB of weights and may hold {:.2f} GB"
    over = [said.format(at, size / GB, budgets[at] / GB) for at, size in sizes.items() if size > budgets[at]]
    if over and not request.offload:
        raise ValueError(f"{'; '.join(over)}. {instead}, a smaller weight type, or turn offload on")
    if over:
        _log.warning("split: %s; the rest stays in host memory and is streamed at every step", "; ".join(over))


@dataclass(frozen=True)
class SplitPlan:
    """What was decided about a split, for any tree of the same architecture. A way is a kind of it."""

    executor: ClassVar[Any]  # the class that runs its forwards, made of a tree and the plan
    part: ClassVar[str] = ""  # what each device computes of a block
    blocks: tuple[str, ...]  # fqns inside the diffusion model, in execution order
    devices: tuple[torch.device, ...]  # that are used, the main device first
    layout: NativeModel  # for a class nobody described a row made from its block lists
    request: SplitRequest  # in place of an allocation it has limits
    transport: Transport = "stream"
    overlap: bool = False

    @property
    def main_device(self) -> torch.device:
        return self.devices[0]

    @property
    def of_class(self) -> dict[str, Any]:
        return {"passed_by": PASSED_BY, "per_device": self.layout.per_device}

    def device_of(self, name: str) -> torch.device:
        """Of a whole module or parameter, by its name in the diffusion model; copies and parts do not count."""
        return self.main_device

    def share_of(self, device: torch.device) -> str:
        raise NotImplementedError

    def num_blocks(self) -> list[tuple[str, int]]:
        """Devices and numbers of their blocks, in the order in which a forward comes to them."""
        return [(str(device), len(self.blocks)) for device in self.devices]

    def describe(self) -> str:
        return f"each computed by {', '.join(map(str, self.devices))}, {self.part}{self.describe_exchange()}"

    def describe_exchange(self, what: str = "what travels is rounded, so pictures differ slightly") -> str:
        return "" if self.request.exchange == "full" else f"; exchange 8-bit: {what}"


def layout_of(diffusion_model: nn.Module) -> NativeModel:
    """The row of a described class, or one made for a class nobody described; is_derived has its forward watched."""
    layout = find_native(type(diffusion_model))
    if layout is not None:
        if layout.refusal:
            raise ValueError(f"{layout.class_name} cannot be split across GPUs: {layout.refusal}")
        return layout
    lists, kind = find_block_lists(diffusion_model), type(diffusion_model)
    _log.warning("split: %s is not a model we know; its blocks in %s are relayed", kind.__name__, ", ".join(lists))
    note = "it is not described; its blocks were found by their containers"
    return NativeModel(path_of(kind), lists, (), note, "relay", is_derived=True)
