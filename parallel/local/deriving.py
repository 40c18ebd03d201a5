"""Where the rows of a class are: what its forwards of several sizes show of its blocks, and guesses from that.

A forward shows how long everything is that blocks take, return and attend to. The lengths of a spot in all forwards are
its axis. What blocks take and return is a stream; sums of streams are joint axes, whose order nothing shows: each is a
candidate. What has a stream's lengths is cut, and such keys are gathered.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...families.token_plan import BlockRows, TokenPlan
from ...patches.hooks import HookSet, attributes_of, tensors_reached
from ..block_lists import members

_NEAR = {torch.float32: 2e-5, torch.float64: 1e-9}  # of the largest value; kernels are chosen by the number of rows
_NEAR_IN_HALF = 0.02  # of a standard deviation
PASSED_BY = frozenset(("transformer_options", "control", "patches", "cache"))  # what blocks and host share by name


class Spot(NamedTuple):
    """Where a length was seen: in the arguments ("in") or the output ("out") of blocks of a list, at a path in these;
    as an argument that is a "number"; as "keys", by the attending module in the block; in the first argument of a
    module "between" blocks or behind them ("tail"). dim: counted from the front, and -1 for the last one; of keys the
    number of the attention in its module."""

    kind: str
    where: str
    path: str
    dim: int


@dataclass
class Notes:
    """Of one forward."""

    lengths: dict[Spot, int] = field(default_factory=dict)  # of the first block of a list that has such a spot
    # Of all attentions, in order, with whether it was called by name, and handed transformer_options.
    keys: list[tuple[torch.Tensor, bool, bool]] = field(default_factory=list)
    # By list and module of attention with a mask, whether that lies in an argument of the block.
    masks: dict[tuple[str, str], bool] = field(default_factory=dict)
    has_options: bool = True  # whether each attention inside blocks was handed transformer_options
    calls: Counter[str] = field(default_factory=Counter)  # of blocks, by list
    ends: dict[str, set[str]] = field(default_factory=dict)  # paths in what the last block of a list returned

    def keys_seen(self, *, by_options: bool) -> list[torch.Tensor]:
        """Of those attentions that transformer_options, or their names, lead to us."""
        return [keys for keys, is_named, has_options in self.keys if (has_options if by_options else is_named)]


class Watch:
    """Notes a forward of a model. Its attention has to be led to `attend` and `override`; see TokenParallel."""

    rows = None  # as of a TokenParallel outside of a forward by rows
    plan = TokenPlan({}, passes_options=False)

    def __init__(self, model: nn.Module, lists: Sequence[str]) -> None:
        self.notes = Notes()
        self._hooks = HookSet()
        self._stack: list[tuple[str, str]] = []  # lists of the blocks being computed, and modules in them
        self._storages: set[int] = set()  # of the arguments of the block being computed
        self._attentions: Counter[tuple[str, str]] = Counter()  # of that block
        self._since: list[tuple[str, Any]] = []  # modules called since the last block, with their first argument
        self._named: list[bool] = []  # whether attention that was called by name was handed transformer_options
        inner: set[int] = set()
        for name in lists:
            for _, block in members(model, name):
                own: Any = type(block).forward
                for path, module in block.named_modules():
                    inner.add(id(module))
                    self._hooks.just_before(module, lambda *call, place=(name, path): self._stack.append(place))
                    self._hooks.after(module, lambda *call: self._stack.pop() and None)
                self._hooks.just_before(block, partial(self._enter, name, inspect.signature(own.__get__(block))))
                self._hooks.after(block, partial(self._leave, name))
        for name, module in model.named_modules():
            if name and id(module) not in inner and name not in lists:
                self._hooks.just_before(module, partial(self._note_call, name))

    def stop(self) -> Notes:
        """Take the hooks off; what was seen."""
        self._hooks.remove()
        self._note_since("tail")
        return self.notes

    def _enter(self, name: str, signature: inspect.Signature, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._note_since("between")
        self._attentions.clear()
        self.notes.calls[name] += 1
        given = signature.bind(*args, **kwargs).arguments
        self._storages = {_storage(each) for _, each in leaves(given, PASSED_BY) if isinstance(each, torch.Tensor)}
        self._note("in", name, given)

    def _leave(self, name: str, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._note("out", name, output)
        self.notes.ends[name] = {path for path, _ in leaves(output, PASSED_BY)}

    def _note_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._stack:
            self._since.append((name, args[0] if args else None))

    def _note_since(self, kind: str) -> None:
        """The outermost module behind a block."""
        if self.notes.calls and self._since and isinstance(self._since[0][1], torch.Tensor):
            self._note(kind, *self._since[0])
        self._since.clear()

    def _note(self, kind: str, where: str, value: Any) -> None:
        for path, leaf in leaves(value, PASSED_BY):
            if isinstance(leaf, torch.Tensor):
                for dim, length in enumerate(leaf.shape):
                    last = dim - leaf.ndim if dim == leaf.ndim - 1 else dim
                    self.notes.lengths.setdefault(Spot(kind, where, path, last), length)
            elif kind == "in" and type(leaf) is int:
                self.notes.lengths.setdefault(Spot("number", where, path, 0), leaf)

    def attend(self, func: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        """What func gives, which the class calls by its name."""
        q, k, v = (each if isinstance(each, torch.Tensor) else each.take() for each in (q, k, v))
        self._named.append(False)
        try:
            output = func(q, k, v, *args, **kwargs)
        finally:
            has_options = self._named.pop()
        self._attended(k, (*args, kwargs.get("mask"), kwargs.get("attn_mask")), True, has_options)
        return output

    def override(self, func: Callable[..., torch.Tensor], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        """The same, of attention that is handed transformer_options with this as their override."""
        if self._named:
            self._named[-1] = True
        else:
            self._attended(k, (*args, kwargs.get("mask"), kwargs.get("attn_mask")), False, True)
        return func(q, k, v, *args, **kwargs)

    def _attended(self, k: torch.Tensor, others: Sequence[Any], is_named: bool, has_options: bool) -> None:
        self.notes.keys.append((k.detach().clone(), is_named, has_options))
        if not self._stack:
            return
        place = self._stack[-1]
        self._attentions[place] += 1
        self.notes.lengths.setdefault(Spot("keys", *place, self._attentions[place]), k.shape[-2])
        self.notes.has_options &= has_options
        for mask in (each for each in others if isinstance(each, torch.Tensor)):
            is_given = _storage(mask) in self._storages
            self.notes.masks[place] = self.notes.masks.get(place, True) and is_given


def leaves(value: Any, passed_by: Collection[Any] = frozenset(), path: str = "") -> Iterator[tuple[str, Any]]:
    """What is no container inside value, by paths such as "x.0"; not what dicts hold under the keys in passed_by."""
    if isinstance(value, Mapping):
        parts = {name: each for name, each in value.items() if name not in passed_by}
    elif isinstance(value, (tuple, list)):
        parts = dict(enumerate(value))
    elif not isinstance(value, torch.Tensor) and (names := attributes_of(value)):
        parts = {name: getattr(value, name, None) for name in names}
    else:
        yield path, value
        return
    for name, each in parts.items():
        yield from leaves(each, passed_by, f"{path}.{name}".lstrip("."))


def _storage(tensor: torch.Tensor) -> int:
    """A number that views of a tensor have in common, or the tensor's own where it has no memory."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or id(tensor)
    except RuntimeError:
        return id(tensor)


