"""Records the launches of a thread per card as one CUDA graph, which one launch on the first card replays."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..devices import CPU
from ..staged_copies import SideStreams
from ..transfer import CurrentStreams
from .graphs import Addresses, Graphs, Run, Work

_ONE_AT_A_TIME = threading.Lock()  # recordings of this process


def can_record(devices: Sequence[torch.device]) -> bool:
    return all(device.type == "cuda" for device in devices) and torch.version.hip is None


def graphs_on(devices: Sequence[torch.device], copies: SideStreams, addresses: Addresses) -> Graphs | None:
    """What replays work on these devices, between which tensors travel so; None where there are no such graphs."""
    return Graphs(devices, partial(GraphRecorder, devices, copies), addresses) if can_record(devices) else None


class GraphRecorder:
    """Records on several CUDA cards, the first of which launches the graphs. These share pools of memory, so each must
    be launched behind the one before. Allocations of a thread on the further cards come from a pool of its own: torch's
    allocator tells by the thread what belongs to a recording there, and other threads may allocate meanwhile."""

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
        """Whether the first card has done all that was launched on it before this mark; asked without waiting."""
        return torch.cuda.current_stream(self._devices[0]).record_event().query

    def looked_at(self, work: Work, waiting: list[str]) -> Work:
        """The same work, which adds to `waiting` what in it has the host wait for a card: that ends a recording, and
        where the driver's own allocator is used, the process."""

        def run() -> Any:
            with _Looking(waiting):
                return work()

        return run

    def record(self, run: Run, work: Sequence[Work]) -> Callable[[], None]:
        """What replays all that the ranks' work launches, behind the work on the cards' current streams.
        Raises: an error of a rank, and RuntimeError for launches that cannot be recorded."""
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
            is_collecting = gc.isenabled()
            gc.disable()  # what the collector finalises may wait for a card, which ends a recording
            try:
                with torch.cuda.device(self._devices[0]), CurrentStreams(torch.cuda, *self._streams):
                    graph = _capture(on_all, self._pools[0], self._devices[0])
            finally:
                if is_collecting:
                    gc.enable()
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
            held.clear()
            self._side_streams.held = None

    def _part(self, rank: int, work: Work) -> None:
        with CurrentStreams(torch.cuda, *self._streams), self._allocating(rank), torch.cuda.device(self._devices[rank]):
            try:
                work()
            except BaseException as error:
                # What it holds must be freed in the recording: the driver's allocator ends the process if it is later.
                traceback.clear_frames(error.__traceback__)
                raise

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


class _Looking(TorchDispatchMode):
    """Notes operations that have the host wait for a card, by name."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_by_numbers = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        tensors = [each for each in tree_leaves((args, kwargs, output)) if isinstance(each, torch.Tensor)]
        if func is torch.ops.aten.index.Tensor:
            is_by_numbers = any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)
        kinds = {each.device.type for each in tensors if each.device != CPU or each.ndim and not each.is_pinned()}
        if is_by_numbers and kinds != {"cpu"} or len(kinds) > 1:
            self._found.append(str(func))
        return output


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
