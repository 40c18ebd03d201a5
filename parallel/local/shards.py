"""One device's part of a block that several devices compute together: its slices, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from ...families.tensor_plan import HEADS, Divided, Range, Shares, TensorPlan, Unit, share_heads
from ...patches.hooks import BeforeHook, map_tensors

Cut = Callable[[torch.Tensor, "Slice"], torch.Tensor]  # a weight and a slice of it -> the slice as a weight


@dataclass(frozen=True)
class BlockCollective:
    """A module behind which the devices exchange something. Args: how: "all_gather" is along the features, "broadcast"
    takes the first device's output, and "norm" corrects that of an RMS norm by the mean square of all. width: the
    number of features of all devices: of an RMS norm, or of gathered outputs."""

    name: str
    how: Literal["all_reduce", "all_gather", "norm", "broadcast"]
    width: int = 0


def _of_heads(
    dims: Mapping[str, int], shares: Shares, rank: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before a module: of keyword arguments with tensors of all heads it gets those of one device's heads, along
    `dims`, by name. One row for all heads stays."""

    def own(dim: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[dim] == 1:
            return tensor
        first, last = shares.ranges("heads", tensor.shape[dim])[rank]
        return tensor.narrow(dim, first, last - first)

    return args, {**kwargs, **{n: map_tensors(kwargs[n], partial(own, dim)) for n, dim in dims.items() if n in kwargs}}


@dataclass
class BlockShard:
    """What one device holds of one block: by name of a divided parameter its slice, and the whole."""

    block: nn.Module
    collectives: list[BlockCollective] = field(default_factory=list)
    arguments: list[tuple[nn.Module, BeforeHook]] = field(default_factory=list)
    slices: dict[str, Slice] = field(default_factory=dict)
    wholes: dict[str, torch.Tensor] = field(default_factory=dict)


def find_plan(plans: tuple[TensorPlan, ...], block: nn.Module) -> TensorPlan | None:
    return next((plan for plan in plans if fnmatchcase(type(block).__name__, plan.block)), None)


def shares_of(block: nn.Module, plan: TensorPlan, num_devices: int) -> Shares:
    """How this block's heads are shared out. Raises: ValueError if there are too few heads, or the block is built
    otherwise than the plan says."""
    num_heads = _number(block, plan.num_heads)
    num_kv_heads = _number(block, plan.num_kv_heads) if plan.num_kv_heads else 0  # 0 for as many
    behind = (
        _divided_size(module, divided)
        for name, module in block.named_modules()
        if (divided := plan.find(name)) and divided.by == "row" and divided.parts == HEADS
    )
    width = _number(block, plan.width) if plan.width else next(behind, 0)
    if not width:
        raise ValueError(f"this {type(block).__name__} cannot be divided: no linear takes all of its heads")
    return share_heads(num_heads, num_kv_heads, width, num_devices)


def divide_block(
    block: nn.Module, plan: TensorPlan, shares: Shares, rank: int, cut: Cut = lambda w, s: s.of(w)
) -> BlockShard:
    """Make a whole block what one device computes, in place. Raises: ValueError for other parts than the plan's."""
    shard = BlockShard(block)
    parts = _parts(block, plan, shares)
    lengths: dict[str, int] = {}
    for name in plan.attributes.values():
        if name in parts:  # the features of a linear's divided dimension that belong to no head
            divided, number = plan.find(name), parts[name].count("features")
            assert divided is not None, "_parts has looked"
            size = shares.without_heads(parts[name], _divided_size(block.get_submodule(name), divided)) // number
            lengths[name] = number * shares.count("features", size, rank)
    for name, module in block.named_modules():
        if name in parts:
            _divide_linear(shard, name, module, plan, parts[name], shares, rank, cut)
        elif plan.is_norm(name) and getattr(module, "weight", None) is not None:
            width = len(module.weight)
            ranges = tuple(shares.slices(("heads",), width, rank))
            _cut(shard, module, f"{name}.weight", Slice(0, ranges), cut)
            module.normalized_shape = (sum(last - first for first, last in ranges),)
            shard.collectives.append(BlockCollective(name, "norm", width))
        elif plan.is_decided(name):
            shard.collectives.append(BlockCollective(name, "broadcast"))
        of_heads = next((dims for pattern, dims in plan.arguments.items() if fnmatchcase(name, pattern)), None)
        if of_heads is not None:
            shard.arguments.append((module, partial(_of_heads, of_heads, shares, rank)))
    for name, module in block.named_modules():
        for attribute, number in list(vars(module).items()):
            path = f"{name}.{attribute}".lstrip(".")
            counts = plan.counted(path)
            if counts is not None and type(number) is int:
                is_unit = counts in ("heads", "kv_heads")
                local = shares.count(counts, number, rank) if is_unit else lengths[counts]  # type: ignore[arg-type]
                setattr(module, attribute, local)
    return shard


def plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that a quantized tensor of ComfyUI's is made of, detached; itself if it is plain."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from plain_parts(getattr(tensor, name))


def _parts(block: nn.Module, plan: TensorPlan, shares: Shares) -> dict[str, tuple[Unit, ...]]:
    """Name of each divided linear -> the parts its divided dimension consists of in this build."""
    linears = {name: module for name, module in block.named_modules() if hasattr(module, "in_features")}
    found: dict[str, tuple[Unit, ...]] = {}
    for name, module in linears.items():
        divided = plan.find(name)
        if divided is None:
            continue
        parts = divided.parts
        if divided.repeats:
            parts = shares.repeated(parts, _divided_size(module, divided))
        if divided.into:
            target: Any = linears[divided.into]
            behind = plan.find(divided.into)
            assert behind is not None, f"{divided.into} is divided as well"
            each = shares.without_heads(behind.parts, int(target.in_features))
            total = shares.without_heads(parts, int(module.out_features))  # type: ignore[arg-type]
            if not each or total % each:
                raise ValueError(f"{name} has {total} features beside its heads, and {divided.into} takes {each}")
            parts = tuple(unit for unit in parts for _ in range(total // each if unit == "features" else 1))
        found[name] = parts
    return found


def _divided_size(linear: Any, divided: Divided) -> int:
    return int(linear.in_features if divided.by == "row" else linear.out_features)


def _divide_linear(
    shard: BlockShard,
    name: str,
    module: Any,
    plan: TensorPlan,
    parts: tuple[Unit, ...],
    shares: Shares,
    rank: int,
    cut: Cut,
) -> None:
    divided = plan.find(name)
    assert divided is not None, "the caller has looked"
    is_row, whole = divided.by == "row", _divided_size(module, divided)
    try:
        ranges = tuple(shares.slices(parts, whole, rank))
    except ValueError as error:
        raise ValueError(f"{name} cannot be divided: {error}") from error
    _cut(shard, module, f"{name}.weight", Slice(1 if is_row else 0, ranges), cut)
    if module.bias is not None and not is_row:
        _cut(shard, module, f"{name}.bias", Slice(0, ranges), cut)
    elif module.bias is not None and rank > 0:
        module.bias = None  # added once
    length = sum(last - first for first, last in ranges)
    setattr(module, "in_features" if is_row else "out_features", length)
    around = plan.summed_in(name)
    if divided.by == "gathered":
        shard.collectives.append(BlockCollective(name, "all_gather", whole))
    elif is_row and not any(each.name == around for each in shard.collectives):
        shard.collectives.append(BlockCollective(around or name, "all_reduce"))


def _cut(shard: BlockShard, module: nn.Module, name: str, part: Slice, cut: Cut) -> None:
    leaf = name.rpartition(".")[2]
    whole: Any = module._parameters[leaf]
    shard.wholes[name], shard.slices[name] = whole.data, part
    module._parameters[leaf] = nn.Parameter(cut(whole.data, part), requires_grad=False)


def _number(block: nn.Module, path: str) -> int:
    """Raises: ValueError if the block has no such attribute."""
    found: Any = block
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ValueError(f"this {type(block).__name__} cannot be divided: it has no {path}")
    return int(found)


# ---- slices of weights without a copy

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Slice:
    """Ranges of one dimension, which is counted from the front."""

    dim: int
    ranges: tuple[Range, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These ranges joined: a view if there is one, else a JoinedSlices. No memory is taken."""
        pieces = [tensor.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return pieces[0] if len(pieces) == 1 else JoinedSlices(pieces, self.dim)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """These ranges joined, in memory of their own."""
        return torch.cat([tensor.narrow(self.dim, first, last - first) for first, last in self.ranges], self.dim)


class JoinedSlices(torch.Tensor):
    """Slices of one tensor as if joined along a dimension; they are joined when they are copied, not before. So a slice
    of a packed weight stays in the mapped file until a device takes it. What only asks, copies or makes room joins
    nothing in host memory; everything else works on a joined copy."""

    pieces: Sequence[torch.Tensor]
    along: int

    @staticmethod
    def __new__(cls: type[JoinedSlices], pieces: Sequence[torch.Tensor], along: int) -> JoinedSlices:
        first = pieces[0]
        shape = list(first.shape)
        shape[along] = sum(piece.shape[along] for piece in pieces)
        made: JoinedSlices = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=first.dtype, device=first.device, requires_grad=False
        )
        made.pieces, made.along = tuple(pieces), along
        return made

    def __init__(self, pieces: Sequence[torch.Tensor], along: int) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.joined()

    def joined(self) -> torch.Tensor:
        return torch.cat(list(self.pieces), self.along)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            with torch.inference_mode(args[0].is_inference()):  # else torch refuses to give it the other's version
                return cls(args[0].pieces, args[0].along)
        if func.overloadpacket is _aten.to:  # in inference mode it comes here whole
            return func.decompose(*args, **kwargs)
        if func is _aten._to_copy.default:
            return torch.cat([func(piece, **kwargs) for piece in args[0].pieces], args[0].along)
        if func is _aten.empty_like.default:
            return func(args[0].pieces[0].new_empty(()).expand(args[0].shape), **kwargs)
        if func in (_aten.is_pinned.default, _aten._has_compatible_shallow_copy_type.default):
            return False  # the latter: a module that is moved takes what was made of this as a parameter of its own
        if func is _aten.clone.default:
            return args[0].joined()
        if func is _aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            target, source, *others = args
            lengths = [piece.shape[source.along] for piece in source.pieces]
            for place, piece in zip(target.split(lengths, source.along), source.pieces, strict=True):
                place.copy_(piece, *others, **kwargs)
            return target
        args, kwargs = tree_map_only(cls, cls.joined, (args, kwargs))  # also inside lists
        return func(*args, **kwargs)
