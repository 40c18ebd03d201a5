"""How long devices take: moments in the order of their work, and how fast bytes travel between them.

A card works behind the host's back, so its own events tell the time where it has any; else everything queued is waited
for and the host's clock is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .devices import CPU, free_bytes, synchronize

_PIECE_BYTES = 2**26  # of one copy
_NUM_COPIES, _NUM_ROUNDS = 4, 5


class Stopwatch(Protocol):
    """Moments of one device."""

    def mark(self) -> Any:
        """This moment: after all that was queued so far."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to a later one, once both have passed."""


MakeStopwatch = Callable[[torch.device], Stopwatch]


class EventStopwatch:
    """By events on the current CUDA or ROCm stream of a device, so that marking waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class WaitingStopwatch:
    """By the host's clock, once some devices are done."""

    def __init__(self, *devices: torch.device) -> None:
        self._devices = devices

    def mark(self) -> float:
        synchronize(self._devices)
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The exactest that a device has."""
    return EventStopwatch(device) if device.type == "cuda" else WaitingStopwatch(device)


def link_speed(source: torch.device, target: torch.device, stopwatch: Stopwatch | None = None) -> float:
    """Bytes per second from one device to another; the host's memory is pinned where the target can read it by itself.

    Takes up to 64 MiB on both sides, and some milliseconds.
    """
    watch = stopwatch or WaitingStopwatch(source, target)
    quarters = [free // 4 for free in map(free_bytes, (source, target)) if free is not None]
    size = max(2**20, min([_PIECE_BYTES, *quarters]))
    held = torch.ones(size, dtype=torch.uint8, device=source)
    if source == CPU and target.type == "cuda":
        held = held.pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device=target)
    seconds = []
    for _ in range(1 + _NUM_ROUNDS):
        start = watch.mark()
        for _ in range(_NUM_COPIES):
            there.copy_(held, non_blocking=True)
        seconds.append(watch.between(start, watch.mark()))
    return _NUM_COPIES * size / statistics.median(seconds[1:])  # the first sets up what the others use
