"""How fast a machine is at what a divided block needs: exchanges between two cards, and matrix products.

An exchange has both cards send at once, beside their kernels, as an all-reduce of partial sums does.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .devices import synchronize
from .staged_copies import copies_between
from .transfer import Arrivals, SideStreams, settle

_EXCHANGED_BYTES = 2**25
_NUM_EXCHANGES, _NUM_ROUNDS = 2, 3
_LARGEST_PRODUCT = 8192  # rows and columns: long beside its launch on every card
_LONG_ENOUGH_S = 5e-3
Clock = Callable[[], float]  # seconds


def exchange_speed(
    one: torch.device, other: torch.device, copies: SideStreams | None = None, clock: Clock = time.perf_counter
) -> float:
    """Bytes per second that each card sends in a large exchange; takes about 100 MiB of each card."""
    copies = copies or copies_between((one, other))
    sent = [
        (torch.ones(_EXCHANGED_BYTES, dtype=torch.uint8, device=source), to)
        for source, to in ((one, other), (other, one))
    ]

    def exchange() -> None:
        for _ in range(_NUM_EXCHANGES):
            arrivals: Arrivals = {}
            got = [copies.copy(tensor, to, arrivals) for tensor, to in sent]
            settle(arrivals)  # what is launched next waits for these
            del got

    return _NUM_EXCHANGES * _EXCHANGED_BYTES / _median_s(exchange, (one, other), clock)


def product_speed(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Operations per second of a large matrix product in half precision."""
    size = 256
    while True:
        # Of numbers that differ: a card computes faster with constants, which take less power.
        matrix = torch.arange(size * size, dtype=torch.float32, device=device).sin().view(size, size).half()
        seconds = _median_s(functools.partial(torch.matmul, matrix, matrix), (device,), clock)
        if size >= _LARGEST_PRODUCT or seconds > _LONG_ENOUGH_S:
            return 2.0 * size**3 / seconds
        size *= 2


def _median_s(work: Callable[[], object], devices: Sequence[torch.device], clock: Clock) -> float:
    """Of a few rounds; the first sets up what the others use."""
    seconds = []
    for _ in range(1 + _NUM_ROUNDS):
        synchronize(devices)
        start = clock()
        work()
        synchronize(devices)
        seconds.append(clock() - start)
    return max(statistics.median(seconds[1:]), 1e-9)
