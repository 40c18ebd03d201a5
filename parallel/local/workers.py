"""Threads that work on one run together: how they wait for each other, in what order, and how the run ends."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from ..devices import device_module
from ..runner import MicroBatch
from ..transfer import module_with_streams


class Stopped(BaseException):
    """Unwinds a worker of a run that is to end; no Exception, so that no `except Exception` of a model keeps it."""


class Coordinator:
    """The workers of one run. A policy says what a worker may do when (StageOrder, Prefetch, RoundRobin); its data is
    read and changed only inside `when` or `changing`."""

    def __init__(self, pool: ThreadPool, devices: Sequence[torch.device]) -> None:
        self.is_stopping = self._is_open = False
        self._pool, self._state = pool, ThreadState(devices)
        self._error: BaseException | None = None
        self._changed = threading.Condition(threading.Lock())

    def run(
        self, workers: Sequence[Callable[[], Any]], at_end: Callable[[int], None] = lambda index: None
    ) -> list[Any]:
        """What the workers return, of which none begins before every thread could be had. Args: at_end: called in a
        worker's thread when it has ended or will not begin, and its error is known. Raises: the first exception of a
        worker, where the others are unwound as they next wait; RuntimeError if no thread can be had."""
        results: dict[int, Any] = {}

        def carry(index: int, work: Callable[[], Any]) -> None:
            try:
                with self._state.taken_over():
                    with self.when(lambda: self._is_open):
                        pass
                    results[index] = work()
            except BaseException as error:
                self.fail(error)
            finally:
                at_end(index)

        name = "devicebridge-worker-{}"
        tasks = [self._pool.task(name.format(at), carry, at, work) for at, work in enumerate(workers)]
        try:
            for task in tasks:
                task.start()
            with self._changed:
                self._is_open = True
                self._changed.notify_all()
            wait_for(tasks)
        except BaseException:  # KeyboardInterrupt while waiting, or no thread to be had
            while True:  # however often the user interrupts
                try:
                    self.fail(None)
                    wait_for(tasks)
                    self._error = None
                    break
                except KeyboardInterrupt:
                    continue
            raise
        try:
            if self._error is not None:
                raise self._error
        finally:
            self._error = None  # its traceback holds this frame: memory would wait for the garbage collector
        return [results[index] for index in range(len(workers))]

    def fail(self, error: BaseException | None) -> None:
        """End the run; the first error is what it raises."""
        # Not by `changing`: an interrupt of the caller may come between the lock and the inside of a generator's with.
        with self._changed:
            if not self.is_stopping:
                self._error = error
            self.is_stopping = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def when(self, is_ready: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Begin when is_ready(). Inside, no other worker is inside. Raises: Stopped if the run is to end."""
        with self.changing():
            self.wait(lambda: self.is_stopping or is_ready())
            yield

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """As when, at once and without raising, for what is done while the run ends."""
        with self._changed:
            yield
            self._changed.notify_all()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Inside when: let others be inside until is_ready(). Raises: Stopped then, if the run is to end."""
        if not is_ready():
            self._changed.notify_all()
            self._changed.wait_for(is_ready)
        if self.is_stopping:
            raise Stopped


def wait_for(tasks: Sequence[Task]) -> None:
    """Wait for the tasks that were started, and let no others start; open to interrupts."""
    for task in [task for task in tasks if task.is_started or not task.withdraw()]:
        task.join()


# ---- which microbatch a stage works on when: the plans, and the policies that make workers keep to them


@dataclass(frozen=True)
class Work:
    """One entry of a stage's order."""

    is_backward: bool
    microbatch: int


def num_held(num_stages: int, num_microbatches: int, ahead: int = 0) -> list[int]:
    """How many microbatches each stage holds between forward and backward. Args: ahead: what all but the last hold
    besides, which fills the gaps that uneven stages leave. [num_stages]"""
    last = num_stages - 1
    held = [num_stages - stage + (ahead if stage < last else 0) for stage in range(num_stages)]
    return [min(count, num_microbatches) for count in held]


def plan_order(num_stages: int, num_microbatches: int, ahead: int = 0) -> list[list[Work]]:
    """Every stage's order in a pipeline of 1f1b (PipeDream-Flush in Megatron-LM, arXiv 2104.04473): as many forwards as
    it may hold, then backwards and forwards alternately, then backwards. [num_stages][2 * num_microbatches]"""
    orders = []
    for held in num_held(num_stages, num_microbatches, ahead):
        order = [Work(False, index) for index in range(held)]
        for index in range(num_microbatches):
            order.append(Work(True, index))
            if held + index < num_microbatches:
                order.append(Work(False, held + index))
        orders.append(order)
    return orders


