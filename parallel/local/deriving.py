"""Guesses of where the rows of a class are, from what its forwards of several sizes have shown (watching.py).

The lengths of a spot in all forwards are its axis. What blocks take and return is a stream; sums of streams are joint
axes, whose order nothing shows: each is a candidate. What has a stream's lengths is cut, and such keys are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields

from ...families.token_plan import BlockRows, TokenPlan
from .watching import Notes, Spot

Axis = tuple[int, ...]  # lengths in all forwards
_MOST = 48  # candidates; those further down never held where all were tried


def derive(forwards: Sequence[Notes], lists: Sequence[str], weights: dict[str, int]) -> list[TokenPlan]:
    """Candidates, the likeliest first; [] where blocks have no axis that changes with the size. forwards: at least two,
    of several sizes: the first one's, a wider picture, a longer text, more frames. weights: bytes of each list."""
    called = [name for name in forwards[0].calls if name in lists]
    total, found = sum(weights[name] for name in called), list[TokenPlan]()
    for first in range(len(called)):
        kept = tuple(called[first:])  # small lists before the main ones may stay whole
        if found and sum(weights[name] for name in kept) * 2 < total:
            break
        found += _Seen(forwards, kept).candidates()
    return [plan for index, plan in enumerate(found) if plan not in found[:index]][:_MOST]


