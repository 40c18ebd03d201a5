"""Way blocks: every card holds some of the blocks, and activations travel from card to card."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import comfy.model_management as management
import torch
from torch import nn

from ....families.comfy.native import NativeModel
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
        self._plan = plan
        self.parts = {
            device: {name: tree.block(name) for name, place in plan.placement.items() if place == device}
            for device in plan.devices
        }
        self.bridge = self._make_bridge(tree, tree.called_modules())

    def prepare(self, tree: SplitTree, options: Mapping[str, Any]) -> None:
        """Hook the compiled wrapper of a block where a compile node has put one, so that the hooks stay out of it."""
        called = tree.called_modules()
        if called.keys() != self.bridge.blocks.keys():
            self.bridge.remove()
            self.bridge = self._make_bridge(tree, called)
            self.bridge.attach()

    def _make_bridge(self, tree: SplitTree, called: Mapping[nn.Module, torch.device]) -> Bridge:
        layout = self._plan.layout
        return Bridge(
            called,
            self._plan.main_device,
            tail=tail_modules(tree.diffusion_model, layout),
            transport=self._plan.transport,
            passed_by=layout.passed_by,
            per_device=layout.per_device,
        )


def plan_blocks(diffusion_model: nn.Module, request: SplitRequest) -> BlockPlan:
    """Decide where every block goes and how activations travel; reads sizes only.

    Raises: ValueError if the class has no blocks that can be found, the cuts are wrong or the limits are too small.
    """
    layout = layout_of(diffusion_model)
    leaders, order = followers(diffusion_model, layout), execution_order(diffusion_model, layout)
    request, wanted = request.allotted(int(management.module_size(diffusion_model)))
    placed, natural = _place(diffusion_model, layout, leaders, request, wanted), transport_for(diffusion_model, layout)
    if request.transport == "stream" and natural != "stream":
        raise ValueError(
            f"transport stream would give {layout.class_name} wrong pictures or errors ({layout.note}); use auto or "
            "relay"
        )
    transport = request.transport or natural
    devices = tuple(placed.device_of(leaders.get(name, name)) for name in order)
    placement = Placement(order, devices, request.devices[0])
    return BlockPlan(
        order,
        placement.used_devices,
        layout,
        request.limit_bytes,
        request.verify,
        transport,
        request.overlap and transport == "stream" and layout.can_overlap,
        request.exchange,
        placement=placement,
    )


def _place(
    diffusion_model: nn.Module,
    layout: NativeModel,
    leaders: Mapping[str, str],
    request: SplitRequest,
    wanted: Sequence[int],
) -> Placement:
    """The device of every block that follows no other.

    Args:
        wanted: bytes that each device is to hold; () where request says how blocks are shared out.
    Raises: ValueError for cuts that do not fit the model and, with offload off, for weights that do not fit the cards.
    """
    blocks = placed_blocks(diffusion_model, layout)
    size_of = {name: int(management.module_size(diffusion_model.get_submodule(name))) for name in blocks}
    for follower, leader in leaders.items():
        size_of[leader] += int(management.module_size(diffusion_model.get_submodule(follower)))
    sizes = list(size_of.values())
    other_bytes = int(management.module_size(diffusion_model)) - sum(sizes)  # on the main device
    budgets = request.card_budgets()
    by_hand = plan_manual(blocks, request.devices, request.split_at) if request.balance == "manual" else None
    is_time, costs = request.balance == "time", list[float](sizes)
    if is_time:  # a block's share changes little with the size of what is sampled
        of_blocks, side = map(diffusion_model.get_submodule, blocks), native_list(layout)
        costs = [block_flops(block, side, PICTURE_TOKENS, NUM_TEXT_TOKENS) for block in of_blocks]

    def plan(budget: Mapping[torch.device, int]) -> Placement:
        if by_hand is not None:
            check_budgets(by_hand, sizes, other_bytes, budget)
            return by_hand
        return plan_placement(
            blocks,
            request.devices,
            block_cost=costs,
            main_cost=0.0 if is_time else other_bytes,
            block_bytes=sizes,
            main_bytes=other_bytes,
            budget_bytes=budget,
            capacity=() if is_time else wanted or list(budgets.values()),
        )

    try:
        return plan(budgets)
    except ValueError as error:
        if not request.offload:
            raise ValueError(f"{error}, or turn offload on") from error
        _log.warning("split: %s; what does not fit stays in host memory and is streamed at every step", error)
        return plan({})
