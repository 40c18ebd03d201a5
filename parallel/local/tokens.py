"""Several ranks compute one forward, each with whole weights and its share of the rows (tokens). Attention, which the
host has to lead to `TokenParallel.attend`, gathers keys and values of all ranks in the order of one card. Also called
sequence or context parallelism, with all-gathered keys (Li et al. 2021, arXiv:2105.13120)."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ...families.token_plan import BlockRows, Place, TokenPlan, places, segments
from ...patches.hooks import HookSet, change_at
from ..block_lists import members
from ..offload.recompute import is_recomputing
from ..staged_copies import copies_between
from ..transfer import Send
from .collectives import AllRows, Collective, Exchange, Layout, ends_of
from .graphs import OPTIONS
from .heads import Gathered, find_heads
from .tensor_parallel import ForwardWorkers
from .token_graphs import Replays, computed
from .workers import ThreadPool

T = TypeVar("T")
Call = Callable[..., Any]


@dataclass
class _Frame:
    """A block, or a module in it, that is being computed. axes: of the keys of its attentions to come."""

    block: str
    module: str
    axes: list[str]


class RowsError(RuntimeError):
    """A forward that the devices cannot share out by rows. plan: where these inputs have theirs, if that is known."""

    def __init__(self, said: str, plan: TokenPlan | None = None) -> None:
        super().__init__(said)
        self.plan = plan


class OneDeviceError(RowsError):
    """One device has to compute this forward: a rank would have no row of an axis, or a part of a group."""


class _Here(threading.local):
    """Of a thread that computes a rank's forward: whose it is, and the rank's rows."""

    parallel: TokenParallel | None = None
    rows: Rows | None = None
    on_block: Callable[[], None] = staticmethod(lambda: None)  # called at each block where it computes all rows


HERE = _Here()


class Rows:
    """The rows of one rank in one forward. Args: shares: relative, by rank. replays: of blocks; None where none are."""

    def __init__(
        self, rank: int, plan: TokenPlan, shares: Sequence[float], group: Collective, replays: Replays | None = None
    ) -> None:
        self.rank, self.plan, self.group, self.replays, self.groups = rank, plan, group, replays, 0
        self._shares = tuple(shares)
        self._aligned = dict(each.partition(":")[::2] for each in plan.aligned.split())
        self._checked: dict[str, int] = {}  # lengths that have been found to divide
        self.lengths: dict[str, int] = {}  # of every segment, on one card
        # The lengths of a block's calls by its list and name; autograd computes the last one again first.
        self.passes: defaultdict[tuple[str, str], list[dict[str, int]]] = defaultdict(list)
        self.is_gathered = False  # whether the last block has been computed
        self.stack: list[_Frame] = []
        self.num_attentions = 0

    def share(self, segment: str, rank: int | None = None) -> tuple[int, int]:
        """The first row and the number of rows that a rank has of a segment; by default this one. Raises:
        OneDeviceError for rows that are no whole groups of the plan's `aligned`."""
        length = self.lengths[segment]
        if segment in self.plan.whole:
            return 0, length
        step = 1
        if segment in self._aligned:
            first, per_group = next(iter(self._aligned.items()))
            groups = self.lengths.get(first, 1) // int(per_group or 1)
            if groups > 1 and length != 1:
                if length % groups:
                    raise OneDeviceError(f"{length} rows of {segment} are no whole groups of {groups}")
                step = length // groups  # rows that stay on one rank
        ends, rank = ends_of(length // step, self._shares), self.rank if rank is None else rank
        return ends[rank] * step, (ends[rank + 1] - ends[rank]) * step

    def local(self, axis: str) -> int:
        """Rows that this rank has of an axis."""
        return sum(self.share(each)[1] for each in segments(axis))

    def whole(self, axis: str) -> int:
        """Rows of an axis on one card."""
        return sum(self.lengths[each] for each in segments(axis))

    def knows(self, axis: str) -> bool:
        return all(each in self.lengths for each in segments(axis))

    def _learn(self, axis: str, length: int) -> None:
        """The first tensor that has an axis tells its length."""
        unknown = [each for each in segments(axis) if each not in self.lengths]
        if len(unknown) > 1 and f"{unknown[0]}?" in axis:
            self.lengths[unknown.pop(0)] = 0
        if len(unknown) == 1:
            self.lengths[unknown[0]] = length - sum(self.lengths.get(each, 0) for each in segments(axis))

    def check_counts(self) -> None:
        """Raises: OneDeviceError if a rank has no row of an axis, or if an axis has one row: that is never cut."""
        if self._checked == self.lengths:  # as for the block before
            return
        for segment, length in self.lengths.items():
            counts = [self.share(segment, rank)[1] for rank in range(self.group.size)]
            if length and segment not in self.plan.whole and (length == 1 or not all(counts)):
                raise OneDeviceError(f"{length} rows of {segment} for {self.group.size} devices")
        self._checked = dict(self.lengths)

    def see(self, value: Any, place: Place, where: str) -> Any:
        """Learn an axis; a number may be a length itself."""
        length = value.shape[place.dim] if isinstance(value, torch.Tensor) else value if isinstance(value, int) else 1
        if length > 1:
            self._learn(place.axis, length)
        return value

    def cut(self, value: Any, place: Place, where: str) -> Any:
        """This rank's rows of a tensor of all rows; what has one row, or was cut before, is left. The result is a copy:
        blocks write into their arguments. Raises: RowsError for another number of rows."""
        axis, dim = place.axis, place.dim
        if not isinstance(value, torch.Tensor) or (length := value.shape[dim]) == 1:
            return value
        self._learn(axis, length)
        if length == self.local(axis) != self.whole(axis):
            return value
        if length != self.whole(axis):
            raise RowsError(
                f"{where}: {length} rows along {axis}, which are neither all {self.whole(axis)} nor the "
                f"{self.local(axis)} of this device"
            )
        parts, start = [], 0
        for segment in segments(axis):
            first, count = self.share(segment)
            parts.append(value.narrow(dim, start + first, count))
            start += self.lengths[segment]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()

    def count(self, value: Any, axis: str) -> Any:
        """A number of rows, or ranges of them, as this rank counts; a range may carry a value per row."""
        is_cut_before, names = axis.startswith("~"), segments(axis.lstrip("~"))
        if value is None or any(name not in self.lengths for name in names):
            return value

        def here(row: int | None) -> Any:
            if row is None:
                return None
            number = start = 0
            for index, name in enumerate(names):
                first, count = self.share(name)
                if is_cut_before and index == 0:
                    number, start = min(row, count), count
                else:
                    number += min(max(row - start - first, 0), count)
                    start += self.lengths[name]
            return number

        def of_range(item: tuple[Any, ...]) -> tuple[Any, ...]:
            first, last, *rest = item
            low, high = here(first), here(last)
            if rest and isinstance(rest[0], torch.Tensor) and rest[0].ndim:
                skipped = self.rows_before(first, names[0])
                rest[0] = rest[0][skipped : skipped + high - low]
            return (low, high, *rest)

        return here(value) if isinstance(value, int) else [of_range(each) for each in value]

    def has_first(self, number: int, segment: str) -> bool:
        """Whether this rank has the first rows of a segment. Raises: OneDeviceError if the first one has not all."""
        if self.share(segment, 0)[1] <= number:
            raise OneDeviceError(f"{number} rows for one device to have")
        return self.rank == 0

    def rows_before(self, row: int, segment: str) -> int:
        """How many rows from `row` on lie before this rank's first one."""
        return max(self.share(segment)[0] - row, 0)

    def gather(self, tensor: torch.Tensor, place: Place, name: str, own: Sequence[str] = ()) -> torch.Tensor:
        """All rows of a tensor, in the order of one card; of segments in own, and of those that are whole, this rank's.
        Args: tensor: of this rank's rows along place.dim. name: of the collective, the same on all ranks."""
        if not self.knows(place.axis):
            return tensor
        name = f"{name} along {place.axis}"
        return AllRows.apply(tensor, self._layout(place, own), self.group, name)  # type: ignore[no-any-return]

    def join(self, found: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        """As gather, of the tensors of all ranks, by rank."""
        return self._layout(place).joined(found)

    def _layout(self, place: Place, own: Sequence[str] = ()) -> Layout:
        names = segments(place.axis)
        counts = tuple(tuple(self.share(each, rank)[1] for rank in range(self.group.size)) for each in names)
        return Layout(self.rank, place.dim, counts, tuple(each in (*own, *self.plan.whole) for each in names))


class TokenParallel:
    """Runs the forwards of one model on several devices by its rows. Args: modules: the model on each of the devices,
    the main device's first, with equal weights. shares: relative shares of the rows, by rank. send: as of Collective;
    None sends beside kernels. groups: of heads, at most, in which keys and values travel (heads.py). exchange: how they
    travel."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        devices: Sequence[torch.device],
        plan: TokenPlan,
        shares: Sequence[float],
        send: Send | None = None,
        groups: int = 1,
        exchange: Exchange = "full",
    ) -> None:
        self.modules, self.devices, self.plan = tuple(modules), tuple(devices), plan
        self._send = send or copies_between(devices).to_ranks(devices)
        self.shares, self.groups, self.exchange = tuple(shares), groups, exchange
        self._hooks = HookSet()
        self._pool = ThreadPool()
        self.newest: dict[int, Rows] = {}  # of a rank's forward in training; blocks read their arguments twice
        self.on_keys: Callable[[int, str, torch.Tensor], Any] | None = None  # called with rank, axis and gathered keys

    def attach(self) -> None:
        """Hook the modules, once. Raises: AttributeError for a module that a model lacks; nothing is hooked then."""
        if self._hooks:
            return
        try:
            for rank, model in enumerate(self.modules):
                blocks = {name: list(members(model, name)) for name in self.plan.blocks}
                ordered = [block for each in blocks.values() for _, block in each]
                if not ordered:
                    raise AttributeError(f"{type(model).__name__} has none of the blocks {', '.join(self.plan.blocks)}")
                for list_name in self.plan.blocks:
                    for name, block in blocks[list_name]:
                        is_last = block is ordered[-1] and not self.plan.tail
                        self._hook_block((rank, list_name, name), block, is_first=block is ordered[0], is_last=is_last)
                for place in places(self.plan.tail):
                    for _, module in members(model, ".".join(place.path)):
                        self._hooks.around(module, functools.partial(self._tail, place))
                for place in places(self.plan.between):
                    for name, module in members(model, ".".join(place.path)):
                        self._hooks.around(module, functools.partial(self._between, name, place))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._hooks.remove()

    @property
    def rows(self) -> Rows | None:
        """Of the rank whose forward this thread computes; None outside of one."""
        return HERE.rows if HERE.parallel is self else None

    def run(self, calls: Sequence[Callable[[], Any]], replays: Replays | None = None) -> list[Any]:
        """What the ranks' forwards return, each with all rows of the result. Args: calls: a forward for each rank, on
        its device. replays: of their blocks, where nothing but the model's own code runs in them. Raises: the first
        error of a rank, which ends the others; OneDeviceError where one device has to compute this."""

        def of_rank(rank: int, call: Callable[[], Any], group: Collective) -> Any:
            with self.on(Rows(rank, self.plan, self.shares, group, replays)):
                return call()

        try:
            return self.on_ranks([functools.partial(of_rank, *each) for each in enumerate(calls)])
        finally:
            if replays is not None:
                replays.graphs.forget()

    def on_ranks(self, work: Sequence[Callable[[Collective], T]]) -> list[T]:
        """What every rank's work returns, given their group, in a thread of its device. Raises: the first error of a
        rank, which ends the others."""
        with closing(ForwardWorkers(self._pool, self.devices, self._send, self.exchange)) as workers:
            return workers.run(self.modules[0], [functools.partial(each, workers.collective) for each in work])

    @contextmanager
    def on(self, rows: Rows) -> Iterator[None]:
        """Inside, this thread computes a forward of the rank that has these rows."""
        before, (HERE.parallel, HERE.rows) = (HERE.parallel, HERE.rows), (self, rows)
        try:
            yield
        finally:
            HERE.parallel, HERE.rows = before

    def _hook_block(self, place: tuple[int, str, str], block: nn.Module, *, is_first: bool, is_last: bool) -> None:
        rank, list_name, name = place
        own_forward: Any = type(block).forward  # training may have put its guard before it
        signature, keys = inspect.signature(own_forward.__get__(block)), places(self.plan.blocks[list_name].keys)
        axes = {".".join(each.path): each.axis.split("/") for each in keys}

        def around(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            here = self.rows
            if here is None and is_recomputing() and rank in self.newest:  # in a thread of autograd's
                newest = self.newest[rank]
                newest.lengths = newest.passes[list_name, name].pop()
                with self.on(newest):
                    return around(call, args, kwargs)
            if here is None:
                HERE.on_block()
                return call(*args, **kwargs)
            if not is_recomputing():
                if is_first:  # some classes run all blocks several times
                    here.lengths, here.is_gathered = {}, False
                here.passes[list_name, name].append(here.lengths)
            bound = signature.bind(*args, **kwargs)
            is_own = not (bound.arguments.get(OPTIONS) or {}).get("patches_replace")  # others' code may call it twice
            may_release = is_first and is_own and not (torch.is_grad_enabled() or rank in self.newest)
            kept = bound.arguments.get(here.plan.released) if may_release else None
            _cut_arguments(here, bound.arguments, here.plan.blocks[list_name], name)
            if kept is not None:
                kept.set_(bound.arguments[here.plan.released])
            given = {**bound.arguments, **bound.kwargs}  # a guard tells ways of being called by positional numbers
            own = bound.args[: len(args)], {each: given[each] for each in kwargs}
            output = computed(here, block, functools.partial(self._block, name, axes, call), name, own)
            if is_last:
                here.is_gathered = True
                for each in places(here.plan.blocks[list_name].out or here.plan.out):
                    join = functools.partial(here.gather, place=each, name=name, own=here.plan.own)
                    output = change_at(output, each.path, join)
            return output

        self._hooks.around(block, around)
        for inner, inner_axes in axes.items():
            if inner:
                hook = functools.partial(self._attending, name, inner, inner_axes)
                self._hooks.around(block.get_submodule(inner), hook)

    def _block(self, name: str, axes: dict[str, list[str]], call: Call, *args: Any, **kwargs: Any) -> Any:
        """What a block returns of the rank's rows. Raises: RowsError if no attention of it was seen."""
        here = self.rows
        assert here is not None
        num_before = here.num_attentions
        output = self._attending(name, "", axes.get("", ["-"]), call, args, kwargs)
        if axes and num_before == here.num_attentions:
            raise RowsError(f"no attention of {name} was seen; its keys of the other devices would be missing")
        return output

    def _attending(self, block: str, module: str, axes: list[str], call: Call, args: Any, kwargs: Any) -> Any:
        if (here := self.rows) is None:
            return call(*args, **kwargs)
        here.stack.append(_Frame(block, module, list(axes)))
        try:
            return call(*args, **kwargs)
        finally:
            here.stack.pop()

    def _tail(self, place: Place, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (here := self.rows) is not None and not here.is_gathered:
            here.is_gathered = True
            args = (here.gather(args[0], place, ".".join(place.path)), *args[1:])
        return call(*args, **kwargs)

    def _between(self, name: str, place: Place, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = self.rows
        if here is None or here.is_gathered or not here.lengths:
            return call(*args, **kwargs)
        output = call(here.gather(args[0].clone(), place, name), *args[1:], **kwargs)
        return here.cut(output, place, name)

    def attend(
        self, func: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks, by func. Args: q, k, v: [..., tokens, width], or
        as func takes them; of this rank's rows. A holder gives its own by `take`. Masks are cut to this rank's queries.
        Raises: RowsError for keys, or a mask, of another number of rows than the rank's."""
        if (here := self.rows) is None:
            return func(q, k, v, *args, **kwargs)  # type: ignore[no-any-return]
        q, k, v = (each if isinstance(each, torch.Tensor) else each.take() for each in (q, k, v))
        here.num_attentions += 1
        frame = here.stack[-1] if here.stack else _Frame("", "", ["-"])
        axis = self._axis(here, frame, k)
        num_keys = k.shape[-2] if axis == "-" else here.whole(axis)

        def fit(value: Any) -> Any:
            is_mask = isinstance(value, torch.Tensor)
            return self._mask(here, frame, value, q, num_keys, k.shape[-2], axis) if is_mask else value

        # Masks may travel too, and what is sent first is taken first.
        args = tuple(map(fit, args))
        kwargs = {name: fit(each) if name in ("mask", "attn_mask") else each for name, each in kwargs.items()}
        see = functools.partial(self.on_keys, here.rank, axis) if self.on_keys is not None else None
        if axis == "-":
            if see is not None:
                see(k)
            return func(q, k, v, *args, **kwargs)  # type: ignore[no-any-return]
        name, heads = f"{frame.block}.{frame.module}", find_heads((q, k, v), args, kwargs)
        gathered = Gathered(here, name, axis, (k, v), heads, here.groups or self.groups)
        return gathered.attend(func, q, args, kwargs, see)

    def _axis(self, here: Rows, frame: _Frame, k: torch.Tensor) -> str:
        """The axis of the keys; "-" of those that no other rank has rows of."""
        # Of several by the number of keys: training may watch a block for one forward before it counts.
        fits = (each for each in frame.axes[:-1] if here.knows(each) and k.shape[-2] == here.local(each))
        axis = next(fits, frame.axes[-1])
        if axis == "-":
            return axis
        if not here.knows(axis):
            raise OneDeviceError(f"one row of {axis}")
        if k.shape[-2] != here.local(axis):
            found = f"{k.shape[-2]} keys, and this device has {here.local(axis)} rows of {axis}"
            raise RowsError(f"{frame.block}.{frame.module}: {found}")
        return axis

    def _mask(
        self, here: Rows, frame: _Frame, mask: torch.Tensor, q: torch.Tensor, num_keys: int, num_local: int, axis: str
    ) -> torch.Tensor:
        """A mask for this rank's queries and the keys of all ranks."""
        name = f"{frame.block}.{frame.module}"
        if self.plan.makes_mask is not None and axis != "-":
            module = self.modules[here.rank].get_submodule(name.rstrip("."))
            return self.plan.makes_mask(here, module, mask, axis)  # type: ignore[no-any-return]
        num_queries = q.shape[-2]
        if mask.shape[-1] == num_local != num_keys and self.plan.cuts_masks:
            mask = here.gather(mask, Place((), axis, mask.ndim - 1), f"mask of {name}")
        if mask.shape[-1] not in (1, num_keys):
            raise RowsError(f"{name}: a mask of {tuple(mask.shape)} for {num_keys} keys")
        if mask.ndim < 3 and mask.shape[0] == q.shape[0] or mask.shape[-2] in (1, num_queries):
            return mask
        for each in {place.axis for rows in self.plan.blocks.values() for place in places(rows.rows)}:
            if here.knows(each) and (here.whole(each), here.local(each)) == (mask.shape[-2], num_queries):
                return here.cut(mask, Place((), each, mask.ndim - 2), name)  # type: ignore[no-any-return]
        raise RowsError(f"{name}: a mask of {tuple(mask.shape)} for {num_queries} queries")


def _cut_arguments(here: Rows, arguments: dict[str, Any], rows: BlockRows, name: str) -> None:
    """Cut a block's arguments to the rank's rows, in place."""

    def change(path: Sequence[str], by: Callable[[Any], Any]) -> None:
        held = arguments if path[0] in arguments else arguments.get("kwargs", {})
        if path[0] in held:
            held[path[0]] = change_at(held[path[0]], path[1:], by)

    for argument in rows.refused:
        if arguments.get(argument) is not None:
            raise RowsError(f"{name} is called with {argument}, which the devices cannot share out by rows")
    found = sorted(places(rows.rows), key=lambda place: place.axis.count("+"))
    for step in (here.see, here.cut):  # an axis of two segments is known by those that have one of them
        for place in found:
            change(place.path, functools.partial(step, place=place, where=f"{name}, {'.'.join(place.path)}"))
        here.check_counts()
    for place in places(rows.counts):
        change(place.path, functools.partial(here.count, axis=place.axis))
    for argument, by in rows.changes.items():
        if arguments.get(argument) is not None:
            arguments[argument] = by(here, arguments[argument])
