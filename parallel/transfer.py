"""How a tensor gets to another device, and which device and streams are the current ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .devices import device_module

Pair = tuple[torch.device, torch.device]  # source, target
Arrivals = dict[Pair, Any]  # copies under way: the event of the last one
Tensors = Sequence[torch.Tensor]
# Tensors, the receiving rank, a place for the copies' events -> the copies, not to be used before settle(events)
Send = Callable[[Tensors, int, Arrivals], Tensors]


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on device, ordered on the current streams of both devices."""
    # Between accelerators of one kind the copy is ordered on both streams; to the host it would not be.
    return tensor.to(device, non_blocking=tensor.device.type == device.type != "cpu")


def is_everywhere(tensor: torch.Tensor) -> bool:
    """Whether this mixes with tensors of every device: one number on the CPU."""
    return tensor.device.type == "cpu" and tensor.ndim == 0


class CurrentStreams:
    """Cards' current streams while active, which gives those that were. torch's own context, once for each stream,
    takes the host as long as a copy (docs/internals/experiments.md)."""

    def __init__(self, module: Any, *streams: Any) -> None:
        self._module, self._streams = module, streams

    def __enter__(self) -> list[Any]:
        self._device = self._module.current_device()
        self._before = [self._module.current_stream(stream.device.index) for stream in self._streams]
        self._choose(self._streams)
        return self._before

    def __exit__(self, *error: object) -> None:
        self._choose(self._before)

    def _choose(self, streams: Sequence[Any]) -> None:
        for stream in reversed(streams):
            self._module.set_stream(stream)  # chooses its device, too; the first one's mostly is the current one
        if self._streams[0].device.index != self._device:
            self._module.set_device(self._device)


def settle(arrivals: Arrivals, device: torch.device | None = None) -> None:
    """Have the current stream of device (None: of every target) wait for the copies under way, and forget these."""
    for pair in list(arrivals) if device is None else [pair for pair in arrivals if pair[1] == device]:
        module = device_module(pair[1])
        assert module is not None
        module.current_stream(pair[1].index).wait_event(arrivals.pop(pair))


def module_with_streams(source: torch.device, target: torch.device) -> Any:
    """torch.cuda or its like if both devices are of it and it has streams; else None."""
    if source.type != target.type:
        return None
    module = device_module(source)
    needs = ("Stream", "stream", "current_stream", "set_stream", "current_device", "set_device")
    return module if all(hasattr(module, name) for name in needs) else None


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None in inference mode, where nobody counts."""
    return None if tensor.is_inference() else tensor._version


class Versioned:
    """What is made inside has a version that tells of writes into it; in inference mode tensors have none."""

    def __enter__(self) -> None:
        self._mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._mode is not None:
            self._mode.__enter__()
            torch.set_grad_enabled(False)  # leaving that mode has allowed it; going back to it restores what was

    def __exit__(self, *error: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)


def with_version(tensor: torch.Tensor) -> torch.Tensor:
    """Inside Versioned, the tensor itself, or where it has no version another one over the same memory that has."""
    if not tensor.is_inference():
        return tensor
    if type(tensor) is not torch.Tensor:
        return tensor.clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload,no-any-return]


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """While active device is the current one, where its kind has such a thing."""
    switch: Any = getattr(device_module(device), "device", None)
    return contextlib.nullcontext() if switch is None else switch(device.index)
