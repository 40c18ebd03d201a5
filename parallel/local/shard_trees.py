"""A model as trees of shards: every device has all of its modules, and of the weights of its blocks the slices of that
device.

Nobody holds the whole model. A layer is read and rounded whole, on the device that will own its LoRA, and cut as soon
as it is final. What stays of the whole are shapes: a LoRA for one device is attached to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ...families.spec import ModelFamily
from ...families.tensor_plan import Shares
from ...patches.lora import is_torchao_tensor
from ...quantization import weight_only
from ...quantization.frozen_linear import FrozenLinear8
from ...quantization.quantize import QuantizeSettings
from ..placement import block_names
from .shards import BlockShard, divide_block, find_plan, shares_of
from .slices import Slice

Slices = dict[str, Slice]  # name of each divided parameter in the model -> the slice of one device


def divide_model(model: nn.Module, family: ModelFamily, shares: Sequence[int], rank: int) -> dict[str, BlockShard]:
    """Turn the blocks of a model on meta into what one of several devices computes of them; in place.

    Args:
        shares: of every device, in whose proportion heads are shared out.
    Returns: name of a block -> its shard.
    Raises: ValueError if nobody described how, or there are fewer heads than devices.
    """
    shards = {}
    for name in block_names(model, family):
        block = model.get_submodule(name)
        plan, found = find_plan(family.tensor, block), shares_in(block, family, shares)
        assert plan is not None, "shares_in has looked"
        shards[name] = divide_block(block, plan, found, rank, lambda weight, part: part.copied(weight))
    return shards


def shares_in(block: nn.Module, family: ModelFamily, shares: Sequence[int]) -> Shares:
    """How a block is shared out among devices.

    Raises: ValueError if nobody described how, or there are fewer heads than devices.
    """
    plan = find_plan(family.tensor, block)
    if plan is None:
        raise ValueError(
            f"nobody has described how the {type(block).__name__} of {family.title} is divided among devices; use "
            'parallel.strategy = "auto"'
        )
    return shares_of(block, plan, shares)


def division_fault(
    model: nn.Module, family: ModelFamily, shares: Sequence[int], quantize: QuantizeSettings | None
) -> str:
    """Why the blocks of a model on meta cannot be divided among devices in these shares; "" if they can.

    Of layers that int8-compute rotates in blocks of features, slices must begin and end with such a block.
    """
    for rank in range(max(1, len(shares) - 1)):  # the last one's edges are the others'
        try:
            shards = divide_model(copy.deepcopy(model), family, shares, rank)
        except ValueError as error:
            return str(error)
        parts = [(f"{block}.{leaf}", part) for block, shard in shards.items() for leaf, part in shard.slices.items()]
        for name, part in parts:
            whole = model.get_parameter(name)
            if quantize is None or part.dim == 0 or whole.ndim != 2:
                continue
            width = quantize.rotation_of(whole.shape[1])
            edges = [edge for each in part.ranges for edge in each]
            if width and any(edge % width for edge in edges):
                uncut = (each for each in (64, 16) if each < width and not any(edge % each for edge in edges))
                return (
                    f"int8-compute rotates {name} in blocks of {width} features, and {len(shares)} devices would cut "
                    f"these; use model.rotation = {next(uncut, 0)}"
                )
    return ""


class ShardTrees:
    """Takes a model's layers from the loader and deals them out; a LayerStore.

    Args:
        owner_of: device of a layer before it is cut, by its name.
        shares: of every device, in whose proportion heads are shared out; () is evenly.
    """

    def __init__(
        self,
        family: ModelFamily,
        devices: Sequence[torch.device],
        owner_of: Callable[[str], torch.device],
        shares: Sequence[int] = (),
    ) -> None:
        self.devices = tuple(devices)
        self.trees: tuple[nn.Module, ...] = ()
        self.shards: tuple[dict[str, BlockShard], ...] = ()
        self.slices: tuple[Slices, ...] = ()
        self._family, self._owner_of = family, owner_of
        self._shares = tuple(shares) or (1,) * len(self.devices)

    def begin(self, model: nn.Module, layers: Collection[str]) -> None:
        """Make the trees, empty, from a model whose parameters are on meta."""
        self._whole = model
        self.trees = tuple(copy.deepcopy(model) for _ in self.devices)
        shares = self._shares
        self.shards = tuple(divide_model(tree, self._family, shares, rank) for rank, tree in enumerate(self.trees))
        self.slices = tuple(
            {f"{block}.{name}": part for block, shard in shards.items() for name, part in shard.slices.items()}
            for shards in self.shards
        )

    def finish(self, layer: str) -> None:
        """Deal out a layer that is final; its shape stays."""
        whole: Any = self._whole.get_submodule(layer)
        for device, tree, slices in zip(self.devices, self.trees, self.slices, strict=True):
            given = _cut(whole, tree.get_submodule(layer), layer, slices, device)
            if given is not None:
                tree.set_submodule(layer, given)
        owner = self._owner_of(layer)
        for leaf, parameter in whole._parameters.items():
            if parameter is not None and not is_torchao_tensor(parameter):
                whole._parameters[leaf] = nn.Parameter(_shape_of(parameter.data, owner), requires_grad=False)
        if isinstance(whole, FrozenLinear8):
            whole.scale = _shape_of(whole.scale, owner)
        elif _is_quantized(whole):
            values, scale = weight_only.values_and_scale(whole.weight)
            scheme, dtype = _stored_scheme(values), whole.weight.dtype
            weight_only.adopt(whole, scheme, _shape_of(values, owner), _shape_of(scale, owner), dtype)

    def close(self, dtype: torch.dtype) -> None:
        """All layers are distributed: the whole is a model of plain linears without numbers, for a LoRA's shapes.

        Args:
            dtype: that quantized layers compute in.
        """
        for device, tree in zip(self.devices, self.trees, strict=True):
            for name, buffer in list(tree.named_buffers()):
                owner, _, leaf = name.rpartition(".")
                tree.get_submodule(owner)._buffers[leaf] = buffer.to(device)
            assert not any(each.is_meta for each in tree.parameters()), "every layer has been distributed"
            tree.requires_grad_(False).eval()
        for name, module in list(self._whole.named_modules()):
            if not isinstance(module, nn.Linear) or not _is_quantized(module):
                continue
            is_biased = module.bias is not None
            plain = nn.Linear(module.in_features, module.out_features, bias=is_biased, device="meta")
            for leaf, parameter in plain.named_parameters():
                shape = _shape_of(parameter.to(dtype), self._owner_of(name))
                plain._parameters[leaf] = nn.Parameter(shape, requires_grad=False)
            self._whole.set_submodule(name, plain.train(module.training))
        self._whole.forward = _refuse  # type: ignore[method-assign]


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, FrozenLinear8) or is_torchao_tensor(module._parameters.get("weight"))  # type: ignore[arg-type]


def _cut(whole: Any, own: Any, layer: str, slices: Slices, device: torch.device) -> nn.Module | None:
    """Give a tree's module one device's slices of the whole one's parameters; what is to take its place, if anything
    is: of a quantized layer. The slice has the very values that the whole layer has, for scales are of rows."""
    is_quantized = _is_quantized(whole)
    for leaf, parameter in whole._parameters.items():
        if parameter is None or own._parameters[leaf] is None:  # a bias that another device adds
            continue
        if leaf == "weight" and is_quantized:
            continue
        taken = _taken(parameter.data, slices.get(f"{layer}.{leaf}".lstrip(".")), device)
        own._parameters[leaf] = nn.Parameter(taken, requires_grad=False)
    own._buffers.update({leaf: each if each is None else each.to(device) for leaf, each in whole._buffers.items()})
    if not is_quantized:
        return None
    part = slices.get(f"{layer}.weight")
    rows = part if part is not None and part.dim == 0 else None
    if isinstance(whole, FrozenLinear8):
        rotation = None if whole.rotation is None else whole.rotation.to(device)
        values, scale = _taken(whole.weight.data, part, device), _taken(whole.scale, rows, device)
        return FrozenLinear8(values, scale, own.bias, whole.compute_dtype, rotation)
    values, scale = weight_only.values_and_scale(whole.weight)
    return weight_only.adopt(
        own, _stored_scheme(values), _taken(values, part, device), _taken(scale, rows, device), whole.weight.dtype
    )


def _taken(tensor: torch.Tensor, part: Slice | None, device: torch.device) -> torch.Tensor:
    """A slice, None for all of it, on the device."""
    return (tensor if part is None else part.copied(tensor)).to(device)


def _stored_scheme(values: torch.Tensor) -> weight_only.WeightOnlyScheme:
    return next(scheme for scheme, dtype in weight_only.WEIGHT_ONLY.items() if dtype is values.dtype)


def _shape_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this shape and type that takes the memory of one value."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: RuntimeError always."""
    raise RuntimeError("this model has no numbers: its weights are with the devices that compute it together")
