"""A link between cards that is slower than the machine's own, for benchmarks of what travels over it.

A copy is followed by a wait on the receiving stream. So each direction carries so many bytes per second, and both at
once. A wait counts the card's cycles, whose frequency falls with load: waits are timed, and the next ones corrected.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from devicebridge.parallel.devices import synchronize
from devicebridge.parallel.staged_copies import SideStreams, exchange_speed
from devicebridge.parallel.transfer import Arrivals

LINKS = (0.0, 39.0, 20.0, 10.0)  # GB/s each way at once; 0 is the real one
_WATCHED = 8  # of so many long waits one is timed
_SHORTEST_S = 1e-5  # a shorter wait is none: a copy of that size takes as long by itself
_LONG_S = 1e-4  # beside the time between two events, which a timing has in it


class SlowLink(SideStreams):
    """Copies that take as long as over a slower link; those of one direction follow each other.

    gb_per_s: decimal GB that each card sends at the same time; 0 is as fast as it can.

    Args:
        cards: of CUDA, or others, whose copies stay as fast as they are.
    """

    def __init__(self, cards: Sequence[torch.device]) -> None:
        super().__init__()
        self.gb_per_s, self.direct_gb_per_s = 0.0, float("inf")
        self._cards = tuple(cards)
        self._hz: dict[torch.device, float] = {}
        self._waits: Counter[torch.device] = Counter()
        self._timed: list[tuple[torch.device, float, Any, Any]] = []  # the card, seconds as wanted, two events

    def calibrate(self) -> dict[str, float]:
        """Measure this machine's link and clocks; the speed that the pack finds for each slower link."""
        if any(card.type != "cuda" for card in self._cards):
            return {}
        for card in self._cards:
            with torch.cuda.device(card):
                for cycles in (10**6, 10**8):
                    synchronize(self._cards)
                    start = time.perf_counter()
                    torch.cuda._sleep(cycles)
                    synchronize(self._cards)
                self._hz[card] = cycles / (time.perf_counter() - start)
        self.direct_gb_per_s = exchange_speed(*self._cards[:2], self) / 1e9
        found = {}
        for self.gb_per_s in LINKS:
            found[link_name(self.gb_per_s)] = exchange_speed(*self._cards[:2], self) / 1e9
        self.gb_per_s = 0.0
        self._timed.clear()
        return found

    def copies(self, tensors: Sequence[torch.Tensor], device: torch.device, arrivals: Arrivals) -> list[torch.Tensor]:
        made = super().copies(tensors, device, arrivals)
        pair = tensors[0].device, device
        seconds = sum(tensor.nbytes for tensor in tensors) * self._slower_by() / 1e9
        if seconds < _SHORTEST_S or pair not in self.pairs:
            return made
        # torch has the receiving stream wait for the copy, and the next copy for the receiving stream.
        with torch.cuda.stream(self.pairs[pair][1]):
            self._waits[device] += seconds > _LONG_S
            is_recorded = self.held is not None  # in a CUDA graph, whose events have no time
            is_timed = seconds > _LONG_S and self._waits[device] % _WATCHED == 0 and not is_recorded
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_timed)]
            for event in events[:1]:
                event.record()
            torch.cuda._sleep(int(seconds * self._hz[device]))
            for event in events[1:]:
                event.record()
        if events:
            self._timed.append((device, seconds, *events))
        arrivals[pair] = self.pairs[pair][1].record_event()
        return made

    def _slower_by(self) -> float:
        """Seconds by which a GB takes longer than over the real link."""
        return max(0.0, 1 / self.gb_per_s - 1 / self.direct_gb_per_s) if self.gb_per_s else 0.0

    def seen_gb_per_s(self) -> dict[str, float]:
        """What each card was sent per second since the last time; corrects the clocks. The cards must be idle."""
        wanted: defaultdict[torch.device, float] = defaultdict(float)
        taken: defaultdict[torch.device, float] = defaultdict(float)
        for card, seconds, first, last in self._timed:
            wanted[card] += seconds
            taken[card] += first.elapsed_time(last) / 1e3
        self._timed.clear()
        seen = {}
        for card, seconds in wanted.items():
            ratio = taken[card] / seconds
            self._hz[card] /= min(max(ratio, 0.5), 2.0)
            seen[str(card)] = 1 / (1 / self.direct_gb_per_s + ratio * self._slower_by())
        return seen


def link_name(gb_per_s: float) -> str:
    return f"{gb_per_s:g}" if gb_per_s else "direct"
