"""Way tensor: every card computes a part of each block, with its own slices of the weights.

Patches are of whole weights, so a card takes its slice of the patched whole; of a plain LoRA one factor is sliced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.lora
import comfy.model_management as management
import comfy.ops
import comfy_aimdo.model_vbar as vbar
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter.base import WeightAdapterBase
from comfy.weight_adapter.bypass import BypassForwardHook
from comfy.weight_adapter.lora import LoRAAdapter
from torch import nn

from ....families.tensor_plan import Shares, TensorPlan
from ....parallel.block_lists import execution_order
from ....parallel.local.shards import BlockShard, JoinedSlices, Slice, divide_block, find_plan, plain_parts, shares_of
from ....parallel.local.tensor_parallel import TensorParallel
from .attachments import KEY, ROOT, attention_of, check_divisible, is_options
from .model_copy import Origin, copy_structure, reachable
from .plan import SplitPlan, SplitRequest, find_streamed, layout_of
from .tree import Executor, SplitTree

# Layouts of comfy_kitchen whose scales are of the whole weight or of its rows.
_DIVISIBLE_LAYOUTS = tuple(f"TensorCoreFP8{kind}Layout" for kind in ("", "E4M3", "E5M2")) + ("TensorWiseINT8Layout",)


def plan_tensor(diffusion_model: nn.Module, request: SplitRequest) -> DividedPlan:
    """Decide how every block is divided; reads sizes and formats only. Raises: ValueError if nobody described how,
    there are fewer heads than cards, a format cannot be divided, or the limits are too small."""
    layout = layout_of(diffusion_model)
    blocks, divided = execution_order(diffusion_model, layout), {}
    for name in blocks:
        block = diffusion_model.get_submodule(name)
        how = find_plan(layout.tensor, block)
        if how is None:
            what = f"a {type(block).__name__} of {layout.class_name}"
            raise ValueError(f"nobody has described how {what} is divided among cards. Use way 'blocks'")
        _check_formats(name, block, how)
        divided[name] = how, shares_of(block, how, len(request.devices))
    plan = DividedPlan(blocks, request.devices, layout, request, divided=divided)
    find_streamed(request, plan.bytes_on(diffusion_model), "Use more GPUs")
    return plan


def _check_formats(name: str, block: nn.Module, plan: TensorPlan) -> None:
    for linear, module in block.named_modules():
        divided, weight = plan.find(linear), getattr(module, "weight", None)
        if divided is None or weight is None:
            continue
        data = getattr(weight, "data", weight)
        layout, params = getattr(data, "_layout_cls", None), getattr(data, "_params", None)
        is_known = layout in _DIVISIBLE_LAYOUTS if layout is not None else type(data) is torch.Tensor
        has_rotation = divided.by == "row" and getattr(params, "convrot", False)
        if not is_known or has_rotation or getattr(params, "transposed", False):
            found = f"in the format {layout or type(data).__name__}{' with rotation' if has_rotation else ''}"
            instead = "Use way 'blocks', or a bf16, fp8 or int8 file without rotation"
            raise ValueError(f"{name}.{linear} is {found}, which cannot be divided among cards. {instead}")
        if vars(module).get("pre_quant_scale") is not None or "pre_quant_scale" in module._parameters:
            raise ValueError(f"{name}.{linear} scales its input per feature, which cannot be divided. Use way 'blocks'")


class TensorExecutor(Executor):
    """The main device's parts take the blocks' places; every other card has a copy of each block for its part."""

    plain = "without overlap, with every card given all that a block is called with anew"
    plainer = "way to blocks"

    def __init__(self, tree: SplitTree, plan: DividedPlan) -> None:
        self._plan = plan
        self.shards: dict[torch.device, dict[str, BlockShard]] = {device: {} for device in plan.devices}
        for name, (how, shares) in plan.divided.items():
            for rank, device in reversed(list(enumerate(plan.devices))):  # the whole block becomes a part last
                block = tree.block(name) if rank == 0 else copy_structure(tree.block(name))[0]
                if found := {str(each.device) for each in block.parameters()} - {"cpu"}:
                    stay = f"the weights of this MODEL stay on {min(found)}, as with --highvram or --gpu-only"
                    raise ValueError(f"{stay}. Start ComfyUI without that, or use way 'blocks'")
                self.shards[device][name] = divide_block(block, how, shares, rank, cut_weight)
        self.parts = {at: {name: each.block for name, each in of.items()} for at, of in self.shards.items()}
        mains, *others = map(self.shards.__getitem__, plan.devices)
        by_block = {shard.block: (shard, [each[name] for each in others]) for name, shard in mains.items()}
        options: dict[str, Any] = {"exchange": plan.request.exchange, "addresses": addresses_on, **plan.of_class}
        self.bridge: TensorParallel = TensorParallel(plan.devices, by_block, **options)
        self.graphs = self.bridge.graphs
        self._layers = tuple(layer for block in by_block for layer in block.modules())
        self._num_attached = 0  # hooks and forwards of layers, at the last forward
        self._attention = attention_of(tree.diffusion_model, is_wide=True)
        self._patches: dict[torch.device, tuple[Any, dict[str, Any]]] = {}
        self._patches_uuid: object = None  # with which the cards were compared
        self._unpatched: dict[torch.device, dict[str, torch.Tensor]] = {device: {} for device in self.parts}
        for device, (name, block) in ((at, each) for at, parts in self.parts.items() for each in parts.items()):
            self._unpatched[device] |= {f"{ROOT}.{name}.{key}": each.data for key, each in block.named_parameters()}

    def attach(self, patches_uuid: object) -> None:
        if patches_uuid != self._patches_uuid:
            self.bridge.check_again()
            self._patches_uuid = patches_uuid
        super().attach(patches_uuid)

    def prepare(self, tree: SplitTree, options: Mapping[str, Any]) -> None:
        found = [] if tree.called_modules().keys() == self.bridge.blocks.keys() else ["a compiled block"]
        on_layers = ((each._forward_hooks, each._forward_pre_hooks, each.__dict__) for each in self._layers)
        number = sum(len(after) + len(before) + ("forward" in own) for after, before, own in on_layers)
        if number != self._num_attached:
            tree.look_again()
            self._num_attached = number
        if (attention := {at: getattr(*at, None) for at in self._attention}) != self._attention:
            self.release()  # graphs call what stood there before
            self._attention = attention
        forwards = [layer.__dict__["forward"] for layer in self._layers if "forward" in layer.__dict__]
        if any(isinstance(part, BypassForwardHook) for each in forwards for part in reachable(each)):
            found.append("a bypass LoRA")  # it would act on the main card's slices only
        check_divisible((*found, *tree.unseen(in_blocks=True)), options, self._plan.layout.patches_inside)

    def guard(self, tree: SplitTree, options: Mapping[str, Any]) -> dict[str, Any]:
        guarded = super().guard(tree, options)
        around = options.get("wrappers", {}).get("diffusion_model")
        if not around:
            return guarded
        inside = self._plan.layout.patches_inside

        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            for each in (*args, *kwargs.values()):
                if isinstance(each, dict) and is_options(each):
                    check_divisible((), each, inside)
            return executor(*args, **kwargs)

        return {**guarded, "wrappers": {**options["wrappers"], "diffusion_model": {**around, KEY: [run]}}}

    def check_possible(self, action: str) -> None:
        found = "this MODEL is split with way 'tensor', so every card has a part of each weight"
        raise RuntimeError(f"{found}, and {action} is not possible; use way 'blocks', or the MODEL before the split")

    def whole_weight(self, key: str) -> torch.Tensor | None:
        found = self._find(self._plan.main_device, key)
        return found and found[0].wholes[found[1]]

    def origin_on(self, device: torch.device, given: Origin | None) -> Origin:
        mine = self._unpatched[device]

        return lambda name: mine[name] if name in mine else given(name) if given is not None else None

    def patches_on(self, device: torch.device, patches: dict[str, Any], uuid: object) -> dict[str, Any]:
        """Made once as long as ComfyUI's number for them stays."""
        before, sliced = self._patches.get(device, (None, {}))
        if device in self._patches and before == uuid:
            return sliced
        sliced = dict(patches)
        for key, given in patches.items():
            if (found := self._find(device, key)) is not None:
                shard, name = found
                whole, part = shard.wholes[name], shard.slices[name]
                loras = [_sliced_lora(patch, part, whole.shape) for patch in given]
                instead = [(1.0, SlicedPatch(set(), (list(given), whole, part)), 1.0, None, None)]
                sliced[key] = instead if None in loras else loras
        self._patches[device] = uuid, sliced
        return sliced

    def _find(self, device: torch.device, key: str) -> tuple[BlockShard, str] | None:
        block, name = key.removeprefix(f"{ROOT}."), ""
        while "." in block:
            block, _, last = block.rpartition(".")
            name = f"{last}.{name}".rstrip(".")
            if (shard := self.shards[device].get(block)) is not None:
                return (shard, name) if name in shard.slices else None
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DividedPlan(SplitPlan):
    """Args: divided: name of a block -> how it is divided, and each device's share."""

    executor, part = TensorExecutor, "a part of it each"
    divided: Mapping[str, tuple[TensorPlan, Shares]]

    def share_of(self, device: torch.device) -> str:
        return "a part of every block"

    def bytes_on(self, diffusion_model: nn.Module) -> dict[torch.device, int]:
        """Bytes of weights that each device holds of this model, which is whole; the main device has the rest, too."""
        sizes = dict.fromkeys(self.devices, 0)
        sizes[self.main_device] = management.module_size(diffusion_model)
        for name, how in self.divided.items():
            block = diffusion_model.get_submodule(name)
            sizes[self.main_device] -= management.module_size(block)
            for rank, device in enumerate(self.devices):
                part = divide_block(copy_structure(block)[0], *how, rank, cut_weight).block
                sizes[device] += sum(each.nbytes for weight in part.parameters() for each in plain_parts(weight))
        return sizes


