"""A MODEL's blocks divided among cards that compute each of them together: whose slices are where, and their patches.

Every card has a copy of each block with its own slices of the weights, which stay views of the given weights until the
card takes them. LoRAs and other patches are made for whole weights. So a card patches the whole weight and takes its
slice of the result: right for every kind of patch, also for those that depend on the weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import comfy.lora
import comfy.model_management
import comfy.ops
import comfy_aimdo.model_vbar
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter.base import WeightAdapterBase
from comfy.weight_adapter.bypass import BypassForwardHook
from comfy.weight_adapter.lora import LoRAAdapter
from torch import nn

from ....parallel.local.shards import BlockShard, divide_block
from ....parallel.local.slices import JoinedSlices, Slice
from ....quantization.wrapped import plain_parts
from .attachments import ROOT
from .division_plan import Division
from .model_copy import Origin, copy_structure, reachable


class DividedBlocks:
    """The blocks of one tree, divided: home's in place, and a copy of each for every other card.

    Args:
        root: the diffusion model; its blocks become home's parts.
    """

    def __init__(self, root: nn.Module, division: Division) -> None:
        self.division = division
        self.shards: dict[torch.device, dict[str, BlockShard]] = {device: {} for device in division.devices}
        home = division.devices[0]
        for name, (plan, shares) in division.blocks.items():
            block = root.get_submodule(name)
            for rank, device in enumerate(division.devices[1:], start=1):
                copied, _ = copy_structure(block)
                self.shards[device][name] = divide_block(copied, plan, shares, rank, cut_weight)
            self.shards[home][name] = divide_block(block, plan, shares, 0, cut_weight)
        self._patches: dict[torch.device, tuple[Any, dict[str, Any]]] = {}
        self._unpatched = {
            device: {
                f"{ROOT}.{name}.{parameter}": value.data
                for name, shard in shards.items()
                for parameter, value in shard.block.named_parameters()
            }
            for device, shards in self.shards.items()
        }

    def by_block(self) -> dict[nn.Module, tuple[BlockShard, list[BlockShard]]]:
        """Home's block -> its shard, and those of the other cards."""
        home, *others = self.division.devices
        return {
            shard.block: (shard, [self.shards[device][name] for device in others])
            for name, shard in self.shards[home].items()
        }

    def whole(self, key: str) -> torch.Tensor | None:
        """The whole of a divided weight, by its name in the BaseModel; None if it is not divided."""
        found = self._find(self.division.devices[0], key)
        return None if found is None else found[0].wholes[found[1]]

    def origin(self, device: torch.device, given: Origin | None) -> Origin:
        """Where the unpatched weights of one card lie in host memory."""
        mine = self._unpatched[device]

        def find(name: str) -> torch.Tensor | None:
            return mine[name] if name in mine else (given(name) if given is not None else None)

        return find

    def patches_on(self, device: torch.device, patches: Mapping[str, Sequence[Any]], uuid: Any) -> dict[str, Any]:
        """The patches as this card applies them to its slices; made once as long as ComfyUI's number for them stays."""
        known = self._patches.get(device)
        if known is None or known[0] != uuid:
            known = self._patches[device] = uuid, self._slice_patches(device, patches)
        return known[1]

    def _slice_patches(self, device: torch.device, patches: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        sliced: dict[str, Any] = dict(patches)
        for key in patches:
            found = self._find(device, key)
            if found is not None:
                shard, name = found
                sliced[key] = _sliced(list(patches[key]), shard.wholes[name], shard.slices[name])
        return sliced

    def _find(self, device: torch.device, key: str) -> tuple[BlockShard, str] | None:
        path = key.removeprefix(f"{ROOT}.")
        parts = path.split(".")
        for length in range(len(parts) - 1, 0, -1):
            shard = self.shards[device].get(".".join(parts[:length]))
            if shard is not None:
                name = ".".join(parts[length:])
                return (shard, name) if name in shard.slices else None
        return None


def _sliced(patches: list[Any], whole: torch.Tensor, part: Slice) -> list[Any]:
    """Patches of a slice that have the effect which these have on the whole."""
    loras = [_sliced_lora(patch, part, whole.shape) for patch in patches]
    if all(each is not None for each in loras):
        return [patch for each in loras for patch in each or ()]
    return [(1.0, SlicedPatch(set(), (patches, whole, part)), 1.0, None, None)]


def _sliced_lora(patch: Any, part: Slice, shape: Sequence[int]) -> list[Any] | None:
    """A LoRA of one weight as LoRAs of its slice: one factor keeps all of it. None for any other patch, also for a
    LoRA that does not fit the weight: ComfyUI says so of the whole, and leaves it alone."""
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

    def cut(ranges: Sequence[tuple[int, int]]) -> Any:
        factor = Slice(part.dim, tuple(ranges)).copied(down if part.dim else up)
        factors = (up, factor) if part.dim else (factor, down)
        return LoRAAdapter(adapter.loaded_keys, (*factors, alpha, mid, dora, reshape))

    if offset is None or offset[0] != part.dim:
        return [(strength, cut(part.ranges), strength_model, offset, function)]
    found, at, (_, start, length) = [], 0, offset
    for first, last in part.ranges:
        low, high = max(first, start), min(last, start + length)
        if low < high:
            place = (part.dim, at + low - first, high - low)
            found.append((strength, cut([(low - start, high - start)]), strength_model, place, function))
        at += last - first
    return found


class SlicedPatch(WeightAdapterBase):
    """All patches of one weight, of which a card holds a slice.

    Args:
        loaded_keys: as ComfyUI's adapters have it; empty.
        weights: the patches in ComfyUI's form, the whole weight they were made for, and the slice. ComfyUI may make
            another object of this class with the tensors inside on a card.
    """

    name = "devicebridge_slice"

    def __init__(self, loaded_keys: set[str], weights: tuple[list[Any], torch.Tensor, Slice]) -> None:
        self.loaded_keys = loaded_keys
        self.weights = weights

    def calculate_weight(
        self,
        weight: torch.Tensor,
        key: str,
        strength: float,
        strength_model: float,
        offset: Any,
        function: Any,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: Any = None,
    ) -> torch.Tensor:
        """The slice of the patched whole; of the given slice, only its device and type matter."""
        patches, whole, part = self.weights
        plain = whole.dequantize() if isinstance(whole, QuantizedTensor) else whole
        moved = comfy.model_management.cast_to_device(plain, weight.device, weight.dtype, copy=True)
        return part.copied(comfy.lora.calculate_weight(patches, moved, key, intermediate_dtype, original_weight))

    def calculate_shape(self, key: str) -> None:
        """It changes no shape."""


def cut_weight(weight: torch.Tensor, part: Slice) -> torch.Tensor:
    """A slice of a weight in the weight's own format, without a copy: of 8-bit weights only scales of rows are copied.

    Raises: ValueError for a weight that is on a card: the slices of all cards would be made there.
    """
    if weight.device.type != "cpu":
        raise ValueError(
            f"the weights of this MODEL stay on {weight.device}, as with --highvram or --gpu-only; dividing them among "
            "cards would take more memory there, not less. Start ComfyUI without that, or use way 'blocks'"
        )
    if not isinstance(weight, QuantizedTensor):
        return part.of(weight)
    params = weight._params
    scale = params.scale
    is_per_row = isinstance(scale, torch.Tensor) and scale.ndim > 0 and scale.numel() > 1
    if is_per_row and part.dim == 0:
        scale = part.copied(scale)
    data = part.of(weight._qdata)
    if not data.is_contiguous():  # ComfyUI pins what an 8-bit weight's address says, without asking whether it is whole
        data = JoinedSlices([data], part.dim)
    own = dataclasses.replace(params, scale=scale, orig_shape=tuple(data.shape))
    return QuantizedTensor(data, weight._layout_cls, own)


def addresses_on(layer: nn.Module, device: torch.device) -> tuple[int, ...] | None:
    """Where a layer's weights lie on the card; None unless all are there and used as they are.

    Under DynamicVRAM a weight is there if ComfyUI would not fetch it before the next use.
    """
    held: list[Any] = []
    try:
        return _addresses(layer, device, held)
    finally:
        for address in held:
            comfy_aimdo.model_vbar.vbar_unpin(address)


def _addresses(layer: nn.Module, device: torch.device, held: list[Any]) -> tuple[int, ...] | None:
    """This is asked before every replay, so that containers are passed over, and plain weights are not looked into.

    Args: held: to be told what DynamicVRAM may not take away until all is found.
    """
    found: list[int] = []
    left: list[nn.Module | None] = [layer]
    while left:
        module = left.pop()
        if module is None:
            continue
        left += module._modules.values()
        weights = [*module._parameters.values(), *module._buffers.values()]
        address = vars(module).get("_v")
        if not weights and address is None:
            continue
        if getattr(module, "weight_function", None) or getattr(module, "bias_function", None):
            return None  # such as a LoRA that is added at every call
        if address is not None:
            signature = comfy_aimdo.model_vbar.vbar_fault(address)
            if signature is None:
                return None
            held.append(address)
            if not comfy_aimdo.model_vbar.vbar_signature_compare(signature, getattr(module, "_v_signature", None)):
                return None
            weights = [getattr(module, "_v_weight", None), getattr(module, "_v_bias", None)]
        for weight in weights:
            if weight is None:
                continue
            if weight.device != device:
                return None
            parts = (weight,) if type(weight) in (nn.Parameter, torch.Tensor) else plain_parts(weight)
            found += [part.data_ptr() for part in parts]
    return tuple(found)


def find_bypass(layers: Iterable[nn.Module]) -> list[str]:
    """A word for ComfyUI's bypass LoRA if it is on a layer of these: it would act on home's slices only."""
    forwards = (module.__dict__.get("forward") for module in layers)
    found = any(
        isinstance(part, BypassForwardHook) for each in forwards if each is not None for part in reachable(each)
    )
    return ["a bypass LoRA"] if found else []


def check_runnable(unseen: Sequence[str], options: Mapping[str, Any], inside: Sequence[str]) -> None:
    """Refuse what other nodes would do inside a block, where each card has some of the heads.

    Args:
        unseen: what is attached inside the model. options: transformer_options of the forward.
        inside: names of the patches that this class calls inside a block.
    Raises: RuntimeError that names it.
    """
    patches = options.get("patches", {})
    found = list(unseen)
    found += [f"the patch {name!r}" for name in inside if patches.get(name)]
    found += [
        f"the replacement {name!r}"
        for name, keyed in options.get("patches_replace", {}).items()
        if keyed and name != "dit"
    ]
    if options.get("optimized_attention_override") is not None:
        found.append("an attention override")
    if found:
        raise RuntimeError(
            f"each card of this split computes some of the attention heads, and {found[0]} of another node works "
            "inside the blocks, where it would see only those. Use way 'blocks' in the split node, or take that node "
            "out"
        )
