"""Copies between cards beside their kernels, and how fast these and products are."""

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
from .transfer import Arrivals, CurrentStreams, Pair, Send, copy_to, module_with_streams, settle

PIECE_BYTES = 2**23  # large enough that the copy takes longer than its launch, small enough that two of them overlap


def copies_between(devices: Sequence[torch.device]) -> SideStreams:
    """How tensors travel between these cards: through the host where a pair is known to have no access."""
    pairs = permutations(dict.fromkeys(devices), 2)
    return SideStreams(frozenset(pair for pair in pairs if has_peer_access(*pair) is False))


class SideStreams:
    """A pair of streams for the copies from each card to each other one: torch's own copy would wait for all work of
    the target's current stream, which may be another forward's. To be kept from run to run, since memory that was freed
    on a stream is only handed out again there. A pair is one thread's at a time. Args: staged: pairs that go through
    pinned host memory, piece by piece; None for all. The source's copy engine fills one of two buffers while the
    target's empties the other."""

    def __init__(self, staged: Collection[Pair] | None = (), piece_bytes: int = PIECE_BYTES) -> None:
        self.pairs: dict[Pair, tuple[Any, Any]] = {}  # the stream that reads the source, the one that writes the target
        # While a CUDA graph is recorded: what is copied, and copies. The allocator must not give their memory to
        # others meanwhile, and has no events to wait for.
        self.held: list[torch.Tensor] | None = None
        self._staged, self._piece_bytes = staged, piece_bytes
        self._buffers: dict[Pair, deque[PinnedBuffer]] = {}  # the one that was used longest ago comes first

    def to_ranks(self, devices: Sequence[torch.device]) -> Send:
        """How ranks on these devices send each other tensors."""
        return lambda tensors, rank, arrivals: (
            tensors if tensors[0].device == devices[rank] else self.copies(tensors, devices[rank], arrivals)
        )

    def copy(self, tensor: torch.Tensor, device: torch.device, arrivals: Arrivals) -> torch.Tensor:
        return self.copies((tensor,), device, arrivals)[0]

    def copies(self, tensors: Sequence[torch.Tensor], device: torch.device, arrivals: Arrivals) -> list[torch.Tensor]:
        """Copies of tensors of one device, which its current stream must not use before settle(arrivals). Devices
        without streams, and copies from or to the host, take the ordinary way."""
        pair = tensors[0].device, device
        module = module_with_streams(*pair)
        if module is None:
            return [copy_to(tensor, device) for tensor in tensors]
        if pair not in self.pairs:
            self.pairs[pair] = module.Stream(pair[0]), module.Stream(device)
        leaving, arriving = self.pairs[pair]
        buffers = self._buffers_of(pair) if self._staged is None or pair in self._staged else None
        if buffers is not None:
            tensors = [tensor.contiguous() for tensor in tensors]
        # Copies run on the source's current stream, and what comes from the host on the target's: both must be ours.
        with CurrentStreams(module, leaving, arriving) as (of_source, of_target):
            leaving.wait_stream(of_source)
            if buffers is None:
                made = [tensor.to(device, non_blocking=True) for tensor in tensors]
            else:
                made = [self._staged_copy(tensor, device, buffers, leaving, arriving) for tensor in tensors]
        if self.held is not None:
            self.held += (*tensors, *made)
        else:
            for tensor, copy in zip(tensors, made, strict=True):
                tensor.record_stream(leaving)
                copy.record_stream(of_target)
        arrivals[pair] = arriving.record_event()
        return made

    def _staged_copy(
        self, source: torch.Tensor, device: torch.device, buffers: deque[PinnedBuffer], leaving: Any, arriving: Any
    ) -> torch.Tensor:
        copy = torch.empty_like(source, device=device)
        pieces = (each.view(-1).view(torch.uint8).split(self._piece_bytes) for each in (source, copy))
        for piece, there in zip(*pieces, strict=True):
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
        return copy

    def _buffers_of(self, pair: Pair) -> deque[PinnedBuffer] | None:
        """None where memory cannot be pinned: the driver has pinned memory of its own."""
        if pair not in self._buffers:
            with torch.inference_mode(False):  # or nobody could write to them outside that mode
                self._buffers[pair] = deque(PinnedBuffer(self._piece_bytes, pair[0]) for _ in range(2))
        found = self._buffers[pair]
        return found if pair[1].type != "cuda" or all(buffer.is_pinned for buffer in found) else None


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
