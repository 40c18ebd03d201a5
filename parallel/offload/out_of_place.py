"""Arguments of a block that x += y leaves as they are: there the sum is a new tensor, which the name x stands for.

A block that writes x += y into what it is called with needs no copy of it then, and autograd may keep the old values.
That is the same as long as nobody looks at the old tensor, or at a view of it, after the assignment; `LateReads` finds
out whether somebody does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...patches.compile_blocks import AUGMENTED
from ...patches.hooks import map_tensors, tensors_reached

_local = threading.local()  # reads: the LateReads of this thread, if any


def out_of_place(tensor: Tensor) -> Tensor:
    """A view of a tensor whose +=, -=, *= and /= make another such tensor. Operations on it give ordinary ones."""
    view = tensor.view_as(tensor)
    view.__class__ = _kind_like(getattr(type(tensor), "_is_like", type(tensor)))
    return view


def in_place(value: Any, given: dict[int, Tensor]) -> Any:
    """A block's output with ordinary tensors.

    Args:
        given: id of what out_of_place returned -> what it is a view of, which takes its place.
    """

    def ordinary(tensor: Tensor) -> Tensor:
        original = given.get(id(tensor))
        if original is None and (cls := getattr(type(tensor), "_is_like", None)) is not None:
            tensor.__class__ = cls
        return tensor if original is None else original

    return map_tensors(value, ordinary)


class LateReads(TorchDispatchMode):
    """While entered, notes whether an operation of this thread is given what an assignment to another name has left
    behind."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._left: dict[int, Tensor] = {}  # address of a storage -> a tensor in it, so that no other takes its place

    def __enter__(self) -> LateReads:
        self._before, _local.reads = getattr(_local, "reads", None), self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _local.reads = self._before

    def leave(self, tensor: Tensor) -> None:
        """From now on nobody may read this."""
        self._left[_address(tensor)] = tensor

    def look(self, value: Any) -> None:
        """Note it if there is such a tensor in value."""
        self.found = self.found or any(_address(tensor) in self._left for tensor in tensors_reached(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left:
            self.look((args, kwargs))
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@functools.cache
def _kind_like(cls: type[Tensor]) -> type[Tensor]:
    named = {f"__{augmented.__name__}__": operation for augmented, operation in AUGMENTED.items()}
    members = {name: _assignment(name, operation) for name, operation in named.items()}
    plain = {"__torch_function__": torch._C._disabled_torch_function_impl, "_is_like": cls}
    return type(f"OutOfPlace{cls.__name__}", (cls,), {**members, **plain})


def _assignment(name: str, operation: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """The method of an augmented assignment: the type stays, as does the shape."""

    def assign(tensor: Tensor, other: Any) -> Tensor:
        made = operation(tensor, other)
        if made.dtype is not tensor.dtype and torch.can_cast(made.dtype, tensor.dtype):
            made = made.to(tensor.dtype)
        if made.dtype is not tensor.dtype or made.shape != tensor.shape:
            return getattr(Tensor, name)(tensor, other)  # type: ignore[no-any-return]  # raises what it would raise
        made.__class__ = type(tensor)
        reads: LateReads | None = getattr(_local, "reads", None)
        if reads is not None:
            reads.leave(tensor)
        return made

    return assign
