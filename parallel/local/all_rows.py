"""Rows of all ranks gathered on each of them, with a backward: the gradient of a row returns to the rank that has it.

Every rank computes the loss of its own copy of a sample, and the sum of the gradients of all copies is wanted: each
rank gives the gradients of other ranks' rows to these, and adds up what it is given, in the order of ranks. The loss of
the first rank counts alone (`CountedOnce`), so layers behind the last gathering have their gradient once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .collectives import Collective


@dataclass(frozen=True)
class Layout:
    """Where ranks have their rows in a tensor of all rows: by segment of the axis, the rows of every rank (counts), and
    whether the tensor has this rank's rows of it alone (own).
    """

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
        kept: list[torch.Tensor] = []
        start = 0
        for counts, is_own in zip(self.counts, self.own, strict=True):
            for rank, count in enumerate(counts):
                if is_own and rank != self.rank:
                    continue
                (kept if is_own else for_rank[rank]).append(grad.narrow(self.dim, start, count))
                start += count
        total = group.reduce_scatter(self.rank, name, [torch.cat(each, self.dim) for each in for_rank])
        shared = [each[self.rank] for each, is_own in zip(self.counts, self.own, strict=True) if not is_own]
        of_own, of_all = iter(kept), iter(total.split(shared, self.dim))
        return torch.cat([next(of_own if is_own else of_all) for is_own in self.own], self.dim)


def all_rows(tensor: torch.Tensor, layout: Layout, group: Collective, name: str) -> torch.Tensor:
    """The rows of all ranks, of this rank's tensor; with a backward where autograd records. name: as of all_gather."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _AllRows.apply(tensor, layout, group, name)  # type: ignore[no-any-return]
    return layout.joined(group.all_gather(layout.rank, name, tensor.contiguous()))


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: Layout, group: Collective, name: str) -> torch.Tensor:
        ctx.place = layout, group, name  # the backward runs in a thread of autograd's
        return layout.joined(group.all_gather(layout.rank, name, tensor.contiguous()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        layout, group, name = ctx.place
        return layout.returned(grad, group, f"{name}, backward"), None, None, None


class CountedOnce(torch.autograd.Function):
    """A result that all ranks have, on a rank whose loss does not count."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)
