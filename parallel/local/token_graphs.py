"""A block of which each rank computes its rows, replayed as one CUDA graph (graphs.py). The ranks' threads are inside
forwards of their own: each sends its call to the first rank, and does what that one says until it has the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from .collectives import Collective
from .graphs import Call, Graphs, Work
from .heads import Rows


class Replays(NamedTuple):
    """How blocks of a forward are replayed. Args: beside: what else than their calls they depend on; compared with
    `==`, and hashed. groups: of heads, in which keys and values travel there; 0 for as many as in launched blocks."""

    graphs: Graphs
    beside: Any
    groups: int = 0


def computed(rank: Rows, block: nn.Module, part: Callable[..., Any], name: str, call: Call) -> Any:
    """What this rank's part of a block returns, replayed or computed. Args: part: how it is called. name: on all."""
    replays = rank.replays
    if replays is None:
        return part(*call[0], **call[1])

    def outputs(given: Sequence[tuple[nn.Module, Callable[..., Any], Call]], run: Callable[..., Any]) -> Sequence[Any]:
        blocks, parts, calls = zip(*given, strict=True)
        beside = tuple(sorted(rank.lengths.items())), replays.beside
        recorded, launch = (partial(run, groups=replays.groups), run) if replays.groups else (run, None)
        return replays.graphs.outputs(blocks, calls, parts, recorded, beside, launch)

    return _led(rank, name, (block, part, call), outputs)


def _led(rank: Rows, name: str, given: Any, compute: Callable[[Sequence[Any], Any], Sequence[Any]]) -> Any:
    """This rank's output of what the first one computes of what all have given, with run: their threads for work. All
    work that is begun at once has a Collective of its own, so that an error ends that and no more."""
    outer = rank.group

    def done(group: Collective, groups: int, work: Work) -> Any:
        rank.group, rank.groups = group, groups
        try:
            return work()
        except BaseException as error:
            group.abort(error)
        finally:
            rank.group, rank.groups = outer, 0

    if rank.rank:
        outer.send(rank.rank, 0, name, given)
        while True:
            group, groups, work = outer.receive(0, rank.rank, name)
            if group is None:
                return work
            output = done(group, groups, work)
            del work
            outer.send(rank.rank, 0, name, output)

    def run(work: Sequence[Work], groups: int = 0) -> Sequence[Any]:
        group = outer.another()
        try:
            for to in range(1, outer.size):
                outer.send(0, to, name, group, groups, work[to])
            found = [done(group, groups, work[0]), *(outer.receive(each, 0, name)[0] for each in range(1, outer.size))]
        except BaseException as failure:  # such as an interrupt, while others wait in the group
            group.abort(failure)
            raise
        try:
            if group.error is not None:
                raise group.error
        finally:
            group.forget()  # or the error's traceback would keep this frame, and this frame the error
        return found

    outputs = compute([given, *(outer.receive(each, 0, name)[0] for each in range(1, outer.size))], run)
    for to in range(1, outer.size):
        outer.send(0, to, name, None, 0, outputs[to])
    return outputs[0]
