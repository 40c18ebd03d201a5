"""Where the rows of a class are, from what its forwards of several sizes have shown (watching.py).

The lengths of a spot in all forwards are its axis. What blocks take and return is a stream; sums of streams are joint
axes, whose order nothing shows: each is a candidate. What else has a stream's lengths is cut, and keys with them are
gathered. A candidate is a guess, however likely: proving.py says whether it holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ...families.token_plan import BlockRows, TokenPlan
from .watching import Notes, Spot

Axis = tuple[int, ...]  # lengths in all forwards
_MOST = 48  # candidates; those further down never held where all were tried


@dataclass(frozen=True)
class _Guess:
    """What nothing shows.

    Args:
        end: where rows come together: behind the last block, the same with the text's rows left, or at the tail.
        order: of the segments of joint axes.
        whole: streams that every rank has all rows of.
    """

    end: str = "all"
    order: int = 0
    whole: tuple[str, ...] = ()
    has_counts: bool = False
    has_between: bool = False
    cuts_masks: bool = False


@dataclass
class _Seen:
    """All forwards, by axis.

    Args:
        lists: in the order in which a forward calls them.
        moving: spots whose length is not the same in all forwards.
        streams: names of axes that blocks take and return. groups: of axes whose rows belong to one of a stream.
    """

    lists: tuple[str, ...]
    axes: dict[Spot, Axis]
    moving: list[Spot]
    streams: dict[Axis, str] = field(default_factory=dict)
    groups: dict[Axis, str] = field(default_factory=dict)
    aligned: str = ""

    def named(self, axis: Axis, order: int = 0) -> str:
        """ "txt+img" of an axis of two streams; "" of one that is none."""
        if name := self.streams.get(axis) or self.groups.get(axis):
            return name
        sums = self.sums(axis)
        return sums[min(order, len(sums) - 1)] if sums else ""

    def sums(self, axis: Axis) -> list[str]:
        """Orders of streams whose lengths add up to this."""
        return [
            "+".join(self.streams[each] for each in parts)
            for count in (2, 3)
            for parts in itertools.permutations(self.streams, count)
            if tuple(map(sum, zip(*parts, strict=True))) == axis
        ]


def derive(forwards: Sequence[Notes], lists: Sequence[str], weights: dict[str, int]) -> list[TokenPlan]:
    """Candidates, the likeliest first; [] where blocks have no axis that changes with the size.

    Args:
        forwards: at least two, of several sizes: the first one's, a wider picture, a longer text, more frames.
        lists: of blocks. weights: bytes of each.
    """
    called = [name for name in forwards[0].calls if name in lists]
    total, found = sum(weights[name] for name in called), list[TokenPlan]()
    for first in range(len(called)):
        kept = tuple(called[first:])  # small lists before the main ones may stay whole
        if found and sum(weights[name] for name in kept) * 2 < total:
            break
        found += _candidates(_see(forwards, kept), forwards)
    return [plan for index, plan in enumerate(found) if plan not in found[:index]][:_MOST]


def _see(forwards: Sequence[Notes], lists: tuple[str, ...]) -> _Seen:
    spots = [spot for spot in forwards[0].lengths if all(spot in each.lengths for each in forwards)]
    axes = {spot: tuple(each.lengths[spot] for each in forwards) for spot in spots}
    seen = _Seen(lists, axes, [spot for spot in spots if len(set(axes[spot])) > 1])
    taken = {axes[spot] for spot in seen.moving if spot.kind == "in"}
    for spot in seen.moving:
        is_stream = spot.kind == "out" and spot.where in lists and spot.dim != -1 and axes[spot] in taken
        # Of frames, rows and columns the frames are an axis.
        is_first = not any(each[:3] == spot[:3] and -1 != each.dim < spot.dim for each in seen.moving)
        if is_stream and is_first and not seen.sums(axes[spot]):
            seen.streams.setdefault(axes[spot], _name_of(axes[spot], seen))
    _find_groups(seen)
    return seen


def _name_of(axis: Axis, seen: _Seen) -> str:
    """The name of the first argument with that axis, such as "img", or of its list of blocks."""
    taken = set(seen.streams.values())
    mine = [spot for spot in seen.moving if spot.kind == "in" and spot.where in seen.lists and seen.axes[spot] == axis]
    names = [spot.path.replace(".", "_") for spot in mine[:1]]
    names += [spot.where.rpartition(".")[2].partition("_")[0] for spot in mine[:1]]
    return next((name for name in names if name.isidentifier() and name not in taken), f"s{len(taken)}")


def _find_groups(seen: _Seen) -> None:
    """Axes whose rows come in whole groups: positions of a grid of frames, or one row of modulation for a frame's."""
    inside = [spot for spot in seen.moving if spot.kind in ("in", "keys") and spot.dim != -1]
    for axis in {seen.axes[spot]: None for spot in inside if seen.axes[spot] not in seen.streams}:
        if seen.sums(axis):
            continue
        for stream, name in seen.streams.items():
            if all(a % b == 0 for a, b in zip(axis, stream, strict=True)):
                seen.groups[axis], seen.aligned = "rows", f"{name} rows"
            elif all(a % b == 0 for a, b in zip(stream, axis, strict=True)) and any(
                seen.axes[spot] == axis and spot.kind == "in" and spot.dim == 1 for spot in seen.moving
            ):
                seen.groups[axis], seen.aligned = "groups", f"groups {name}"