class _Seen:
    """All forwards, by axis. Args: lists: in the order in which a forward calls them."""

    def __init__(self, forwards: Sequence[Notes], lists: tuple[str, ...]) -> None:
        self._forwards, self._lists = forwards, lists
        spots = [spot for spot in forwards[0].lengths if all(spot in each.lengths for each in forwards)]
        axes = {spot: tuple(each.lengths[spot] for each in forwards) for spot in spots}
        self._axes = {spot: axis for spot, axis in axes.items() if len(set(axis)) > 1}  # of those that change
        self._keys = sorted((spot for spot in spots if spot.kind == "keys"), key=lambda spot: spot.dim)
        self._streams: dict[Axis, str] = {}  # names of axes that blocks take and return
        taken = {axis for spot, axis in self._axes.items() if spot.kind == "in"}
        for spot, axis in self._axes.items():
            is_stream = spot.kind == "out" and spot.where in lists and spot.dim != -1 and axis in taken
            # Of frames, rows and columns the frames are an axis.
            is_first = not any(each[:3] == spot[:3] and -1 != each.dim < spot.dim for each in self._axes)
            if is_stream and is_first and axis not in self._streams and not self._sums(axis):
                self._streams[axis] = self._name_of(axis)
        self._find_groups()

    def _sums(self, axis: Axis) -> list[str]:
        """Orders of streams whose lengths add up to this."""
        return [
            "+".join(self._streams[each] for each in parts)
            for count in (2, 3)
            for parts in itertools.permutations(self._streams, count)
            if tuple(map(sum, zip(*parts, strict=True))) == axis
        ]

    def _name_of(self, axis: Axis) -> str:
        """The name of the first argument with that axis, such as "img", or of its list of blocks."""
        taken = set(self._streams.values())
        alike = (spot for spot, each in self._axes.items() if each == axis and spot.kind == "in")
        spot = next((spot for spot in alike if spot.where in self._lists), None)
        names = [spot.path.replace(".", "_"), spot.where.rpartition(".")[2].partition("_")[0]] if spot else []
        return next((name for name in names if name.isidentifier() and name not in taken), f"s{len(taken)}")

    def _find_groups(self) -> None:
        """Axes whose rows come in whole groups: positions of a grid of frames, or a row of modulation for a frame's."""
        self._groups, self._aligned = dict[Axis, str](), ""
        inside = [spot for spot in self._axes if spot.kind in ("in", "keys") and spot.dim != -1]
        for axis in dict.fromkeys(self._axes[spot] for spot in inside):
            if axis in self._streams or self._sums(axis):
                continue
            is_given = any(self._axes[spot] == axis and spot.kind == "in" and spot.dim == 1 for spot in inside)
            for stream, name in self._streams.items():
                if all(a % b == 0 for a, b in zip(axis, stream, strict=True)):
                    self._groups[axis], self._aligned = "rows", f"{name} rows"
                elif is_given and all(a % b == 0 for a, b in zip(stream, axis, strict=True)):
                    self._groups[axis], self._aligned = "groups", f"groups {name}"

    def _named(self, spot: Spot, order: int) -> str:
        """ "txt+img" of an axis of two streams; "" of one that is none, or does not change."""
        axis = self._axes.get(spot, ())
        sums = self._sums(axis) or [""]
        return self._streams.get(axis) or self._groups.get(axis) or sums[min(order, len(sums) - 1)]

    def candidates(self) -> Iterator[TokenPlan]:
        if not self._streams:
            return
        texts = tuple(name for axis, name in self._streams.items() if axis[0] == axis[1])
        # A mask that attention makes by the length it sees would be one of this rank's rows, so it must be an argument.
        masks = [given for each in self._forwards for place, given in each.masks.items() if place[0] in self._lists]
        between, tail = self._calls("between"), self._calls("tail").partition(" ")[0]
        has_numbers = any(spot.kind == "number" and spot.where in self._lists for spot in self._axes)
        for gaps, cuts_masks, has_counts, whole, end, order in itertools.product(
            dict.fromkeys(("", between)),
            (False, True) if masks and all(masks) else (False,),
            (False, True) if has_numbers else (False,),
            dict.fromkeys(((), texts)),
            ("tail", "all", "own") if between else ("all", "own", "tail"),  # own: the text's rows stay
            range(max(len(self._sums(axis)) for axis in self._axes.values()) or 1),
        ):
            out = self._out(order)
            if (end == "own" and "+" not in out) or (end == "tail" and not tail) or not (out or end == "tail"):
                continue
            options = {"cuts_masks": cuts_masks, "has_counts": has_counts}
            blocks = {name: self._rows_of(name, order, **options) for name in self._lists}
            if any(not rows.keys for rows in blocks.values()):
                continue  # no attention was seen there, so nothing would say whose keys its rows lack
            yield TokenPlan(
                blocks,
                out="" if end == "tail" else out,
                tail=tail if end == "tail" else "",
                own=texts if end == "own" else (),
                whole=whole,
                between=gaps,
                aligned=self._aligned,
                cuts_masks=cuts_masks,
                passes_options=all(each.has_options for each in self._forwards),
            )

    def _calls(self, kind: str) -> str:
        spots = {spot: axis for spot, axis in self._axes.items() if spot.kind == kind and spot.dim != -1}
        named = ((spot, self._streams.get(axis)) for spot, axis in spots.items())
        return " ".join(dict.fromkeys(f"{spot.where}={name}@{spot.dim}" for spot, name in named if name))

    def _out(self, order: int) -> str:
        """Where rows are in what the last block returns; earlier blocks may return more."""
        last, found = self._lists[-1], dict[str, str]()
        for spot in self._axes:
            is_returned = spot[:2] == ("out", last) and spot.path in self._forwards[0].ends[last]
            if is_returned and spot.dim != -1 and (name := self._named(spot, order)):
                found.setdefault(spot.path, f"{spot.path}={name}@{spot.dim}")
        return " ".join(found.values())

    def _rows_of(self, name: str, order: int, *, cuts_masks: bool, has_counts: bool) -> BlockRows:
        rows, keys = dict[str, str](), dict[str, list[str]]()
        for spot in (each for each in self._keys if each.where == name):
            keys.setdefault(spot.path, []).append(self._named(spot, order) or "-")
        for spot in (each for each in self._axes if each[:2] == ("in", name)):
            axis = self._named(spot, order)
            is_mask = spot.dim == -1 or self._named(spot._replace(dim=-1), order)
            if axis and (cuts_masks or not is_mask):
                rows.setdefault(spot.path, f"{spot.path}={axis}@{spot.dim}")
        numbers = [spot.path for spot in self._axes if has_counts and spot[:2] == ("number", name)]
        counts = dict.fromkeys(f"{path.partition('.')[0]}={next(iter(self._streams.values()))}" for path in numbers)
        # The block's own axes would hold for a module in it that is not named.
        if "" not in keys or all(set(each) == {"-"} for each in keys.values()):
            keys = {path: each for path, each in keys.items() if set(each) != {"-"}}
        named = (f"{path}={'/'.join(each if len({*each}) > 1 else each[:1])}" for path, each in keys.items())
        return BlockRows(" ".join(rows.values()), " ".join(named), " ".join(counts))


def written(plan: TokenPlan) -> str:
    """The row as families/comfy/token_plans.py would have it."""
    blocks = []
    for name, rows in plan.blocks.items():
        counts = f", counts={rows.counts!r}" if rows.counts else ""
        blocks.append(f'        "{name}": BlockRows({rows.rows!r}, {rows.keys!r}{counts}),')
    others = [(each.name, getattr(plan, each.name), each.default) for each in fields(plan) if each.name != "blocks"]
    said = [f"    {name}={value!r}," for name, value, default in others if value != default]
    return "\n".join(["TokenPlan(", "    {", *blocks, "    },", *said, ")"]).replace("'", '"')
