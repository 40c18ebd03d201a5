"""Collectives between threads of one process, a thread per device, and where blocks that are divided call them.

After Megatron-LM (https://arxiv.org/abs/1909.08053), whose f and g these are. Between column- and row-parallel linears
a device has a part; everything else is computed whole by every device, with the same bits.

    input of a column-parallel linear     forward the input;       backward all-reduce of the gradients        (f)
    output of a row-parallel linear       forward all-reduce;      backward the gradient, equal on all ranks   (g)
    output of a gathered linear           forward all-gather;      backward this device's part of the gradient
    mean square of a norm over all heads  forward all-reduce;      backward all-reduce
    choice of a module                    forward broadcast;       backward all-reduce, to rank 0 alone

A linear and its LoRA count as one: partial sums are added up behind both. The collectives of a backward are called in
the thread that runs it, which autograd chooses by device. Every device has one, so that none waits for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...patches.hooks import HookSet, map_tensors
from ..transfer import Arrivals, settle
from .shards import BlockShard, norm_eps, norm_ratio, sum_of_squares

Tensors = Sequence[torch.Tensor]
# Tensors, the receiving rank, a place for the copies' events -> the copies, not to be used before settle(events)
Send = Callable[[Tensors, int, Arrivals], Tensors]
# Name of the collective, number of the round, the copies for the receiver, their events
_Message = tuple[str, int, Tensors, Arrivals]

# An all-reduce of at least so many bytes among three and more ranks is a reduce-scatter and an all-gather. That takes
# twice as many copies, which cost the host. The cards compute for longer than the host launches at such sizes.
SLICED_FROM_BYTES = 2**23


def bytes_to_one(parts_bytes: float, num_parts: float, size: int) -> float:
    """Bytes that one of `size` ranks receives in `num_parts` all-reduces. parts_bytes: of all parts of one rank."""
    is_sliced = size > 2 and parts_bytes >= num_parts * SLICED_FROM_BYTES
    return parts_bytes * (2 * (size - 1) / size if is_sliced else size - 1)


class Collective:
    """A group of ranks, each a thread, that call the same collectives in the same order.

    A rank that fails calls `abort`, which ends every collective of the group. A part is copied to its receivers as soon
    as it is given: a later copy would wait for all that was launched in between. Collectives belong to rounds, such as
    the calls of a block. A rank that finished a round is at a different place for ranks that still wait in it.

    Args:
        size: number of ranks.
        send: issues the copies for a receiving rank.
    """

    def __init__(self, size: int, send: Send) -> None:
        self.size = size
        self._send = send
        self._boxes: list[list[SimpleQueue[_Message | None]]] = [
            [SimpleQueue() for _ in range(size)] for _ in range(size)
        ]  # [sender][receiver]
        self._rounds = [0] * size  # finished, by rank
        self._errors: dict[str, BaseException] = {}  # "first": setdefault keeps one of two that come at the same time
        self.sliced_from_bytes = SLICED_FROM_BYTES

    def all_gather(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, by rank, on this rank's device.

        Args:
            tensor: any shape; other ranks may give other shapes.
            name: of the collective, equal on all ranks.
        Raises: RuntimeError if the ranks are in different collectives; the error that `abort` was given.
        """
        self._post(rank, name, (tensor,))
        return [tensor if each == rank else self._from(each, rank, name)[0] for each in range(self.size)]

    def all_reduce(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, added in the order of ranks: the same bits on all ranks, in every run.

        Args:
            tensor: the same shape on all ranks; it is not changed.
        Raises: as all_gather.
        """
        slices = self._slices(tensor)
        if not slices:
            return functools.reduce(torch.add, self.all_gather(rank, name, tensor))
        gathered = self.all_gather(rank, f"{name}, reduced", self.reduce_scatter(rank, name, slices))
        return torch.cat(gathered).view(tensor.shape)

    def reduce_scatter(self, rank: int, name: str, parts: Tensors) -> torch.Tensor:
        """The sum of what all ranks have for this one, added in the order of ranks.

        Args:
            parts: what this rank has for each rank; those for one rank have the same shape on all ranks.
        Raises: as all_gather.
        """
        for to in range(self.size):
            if to != rank:
                self._post(rank, name, (parts[to],), to)
        found = [parts[rank] if each == rank else self._from(each, rank, name)[0] for each in range(self.size)]
        return functools.reduce(torch.add, found)

    def _slices(self, tensor: torch.Tensor) -> Tensors:
        """Slices of the rows, one for each rank; () for a tensor that is reduced whole."""
        if self.size == 2 or tensor.ndim < 2 or tensor.nbytes < self.sliced_from_bytes:
            return ()
        return tensor.reshape(-1, tensor.shape[-1]).tensor_split(self.size)

    def finish(self, rank: int) -> None:
        """This rank has ended its round; waits for nobody."""
        self._post(rank, "the end", ())
        self._rounds[rank] += 1

    def _post(self, rank: int, name: str, tensors: Tensors, only: int | None = None) -> None:
        for to, box in enumerate(self._boxes[rank]):
            if to != rank and only in (None, to):
                events: Arrivals = {}
                box.put((name, self._rounds[rank], self._send(tensors, to, events) if tensors else (), events))

    def _from(self, sender: int, rank: int, name: str) -> Tensors:
        box = self._boxes[sender][rank]
        message = None if self._errors else box.get()
        while message is not None and message[1] < self._rounds[rank]:  # the end of an earlier round
            message = box.get()
        if message is None or message[0] != name or self._errors:
            self._fail(message, name)
        assert message is not None
        if message[3]:
            settle(message[3])
        return message[2]

    def _fail(self, message: _Message | None, name: str) -> None:
        if message is not None and message[0] != name:
            self.abort(RuntimeError(f"the devices are at different places: one at {message[0]}, one at {name}"))
        error = self.error
        assert error is not None, "None comes with an error"
        try:
            raise error
        finally:
            del error  # or its traceback would keep this frame, and this frame the error

    @property
    def error(self) -> BaseException | None:
        """The first error that `abort` was given."""
        return self._errors.get("first")

    def abort(self, error: BaseException) -> None:
        """End this and all further collectives by this error; the first one counts."""
        self._errors.setdefault("first", error)
        for boxes in self._boxes:
            for box in boxes:
                box.put(None)

    def forget(self) -> None:
        """Let go of the error and of messages that nobody took, which hold activations; no thread comes any more."""
        self._errors.clear()
        self._boxes.clear()


class Group(Protocol):
    """The ranks that compute a block; see Collective."""

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
        block = shard.block
        if has_backward:
            inputs = _Inputs(_Place(f"{name}.input", rank, find_group))
            for entered in shard.entered:
                hooks.before(block.get_submodule(entered), inputs.share)
            hooks.after(block, inputs.forget, also_on_error=True)
        for each in shard.collectives:
            module = block.get_submodule(each.name)  # with the LoRA that was put around it
            place = _Place(f"{name}.{each.name}", rank, find_group)
            if each.how == "norm":
                hooks.after(module, functools.partial(_correct_norm, each.width, place))
            else:
                hooks.after(module, functools.partial(_apply, _OF_OUTPUTS[each.how], place))
        for of_heads in shard.arguments:
            hooks.before(of_heads.module, of_heads)
    return hooks


class _Place:
    """Where in the model a device is. Args: name: the same on every device."""

    def __init__(self, name: str, rank: int, find_group: FindGroup) -> None:
        self.name, self.rank, self._find_group = name, rank, find_group

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._find_group().all_gather(self.rank, self.name, tensor)

    def all_reduce(self, tensor: torch.Tensor, *, is_backward: bool = False) -> torch.Tensor:
        name = f"{self.name}, backward" if is_backward else self.name
        return self._find_group().all_reduce(self.rank, name, tensor)


def _apply(
    function: Any, place: _Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    return map_tensors(output, lambda tensor: function.apply(tensor, place))


def _correct_norm(
    width: int, place: _Place, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    """What an RMS norm of one device's features returned, normalised by the features of all devices instead."""
    x = args[0] if args else next(iter(kwargs.values()))
    sums = sum_of_squares(x)
    total = _Share.apply(_AllReduce.apply(sums, place), place)  # every device goes on with it in its own way
    ratio = norm_ratio(sums, total, x.shape[-1], width, norm_eps(module, x.dtype))
    return (output * ratio).to(output.dtype) if torch.is_grad_enabled() else output.mul_(ratio)


class _Inputs:
    """The inputs of the column-parallel linears of a block, or of a module that holds them and whose output is summed.
    Those that are called with one tensor, as q, k and v are, share one sum of its gradients."""

    def __init__(self, place: _Place) -> None:
        self._place = place
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


class _AllReduce(torch.autograd.Function):
    """g: the output of a row-parallel linear."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, place: _Place) -> torch.Tensor:
        return place.all_reduce(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _AllGather(torch.autograd.Function):
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


class _Broadcast(torch.autograd.Function):
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


_OF_OUTPUTS: Mapping[str, Any] = {"all_reduce": _AllReduce, "all_gather": _AllGather, "broadcast": _Broadcast}