def apart(found: Any, expected: Any, tolerance: float = 0.0) -> float:
    """How far two results are apart, as a share of what may be: above 1 they differ. NaN differs. Args: tolerance: of a
    standard deviation; 0 takes what the type of number allows."""
    pairs = tensors_reached(found), tensors_reached(expected)
    if [each.shape for each in pairs[0]] != [each.shape for each in pairs[1]]:
        return float("inf")
    worst = 0.0
    for a, b in zip(*pairs, strict=True):
        other, is_near = b.double(), not tolerance and b.dtype in _NEAR
        off, largest = float((a.to(b.device).double() - other).abs().max()), float(other.abs().max())
        spread = float(other.std()) if other.numel() > 1 else largest
        bound = _NEAR[b.dtype] * largest if is_near else (tolerance or _NEAR_IN_HALF) * spread
        if off:
            worst = max(worst, off / bound if bound and off == off else float("inf"))
    return worst


# ---- guesses

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
    """The plan as a row of families/comfy would have it."""
    blocks = []
    for name, rows in plan.blocks.items():
        counts = f", counts={rows.counts!r}" if rows.counts else ""
        blocks.append(f'        "{name}": BlockRows({rows.rows!r}, {rows.keys!r}{counts}),')
    others = [(each.name, getattr(plan, each.name), each.default) for each in fields(plan) if each.name != "blocks"]
    said = [f"    {name}={value!r}," for name, value, default in others if value != default]
    return "\n".join(["TokenPlan(", "    {", *blocks, "    },", *said, ")"]).replace("'", '"')
