"""Tensors that are made of others, as torchao's quantized ones are: what they are made of, and others like them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of, detached; itself if it is one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from plain_parts(getattr(tensor, name))


def tensor_bytes(tensor: Tensor) -> int:
    """What a tensor takes; for one made of others (values and scales) what its parts take."""
    return sum(part.numel() * part.element_size() for part in plain_parts(tensor))


def rebuilt(tensor: Any, parts: Iterator[Tensor]) -> Tensor:
    """A tensor like this one, made of the next of parts."""
    if not is_traceable_wrapper_subclass(tensor):
        return next(parts)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rebuilt(getattr(tensor, name), parts) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
