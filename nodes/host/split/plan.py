"""What a user asks of a split, and what is decided from it: a device for every block, and how activations travel."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import comfy.model_management as management
import torch
from torch import nn

from ....families.comfy.native import NativeModel, Transport
from ....families.comfy.registry import find_native
from ....parallel.block_lists import execution_order, find_block_lists, followers, placed_blocks, transport_for
from ....parallel.placement import Placement, check_budgets, native_block_flops, plan_manual, plan_placement
from ....planning.ways import Ways
from .division_plan import Division, plan_division

_log = logging.getLogger(__name__)
GB = 1e9


@dataclass(frozen=True)
class SplitRequest:
    """How a user wants a MODEL split.

    Args:
        devices: in execution order; the first is home, where embedders, tail and the sampler's tensors are.
        balance: share out weights by bytes, computing time, or cut where split_at says.
        split_at: index of the first block of each device after the first; for manual.
        memory_limit_gb: decimal GB of weights each device may hold resident; () is as much as ComfyUI grants.
        transport: None takes the family's; relay is right for every model, stream for those that are known.
        overlap: let micro-batches of a batch use the cards at the same time where that is known to be right.
        offload: weights beyond a limit stay in host memory and are streamed at every use; else that is refused.
        verify: compute the first step of every run twice, the second time in the plainest way, and compare.
        way: "blocks" gives every device some of the blocks; "tensor" has all devices compute each block together;
            None takes the faster one (ways.py).
    """

    devices: tuple[torch.device, ...]
    balance: Literal["memory", "time", "manual"] = "memory"
    split_at: tuple[int, ...] = ()
    memory_limit_gb: tuple[float, ...] = ()
    transport: Literal["stream", "relay"] | None = None
    overlap: bool = True
    offload: bool = True
    verify: bool = False
    way: Literal["blocks", "tensor"] | None = "blocks"

    def __post_init__(self) -> None:
        names = ", ".join(map(str, self.devices))
        if len(self.devices) < 2 or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"a split needs two or more different devices; asked for {names or 'none'}")
        if any(device.type == "cpu" for device in self.devices):
            raise ValueError(
                "a split is over GPUs, and the CPU was named too; with offload on, weights that no GPU holds stay in "
                "host memory by themselves"
            )
        if self.memory_limit_gb and len(self.memory_limit_gb) != len(self.devices):
            raise ValueError(
                f"memory_limit_gb gives {', '.join(map(str, self.memory_limit_gb))} for {len(self.devices)} devices "
                f"({names}); give one number per device, or none"
            )
        if any(limit <= 0 for limit in self.memory_limit_gb):
            raise ValueError(f"memory_limit_gb {list(self.memory_limit_gb)}: every limit must be above 0")
        if self.balance == "manual" and not self.split_at:
            raise ValueError("balance manual needs split_at: the first block of each further device, such as 23")
        if self.balance != "manual" and self.split_at:
            raise ValueError(f"split_at {list(self.split_at)} belongs to balance manual, not {self.balance}")
        if self.balance == "manual" and self.way == "tensor":
            raise ValueError(
                "balance manual says which blocks a device gets; with way tensor every device has all of them"
            )


@dataclass(frozen=True)
class SplitPlan:
    """What was decided about a split, for any tree of the same architecture.

    Args:
        placement: block fqns inside the diffusion model, and their devices.
        layout: what the class is; for a class nobody described a row made from its block lists.
        limit_bytes: weights each device may hold resident; absent is unlimited.
        transport, overlap, verify: as in SplitRequest, decided.
        division: how the blocks are divided where all devices compute each together; None where each has its own.
        ways: what the way was chosen by; None if there was no choice.
    """

    placement: Placement
    layout: NativeModel
    transport: Transport
    limit_bytes: Mapping[torch.device, int]
    overlap: bool
    verify: bool
    division: Division | None = None
    ways: Ways | None = None

    @property
    def home(self) -> torch.device:
        return self.placement.home

    @property
    def used_devices(self) -> tuple[torch.device, ...]:
        return self.placement.used_devices if self.division is None else self.division.devices

    @property
    def foreign_devices(self) -> tuple[torch.device, ...]:
        return tuple(device for device in self.used_devices if device != self.home)

    def blocks_on(self, device: torch.device) -> list[str]:
        placement = self.placement
        return [name for name, place in zip(placement.blocks, placement.devices, strict=True) if place == device]


def plan_split(diffusion_model: nn.Module, request: SplitRequest) -> SplitPlan:
    """Decide where every block goes and how activations travel; reads sizes only.

    Raises: ValueError if the class has no blocks that can be found, the cuts are wrong or the limits are too small.
    """
    layout = _layout(diffusion_model)
    if request.way == "tensor":
        return _plan_tensor(diffusion_model, layout, request)
    leaders = followers(diffusion_model, layout)
    limit_bytes = {d: int(gb * GB) for d, gb in zip(request.devices, request.memory_limit_gb, strict=False)}
    main = _place(diffusion_model, layout, leaders, request, limit_bytes)
    order = execution_order(diffusion_model, layout)
    transport = _transport(diffusion_model, layout, request)
    return SplitPlan(
        Placement(order, tuple(main.device_of(leaders.get(name, name)) for name in order), request.devices[0]),
        layout,
        transport,
        limit_bytes,
        overlap=request.overlap and transport == "stream" and layout.can_overlap,
        verify=request.verify,
    )


def _plan_tensor(diffusion_model: nn.Module, layout: NativeModel, request: SplitRequest) -> SplitPlan:
    """All blocks at home, and each divided among the devices by what fits the memory that they may take."""
    limit_bytes = {d: int(gb * GB) for d, gb in zip(request.devices, request.memory_limit_gb, strict=False)}
    rooms = {device: room or 0 for device, room in card_budgets(request.devices, limit_bytes).items()}
    division = plan_division(diffusion_model, layout, request.devices)
    _check_room(division.bytes_on(diffusion_model), rooms, request.offload)
    order = execution_order(diffusion_model, layout)
    home = request.devices[0]
    return SplitPlan(
        Placement(order, (home,) * len(order), home),
        layout,
        "stream",
        limit_bytes,
        overlap=False,
        verify=request.verify,
        division=division,
    )


def _check_room(sizes: Mapping[torch.device, int], rooms: Mapping[torch.device, int], may_offload: bool) -> None:
    """Raises: ValueError for parts of blocks that do not fit their cards, where nothing may be offloaded."""
    over = [
        f"{device} would hold {size / GB:.2f} GB of weights and may hold {rooms[device] / GB:.2f} GB"
        for device, size in sizes.items()
        if size > rooms[device]
    ]
    if over and not may_offload:
        raise ValueError(f"{'; '.join(over)}. Use more GPUs or a smaller weight type, or turn offload on")
    if over:
        _log.warning("split: %s; the rest stays in host memory and is streamed at every step", "; ".join(over))


def _layout(diffusion_model: nn.Module) -> NativeModel:
    """The row of a described class, or one made for a class nobody described; is_derived has its forward watched."""
    layout = find_native(type(diffusion_model))
    if layout is not None:
        if layout.refusal:
            raise ValueError(f"{layout.class_name} cannot be split across GPUs: {layout.refusal}")
        return layout
    lists = find_block_lists(diffusion_model)
    name = type(diffusion_model).__name__
    _log.warning("split: %s is not a model we know; its blocks in %s are relayed", name, ", ".join(lists))
    return NativeModel(
        class_name=name,
        module=type(diffusion_model).__module__,
        block_lists=lists,
        tail=(),
        transport="relay",
        note="it is not described; its blocks were found by their containers",
        is_derived=True,
    )


def _transport(diffusion_model: nn.Module, layout: NativeModel, request: SplitRequest) -> Transport:
    natural = transport_for(diffusion_model, layout)
    if request.transport in (None, natural):
        return natural
    if request.transport == "stream":
        raise ValueError(
            f"transport stream would give {layout.class_name} wrong pictures or errors ({layout.note}); use auto or "
            "relay"
        )
    return "relay"


def _place(
    diffusion_model: nn.Module,
    layout: NativeModel,
    leaders: Mapping[str, str],
    request: SplitRequest,
    limit_bytes: Mapping[torch.device, int],
) -> Placement:
    """The device of every block that follows no other.

    Raises: ValueError for cuts that do not fit the model and, with offload off, for weights that do not fit the cards.
    """
    blocks = placed_blocks(diffusion_model, layout)
    sizes, home_bytes = _sizes(diffusion_model, blocks, leaders)
    budgets = card_budgets(request.devices, limit_bytes)
    by_hand = plan_manual(blocks, request.devices, request.split_at) if request.balance == "manual" else None
    is_time = request.balance == "time"

    def plan(budget: Mapping[torch.device, int | None]) -> Placement:
        if by_hand is not None:
            check_budgets(by_hand, sizes, home_bytes, budget)
            return by_hand
        return plan_placement(
            blocks,
            request.devices,
            block_cost=native_block_flops(diffusion_model, layout, blocks) if is_time else sizes,
            home_cost=0.0 if is_time else home_bytes,
            block_bytes=sizes,
            home_bytes=home_bytes,
            budget_bytes=budget,
            capacity=() if is_time else list(budgets.values()),
        )

    try:
        return plan(budgets)
    except ValueError as error:
        if not request.offload:
            raise ValueError(f"{error}, or turn offload on") from error
        _log.warning("split: %s; what does not fit stays in host memory and is streamed at every step", error)
        return plan({})


def _sizes(diffusion_model: nn.Module, blocks: tuple[str, ...], leaders: Mapping[str, str]) -> tuple[list[int], int]:
    """Bytes as stored of each placed block with its followers, and of everything else."""
    size = {name: int(management.module_size(diffusion_model.get_submodule(name))) for name in blocks}
    for follower, leader in leaders.items():
        size[leader] += int(management.module_size(diffusion_model.get_submodule(follower)))
    return list(size.values()), int(management.module_size(diffusion_model)) - sum(size.values())


def card_budgets(
    devices: tuple[torch.device, ...], limit_bytes: Mapping[torch.device, int]
) -> dict[torch.device, int | None]:
    """Bytes of weights each card can hold beside what ComfyUI keeps for computing, and within the user's limit."""
    rooms = {
        device: int(management.get_total_memory(device) - management.minimum_inference_memory()) for device in devices
    }
    return {device: min(room, limit_bytes.get(device, room)) for device, room in rooms.items()}
