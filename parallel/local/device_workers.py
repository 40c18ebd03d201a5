"""Who computes for each device of one forward: a thread per device, or one thread that does so in turns.

Threads launch the kernels of all devices under Python's one lock, and a thread that waits for another one gives the
lock away and has to get it back. Where kernels are short, that takes longer than launching them
(docs/internals/experiments.md). In turns there is no waiting: home's own thread computes for home until it needs what
another device has not brought yet. Then it goes on for that device, as a greenlet, and comes back when that one needs
something in turn. The devices compute at the same time all the same, since launching does not wait for a kernel.

What torch keeps per thread is one for all devices then. The current device is set at every turn. Streams are per device
already. Grad mode, autocast and the like must be those in which the block began, wherever one device lets others go on.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from ..devices import device_module
from ..transfer import current_device
from .thread_pool import Task, ThreadPool
from .workers import ThreadState

try:
    import greenlet
except ImportError:  # no build for this Python: a thread per device
    greenlet = None  # type: ignore[assignment]

_HOMES: dict[int, list[Any]] = {}  # of a thread: greenlets of it that let others go on, the last one last


class Queue(Protocol):
    """Of what one worker hands another."""

    def put(self, item: Any) -> None: ...

    def get(self) -> Any:
        """The oldest item; waits until there is one."""


class DeviceWorkers(Protocol):
    """A worker for every device but home, whose own is the thread that makes these."""

    def queue(self) -> Queue:
        """One that works between these workers."""

    def start(self, rank: int, work: Callable[[], None]) -> None:
        """Have a device's worker do this, at once or as soon as somebody waits for it."""

    def here(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """What the work of a device is to be done in: its current device, and home's grad mode and the like."""

    def rank(self) -> int:
        """Of the device for which the caller computes."""

    def begin_block(self) -> None:
        """Home begins a block."""

    def join(self) -> None:
        """Return when no worker computes any more. They have been told to end."""


def make_workers(pool: ThreadPool, devices: Sequence[torch.device], *, in_turns: bool) -> DeviceWorkers:
    """Args: in_turns: one thread for all, where greenlets are to be had."""
    return _Turns(devices) if in_turns and can_take_turns() else _Threads(pool, devices)


def can_take_turns() -> bool:
    """Whether one thread can compute for all devices."""
    return greenlet is not None


def suspended_frames(thread: int) -> list[types.FrameType]:
    """Where code of this thread stands that waits for another greenlet of it, as home's does while this one computes
    for another device."""
    return [home.gr_frame for home in _HOMES.get(thread, ()) if home.gr_frame is not None]


@contextlib.contextmanager
def letting_others_go_on() -> Iterator[Any]:
    """Inside, the current greenlet, which is given, may wait for others that it has begun."""
    thread, home = threading.get_ident(), greenlet.getcurrent()
    _HOMES.setdefault(thread, []).append(home)
    try:
        yield home
    finally:
        _HOMES[thread].remove(home)
        if not _HOMES[thread]:
            del _HOMES[thread]


def modes_of_thread(devices: Sequence[torch.device]) -> Callable[[], tuple[object, ...]]:
    """What tells, whenever it is called, what torch keeps per thread beside device and streams."""
    kinds = [kind for kind in {*(device.type for device in devices), "cpu"} if torch.amp.is_autocast_available(kind)]

    def modes() -> tuple[object, ...]:
        casts = tuple(map(torch.is_autocast_enabled, kinds))
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            any(casts) and (casts, *map(torch.get_autocast_dtype, kinds)),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        )

    return modes


class _Threads:
    """A thread per device."""

    def __init__(self, pool: ThreadPool, devices: Sequence[torch.device]) -> None:
        self._pool, self._devices = pool, devices
        self._state = ThreadState(devices)
        self._ranks: dict[int, int] = {}
        self._tasks: list[Task] = []

    def queue(self) -> Queue:
        # Two threads meet every 100 microseconds or so: a queue that is written in C costs a tenth of a condition.
        return SimpleQueue()

    def start(self, rank: int, work: Callable[[], None]) -> None:
        task = self._pool.task(f"devicebridge-{self._devices[rank]}", work)
        task.start()
        self._tasks.append(task)

    @contextlib.contextmanager
    def here(self, rank: int) -> Iterator[None]:
        self._ranks[threading.get_ident()] = rank
        with self._state.taken_over(), current_device(self._devices[rank]):
            yield

    def rank(self) -> int:
        return self._ranks.get(threading.get_ident(), 0)

    def begin_block(self) -> None:
        """Threads have modes of their own."""

    def join(self) -> None:
        for task in self._tasks:
            task.join()


class _Turns:
    """One thread, in which a greenlet computes for each further device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._inside = contextlib.ExitStack()
        self._home = self._inside.enter_context(letting_others_go_on())
        self._greenlets: deque[Any] = deque()  # the next one to go on first
        self._rank, self.num_idle = 0, 0
        module: Any = device_module(devices[0])
        self._module = module if hasattr(module, "set_device") else None
        self._current_modes = modes_of_thread(devices)
        self._modes = self._current_modes()

    def queue(self) -> Queue:
        return _Handover(self)

    def start(self, rank: int, work: Callable[[], None]) -> None:
        made = greenlet.greenlet(functools.partial(self._begin, rank, work), parent=self._home)
        made.gr_context = contextvars.copy_context()
        self._greenlets.append(made)

    def _begin(self, rank: int, work: Callable[[], None]) -> None:
        self._rank = rank
        work()

    @contextlib.contextmanager
    def here(self, rank: int) -> Iterator[None]:
        with current_device(self._devices[rank]):
            yield

    def rank(self) -> int:
        return self._rank

    def begin_block(self) -> None:
        self._modes = self._current_modes()

    def pass_on(self) -> None:
        """Let others go on; returns when it is this device's turn again.

        Raises: RuntimeError if that cannot help, or would give others another grad mode or the like.
        """
        if self._current_modes() != self._modes:
            raise RuntimeError(
                "a block that several devices compute together changes torch's grad mode, autocast or another mode "
                "around a layer whose parts meet; use the model with whole blocks on each device (way 'blocks')"
            )
        rank, index = self._rank, None if self._module is None else self._module.current_device()
        (self._next() if rank == 0 else self._home).switch()
        self._rank = rank
        if self._module is not None:
            self._module.set_device(index)

    def _next(self) -> Any:
        self.num_idle += 1
        for _ in range(len(self._greenlets)):
            found = self._greenlets[0]
            self._greenlets.rotate(-1)
            if not found.dead and self.num_idle <= 2 * len(self._greenlets):
                return found
        raise RuntimeError("the devices wait for each other")

    def join(self) -> None:
        for each in self._greenlets:
            if each:  # begun and not ended
                each.switch()
            for _ in range(3):  # code that catches everything may go on
                if each:
                    each.throw(greenlet.GreenletExit)
        self._rank = 0
        self._greenlets.clear()
        self._inside.close()


class _Handover:
    """A queue inside one thread: whoever finds it empty lets the others go on."""

    def __init__(self, turns: _Turns) -> None:
        self._items: deque[Any] = deque()
        self._turns = turns

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._turns.num_idle = 0

    def get(self) -> Any:
        while not self._items:
            self._turns.pass_on()
        return self._items.popleft()
