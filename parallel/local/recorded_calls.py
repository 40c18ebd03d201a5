"""What a recorded call of a block depends on beside the numbers in its tensors; see divided_graphs.py."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...patches.hooks import PLAIN, attributes_of, tensors_reached

OPTIONS = "transformer_options"
MISSING = object()
_REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
_OF_PRODUCTS = ("allow_tf32", "fp32_precision", "allow_fp16_accumulation", *_REDUCTIONS)


class Unlike(Exception):
    """A value that cannot be compared with another one."""


class WatchedOptions(dict[Any, Any]):
    """Options that know which of them were read, also in their copies, and whether something was written.

    Args: read: where to note it; a copy shares it. A block may write into a copy that it has made.
    """

    def __init__(self, values: Mapping[Any, Any], read: set[Any] | None = None) -> None:
        super().__init__(values)
        self.read: set[Any] = set() if read is None else read
        self.written: set[Any] = set()

    def _note(self, *names: Any) -> None:
        self.read.update(name for name in names if name not in self.written)

    def __getitem__(self, name: Any) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __contains__(self, name: Any) -> bool:
        self._note(name)
        return super().__contains__(name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def keys(self) -> Any:
        self._note(*super().keys())
        return super().keys()

    def items(self) -> Any:
        self._note(*super().keys())
        return super().items()

    def values(self) -> Any:
        self._note(*super().keys())
        return super().values()

    def copy(self) -> WatchedOptions:
        made = WatchedOptions(dict(super().items()), self.read)
        made.written = set(self.written)
        return made

    __copy__ = copy

    def __setitem__(self, name: Any, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"it takes things out of the {OPTIONS}, or puts several in")

    pop = popitem = setdefault = update = clear = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]


def key_of(value: Any) -> Any:
    """What two values have in common if one can stand for the other, but for the numbers in tensors.

    Raises: Unlike for what nobody can tell that of.
    """
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
            raise Unlike(f"it is given a {type(value).__name__}")
        return type(value), value.shape, value.stride(), value.dtype
    kind = type(value)
    if kind in PLAIN or value is MISSING or isinstance(value, (torch.dtype, torch.device)) or _is_ours(value):
        return kind, value
    if kind in (tuple, list):
        return kind, *map(key_of, value)
    if isinstance(value, dict):
        return kind, *((name, key_of(each)) for name, each in value.items())
    names = attributes_of(value)
    if not names:
        raise Unlike(f"it is given a {kind.__name__}")
    return kind, *((name, key_of(getattr(value, name, None))) for name in names)


def keys_read(watched: Sequence[WatchedOptions]) -> dict[Any, Any]:
    """Of the options that any of these was asked for, the first one's keys.

    Raises: RuntimeError if something was written there, or tensors were read.
    """
    read = {name: dict.get(watched[0], name, MISSING) for each in watched for name in each.read}
    if any(each.written for each in watched) or tensors_reached(list(read.values())):
        raise RuntimeError(f"it changes the {OPTIONS}, or reads tensors there")
    return {name: key_of(value) for name, value in read.items()}


def reads_alike(read: Mapping[Any, Any], options: Mapping[Any, Any]) -> bool:
    """Whether the options that a block looked up are those of its recording. Args: read: of each its key then."""
    try:
        return all(key_of(options.get(name, MISSING)) == key for name, key in read.items())
    except Unlike:
        return False


def _is_ours(value: Any) -> bool:
    """A function of this pack that depends on nothing but its arguments."""
    of_pack = (getattr(value, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]
    return isinstance(value, types.FunctionType) and of_pack and not value.__closure__


def switches() -> tuple[Any, ...]:
    """What torch keeps for the whole process and chooses kernels by; nodes switch it for one MODEL and back."""
    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    return (
        *(_switch(matmul, name) for name in _OF_PRODUCTS),
        *(_switch(cudnn, name) for name in ("allow_tf32", "fp32_precision")),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _switch(owner: Any, name: str) -> Any:
    """None where this torch has no such switch, or does not tell it beside its newer one."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None
