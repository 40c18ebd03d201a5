"""What devices do where they meet inside a block, in one forward; see tensor_parallel.py.

    sum    outputs of a row-parallel linear, added in the order of devices
    norm   an RMS norm of one device's features, corrected by the mean square of all
    join   outputs of a gathered linear, joined along the features; ahead of their blocks where these have one input
    first  what a module chose, as the first device computed it

Modules whose outputs nobody reads before the last of them is computed meet once, behind the last. Until then a sum's
output is memory that nobody has written to, and a norm's is not corrected. In the forward whose blocks are compared
code that reads it after all is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...patches.hooks import map_tensors, tensors_of
from .ahead import Ahead
from .exchange import Exchange, TokenChunks
from .shards import Meeting, norm_eps, norm_ratio, sum_of_squares

Call = Callable[..., Any]
# A module, the device that computes it -> whether its weights lie there for longer than one call
Stays = Callable[[nn.Module, torch.device], bool]


_WITH_ITS_VALUES = {getattr(torch.Tensor, name) for name in ("T", "mT", "H", "mH", "data", "real", "imag")}


class Early(torch.Tensor):
    """What nobody may read before it is complete. Afterwards it is an ordinary tensor to whatever reads it."""

    is_complete = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: RuntimeError if something reads more than its shape or the like too early."""
        name = getattr(func, "__name__", "")
        is_read = name != "__get__" or getattr(func, "__self__", None) in _WITH_ITS_VALUES
        if is_read and not all(each.is_complete for each in tensors_of((args, kwargs)) if isinstance(each, cls)):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} reads a layer's output before another layer is computed, with "
                "whose parts its own are to travel; use the model with whole blocks on each device (way 'blocks')"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Norm(NamedTuple):
    """One device's output of a norm, and what it is corrected by."""

    output: torch.Tensor
    sums: torch.Tensor  # of squares
    features: int
    meeting: Meeting
    eps: float

    def correct(self, total: torch.Tensor) -> torch.Tensor:
        return self.output.mul_(norm_ratio(self.sums, total, self.features, self.meeting.width, self.eps))


class Meetings:
    """Args: chunks: for sums; None computes each layer at once. stays: see Stays; asked for layers in chunks."""

    def __init__(
        self,
        exchange: Exchange,
        devices: Sequence[torch.device],
        ahead: Ahead,
        *,
        chunks: TokenChunks | None,
        stays: Stays,
    ) -> None:
        self._exchange, self._devices = exchange, devices
        self.ahead = ahead
        self._chunks, self._stays = chunks, stays
        self._held: list[list[Any]] = [[] for _ in devices]  # what waits for a later meeting
        self._shown: list[list[torch.Tensor]] = [[] for _ in devices]  # what the block has of it
        self.is_compared = False  # the block that is being computed
        self.may_wait = True  # for a later one: nobody else's code runs that could read what is not complete

    def sum(self, rank: int, meeting: Meeting, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        can_be_cut = meeting.is_alone and not self._held[rank] and isinstance(x, torch.Tensor)
        if self._chunks is not None and can_be_cut:
            is_linear = isinstance(meeting.module, nn.Linear)
            # Pictures of a batch are rows behind each other to a linear.
            rows = x.reshape(*[1] * (x.ndim - 2), -1, x.shape[-1]) if is_linear and x.ndim > 1 else x
            features = meeting.module.out_features if is_linear else 0
            if tokens := self._chunks.tokens(rows, features):  # type: ignore[arg-type]
                found = self._sum_of_chunks(self._chunks, rank, meeting, call, rows, tokens)
                return found.view(*x.shape[:-1], -1) if is_linear else found
        part = call(*args, **kwargs)
        if self._waits(meeting):
            place = torch.empty_like(part, memory_format=torch.contiguous_format)
            return self._hold(rank, (part, place), place)
        if not self._held[rank]:
            return self._exchange.sum(rank, meeting.name, part)
        held = self._take(rank)
        self._exchange.bring(rank, meeting.name, *(each for each, _ in held), part)
        return self._exchange.collect(rank, meeting.name, [*(place for _, place in held), None])[-1]

    def _sum_of_chunks(
        self, chunks: TokenChunks, rank: int, meeting: Meeting, call: Call, x: torch.Tensor, tokens: int
    ) -> Any:
        is_called_once = not self._stays(meeting.module, self._devices[rank])
        whole = chunks.bring(self._exchange, rank, meeting.name, call, x, tokens=tokens, is_called_once=is_called_once)
        if torch.is_grad_enabled() or len(x) > 1 < x.ndim - 1:  # of several samples chunks do not lie in a row
            return torch.cat(self._exchange.collect(rank, meeting.name), dim=-2)
        self._exchange.collect(rank, meeting.name, whole.split(tokens, dim=-2))
        return whole

    def norm(self, rank: int, meeting: Meeting, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, output = args[0], call(*args, **kwargs)
        norm = _Norm(output, sum_of_squares(x), x.shape[-1], meeting, norm_eps(meeting.module, x.dtype))
        if self._waits(meeting):
            return self._hold(rank, norm, output)
        if not self._held[rank]:
            return norm.correct(self._exchange.sum(rank, meeting.name, norm.sums))
        norms = [*self._take(rank), norm]
        self._exchange.bring(rank, meeting.name, *(each.sums for each in norms))
        totals = self._exchange.collect(rank, meeting.name, [None] * len(norms))
        return [each.correct(total) for each, total in zip(norms, totals, strict=True)][-1]

    def join(self, rank: int, meeting: Meeting, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1 and not kwargs:
            known = self.ahead.find(self._exchange, rank, meeting.module, args[0])
            if known is not None:
                return known
        return torch.cat(self._exchange.all(rank, meeting.name, call(*args, **kwargs)), dim=-1)

    def first(self, rank: int, meeting: Meeting, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(*args, **kwargs)
        return map_tensors(output, lambda tensor: self._exchange.all(rank, meeting.name, tensor)[0])

    def _waits(self, meeting: Meeting) -> bool:
        return bool(meeting.until) and self.may_wait and not torch.is_grad_enabled()  # written later is in no graph

    def _hold(self, rank: int, what: Any, place: torch.Tensor) -> torch.Tensor:
        """Keep something for a later meeting; place, which is complete then, as the block is to have it."""
        self._held[rank].append(what)
        shown = place.as_subclass(Early) if self.is_compared else place
        self._shown[rank].append(shown)
        return shown

    def _take(self, rank: int) -> list[Any]:
        """What waits for this meeting, behind which the block goes on."""
        for shown in self._shown[rank]:
            if isinstance(shown, Early):
                shown.is_complete = True
        held, self._held[rank], self._shown[rank] = self._held[rank], [], []
        return held

    def finish(self, rank: int) -> None:
        """A device has computed its part of a block. Raises: RuntimeError if something waits for a later meeting."""
        if self._held[rank]:
            raise RuntimeError(
                "a layer whose parts meet behind a later one was computed, and the later one was not; use the model "
                "with whole blocks on each device (way 'blocks')"
            )
        self._exchange.finish(rank)

    def forget(self) -> None:
        self.ahead.forget()
        self._held.clear()
        self._shown.clear()


MEETS = {"sum": Meetings.sum, "norm": Meetings.norm, "join": Meetings.join, "first": Meetings.first}