def _sliced_lora(patch: Any, part: Slice, shape: Sequence[int]) -> Any:
    """A LoRA of one weight as that of its slice; None for any other patch, and for a LoRA that does not fit."""
    strength, adapter, strength_model, offset, function = patch
    if type(adapter) is not LoRAAdapter or function is not None or strength_model != 1.0:
        return None
    up, down, alpha, mid, dora, reshape = adapter.weights
    if up.ndim != 2 or down.ndim != 2 or mid is not None or dora is not None or reshape is not None:
        return None

    wanted = list(shape)
    if offset is not None:
        if offset[1] + offset[2] > wanted[offset[0]]:
            return None
        wanted[offset[0]] = offset[2]
    if [up.shape[0], down.shape[1]] != wanted or up.shape[1] != down.shape[0]:
        return None
    factor = down if part.dim else up
    if offset is not None and offset[0] == part.dim:  # of some of the rows that are sliced: of others it is zero
        whole = [*factor.shape]
        whole[part.dim] = shape[part.dim]
        factor = factor.new_zeros(whole).slice_scatter(factor, part.dim, offset[1], offset[1] + offset[2])
        offset = None
    factor = part.copied(factor)
    factors = (up, factor) if part.dim else (factor, down)
    own = LoRAAdapter(adapter.loaded_keys, (*factors, alpha, mid, dora, reshape))
    return strength, own, strength_model, offset, function


