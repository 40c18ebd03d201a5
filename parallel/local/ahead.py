"""Linears of many blocks that are given one input: computed at the first of these blocks, and joined in one meeting.

The modulation of a block is a linear over one vector per picture, the same for all blocks. It is a third of
Qwen-Image's weights, so each device has a part of it; joined in every block it would be a third of the meetings, too.
That a linear's input follows from one argument of its block alone is data (families/tensor_plan.py). A block that is
given another one, or one that was changed, computes its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...patches.hooks import own_call
from .bridge import version_of
from .exchange import Exchange
from .shards import BlockShard, Meeting

_MOST_BYTES = 2**28  # of joined outputs, which live as long as the forward; a vector for each token would take more


@dataclass(eq=False)
class SameInput:
    """The gathered linears of one name in blocks of one class.

    Args:
        argument: of the blocks; the linears' input follows from it. position: where it comes without its name.
        meetings: of each device, by block in execution order.
    """

    argument: str
    position: int | None
    meetings: list[list[Meeting]] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(meeting.width for meeting in self.meetings[0])

    def value(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.argument in kwargs or self.position is None:
            return kwargs.get(self.argument)
        return args[self.position] if self.position < len(args) else None


class Groups:
    """Which linears of a divided model have one input. Args: shards: home's part of a block -> those of all devices."""

    def __init__(self, shards: Mapping[nn.Module, Sequence[BlockShard]]) -> None:
        found: dict[tuple[str, str], SameInput] = {}
        self.of_block: dict[nn.Module, list[SameInput]] = {}
        self.of_linear: dict[nn.Module, tuple[SameInput, int]] = {}  # and the number of its block in it
        for block, by_rank in shards.items():
            for meetings in zip(*(_joined_in(shard) for shard in by_rank), strict=True):
                first = meetings[0]
                key = type(block).__qualname__, first.name
                if key not in found:
                    found[key] = SameInput(first.of, _position(block, first.of), [[] for _ in by_rank])
                group = found[key]
                self.of_block.setdefault(block, []).append(group)
                for own, meeting in zip(group.meetings, meetings, strict=True):
                    self.of_linear[meeting.module] = group, len(own)
                    own.append(meeting)


def _joined_in(shard: BlockShard) -> list[Meeting]:
    return [meeting for meeting in shard.meetings if meeting.how == "join" and meeting.of]


def _position(block: nn.Module, name: str) -> int | None:
    names = list(inspect.signature(block.forward).parameters)
    return names.index(name) if name in names else None


class Ahead:
    """What was joined ahead in one forward."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._given: dict[SameInput, tuple[torch.Tensor, int | None] | None] = {}
        self._now: list[SameInput] = []  # of the block that is being computed
        self._shapes: dict[SameInput, torch.Size] = {}  # of what the linears were given
        self._known: dict[nn.Module, torch.Tensor | None] = {}  # by linear of any device; None once it was used

    def enter(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_watched: bool) -> None:
        """Home begins a block with these arguments. is_watched: other people's code may have changed them in place."""
        groups = () if is_watched or torch.is_grad_enabled() else self._groups.of_block.get(block, ())
        self._now = [group for group in groups if self._is_given_again(group, group.value(args, kwargs))]

    def _is_given_again(self, group: SameInput, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        if group not in self._given:
            rows = value.numel() // max(1, value.shape[-1]) if value.ndim else 0
            is_small = rows * group.width * value.element_size() <= _MOST_BYTES
            self._given[group] = (value, version_of(value)) if is_small else None
        known = self._given[group]
        return known is not None and known[0] is value and known[1] == version_of(value)

    def find(self, exchange: Exchange, rank: int, linear: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The joined output of this device's linear; None if it is to be computed by itself."""
        group, number = self._groups.of_linear.get(linear, (None, 0))
        if group is None or group not in self._now or self._shapes.setdefault(group, x.shape) != x.shape:
            return None
        if linear not in self._known:
            self._compute(exchange, rank, group, number, x)
        output, self._known[linear] = self._known[linear], None
        return output

    def _compute(self, exchange: Exchange, rank: int, group: SameInput, number: int, x: torch.Tensor) -> None:
        """Of this block and all that follow."""
        meetings = [own[number:] for own in group.meetings]
        own = torch.cat([own_call(meeting.module)(x) for meeting in meetings[rank]], dim=-1)
        name = f"{meetings[rank][0].name} of {len(meetings[rank])} blocks"
        parts = [
            part.split([int(meeting.module.out_features) for meeting in each], dim=-1)  # type: ignore[arg-type]
            for part, each in zip(exchange.all(rank, name, own), meetings, strict=True)
        ]
        joined = torch.cat([part for block in zip(*parts, strict=True) for part in block], dim=-1)
        pieces = joined.split([meeting.width for meeting in meetings[rank]], dim=-1)
        self._known.update(zip((meeting.module for meeting in meetings[rank]), pieces, strict=True))

    def forget(self) -> None:
        self._given.clear()
        self._known.clear()
