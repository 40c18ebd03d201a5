"""How long devices take: moments in the order of their work.

A card works behind the host's back, so its own events tell the time where it has any; else everything queued is waited
for and the host's clock is read.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from .devices import synchronize


class Stopwatch(Protocol):
    """Moments of one device."""

    def mark(self) -> Any:
        """This moment: after all that was queued so far."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to a later one, once both have passed."""


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
