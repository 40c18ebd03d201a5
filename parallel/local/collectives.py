"""Collectives between threads of one process, a thread per device, and where blocks that are divided call them, after
Megatron-LM (https://arxiv.org/abs/1909.08053). A linear and its LoRA count as one: sums are added up behind both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...patches.hooks import HookSet, map_tensors
from ..offload.copies import Piece
from ..transfer import Arrivals, Send, Tensors, settle
from .shards import BlockShard

Exchange = Literal["full", "8-bit"]  # how activations travel: as they are, or as `encode` makes them
# Name of the collective, number of the round, the receiver's copies, their events, and the parts of what travels as one
_Message = tuple[str, int, Sequence[Any], Arrivals, Sequence[Piece]]

_RUN = 128  # numbers of a row that share a scale: a large number takes precision from these alone
_SHORTEST_ROW = 16  # the scale of a shorter one, 4 bytes, would be most of what travels


def encode(tensor: torch.Tensor, run: int | None = None, mean_along: int | None = None) -> list[torch.Tensor]:
    """A tensor [..., width] in 8 bits: what `decode` takes. A number is off by at most 1/254 of the largest one that
    has its scale. Args: run: numbers of a row that share a scale; None takes 128, or the whole row where these do not
    divide it. mean_along: a dimension along which channels, as of keys, have a mean, which travels apart. Returns: int8
    [..., width] and float32 [..., width / run]; with mean_along also means, of length 1 there."""
    width, means = tensor.shape[-1], []
    if mean_along is not None:
        means = [tensor.mean(mean_along, keepdim=True)]
        tensor = tensor - means[0]
    runs = tensor.unflatten(-1, (-1, run or (width if width % _RUN else _RUN)))
    runs = runs.float() if runs.dtype == torch.float64 else runs
    scales = torch.linalg.vector_norm(runs, torch.inf, dim=-1, keepdim=True).float() / 127
    # An addition that leaves no bits behind the point rounds: the lowest byte is the integer, and any of zeros, whose
    # scale is 0. That takes two passes over the numbers where quotient, rounding and cast take three wider ones.
    shifted = torch.addcmul(torch.full((), 1.5 * 2**23, device=runs.device), runs, 1 / scales)
    return [shifted.flatten(-2).view(torch.int8)[..., ::4].contiguous(), scales.squeeze(-1), *means]


def decode(
    codes: torch.Tensor, scales: torch.Tensor, means: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What encode was given, nearly, with `means`, or what else there is, added; the same bits on devices of a kind."""
    num_runs = scales.shape[-1]
    runs, made = codes.unflatten(-1, (num_runs, -1)), torch.empty(codes.shape, dtype=dtype, device=codes.device)
    out = made.unflatten(-1, (num_runs, -1))
    if means is None:
        torch.mul(runs, scales[..., None], out=out)
    else:
        torch.addcmul(means.unflatten(-1, (num_runs, -1)), runs, scales[..., None], out=out)
    return made


