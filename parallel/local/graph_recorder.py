"""Records what is launched on several cards as one CUDA graph, which one launch on the first card replays."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ...patches.cuda_graph_memory import ONE_AT_A_TIME, capture
from ..transfer import CurrentStreams, SideStreams
from .device_workers import can_take_turns
from .divided_calls import Replay
from .exchange import Exchange


def can_record(devices: Sequence[torch.device]) -> bool:
    """Whether one thread computes for all of these devices, and its launches can be recorded."""
    return all(device.type == "cuda" for device in devices) and torch.version.hip is None and can_take_turns()


class CardsRecorder:
    """Records on several CUDA cards. Tests have another with the same methods, for devices without graphs.

    All graphs share one pool of memory on each card, so that each must be launched behind the one before: on the same
    stream of the first card, or on one that waits for it.

    Args:
        devices: the first launches the graphs. side_streams: on which what is recorded copies between the cards.
    """

    def __init__(self, devices: Sequence[torch.device], side_streams: SideStreams) -> None:
        self._devices = tuple(dict.fromkeys(devices))
        self._streams = [torch.cuda.Stream(device) for device in self._devices]
        self._side_streams = side_streams
        self._pool: Any = torch.cuda.graph_pool_handle()
        # torch's own allocator has a pool per card; the driver's has none, and records what is taken and given back.
        self._has_pools = torch.cuda.get_allocator_backend() == "native"
        self._is_used = False
        self._taken: list[int] = []  # cards whose pools are held beside those of the graphs
        weakref.finalize(self, _release, self._taken, self._pool)

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What replays all that compute launches, when the cards' current streams have come so far.

        Raises: what compute raises, and RuntimeError for what cannot be recorded.
        """
        with ONE_AT_A_TIME:
            if not self._is_used:
                torch.cuda.empty_cache()  # a recording cannot take what is cached elsewhere
                self._is_used = True
            current = [torch.cuda.current_stream(device) for device in self._devices]
            for mine, before in zip(self._streams, current, strict=True):
                mine.wait_stream(before)
            with torch.cuda.device(self._devices[0]), CurrentStreams(torch.cuda, *self._streams):
                graph = self._record(compute)
            for mine, before in zip(self._streams, current, strict=True):
                before.wait_stream(mine)
        return lambda: self._launch(graph)

    def mark(self) -> Callable[[], bool]:
        """Whether the first card has done all that was launched on it before this mark; asked without waiting."""
        return torch.cuda.current_stream(self._devices[0]).record_event().query

    def _record(self, compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch._C._cuda_clearCublasWorkspaces()  # so that those of the graph's kernels are made inside

        def on_all_cards() -> None:
            with self._further_cards():
                compute()

        return capture(on_all_cards, self._pool, self._devices[0])

    @contextmanager
    def _further_cards(self) -> Iterator[None]:
        """Inside, what other cards do on their streams is recorded as well, into memory of their pools."""
        first, *others = self._streams
        further = [device.index for device in self._devices[1:]]
        begun: list[int] = []
        try:
            for index in further if self._has_pools else ():
                torch._C._cuda_beginAllocateCurrentThreadToPool(index, self._pool)
                begun.append(index)
                self._taken.append(index)
            joined = [*others, *(stream for pair in self._side_streams.pairs.values() for stream in pair)]
            for stream in joined:
                stream.wait_stream(first)
            held = self._side_streams.held = []
            try:
                yield
                _join(first, joined)
                for stream in joined:
                    stream.wait_stream(first)
                held.clear()  # what is given back on one stream has been read on all others
                torch._C._cuda_clearCublasWorkspaces()  # they are the graph's, as is all that it allocates
                _join(first, joined)
            finally:
                self._side_streams.held = None
        finally:
            for index in begun:
                torch._C._cuda_endAllocateToPool(index, self._pool)

    def _launch(self, graph: torch.cuda.CUDAGraph) -> None:
        _launch(graph, [torch.cuda.current_stream(device) for device in self._devices])


class ThreadsRecorder:
    """Records what a thread for each of several CUDA cards launches; as CardsRecorder, for threads that meet.

    What a thread allocates on the further cards comes from a pool of its own: torch's allocator tells by the thread
    what belongs to a recording there, and other threads may prepare what comes next.
    """

    def __init__(self, devices: Sequence[torch.device], side_streams: SideStreams) -> None:
        self._devices, self._side_streams = tuple(devices), side_streams
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._pools: list[Any] = [torch.cuda.graph_pool_handle() for _ in devices]
        self._current: list[Any] = [None] * len(self._devices)  # stream of each card's thread
        self._has_pools = torch.cuda.get_allocator_backend() == "native"  # as in CardsRecorder
        self._is_used = False
        self._taken: list[tuple[int, Any]] = []  # cards and pools that are held beside those of the graphs
        weakref.finalize(self, _release_all, self._taken)

    def arrive(self, rank: int) -> None:
        """See Recorder."""
        self._current[rank] = torch.cuda.current_stream(self._devices[rank])

    def release(self) -> None:
        """See Recorder."""
        if self._taken:
            _release_all(self._taken)
            self._taken.clear()
            self._pools[:] = [torch.cuda.graph_pool_handle() for _ in self._devices]
            torch.cuda.empty_cache()

    def mark(self) -> Callable[[], bool]:
        """See Recorder."""
        return torch.cuda.current_stream(self._devices[0]).record_event().query

    def record(self, rank: int, exchange: Exchange, compute: Callable[[], None]) -> Replay | None:
        """See Recorder. Raises: what compute raises on this card, and RuntimeError for what cannot be recorded."""
        self.arrive(rank)
        exchange.once(rank, "a recording is prepared", self._prepare)
        with torch.cuda.device(self._devices[rank]), CurrentStreams(torch.cuda, *self._streams):
            if rank != 0:
                self._part(rank, exchange, compute)
                return None
            try:
                with ONE_AT_A_TIME:
                    graph = capture(partial(self._part, 0, exchange, compute), self._pools[0], self._devices[0])
            finally:
                self._side_streams.held = None
        return Replay(lambda: _launch(graph, self._current), lambda rank: None)

    def _prepare(self) -> None:
        """What all threads have launched so far comes before the recording, and no memory is cached elsewhere."""
        if not self._is_used:
            torch.cuda.empty_cache()
            self._is_used = True
        for stream, current in zip(self._streams, self._current, strict=True):
            stream.wait_stream(current)
        torch._C._cuda_clearCublasWorkspaces()  # so that those of the graph's kernels are made inside

    def _part(self, rank: int, exchange: Exchange, compute: Callable[[], None]) -> None:
        """One thread's, while the first card's stream is recorded."""
        exchange.once(rank, "a recording begins", self._join_all)
        begun: list[int] = []
        try:
            for device in self._devices[1:] if self._has_pools else ():
                torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self._pools[rank])
                begun.append(device.index)
                self._taken.append((device.index, self._pools[rank]))
            compute()
        finally:
            for index in begun:
                torch._C._cuda_endAllocateToPool(index, self._pools[rank])
        exchange.once(rank, "a recording ends", self._leave_all)

    def _others(self) -> list[Any]:
        return [*self._streams[1:], *(stream for pair in self._side_streams.pairs.values() for stream in pair)]

    def _join_all(self) -> None:
        self._side_streams.held = []
        for stream in self._others():
            stream.wait_stream(self._streams[0])

    def _leave_all(self) -> None:
        first, others = self._streams[0], self._others()
        _join(first, others)
        for stream in others:
            stream.wait_stream(first)
        self._side_streams.held = None  # what is given back on one stream has been read on all others
        torch._C._cuda_clearCublasWorkspaces()  # they are the graph's, as is all that it allocates
        _join(first, others)


def _launch(graph: torch.cuda.CUDAGraph, streams: Sequence[Any]) -> None:
    """On the first card's stream, when all have come so far; the others go on behind it."""
    first, *others = streams
    _join(first, others)
    graph.replay()
    for stream in others:
        stream.wait_stream(first)


def _join(first: Any, others: Sequence[Any]) -> None:
    for stream in others:
        first.wait_stream(stream)


def _release(taken: Sequence[int], pool: Any) -> None:
    _release_all([(index, pool) for index in taken])


def _release_all(taken: Sequence[tuple[int, Any]]) -> None:
    for index, pool in taken:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)
