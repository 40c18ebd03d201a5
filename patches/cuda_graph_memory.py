"""How CUDA graphs are recorded, and the memory they share: per card, and per micro-batch in flight."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)
ONE_AT_A_TIME = threading.Lock()  # recordings of this process


class CudaRecorder:
    """Records on one CUDA device. Tests have another with the same methods, for devices without graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def make_pool(self) -> Any:
        """Memory that several graphs share."""
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, this thread launches on the recording stream, ordered with what it does before and after."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        """What replays all that compute launches."""
        # A recording cannot take what is cached elsewhere, so it has to be free. One at a time: memory is handed back
        # on all cards, and none that records should notice.
        with ONE_AT_A_TIME, self.aside():
            torch.cuda.empty_cache()
            return capture(compute, pool, self._device).replay


def capture(compute: Callable[[], None], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of all that compute launches on the device's current stream, and on streams that join it."""
    graph = torch.cuda.CUDAGraph()
    # other threads allocate and copy meanwhile, on other cards
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        try:
            compute()
        except BaseException:
            with suppress(RuntimeError):  # of what was raised this one only says that there was something
                graph.capture_end()
            raise
        graph.capture_end()
    except BaseException:
        _end_failed_recording(device, pool)
        raise
    return graph


def _end_failed_recording(device: torch.device, pool: Any) -> None:
    """Tell the allocator and the random numbers that a recording which failed is over: up to torch 2.11 at least
    capture_end raises before it does. No memory that crossed streams would be freed any more, and dropout would
    fail for as long as the process lives."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())  # same seed and offset, in no recording
    with suppress(RuntimeError):  # where it has
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


class CardMemory:
    """What all graphs of one device share.

    Args:
        fault: why nothing more is recorded; "" while all goes well.
    """

    def __init__(self, device: torch.device, recorder: CudaRecorder) -> None:
        self.device, self.recorder = device, recorder
        self.fault = ""
        self._staged: dict[Any, Tensor] = {}
        self._has_recorded = False

    def staged(self, role: str, index: int, like: Tensor) -> Tensor:
        """A tensor like this one, the same for all graphs; its values live from a copy to the next launch."""
        key = role, index, like.shape, like.stride(), like.dtype
        if key not in self._staged:
            self._staged[key] = empty_like(like)
        return self._staged[key]

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        self._has_recorded = True
        return self.recorder.record(compute, pool)

    def release(self) -> None:
        """Hand back what blocks took beside their recordings."""
        if self._has_recorded:
            torch.cuda.empty_cache()
            self._has_recorded = False

    def give_up(self, fault: str) -> None:
        """Record nothing more; what is recorded and in flight goes its way."""
        if not self.fault:
            self.fault = fault
            _log.warning("blocks on %s are no longer replayed as CUDA graphs: %s", self.device, fault)


def empty_like(tensor: Tensor) -> Tensor:
    """With the same strides, unless places in it share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


@dataclass(eq=False)
class Constant:
    """An input that has no gradient, as the graphs of a slot read it.

    Args:
        source, version: what it is a copy of, until the backward of its micro-batch begins.
    """

    static: Tensor
    source: Tensor | None = None
    version: int = 0

    def set(self, source: Tensor) -> None:
        self.source, self.version = source, source._version

    def is_of(self, source: Tensor) -> bool:
        return self.source is source and self.version == source._version


@dataclass(eq=False)
class Slot:
    """Graphs of one micro-batch in flight. They share a pool and may be replayed only in the order of their recording.

    Args:
        order: (block, whether its backward). position: of the next. calls: each block's graphs.
        num_open: blocks whose forward is recorded and whose backward will be.
    """

    pool: Any
    order: list[tuple[nn.Module, bool]] = field(default_factory=list)
    position: int = 0
    calls: dict[nn.Module, Any] = field(default_factory=dict)
    num_open: int = 0
    constants: list[Constant] = field(default_factory=list)

    @property
    def is_at_rest(self) -> bool:
        """Whether its micro-batch has come back, or none is there."""
        return self.position in (0, len(self.order)) and not self.num_open

    def takes(self, block: nn.Module) -> bool:
        """Whether this block's forward comes next."""
        if self.position < len(self.order):
            return self.order[self.position] == (block, False)
        return block not in self.calls and not any(is_backward for _, is_backward in self.order)

    def pass_by(self, block: nn.Module, *, is_backward: bool) -> None:
        """Go on behind this one.

        Raises: RuntimeError if another one comes next.
        """
        if self.position == len(self.order) or self.order[self.position] != (block, is_backward):
            raise RuntimeError(
                "blocks that are replayed as CUDA graphs came in another order than when they were recorded, so their "
                'memory may hold other numbers; train with train.cuda_graphs = "off"'
            )
        self.position += 1

    def constant_for(self, tensor: Tensor) -> tuple[Constant, bool]:
        """The constant that is a copy of this tensor now, and whether it is new."""
        for constant in self.constants:
            if constant.is_of(tensor):
                return constant, False
        self.constants.append(Constant(empty_like(tensor)))
        self.constants[-1].set(tensor)
        return self.constants[-1], True

    def let_go(self) -> None:
        """Of what the constants are copies of; their forward is over."""
        for constant in self.constants:
            constant.source = None
