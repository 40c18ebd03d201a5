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
from ...families.tensor_plan import Shares, TensorPlan
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
    return shares_of(block, _plan_of(block, family), shares)


def _plan_of(block: nn.Module, family: ModelFamily) -> TensorPlan:
    plan = find_plan(family.tensor, block)
    if plan is None:
        raise ValueError(
            f"nobody has described how the {type(block).__name__} of {family.title} is divided among devices; use "
            'parallel.strategy = "auto"'
        )
    return plan


def division_fault(
    model: nn.Module, family: ModelFamily, shares: Sequence[int], quantize: QuantizeSettings | None
) -> str:
    """Why the blocks of a model on meta cannot be divided among devices in these shares; "" if they can.

    Of layers that int8-compute rotates in blocks of features, slices must begin and end with such a block.
    """
    faults = (_fault_of_one(model, family, shares, rank, quantize) for rank in range(max(1, len(shares) - 1)))
    return next(filter(None, faults), "")  # the last one's edges are the others'


def _fault_of_one(
    model: nn.Module, family: ModelFamily, shares: Sequence[int], rank: int, quantize: QuantizeSettings | None
) -> str:
    try:
        shards = divide_model(copy.deepcopy(model), family, shares, rank)
    except ValueError as error:
        return str(error)
    for block, shard in shards.items():
        for name, part in shard.slices.items():
            whole = model.get_parameter(f"{block}.{name}")
            if quantize is None or part.dim == 0 or whole.ndim != 2:
                continue
            width = quantize.rotation_of(whole.shape[1])
            if width and any(edge % width for each in part.ranges for edge in each):
                return (
                    f"int8-compute rotates {block}.{name} in blocks of {width} features, and {len(shares)} devices "
                    f"would cut these; use model.rotation = {_narrower(part, width)}"
                )
    return ""


def _narrower(part: Slice, width: int) -> int:
    """A rotation that the slice does not cut."""
    edges = [edge for each in part.ranges for edge in each]
    return next((each for each in (64, 16) if each < width and not any(edge % each for edge in edges)), 0)


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
        whole = self._whole.get_submodule(layer)
        for device, tree, slices in zip(self.devices, self.trees, self.slices, strict=True):
            given = _cut(whole, tree.get_submodule(layer), layer, slices, device)
            if given is not None:
                tree.set_submodule(layer, given)
        _keep_shapes(whole, self._owner_of(layer))

    def close(self, dtype: torch.dtype) -> None:
        """All layers are dealt out: the whole is a model of plain linears without numbers, for a LoRA's shapes.

        Args:
            dtype: that quantized layers compute in.
        """
        for device, tree in zip(self.devices, self.trees, strict=True):
            for name, buffer in list(tree.named_buffers()):
                owner, _, leaf = name.rpartition(".")
                tree.get_submodule(owner)._buffers[leaf] = buffer.to(device)
            assert not any(each.is_meta for each in tree.parameters()), "every layer has been dealt out"
            tree.requires_grad_(False).eval()
        for name, module in list(self._whole.named_modules()):
            if isinstance(module, nn.Linear) and _is_quantized(module):
                self._whole.set_submodule(name, _plain(module, dtype, self._owner_of(name)))
        self._whole.forward = _refuse  # type: ignore[method-assign]


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, FrozenLinear8) or is_torchao_tensor(module._parameters.get("weight"))  # type: ignore[arg-type]


def _cut(whole: nn.Module, own: nn.Module, layer: str, slices: Slices, device: torch.device) -> nn.Module | None:
    """Give a tree's module one device's slices of the whole one's parameters; what is to take its place, if anything
    is."""
    is_quantized = _is_quantized(whole)
    for leaf, parameter in whole._parameters.items():
        if parameter is None or own._parameters[leaf] is None:  # a bias that another device adds
            continue
        if leaf == "weight" and is_quantized:
            continue
        taken = _taken(parameter.data, slices.get(f"{layer}.{leaf}".lstrip(".")), device)
        own._parameters[leaf] = nn.Parameter(taken, requires_grad=False)
    own._buffers.update({leaf: each if each is None else each.to(device) for leaf, each in whole._buffers.items()})
    return _cut_quantized(whole, own, slices.get(f"{layer}.weight"), device) if is_quantized else None


def _taken(tensor: torch.Tensor, part: Slice | None, device: torch.device) -> torch.Tensor:
    """A slice, None for all of it, on the device."""
    return (tensor if part is None else part.copied(tensor)).to(device)


def _cut_quantized(whole: Any, own: Any, part: Slice | None, device: torch.device) -> nn.Module:
    """The slice has the very values that the whole layer has: scales are of rows."""
    rows = part if part is not None and part.dim == 0 else None
    if isinstance(whole, FrozenLinear8):
        rotation = None if whole.rotation is None else whole.rotation.to(device)
        values, scale = _taken(whole.weight.data, part, device), _taken(whole.scale, rows, device)
        return FrozenLinear8(values, scale, own.bias, whole.compute_dtype, rotation)
    values, scale = weight_only.values_and_scale(whole.weight)
    return weight_only.adopt(
        own, _stored_scheme(values), _taken(values, part, device), _taken(scale, rows, device), whole.weight.dtype
    )


def _stored_scheme(values: torch.Tensor) -> weight_only.WeightOnlyScheme:
    return next(scheme for scheme, dtype in weight_only.WEIGHT_ONLY.items() if dtype is values.dtype)


def _shape_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of this shape and type that takes the memory of one value."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _keep_shapes(module: Any, device: torch.device) -> None:
    for leaf, parameter in module._parameters.items():
        if parameter is not None and not is_torchao_tensor(parameter):
            module._parameters[leaf] = nn.Parameter(_shape_of(parameter.data, device), requires_grad=False)
    if isinstance(module, FrozenLinear8):
        module.scale = _shape_of(module.scale, device)
    elif _is_quantized(module):
        values, scale = weight_only.values_and_scale(module.weight)
        scheme, dtype = _stored_scheme(values), module.weight.dtype
        weight_only.adopt(module, scheme, _shape_of(values, device), _shape_of(scale, device), dtype)


def _plain(linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    """An unquantized linear of the same shape."""
    made = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    for leaf, parameter in made.named_parameters():
        shape = _shape_of(parameter.to(dtype), device)
        made._parameters[leaf] = nn.Parameter(shape, requires_grad=False)
    return made.train(linear.training)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: RuntimeError always."""
    raise RuntimeError("this model has no numbers: its weights are with the devices that compute it together")
