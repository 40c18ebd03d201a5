"""Copies between cards that cannot read each other's memory: through pinned host memory, piece by piece.

The source's copy engine fills one of two buffers while the target's empties the other. The source's side stream waits
until the target has read what was in a buffer, the target's until it is filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import permutations
from typing import Any

import torch

from .devices import has_peer_access
from .offload.copies import PinnedBuffer
from .transfer import Arrivals, CurrentStreams, Pair, SideStreams, module_with_streams

PIECE_BYTES = 2**23  # large enough that the copy takes longer than its launch, small enough that two of them overlap


def pairs_through_host(devices: Sequence[torch.device]) -> frozenset[Pair]:
    """Of these cards the pairs, source and target, that are known to have no access to each other's memory."""
    return frozenset(pair for pair in permutations(dict.fromkeys(devices), 2) if has_peer_access(*pair) is False)


def copies_between(devices: Sequence[torch.device]) -> SideStreams:
    """How tensors travel between these cards; some pairs may have access, and others not."""
    pairs = pairs_through_host(devices)
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
