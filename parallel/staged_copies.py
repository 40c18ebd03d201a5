"""Copies between cards that cannot read each other's memory: through pinned host memory, piece by piece.

The source's copy engine fills one of two buffers while the target's empties the other. The source's side stream waits
until the target has read what was in a buffer, the target's until it is filled.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import permutations
from typing import Any

import torch

from .devices import has_peer_access, synchronize
from .offload.copies import PinnedBuffer
from .transfer import Arrivals, CurrentStreams, Pair, SideStreams, module_with_streams, settle

PIECE_BYTES = 2**23  # large enough that the copy takes longer than its launch, small enough that two of them overlap


def copies_between(devices: Sequence[torch.device]) -> SideStreams:
    """How tensors travel between these cards: through the host where a pair is known to have no access."""
    pairs = frozenset(pair for pair in permutations(dict.fromkeys(devices), 2) if has_peer_access(*pair) is False)
    return StagedCopies(pairs=pairs) if pairs else SideStreams()


class StagedCopies(SideStreams):
    """As SideStreams, through host memory for some pairs (None: all). A pair takes two buffers, and is one thread's at
    a time.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES, pairs: Collection[Pair] | None = None) -> None:
        super().__init__()
        self._piece_bytes, self._pairs = piece_bytes, pairs
        self._buffers: dict[Pair, deque[PinnedBuffer]] = {}

    def copies(self, tensors: Sequence[torch.Tensor], device: torch.device, arrivals: Arrivals) -> list[torch.Tensor]:
        pair = tensors[0].device, device
        is_direct = self._pairs is not None and pair not in self._pairs
        module = None if is_direct else module_with_streams(*pair)
        if module is None:
            return super().copies(tensors, device, arrivals)
        buffers = self._buffers_of(pair)
        if device.type == "cuda" and not all(buffer.is_pinned for buffer in buffers):
            return super().copies(tensors, device, arrivals)  # the driver has pinned memory of its own
        return [self._staged(tensor, pair, module, arrivals) for tensor in tensors]

    def _staged(self, tensor: torch.Tensor, pair: Pair, module: Any, arrivals: Arrivals) -> torch.Tensor:
        buffers, device = self._buffers_of(pair), pair[1]
        if not tensor.numel():
            return super().copies((tensor,), device, arrivals)[0]
        leaving, arriving = self.streams_of(pair, module)
        source = tensor.contiguous()
        # The pieces are read on the source's current stream and written on the target's: both must be ours.
        with CurrentStreams(module, leaving, arriving) as (of_source, of_target):
            leaving.wait_stream(of_source)
            copy = torch.empty_like(source, device=device)
            pieces = zip(_pieces(source, self._piece_bytes), _pieces(copy, self._piece_bytes), strict=True)
            for piece, there in pieces:
                buffer = buffers[0]
                buffers.rotate()
                # A CUDA graph cannot wait for what is not in it, nor others for what is. It is replayed in order.
                if buffer.used is not None and buffer.used[0] is self.held:
                    leaving.wait_event(buffer.used[1])
                here = buffer.tensor[: piece.numel()]
                here.copy_(piece, non_blocking=True)
                arriving.wait_event(leaving.record_event())
                there.copy_(here, non_blocking=True)
                buffer.used = self.held, arriving.record_event()
        self.keep((source,), (copy,), leaving, of_target)
        arrivals[pair] = arriving.record_event()
        return copy

    def _buffers_of(self, pair: Pair) -> deque[PinnedBuffer]:
        """The one that was used longest ago comes first."""
        if pair not in self._buffers:
            with torch.inference_mode(False):  # or nobody could write to them outside that mode
                self._buffers[pair] = deque(PinnedBuffer(self._piece_bytes, pair[0]) for _ in range(2))
        return self._buffers[pair]


def _pieces(tensor: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).view(torch.uint8).split(num_bytes)


# ---- how fast a machine is at exchanges between two cards, both sending at once, and at matrix products

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
    seconds = []
    for _ in range(1 + _NUM_ROUNDS):
        synchronize(devices)
        start = clock()
        work()
        synchronize(devices)
        seconds.append(clock() - start)
    return max(statistics.median(seconds[1:]), 1e-9)
