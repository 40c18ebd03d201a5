"""What one forward of a model shows of its blocks: how long everything is that they take, return and attend to. Several
such forwards, of pictures and texts of several sizes, tell which lengths belong together (deriving.py)."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...families.token_plan import TokenPlan
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