class StageOrder:
    """Lets every stage's work begin in its order, and one that must be alone when no stage works."""

    def __init__(self, run: Coordinator, orders: Sequence[Sequence[Work]]) -> None:
        self._run, self._orders = run, orders
        self._position, self.num_forwards = [0] * len(orders), [0] * len(orders)
        self._busy, self._is_exclusive = set[int](), False

    def begin(self, stage: int, work: Work, is_alone: bool) -> None:
        """Wait until this is next on the stage, if is_alone also for all stages; others wait then. Raises: Stopped."""
        with self._run.when(
            lambda: (
                not (self._busy if is_alone else stage in self._busy or self._is_exclusive)
                and self._orders[stage][self._position[stage]] == work
            )
        ):
            self._busy.add(stage)
            self._is_exclusive = is_alone
            self.num_forwards[stage] += not work.is_backward

    def finish(self, stage: int) -> None:
        with self._run.changing():
            self._busy.remove(stage)
            self._is_exclusive = False
            self._position[stage] += 1


class Prefetch:
    """Prepares the microbatches of a step in order, ahead of the workers, where they are near to their forward."""

    def __init__(
        self, run: Coordinator, microbatches: Sequence[MicroBatch[Any]], may_prepare: Callable[[int], bool]
    ) -> None:
        self._run, self._microbatches, self._may_prepare = run, microbatches, may_prepare
        self._prepared: dict[int, Any] = {}

    def work(self) -> None:
        for index, microbatch in enumerate(self._microbatches):
            with self._run.when(lambda index=index: self._may_prepare(index)):  # type: ignore[misc]
                pass
            prepared = microbatch.prepare()
            with self._run.when():
                self._prepared[index] = prepared
            del prepared

    def take(self, index: int) -> Any:
        """What prepare returned, to be asked for once. Raises: Stopped if the run is to end."""
        with self._run.when(lambda: index in self._prepared):
            return self._prepared.pop(index)


class ThreadState:
    """What torch keeps per thread, as the thread that makes this has it."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._is_grad, self._is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = [autocast_of(kind) for kind in {"cpu", *(device.type for device in devices)}]
        self._dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        self._function_modes = overrides._get_current_function_mode_stack()
        module: Any = device_module(devices[0])
        streams = module_with_streams(devices[0], devices[0])
        self._streams = [] if streams is None else [streams.current_stream(device) for device in devices]
        self._device = module.current_device() if hasattr(module, "set_device") else None
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
            # Neither is put back: the thread has no other use, and its next task takes over another state.
            for stream in self._streams:
                self._module.set_stream(stream)
            if self._device is not None:
                self._module.set_device(self._device)  # last, since choosing a stream chooses its device
            yield


def autocast_of(kind: str) -> tuple[str, torch.dtype, bool] | None:
    """Device type, dtype and whether casts are cached, where autocast is on; else None."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


# ---- threads that are kept from one run to the next: libraries plan kernels for every thread anew, which takes longer
# than a microbatch may. They are daemons, unlike those of concurrent.futures: the process may exit while one works.

Tasks = SimpleQueue["Task | None"]  # None ends a thread
_IDLE = "devicebridge-idle"


class ThreadPool:
    """As many threads as there are tasks at once; they end when this is collected."""

    def __init__(self) -> None:
        # Of threads that have nothing to do, the last one to have become idle at the end. Without locks: the collector
        # may come in the middle of anything that Python does.
        self.idle: deque[Tasks] = deque()

    def __del__(self) -> None:
        for tasks in self.idle:
            tasks.put(None)

    def task(self, name: str, work: Callable[..., None], *args: Any) -> Task:
        """work(*args), which raises nothing, for one of the threads, in the context of the one that asks; not begun."""
        return Task(name, partial(contextvars.copy_context().run, work, *args), self)

    def give(self, task: Task) -> None:
        try:
            tasks = self.idle.pop()
        except IndexError:
            tasks = SimpleQueue()
            tasks.put(task)  # first: an interrupt may come in between
            threading.Thread(target=_serve, args=(tasks,), name=_IDLE, daemon=True).start()
            return
        tasks.put(task)


class Task:
    """Work for a thread, to be started once; as a threading.Thread is."""

    def __init__(self, name: str, call: Callable[[], None], pool: ThreadPool) -> None:
        self.is_started = False
        self._name, self._call, self.pool = name, call, pool
        self._owner: dict[str, str] = {}  # who came first: a thread to do it, or who withdraws it
        self.done = threading.Event()

    def start(self) -> None:
        """Raises: RuntimeError if no thread can be had. Whether a thread has it after any error, withdraw tells."""
        self.pool.give(self)
        self.is_started = True

    def withdraw(self) -> bool:
        """Whether no thread does it or will; one that does must be waited for."""
        return self._owner.setdefault("it", "withdrawn") == "withdrawn"

    def join(self) -> None:
        """Wait until the thread has let go of it."""
        # With a limit: an interrupt just before a wait, or on Windows during one, is noticed when the wait ends.
        while not self.done.wait(timeout=0.2):
            pass

    def run(self) -> None:
        """In this thread."""
        threading.current_thread().name = self._name
        if self._owner.setdefault("it", "begun") == "begun":
            self._call()
        threading.current_thread().name = _IDLE
        del self._call


def _serve(tasks: Tasks) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        task.pool.idle.append(tasks)  # no pool ends whose task has not
        del task.pool  # which may end here, and this thread with it
        task.done.set()  # the thread holds nothing of it any more
        del task
