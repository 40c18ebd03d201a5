"""Host threads that each carry one forward through a split model, and copies that travel beside the kernels.

What turns.py (inference: one baton) and pipeline.py (training: one thread per device) have in common.

torch keeps grad mode, autocast, dispatch modes, current device and streams per thread; a lane takes over those of the
thread that starts it. torch's own copy between cards runs on the source's current stream and first waits for all that
the target's current stream has been given, there possibly another forward's kernels. So copies between cards run on a
pair of side streams: they wait for the source's kernels so far, and the target's current stream waits for them once the
lane goes on there. Both tensors are recorded on the streams that use them, lest the caching allocator hand out their
memory early. Devices without streams, and copies from or to the host, take the ordinary way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import overrides
from torch.utils import _python_dispatch

from ..devices import device_module
from .bridge import copy_to
from .thread_pool import Crew, Task

Pair = tuple[torch.device, torch.device]  # source, target


class Stopped(BaseException):
    """Unwinds a lane of a run that is to end; no Exception, so that no `except Exception` of a model keeps it."""


class Lane(Protocol):
    """What a thread carries."""

    index: int
    ended: threading.Event


def make_task(crew: Crew, work: Callable[..., None], lane: Lane, *args: Any) -> Task:
    """work(lane, *args) for a thread of the crew."""
    return crew.task(f"devicebridge-forward-{lane.index}", work, lane, *args)


def wait_for(lanes: Sequence[Lane], tasks: Sequence[Task]) -> None:
    """Wait for the tasks that were started, and let no others start; open to interrupts.

    An interrupt that comes just before a wait without a limit, or on Windows during one, is noticed when it ends, hence
    the limit.
    """
    pairs = zip(lanes, tasks, strict=True)
    started = [(lane, task) for lane, task in pairs if task.is_started or not task.withdraw()]
    for lane, _ in started:
        while not lane.ended.wait(timeout=0.2):
            pass
    for _, task in started:
        task.join()


def stop_and_wait(stop: Callable[[], None], lanes: Sequence[Lane], tasks: Sequence[Task]) -> None:
    """Stop a run and wait for its end, however often the user interrupts."""
    while True:
        try:
            stop()
            return wait_for(lanes, tasks)
        except KeyboardInterrupt:
            continue


class Ended(Protocol):
    """A run that is over; error is what ended it early."""

    error: BaseException | None


def raise_error_of(run: Ended) -> None:
    """Raise what ended a run early, if anything did; the run forgets it."""
    error, run.error = run.error, None
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame: memory would wait for the garbage collector


class SideStreams:
    """The two streams on which copies from source to target run, beside the kernels of both."""

    def __init__(self, module: Any, source: torch.device, target: torch.device) -> None:
        self.module = module
        self.source, self.target = source, target
        self.leaving, self.arriving = module.Stream(source), module.Stream(target)

    def copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on target and the event of its arrival."""
        self.leaving.wait_stream(self.module.current_stream(self.source))
        # torch runs the copy on the source's current stream and has it wait for the target's: both must be ours.
        with self.module.stream(self.leaving), self.module.stream(self.arriving):
            copy = tensor.to(self.target, non_blocking=True)
        tensor.record_stream(self.leaving)
        copy.record_stream(self.module.current_stream(self.target))
        return copy, self.arriving.record_event()


def copy_beside(
    side_streams: dict[Pair, Any], tensor: torch.Tensor, device: torch.device, arrivals: dict[Pair, Any] | None
) -> torch.Tensor:
    """A copy on device which its current stream must not use before settle(arrivals); an ordinary one without them.

    Args:
        side_streams: made once per pair and kept by the caller: memory freed on one stream is only handed out again on
            the same stream.
    """
    module = module_with_streams(tensor.device, device)
    if arrivals is None or module is None:
        return copy_to(tensor, device)
    pair = (tensor.device, device)
    streams = side_streams.get(pair)
    if streams is None:
        streams = side_streams[pair] = SideStreams(module, *pair)
    copy, arrivals[pair] = streams.copy(tensor)
    return copy


def settle(arrivals: dict[Pair, Any], device: torch.device | None = None) -> None:
    """Have the targets' current streams wait for the copies under way, and forget these.

    Args:
        device: the only target to do so for; None for all.
    """
    for pair in [pair for pair in arrivals if device is None or pair[1] == device]:
        module = device_module(pair[1])
        assert module is not None
        module.current_stream(pair[1]).wait_event(arrivals.pop(pair))


def module_with_streams(source: torch.device, target: torch.device) -> Any:
    """torch.cuda or its like if both devices are of it and it has streams; else None."""
    if source.type != target.type:
        return None
    module = device_module(source)
    needs = ("Stream", "stream", "current_stream", "set_stream")
    return module if all(hasattr(module, name) for name in needs) else None


class ThreadState:
    """What torch keeps per thread, as the thread that makes this has it."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._is_grad, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [autocast_of(kind) for kind in {"cpu", *(device.type for device in devices)}]
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self._function_modes = overrides._get_current_function_mode_stack()
        module = device_module(devices[0])
        has_streams = module_with_streams(devices[0], devices[0]) is not None
        self._streams = [module.current_stream(device) for device in devices if has_streams and module is not None]
        self._device = module.current_device() if module is not None and hasattr(module, "set_device") else None
        self._module = module

    @contextlib.contextmanager
    def taken_over(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._is_grad))
            for kind, dtype, is_cached in filter(None, self._autocast):
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=is_cached))
            # Pushed, not entered: entering a mode a second time may start its bookkeeping anew.
            for mode in self._function_modes:
                overrides._push_mode(mode)
                stack.callback(overrides._pop_mode)
            for mode in self._dispatch_modes:
                _python_dispatch._push_mode(mode)
                stack.callback(_python_dispatch._pop_mode)
            self._take_over_device()
            yield

    def _take_over_device(self) -> None:
        """Nothing is put back: the thread has no other use, and its next job takes over another state."""
        module: Any = self._module
        for stream in self._streams:
            module.set_stream(stream)
        if self._device is not None:
            module.set_device(self._device)  # last, since choosing a stream chooses its device


def autocast_of(kind: str) -> tuple[str, torch.dtype, bool] | None:
    """Device type, dtype and whether casts are cached, where autocast is on; else None."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