def _candidates(seen: _Seen, forwards: Sequence[Notes]) -> Iterator[TokenPlan]:
    if not seen.streams:
        return
    texts = tuple(name for axis, name in seen.streams.items() if axis[0] == axis[1])
    orders = max((len(seen.sums(seen.axes[spot])) for spot in seen.moving), default=0) or 1
    # A mask that attention makes by the length it sees would be one of this rank's rows, so it must be an argument.
    masks = {place: given for each in forwards for place, given in each.masks.items() if place[0] in seen.lists}
    counts = any(spot.kind == "number" and spot.where in seen.lists for spot in seen.moving)
    between = _calls(seen, "between")
    tail = _calls(seen, "tail").partition(" ")[0]
    passes_options = all(each.has_options for each in forwards)
    for has_between, cuts_masks, has_counts, whole, end, order in itertools.product(
        (False, True) if between else (False,),
        (False, True) if masks and all(masks.values()) else (False,),
        (False, True) if counts else (False,),
        ((), texts) if texts else ((),),
        ("tail", "all", "own") if between else ("all", "own", "tail"),
        range(orders),
    ):
        guess = _Guess(end, order, whole, has_counts, has_between, cuts_masks)
        out = _out_of(seen, order, forwards[0].ends[seen.lists[-1]])
        if (end == "own" and "+" not in out) or (end == "tail" and not tail) or not (out or end == "tail"):
            continue
        blocks = {name: _rows_of(seen, name, guess) for name in seen.lists}
        if any(not rows.keys for rows in blocks.values()):
            continue  # no attention was seen there, so nothing would say whose keys its rows lack
        yield TokenPlan(
            blocks,
            out="" if end == "tail" else out,
            tail=tail if end == "tail" else "",
            own=texts if end == "own" else (),
            whole=whole,
            between=between if has_between else "",
            aligned=seen.aligned,
            cuts_masks=cuts_masks,
            passes_options=passes_options,
        )


def _calls(seen: _Seen, kind: str) -> str:
    """Modules between or behind blocks whose first argument is a stream."""
    found = (
        f"{spot.where}={seen.streams[seen.axes[spot]]}@{spot.dim}"
        for spot in seen.moving
        if spot.kind == kind and spot.dim != -1 and seen.axes[spot] in seen.streams
    )
    return " ".join(dict.fromkeys(found))


def _out_of(seen: _Seen, order: int, returned: Collection[str]) -> str:
    """Where rows are in what the last block returns. returned: paths in it; earlier blocks may return more."""
    found: dict[str, str] = {}
    for spot in seen.moving:
        is_returned = spot.kind == "out" and spot.where == seen.lists[-1] and spot.path in returned
        if is_returned and spot.dim != -1 and (name := seen.named(seen.axes[spot], order)):
            found.setdefault(spot.path, f"{spot.path}={name}@{spot.dim}")
    return " ".join(found.values())


def _rows_of(seen: _Seen, name: str, guess: _Guess) -> BlockRows:
    rows: dict[str, str] = {}
    keys: dict[str, list[str]] = {}
    mine = [spot for spot in seen.axes if spot.where == name]
    for spot in sorted((each for each in mine if each.kind == "keys"), key=lambda each: each.dim):
        axis = seen.named(seen.axes[spot], guess.order) if spot in seen.moving else ""
        keys.setdefault(spot.path, []).append(axis or "-")
    moving = [spot for spot in mine if spot.kind == "in" and spot in seen.moving]
    for spot in moving:
        axis = seen.named(seen.axes[spot], guess.order)
        last = Spot(*spot[:3], -1)
        is_mask = spot.dim == -1 or (last in moving and seen.named(seen.axes[last], guess.order))
        if axis and (guess.cuts_masks or not is_mask):
            dim = spot.dim
            if dim == -1:  # behind all others
                dim = 1 + max((each.dim for each in seen.axes if each[:3] == spot[:3]), default=-1)
            rows.setdefault(spot.path, f"{spot.path}={axis}@{dim}")
    counts = [spot for spot in seen.moving if spot.kind == "number" and spot.where == name] if guess.has_counts else []
    numbers = {spot.path.partition(".")[0]: f"{next(iter(seen.streams.values()))}" for spot in counts}
    # The block's own axes would hold for a module in it that is not named.
    if "" not in keys or all(set(each) == {"-"} for each in keys.values()):
        keys = {path: each for path, each in keys.items() if set(each) != {"-"}}
    return BlockRows(
        " ".join(rows.values()),
        " ".join(f"{path}={'/'.join(each if len({*each}) > 1 else each[:1])}" for path, each in keys.items()),
        " ".join(f"{path}={axis}" for path, axis in numbers.items()),
    )


def written(plan: TokenPlan) -> str:
    """The row as families/comfy/token_plans.py would have it."""
    blocks = []
    for name, rows in plan.blocks.items():
        counts = f", counts={rows.counts!r}" if rows.counts else ""
        blocks.append(f'        "{name}": BlockRows({rows.rows!r}, {rows.keys!r}{counts}),')
    fields = ("out", "tail", "own", "whole", "between", "aligned", "cuts_masks", "passes_options")
    plain = TokenPlan({})
    said = [f"    {each}={getattr(plan, each)!r}," for each in fields if getattr(plan, each) != getattr(plain, each)]
    return "\n".join(["TokenPlan(", "    {", *blocks, "    },", *said, ")"]).replace("'", '"')
