"""Records the launches of a thread per card as one CUDA graph, which one launch on the first card replays."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from ..transfer import CurrentStreams, SideStreams
from .graphs import Run, Work

_ONE_AT_A_TIME = threading.Lock()  # recordings of this process


def can_record(devices: Sequence[torch.device]) -> bool:
    return all(device.type == "cuda" for device in devices) and torch.version.hip is None


class GraphRecorder:
    """Records on several CUDA cards, the first of which launches the graphs. Tests have another for other devices.

    All graphs share pools of memory, so each must be launched behind the one before. Allocations of a thread on the
    further cards come from a pool of its own: torch's allocator tells by the thread what belongs to a recording there,
    and other threads may allocate meanwhile.
    """

    def __init__(self, devices: Sequence[torch.device], side_streams: SideStreams) -> None:
        self._devices, self._side_streams = tuple(devices), side_streams
        self._streams = [torch.cuda.Stream(device) for device in devices]
        self._pools: list[Any] = [torch.cuda.graph_pool_handle() for _ in devices]
        # torch's own allocator has pools; the driver's has none, and records allocations and frees themselves.
        self._has_pools = torch.cuda.get_allocator_backend() == "native"
        self._is_used = False
        self._taken: list[tuple[int, Any]] = []  # cards and pools that are held beside those of the graphs
        weakref.finalize(self, _release, self._taken)

    def mark(self) -> Callable[[], bool]:
        """See Recorder."""
        return torch.cuda.current_stream(self._devices[0]).record_event().query

    def record(self, run: Run, work: Sequence[Work]) -> Callable[[], None]:
        """What replays all that the ranks' work launches, behind the work on the cards' current streams; see Recorder.

        Raises: an error of a rank, and RuntimeError for launches that cannot be recorded.
        """
        with _ONE_AT_A_TIME:
            if not self._is_used:
                torch.cuda.empty_cache()  # a recording cannot take what is cached elsewhere
                self._is_used = True
            current = self._current_streams()
            for stream, before in zip(self._streams, current, strict=True):
                stream.wait_stream(before)
            torch._C._cuda_clearCublasWorkspaces()  # so that those of the graph's kernels are made inside
            on_all = partial(
                self._on_all_cards, run, [partial(self._part, rank, each) for rank, each in enumerate(work)]
            )
            with torch.cuda.device(self._devices[0]), CurrentStreams(torch.cuda, *self._streams):
                graph = _capture(on_all, self._pools[0], self._devices[0])
            for stream, before in zip(self._streams, current, strict=True):
                before.wait_stream(stream)

        def replay() -> None:
            """On the first card's stream, when all have come so far; the others go on behind it."""
            first, *others = self._current_streams()
            _join(first, others)
            graph.replay()
            for stream in others:
                stream.wait_stream(first)

        return replay

    def _current_streams(self) -> list[Any]:
        return [torch.cuda.current_stream(device) for device in self._devices]

    def _on_all_cards(self, run: Run, work: Sequence[Work]) -> None:
        """Inside a recording on the first card's stream, which the streams of all cards join."""
        first, *others = self._streams
        others += [stream for pair in self._side_streams.pairs.values() for stream in pair]
        for stream in others:
            stream.wait_stream(first)
        held = self._side_streams.held = []
        try:
            run(work)
            _join(first, others)
            for stream in others:
                stream.wait_stream(first)
            held.clear()  # what is given back on one stream has been read on all others
            torch._C._cuda_clearCublasWorkspaces()  # they are the graph's, as is all that it allocates
            _join(first, others)
        finally:
            self._side_streams.held = None

    def _part(self, rank: int, work: Work) -> None:
        """One rank's work, in its thread."""
        with CurrentStreams(torch.cuda, *self._streams), self._allocating(rank), torch.cuda.device(self._devices[rank]):
            work()

    @contextmanager
    def _allocating(self, rank: int) -> Iterator[None]:
        """Inside, this thread's allocations on the further cards come from the rank's pool."""
        begun: list[int] = []
        try:
            for device in self._devices[1:] if self._has_pools else ():
                torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self._pools[rank])
                begun.append(device.index)
                self._taken.append((device.index, self._pools[rank]))
            yield
        finally:
            for index in begun:
                torch._C._cuda_endAllocateToPool(index, self._pools[rank])


def _join(first: Any, others: Sequence[Any]) -> None:
    for stream in others:
        first.wait_stream(stream)


def _release(taken: Sequence[tuple[int, Any]]) -> None:
    for index, pool in taken:
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, pool)


def _capture(compute: Callable[[], None], pool: Any, device: torch.device) -> torch.cuda.CUDAGraph:
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
        # Tell the random numbers and the allocator that a recording which failed is over: up to torch 2.11 at least
        # capture_end raises before it does. No memory that crossed streams would be freed any more, and dropout would
        # fail for as long as the process lives.
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())  # same seed and offset, in no recording
        with suppress(RuntimeError):  # where it has
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise
    return graph
