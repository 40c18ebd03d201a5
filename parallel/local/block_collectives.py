"""The collectives of a block that several devices compute together (tensor parallelism), forward and backward.

After Megatron-LM (https://arxiv.org/abs/1909.08053), whose f and g these are. Between column- and row-parallel linears
a device has a part; everything else is computed whole by every device, with the same bits.

    input of a column-parallel linear     forward the input;       backward all-reduce of the gradients        (f)
    output of a row-parallel linear       forward all-reduce;      backward the gradient, equal on all ranks   (g)
    output of a gathered linear           forward all-gather;      backward this device's part of the gradient
    mean square of a norm over all heads  forward all-reduce;      backward all-reduce
    choice of a module                    forward rank 0's;        backward all-reduce, to rank 0 alone

A linear and its LoRA count as one: partial sums are added up behind both. Gradients meet in the thread that runs the
backward, which autograd chooses by device. Every device has one, so that none waits for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...patches.hooks import HookSet, map_tensors
from .shards import BlockShard, norm_eps, norm_ratio, sum_of_squares


class Group(Protocol):
    """The ranks that compute a block; see collective.Collective."""

    def all_gather(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]: ...

    def all_reduce(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor: ...


FindGroup = Callable[[], Group]  # of the forward or step that is running


def attach_collectives(
    shards: Mapping[str, BlockShard], rank: int, find_group: FindGroup, *, has_backward: bool = True
) -> HookSet:
    """Attach the collectives to the blocks of one device; to be called when their linears and LoRAs are final.

    Args:
        shards: name of a block -> this device's part of it.
        has_backward: whether the inputs of blocks may have gradients.
    """
    hooks = HookSet()
    for name, shard in shards.items():
        place = _Place(name, rank, find_group)
        if has_backward:
            _attach_to_inputs(hooks, place, shard)
        _attach_to_block(hooks, place, shard)
    return hooks


def _attach_to_inputs(hooks: HookSet, place: _Place, shard: BlockShard) -> None:
    inputs = _Inputs(place)
    for name in shard.entered:
        hooks.before(shard.block.get_submodule(name), inputs.share)
    hooks.after(shard.block, inputs.forget, also_on_error=True)


def _attach_to_block(hooks: HookSet, place: _Place, shard: BlockShard) -> None:
    block = shard.block
    for meeting in shard.meetings:
        module = block.get_submodule(meeting.name)  # with the LoRA that was put around it
        meet = _MEETS[meeting.how] if meeting.how != "norm" else functools.partial(_correct, meeting.width)
        hooks.after(module, functools.partial(_met, meet, place.at(meeting.name)))
    for of_heads in shard.arguments:
        hooks.before(of_heads.module, of_heads)


class _Place:
    """Where in the model a device is. Args: name: the same on every device."""

    def __init__(self, name: str, rank: int, find_group: FindGroup) -> None:
        self.name, self.rank, self._find_group = name, rank, find_group

    def at(self, name: str) -> _Place:
        return _Place(f"{self.name}.{name}", self.rank, self._find_group)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._find_group().all_gather(self.rank, self.name, tensor)

    def all_reduce(self, tensor: torch.Tensor, *, is_backward: bool = False) -> torch.Tensor:
        name = f"{self.name}, backward" if is_backward else self.name
        return self._find_group().all_reduce(self.rank, name, tensor)


Meet = Callable[[_Place, nn.Module, torch.Tensor, Any], Any]


def _met(
    meet: Meet, place: _Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    return meet(place, module, args[0] if args else next(iter(kwargs.values())), output)


def _sum(place: _Place, module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return _Sum.apply(output, place)  # type: ignore[no-any-return]


def _join(place: _Place, module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return _Join.apply(output, place)  # type: ignore[no-any-return]


def _first(place: _Place, module: nn.Module, x: torch.Tensor, output: Any) -> Any:
    return map_tensors(output, lambda tensor: _First.apply(tensor, place))


def _correct(width: int, place: _Place, module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """What an RMS norm of one device's features returned, normalised by the features of all devices instead."""
    sums = sum_of_squares(x)
    total = _Share.apply(_Sum.apply(sums, place), place)  # every device goes on with it in its own way
    ratio = norm_ratio(sums, total, x.shape[-1], width, norm_eps(module, x.dtype))
    return (output * ratio).to(output.dtype) if torch.is_grad_enabled() else output.mul_(ratio)


_MEETS: Mapping[str, Meet] = {"sum": _sum, "join": _join, "first": _first}


class _Inputs:
    """The inputs of the column-parallel linears of a block, or of a module that holds them and whose output is summed.
    Those that are called with one tensor, as q, k and v are, share one sum of its gradients."""

    def __init__(self, place: _Place) -> None:
        self._place = place.at("input")
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def share(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = args[0]
        if not (torch.is_grad_enabled() and x.requires_grad):
            return args, kwargs
        if self._last is None or self._last[0] is not x:
            self._last = x, _Share.apply(x, self._place)
        return (self._last[1], *args[1:]), kwargs

    def forget(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._last = None


class _Share(torch.autograd.Function):
    """f: the input of column-parallel linears."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: _Place) -> torch.Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.place.all_reduce(grad, is_backward=True), None


class _Sum(torch.autograd.Function):
    """g: the output of a row-parallel linear."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, place: _Place) -> torch.Tensor:
        return place.all_reduce(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    """Outputs joined along the last dimension."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, place: _Place) -> torch.Tensor:
        parts = place.all_gather(part)
        ctx.start = sum(each.shape[-1] for each in parts[: place.rank])
        ctx.length = part.shape[-1]
        return torch.cat(parts, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.narrow(-1, ctx.start, ctx.length), None


class _First(torch.autograd.Function):
    """What the first device has computed. The others go on with it, so each has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, place: _Place) -> torch.Tensor:
        ctx.place = place
        first = place.all_gather(own)[0]
        taken = first.view_as(first)
        if not taken.is_floating_point():
            ctx.mark_non_differentiable(taken)
        return taken

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = ctx.place.all_reduce(grad, is_backward=True)
        return total if ctx.place.rank == 0 else torch.zeros_like(total), None
