"""Way blocks: every card holds some of the blocks, and activations travel from card to card."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import comfy.model_management as management
import torch
from torch import nn

from ....parallel.block_lists import execution_order, followers, placed_blocks, tail_modules, transport_for
from ....parallel.local.bridge import Bridge
from ....parallel.placement import Placement, block_flops, check_budgets, native_list, plan_manual, plan_placement
from ....planning.times import NUM_TEXT_TOKENS, PICTURE_TOKENS
from .plan import SplitPlan, SplitRequest, layout_of
from .tree import Executor, SplitTree

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BlockPlan(SplitPlan):
    """Args: placement: a device for every block."""

    placement: Placement

    def make_executor(self, tree: SplitTree) -> BlockExecutor:
        return BlockExecutor(tree, self)

    def device_of(self, name: str) -> torch.device:
        return self.placement.device_of(name)

    def share_of(self, device: torch.device) -> str:
        return f"{self.placement.num_blocks_on(device)} blocks"

    def num_blocks(self) -> list[tuple[str, int]]:
        return self.placement.runs()

    def describe(self) -> str:
        runs = groupby(enumerate(self.placement.devices), key=lambda each: each[1])
        numbers = [(device, [index for index, _ in run]) for device, run in runs]
        where = ", ".join(f"{indices[0]}-{indices[-1]} on {device}" for device, indices in numbers)
        no_use = self._describe_exchange("of no use to way blocks, which sends each activation once and as it is")
        return f"{where}; {self.transport}; overlap {'on' if self.overlap else 'off'}{no_use}"


class BlockExecutor(Executor):
    plain = "without overlap and by relay"
    plainer = "transport to relay and overlap off"

    def __init__(self, tree: SplitTree, plan: BlockPlan) -> None:
        self._plan, parts = plan, {device: dict[str, nn.Module]() for device in plan.devices}
        for name, device in plan.placement.items():
            parts[device][name] = tree.block(name)
        self.parts = parts
        self.bridge = self._make_bridge(tree, tree.called_modules())

    def prepare(self, tree: SplitTree, options: Mapping[str, Any]) -> None:
        """Hook the compiled wrapper of a block where a compile node has put one, so that the hooks stay out of it."""
        called = tree.called_modules()
        if called.keys() != self.bridge.blocks.keys():
            self.bridge.remove()
            self.bridge = self._make_bridge(tree, called)
            self.bridge.attach()

    def _make_bridge(self, tree: SplitTree, called: Mapping[nn.Module, torch.device]) -> Bridge:
        tail = tail_modules(tree.diffusion_model, self._plan.layout)
        return Bridge(called, self._plan.main_device, tail=tail, transport=self._plan.transport, **self._plan.of_class)


def plan_blocks(diffusion_model: nn.Module, request: SplitRequest) -> BlockPlan:
    """Decide where every block goes and how activations travel; reads sizes only.

    Raises: ValueError if the class has no blocks that can be found, the cuts are wrong or the limits are too small.
    """
    layout = layout_of(diffusion_model)
    leaders, order = followers(diffusion_model, layout), execution_order(diffusion_model, layout)
    blocks, natural = placed_blocks(diffusion_model, layout), transport_for(diffusion_model, layout)
    if request.transport == "stream" and natural != "stream":
        raise ValueError(f"transport stream is wrong for {layout.class_name} ({layout.note}); use auto or relay")
    model_bytes = int(management.module_size(diffusion_model))
    request, wanted = request.allotted(model_bytes)
    size_of = dict.fromkeys(blocks, 0)
    for name in order:  # a block that follows another is where that one is
        size_of[leaders.get(name, name)] += int(management.module_size(diffusion_model.get_submodule(name)))
    sizes = list(size_of.values())
    other_bytes = model_bytes - sum(sizes)  # on the main device
    budgets, is_time = request.card_budgets(), request.balance == "time"
    by_hand = plan_manual(blocks, request.devices, request.split_at) if request.balance == "manual" else None
    costs: list[float] = list(sizes)
    if is_time:  # a block's share changes little with the size of what is sampled
        of_blocks, side = map(diffusion_model.get_submodule, blocks), native_list(layout)
        costs = [block_flops(block, side, PICTURE_TOKENS, NUM_TEXT_TOKENS) for block in of_blocks]

    def place(budget: Mapping[torch.device, int]) -> Placement:
        if by_hand is not None:
            check_budgets(by_hand, sizes, other_bytes, budget)
            return by_hand
        others: dict[str, Any] = {"block_cost": costs, "main_cost": 0.0 if is_time else other_bytes}
        others |= {"block_bytes": sizes, "main_bytes": other_bytes, "budget_bytes": budget}
        others["capacity"] = () if is_time else wanted or list(budgets.values())
        return plan_placement(blocks, request.devices, **others)

    try:
        placed = place(budgets)
    except ValueError as error:
        if not request.offload:
            raise ValueError(f"{error}, or turn offload on") from error
        _log.warning("split: %s; what does not fit stays in host memory and is streamed at every step", error)
        placed = place({})
    transport = request.transport or natural
    overlap = request.overlap and transport == "stream" and layout.can_overlap
    devices = tuple(placed.device_of(leaders.get(name, name)) for name in order)
    placement = Placement(order, devices, request.devices[0])
    return BlockPlan(order, placement.used_devices, layout, request, transport, overlap, placement=placement)
