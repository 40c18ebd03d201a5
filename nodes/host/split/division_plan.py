"""How a MODEL's blocks are divided among cards that compute each of them together; reads sizes and formats only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from ....families.comfy.native import NativeModel
from ....families.tensor_plan import Shares, TensorPlan
from ....parallel.block_lists import execution_order
from ....parallel.local.shards import divided_bytes, find_plan, shares_of

# Layouts of comfy_kitchen whose scales are of the whole weight or of its rows.
_DIVISIBLE_LAYOUTS = (
    "TensorCoreFP8Layout",
    "TensorCoreFP8E4M3Layout",
    "TensorCoreFP8E5M2Layout",
    "TensorWiseINT8Layout",
)


@dataclasses.dataclass(frozen=True)
class Division:
    """How the blocks of a model are divided.

    Args:
        devices: home first.
        blocks: name of a block -> its plan and shares.
    """

    devices: tuple[torch.device, ...]
    blocks: Mapping[str, tuple[TensorPlan, Shares]]

    def bytes_on(self, diffusion_model: nn.Module) -> dict[torch.device, int]:
        """Bytes of weights that each device holds of this model, which is whole; home has all but the blocks, too."""
        sizes = dict.fromkeys(self.devices, 0)
        rest = _bytes(diffusion_model)
        for name, (plan, shares) in self.blocks.items():
            block = diffusion_model.get_submodule(name)
            rest -= _bytes(block)
            for rank, device in enumerate(self.devices):
                sizes[device] += divided_bytes(block, plan, shares, rank)
        sizes[self.devices[0]] += rest
        return sizes


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def plan_division(diffusion_model: nn.Module, layout: NativeModel, devices: tuple[torch.device, ...]) -> Division:
    """Decide how every block is divided; reads sizes only.

    Raises: ValueError if nobody described how, there are fewer heads than cards, or weights have a format that cannot.
    """
    plans: dict[str, tuple[nn.Module, TensorPlan]] = {}
    for name in execution_order(diffusion_model, layout):
        block = diffusion_model.get_submodule(name)
        plan = find_plan(layout.tensor, block)
        if plan is None:
            raise ValueError(
                f"{layout.class_name} cannot be computed by all cards together: nobody has described how its "
                f"{type(block).__name__} is divided. Use way 'blocks'"
            )
        plans[name] = block, plan
        _check_formats(name, block, plan)

    evenly = (1.0,) * len(devices)
    return Division(devices, {name: (plan, shares_of(block, plan, evenly)) for name, (block, plan) in plans.items()})


def _check_formats(name: str, block: nn.Module, plan: TensorPlan) -> None:
    for linear, module in block.named_modules():
        divided, weight = plan.find(linear), getattr(module, "weight", None)
        if divided is None or weight is None:
            continue
        data = getattr(weight, "data", weight)
        layout = getattr(data, "_layout_cls", None)
        is_known = layout in _DIVISIBLE_LAYOUTS if layout is not None else type(data) is torch.Tensor
        params = getattr(data, "_params", None)
        has_rotation = divided.by == "row" and getattr(params, "convrot", False)
        if not is_known or has_rotation or getattr(params, "transposed", False):
            found = layout or type(data).__name__
            raise ValueError(
                f"the weights of {name}.{linear} are in the format {found}{' with rotation' if has_rotation else ''}, "
                "which cannot be divided among cards. Use way 'blocks', or a bf16, fp8 or int8 file without rotation"
            )
        if vars(module).get("pre_quant_scale") is not None or "pre_quant_scale" in module._parameters:
            raise ValueError(f"{name}.{linear} scales its input per feature, which cannot be divided. Use way 'blocks'")
