"""Slices of weights without a copy: what one device of several holds of a tensor that they compute with together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...families.tensor_plan import Range

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Slice:
    """Ranges of one dimension. Args: dim: counted from the front."""

    dim: int
    ranges: tuple[Range, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These ranges joined: a view if there is one, else a JoinedSlices. No memory is taken."""
        pieces = [tensor.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return pieces[0] if len(pieces) == 1 else JoinedSlices(pieces, self.dim)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """These ranges joined, in memory of their own."""
        pieces = [tensor.narrow(self.dim, first, last - first) for first, last in self.ranges]
        return torch.cat(pieces, self.dim)


class JoinedSlices(torch.Tensor):
    """Slices of one tensor as if joined along a dimension; they are joined when they are copied, not before.

    So a slice of a packed weight stays in the mapped file until a device takes it. What only asks, copies or makes room
    joins nothing in host memory; everything else works on a joined copy.
    """

    pieces: Sequence[torch.Tensor]
    along: int

    @staticmethod
    def __new__(cls: type[JoinedSlices], pieces: Sequence[torch.Tensor], along: int) -> JoinedSlices:
        first = pieces[0]
        shape = list(first.shape)
        shape[along] = sum(piece.shape[along] for piece in pieces)
        made: JoinedSlices = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=first.dtype, device=first.device, requires_grad=False
        )
        made.pieces, made.along = tuple(pieces), along
        return made

    def __init__(self, pieces: Sequence[torch.Tensor], along: int) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"JoinedSlices({[tuple(piece.shape) for piece in self.pieces]}, along={self.along})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.joined()

    def joined(self) -> torch.Tensor:
        """One ordinary tensor."""
        return torch.cat(list(self.pieces), self.along)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            with torch.inference_mode(args[0].is_inference()):  # else torch refuses to give it the other's version
                return cls(args[0].pieces, args[0].along)
        if func.overloadpacket is _aten.to:  # in inference mode it comes here whole
            return func.decompose(*args, **kwargs)
        if func is _aten._to_copy.default:
            return torch.cat([func(piece, **kwargs) for piece in args[0].pieces], args[0].along)
        if func is _aten.empty_like.default:
            return func(args[0].pieces[0].new_empty(()).expand(args[0].shape), **kwargs)
        if func in (_aten.is_pinned.default, _aten._has_compatible_shallow_copy_type.default):
            return False  # the latter: a module that is moved takes what was made of this as a parameter of its own
        if func is _aten.clone.default:
            return args[0].joined()
        if func is _aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            target, source, *others = args
            lengths = [piece.shape[source.along] for piece in source.pieces]
            for place, piece in zip(target.split(lengths, source.along), source.pieces, strict=True):
                place.copy_(piece, *others, **kwargs)
            return target
        args, kwargs = tree_map_only(cls, cls.joined, (args, kwargs))  # also inside lists
        return func(*args, **kwargs)