class Collective:
    """A group of ranks, each a thread, that call the same collectives in the same order. Collectives belong to rounds,
    such as the calls of a block: a rank that finished one is at a different place for ranks that still wait in it.
    Args: exchange: how the parts of all-reduces travel, and keys and values (heads.py)."""

    def __init__(self, size: int, send: Send, exchange: Exchange = "full") -> None:
        self.size, self.exchange = size, exchange
        self._send = send
        self._boxes: list[list[SimpleQueue[_Message | None]]] = [
            [SimpleQueue() for _ in range(size)] for _ in range(size)
        ]  # [sender][receiver]
        self._rounds = [0] * size  # finished, by rank
        self._errors: dict[str, BaseException] = {}  # "first": setdefault keeps one of two that come at the same time

    def all_gather(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, by rank, on this rank's device; other ranks may give other shapes. Raises:
        RuntimeError if the ranks are in different collectives (name); the error that `abort` was given."""
        self.post(rank, name, (tensor,))
        return [found[0] for found in self.take(rank, name, (tensor,))]

    def post(self, rank: int, name: str, tensors: Tensors, only: int | None = None, *, as_one: bool = False) -> None:
        """Send tensors, which must not be changed, to the other ranks, or to one, in one message of several. Args:
        as_one: join their bytes. Each copy takes the host's time, and through host memory that of a piece."""
        pieces: Sequence[Piece] = ()
        if as_one:
            tensors, pieces = _joined(tensors)
        for to, box in enumerate(self._boxes[rank]):
            if to != rank and only in (None, to):
                events: Arrivals = {}
                box.put((name, self._rounds[rank], self._send(tensors, to, events) if tensors else (), events, pieces))

    def send(self, rank: int, to: int, name: str, *values: Any) -> None:
        """Send another rank values as they are, without a copy."""
        self._boxes[rank][to].put((name, self._rounds[rank], values, {}, ()))

    def another(self) -> Collective:
        """A group of the same ranks, in which nothing has failed yet."""
        return Collective(self.size, self._send, self.exchange)

    def take(self, rank: int, name: str, own: Tensors) -> list[Tensors]:
        """What all ranks posted first that this one has not taken, by rank, its own as is. Raises: as all_gather."""
        return [own if each == rank else self.receive(each, rank, name) for each in range(self.size)]

    def all_reduce(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks, of one shape, in the order of ranks: the same bits on all, in every run.
        In 8 bits the decoded parts are added in float32, each rank's own among them. Raises: as all_gather."""
        is_short = self.exchange == "8-bit" and tensor.ndim > 0 and tensor.shape[-1] >= _SHORTEST_ROW
        if not (is_short and tensor.is_floating_point()):
            return _sum(self.all_gather(rank, name, tensor))
        sent = encode(tensor)
        self.post(rank, name, sent, as_one=True)
        total: torch.Tensor | None = None
        for number, (codes, scales) in enumerate(self.take(rank, name, sent), start=1):
            total = decode(codes, scales, total, tensor.dtype if number == self.size else torch.float32)
        assert total is not None
        return total

    def finish(self, rank: int) -> None:
        """This rank has ended its round; waits for nobody."""
        self.post(rank, "the end", ())
        self._rounds[rank] += 1

    def receive(self, sender: int, rank: int, name: str) -> Sequence[Any]:
        """What a rank sent to this one, the first that it has not taken yet. Raises: as all_gather."""
        box = self._boxes[sender][rank]
        message = None if self._errors else box.get()
        while message is not None and message[1] < self._rounds[rank]:  # the end of an earlier round
            message = box.get()
        if message is not None and message[0] != name:
            self.abort(RuntimeError(f"the devices are at different places: one at {message[0]}, one at {name}"))
        if message is None or self._errors:  # None comes with an error
            raise self._errors["first"]
        if message[3]:
            settle(message[3])
        return [piece.view(message[2][0]) for piece in message[4]] or message[2]

    @property
    def error(self) -> BaseException | None:
        return self._errors.get("first")

    def abort(self, error: BaseException) -> None:
        """End this and all further collectives by this error; the first one counts, or Cancel."""
        if isinstance(error, Exception):
            self._errors.setdefault("first", error)
        else:  # Cancel is heard once, by one rank; it counts whatever else failed
            self._errors["first"] = error
        for boxes in self._boxes:
            for box in boxes:
                box.put(None)

    def forget(self) -> None:
        """Let go of the error and of messages that nobody took, which hold activations; no thread comes any more."""
        self._errors.clear()
        self._boxes.clear()


def _joined(tensors: Tensors) -> tuple[Tensors, Sequence[Piece]]:
    """The bytes of tensors as one, larger numbers first, so that all are aligned; and where each tensor lies."""
    pieces, end = dict[int, Piece](), 0
    for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize):
        pieces[index] = Piece(end, tensors[index].shape, tensors[index].dtype)
        end = pieces[index].end
    joined = torch.cat([tensors[index].reshape(-1).view(torch.uint8) for index in pieces])
    return [joined], [pieces[index] for index in range(len(tensors))]


def _sum(parts: Tensors) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


FindGroup = Callable[[], Collective]  # of the forward that is running


def attach_collectives(shards: Mapping[str, BlockShard], rank: int, find_group: FindGroup) -> HookSet:
    """Attach one device's collectives (shards: by block), when linears and LoRAs are final."""
    hooks = HookSet()
    for name, shard in shards.items():
        for each in shard.collectives:
            module = shard.block.get_submodule(each.name)  # with the LoRA that was put around it
            exchange = functools.partial(_exchange, find_group, rank, f"{name}.{each.name}", each.how)
            if each.how == "norm":
                hooks.after(module, functools.partial(_correct_norm, each.width, exchange))
            else:
                hooks.after(module, lambda *call, exchange=exchange: map_tensors(call[-1], exchange))
        for argument in shard.arguments:
            hooks.before(*argument)
    return hooks


def _exchange(find_group: FindGroup, rank: int, name: str, how: str, tensor: torch.Tensor) -> torch.Tensor:
    group = find_group()
    if how not in ("all_gather", "broadcast"):
        return group.all_reduce(rank, name, tensor)
    found = group.all_gather(rank, name, tensor)
    return torch.cat(found, dim=-1) if how == "all_gather" else found[0]


def _correct_norm(
    width: int,
    sum_of: Callable[[torch.Tensor], torch.Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: torch.Tensor,
) -> torch.Tensor:
    """What an RMS norm of one device's features returned, normalised by the features of all devices instead."""
    x = args[0] if args else next(iter(kwargs.values()))
    given = getattr(module, "eps", None)
    eps = width * float(torch.finfo(x.dtype).eps if given is None else given)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
    own = torch.rsub(squares, eps, alpha=-width / x.shape[-1])  # two kernels in one
    return output.mul_((own / (sum_of(squares) + eps)).sqrt())


# ---- rows of all ranks gathered on each. The loss of the first rank counts alone (`uncounted`).


@functools.cache
def ends_of(number: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Where each rank's part of so many rows or groups begins, and where the last one ends."""
    total, size = sum(shares), len(shares)
    ends = [round(number * each / total) for each in itertools.accumulate(shares, initial=0)]
    for at in range(1, size if number >= size else 0):  # one each, at least
        ends[at] = min(max(ends[at], ends[at - 1] + 1), number - size + at)
    return tuple(ends)


@dataclass(frozen=True)
class Layout:
    """Where ranks have their rows in a tensor of all rows: by segment of the axis, the rows of every rank (counts), and
    whether the tensor has this rank's rows of it alone (own)."""

    rank: int
    dim: int
    counts: tuple[tuple[int, ...], ...]
    own: tuple[bool, ...]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        pieces, starts = [], [0] * len(parts)
        for counts, is_own in zip(self.counts, self.own, strict=True):
            for rank, part in enumerate(parts):
                if rank == self.rank or not is_own:
                    pieces.append(part.narrow(self.dim, starts[rank], counts[rank]))
                starts[rank] += counts[rank]
        return torch.cat(pieces, self.dim)

    def returned(self, grad: torch.Tensor, group: Collective, name: str) -> torch.Tensor:
        """The gradient of this rank's rows, of that of all rows on every rank."""
        for_rank: list[list[torch.Tensor]] = [[] for _ in range(group.size)]
        kept, start = list[torch.Tensor](), 0
        for counts, is_own in zip(self.counts, self.own, strict=True):
            for rank, count in [(self.rank, counts[self.rank])] if is_own else enumerate(counts):
                (kept if is_own else for_rank[rank]).append(grad.narrow(self.dim, start, count))
                start += count
        parts = [torch.cat(each, self.dim) for each in for_rank]
        for to, part in enumerate(parts):
            if to != self.rank:
                group.post(self.rank, name, (part,), to)
        total = _sum([found[0] for found in group.take(self.rank, name, (parts[self.rank],))])
        shared = [each[self.rank] for each, is_own in zip(self.counts, self.own, strict=True) if not is_own]
        of_own, of_all = iter(kept), iter(total.split(shared, self.dim))
        return torch.cat([next(of_own if is_own else of_all) for is_own in self.own], self.dim)


class AllRows(torch.autograd.Function):
    """The rows of all ranks, of this rank's tensor. name: as of all_gather."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: Layout, group: Collective, name: str) -> torch.Tensor:
        ctx.place = layout, group, name  # the backward runs in a thread of autograd's
        return layout.joined(group.all_gather(layout.rank, name, tensor.contiguous()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        layout, group, name = ctx.place
        return layout.returned(grad, group, f"{name}, backward"), None, None, None


def uncounted(output: torch.Tensor) -> torch.Tensor:
    """A result that all ranks have, on a rank whose loss does not count."""
    made = output.clone()  # a later write into a view would leave the hook behind
    if made.requires_grad:
        made.register_hook(torch.zeros_like)
    return made