class SlicedPatch(WeightAdapterBase):
    """All patches of one weight, of which a card holds a slice. weights: ComfyUI's patches, the whole, the slice."""

    name = "devicebridge_slice"

    def __init__(self, loaded_keys: set[str], weights: tuple[list[Any], torch.Tensor, Slice]) -> None:
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self, weight: torch.Tensor, key: str, strength: float, model: float, offset: Any, function: Any, *others: Any
    ) -> torch.Tensor:
        """The slice of the patched whole; of the given slice, only its device and type matter."""
        patches, whole, part = self.weights
        plain = whole.dequantize() if isinstance(whole, QuantizedTensor) else whole
        moved = management.cast_to_device(plain, weight.device, weight.dtype, copy=True)
        return part.copied(comfy.lora.calculate_weight(patches, moved, key, *others))


def cut_weight(weight: torch.Tensor, part: Slice) -> torch.Tensor:
    """A slice of a weight in the weight's own format, without a copy but of scales of rows."""
    if not isinstance(weight, QuantizedTensor):
        return part.of(weight)
    params, scale = weight._params, weight._params.scale
    if part.dim == 0 and isinstance(scale, torch.Tensor) and scale.ndim > 0 and scale.numel() > 1:  # of each row
        scale = part.copied(scale)
    data = part.of(weight._qdata)
    if not data.is_contiguous():  # ComfyUI pins what an 8-bit weight's address says, without asking whether it is whole
        data = JoinedSlices([data], part.dim)
    own = dataclasses.replace(params, scale=scale, orig_shape=tuple(data.shape))
    return QuantizedTensor(data, weight._layout_cls, own)


def addresses_on(layer: nn.Module, device: torch.device) -> tuple[int, ...] | None:
    """Where a layer's weights lie on the card; None unless all are there and used as they are. Under DynamicVRAM a
    weight is there if ComfyUI would not fetch it before the next use."""
    found: list[int] = []
    pinned: list[Any] = []  # what DynamicVRAM may not take away until all is found
    left: list[nn.Module | None] = [layer]
    try:
        while left:
            if (module := left.pop()) is None:
                continue
            left += module._modules.values()
            weights = [*module._parameters.values(), *module._buffers.values()]
            address = vars(module).get("_v")
            if not weights and address is None:
                continue
            if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
                return None  # such as a LoRA that is added at every call
            if address is not None:
                if (signature := vbar.vbar_fault(address)) is None:
                    return None
                pinned.append(address)
                if not vbar.vbar_signature_compare(signature, getattr(module, "_v_signature", None)):
                    return None
                weights = [getattr(module, "_v_weight", None), getattr(module, "_v_bias", None)]
            for weight in (each for each in weights if each is not None):
                if weight.device != device:
                    return None
                parts = (weight,) if type(weight) in (nn.Parameter, torch.Tensor) else plain_parts(weight)
                found += [part.data_ptr() for part in parts]
        return tuple(found)
    finally:
        for address in pinned:
            vbar.vbar_unpin(address)
