"""Several forwards in flight over one split model: while one computes on the second card, the next is on the first.

One forward is sequential over the cards; each waits while another works. m forwards of equal cost over n equal cards
take (m + n - 1) / n of one forward's time when they follow each other through the cards, instead of m. Inference only.

Threads without concurrency. Every forward (a job) runs in a host thread of its own, since the model's code is not ours
and only a thread can be halted in the middle of it. But one baton goes round and only its holder runs, so patches and
wrappers never meet each other, and the order in which kernels are issued is the same each time. The baton is handed on
at every block, to the next job in order that can run. Handing it on only at borders would not do: a card's launch queue
takes about a thousand kernels, then the host stands still, and with it the feeding of the other card.

Devices are held. Besides the baton a job needs the device it computes on: it gets home in the order of the jobs, and at
a border it lets go of one device and queues for the next, first come first served. So the kernels of one forward never
stand in a card's queue in front of those of a forward that came before. There is no deadlock: a job that waits for a
device holds none, so each device waited for is held by a job that can run, and each running job hands the baton on.

Copies travel beside the kernels (lanes.py): at a border a copy is issued while the source is still held, and so waits
for this forward's own kernels only; the target's current stream waits for it once the device is held.

When a job raises, the others are stopped where they next enter a block: an exception that is no Exception unwinds them,
still one at a time. No thread outlives the run.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from .bridge import Bridge
from .workers import (
    Pair,
    Stopped,
    ThreadState,
    copy_beside,
    make_task,
    raise_error_of,
    settle,
    stop_and_wait,
    wait_for,
)

T = TypeVar("T")
Trace = list[tuple[int, torch.device]]


class Turns:
    """Runs forwards through a bridged model interleaved; one run at a time per bridge.

    Args:
        bridge: of the model; attached.
        trace: takes (job, device) for each time a job arrives on a device or enters a block there, in order of issue.
    """

    def __init__(self, bridge: Bridge, *, trace: Trace | None = None) -> None:
        self.bridge = bridge
        self.trace = trace
        self._local = _Local()
        self.error: BaseException | None = None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs, each one forward pass through the model, interleaved; their results in the order of the jobs.

        Each runs in a thread that takes over this thread's grad and inference mode, autocast, dispatch modes, context
        variables, current device and streams. A single job runs in this thread.

        Raises: the first exception of a job, after all have ended; RuntimeError under autograd or inside another run.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("interleaved forwards are for inference; run them under torch.inference_mode or no_grad")
        with self.bridge.interleaved(self):
            if len(jobs) < 2:
                return [job() for job in jobs]
            return self._run_in_threads([_Lane(index, job) for index, job in enumerate(jobs)])

    def _run_in_threads(self, lanes: list[_Lane[T]]) -> list[T]:
        schedule = _Schedule(lanes)
        state = ThreadState(self.bridge.devices)
        tasks = [make_task(self.bridge.crew, self._work, lane, schedule, state) for lane in lanes]
        try:
            for task in tasks:
                task.start()
            schedule.start(self.bridge.home)
            wait_for(lanes, tasks)
        except BaseException:  # KeyboardInterrupt while waiting, or no thread to be had
            stop_and_wait(schedule.stop, lanes, tasks)
            self.error = None
            raise
        raise_error_of(self)
        return [lane.result for lane in lanes]

    def _work(self, lane: _Lane[Any], schedule: _Schedule, state: ThreadState) -> None:
        try:
            schedule.await_first_turn(lane)
            with state.taken_over(), contextlib.ExitStack() as stack:
                stack.callback(self.bridge.end)  # whatever the job left
                self._local.lane, self._local.schedule = lane, schedule
                lane.result = lane.job()
        except Stopped:
            pass
        except BaseException as error:
            if not schedule.is_stopping:  # what a stopped job raises while it unwinds is a consequence
                self.error = error
                schedule.is_stopping = True
        finally:
            self._local.lane = self._local.schedule = None
            del lane.job
            schedule.leave(lane)
            lane.ended.set()

    def arrive(self, device: torch.device) -> None:
        """Let the other jobs go on, hold device, and have its current stream wait for what was copied to it.

        For a thread that is no job's this is a no-op. Raises: Stopped if the run is to end.
        """
        lane, schedule = self._local.lane, self._local.schedule
        if lane is None or schedule is None:
            return
        schedule.pass_turn(lane, device)
        if self.trace is not None:
            self.trace.append((lane.index, device))
        self.settle()

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on device which its current stream must not use before the next arrive or settle."""
        lane = self._local.lane
        return copy_beside(self.bridge.side_streams, tensor, device, None if lane is None else lane.arrivals)

    def settle(self) -> None:
        """Have the current streams wait for the copies this job has under way."""
        lane = self._local.lane
        if lane is not None:
            settle(lane.arrivals)


class _Lane(Generic[T]):
    """One job: what it does, what it holds and what it waits for."""

    result: T

    def __init__(self, index: int, job: Callable[[], T]) -> None:
        self.index = index
        self.job = job
        self.device: torch.device | None = None  # held
        self.wanted: torch.device | None = None  # queued for; then none is held
        self.is_done = False
        self.wake = threading.Event()
        self.ended = threading.Event()
        self.arrivals: dict[Pair, Any] = {}  # the last copy's event


class _Local(threading.local):
    lane: _Lane[Any] | None = None
    schedule: _Schedule | None = None


class _Schedule:
    """Who has the baton and who holds which device.

    Only the holder of the baton changes anything, except for stop; the lock is for that and for the hand-over itself.
    """

    def __init__(self, lanes: Sequence[_Lane[Any]]) -> None:
        self.is_stopping = False
        self._lanes = lanes
        self._running: _Lane[Any] | None = None
        self._holders: dict[torch.device, _Lane[Any]] = {}
        self._queues: dict[torch.device, deque[_Lane[Any]]] = {}
        self._lock = threading.Lock()

    def start(self, home: torch.device) -> None:
        """Queue every job for home and hand the baton to the first."""
        with self._lock:
            for lane in self._lanes:
                self._claim(lane, home)
            self._hand_on(self._lanes[-1])

    def stop(self) -> None:
        """Have every job end where it next passes its turn; those that have not begun end at once."""
        with self._lock:
            self.is_stopping = True
            for lane in self._lanes:
                lane.wake.set()

    def await_first_turn(self, lane: _Lane[Any]) -> None:
        """Wait for the baton. Raises: Stopped if the run is to end, then possibly without it."""
        while self._running is not lane and not self.is_stopping:
            _sleep(lane)
        if self.is_stopping:
            raise Stopped

    def pass_turn(self, lane: _Lane[Any], device: torch.device) -> None:
        """Let go of another device if lane holds one, hand the baton on, and return with it and with device held.

        Raises: Stopped, with the baton held, if the run is to end.
        """
        if self.is_stopping:
            raise Stopped
        with self._lock:
            if lane.device != device:
                self._release(lane)
                self._claim(lane, device)
            self._hand_on(lane)
        while self._running is not lane:
            _sleep(lane)
        if self.is_stopping:
            raise Stopped

    def leave(self, lane: _Lane[Any]) -> None:
        """Let go of everything for good."""
        with self._lock:
            lane.is_done = True
            self._release(lane)
            if self._running is lane:
                self._hand_on(lane)

    def _claim(self, lane: _Lane[Any], device: torch.device) -> None:
        if device in self._holders:
            lane.wanted = device
            self._queues.setdefault(device, deque()).append(lane)
        else:
            self._holders[device] = lane
            lane.device = device

    def _release(self, lane: _Lane[Any]) -> None:
        """Give what lane holds to the next in the queue that is still there."""
        device, lane.device = lane.device, None
        if device is None:
            return
        del self._holders[device]
        queue = self._queues.get(device)
        while queue and device not in self._holders:
            following = queue.popleft()
            if not following.is_done:
                following.wanted = None
                self._claim(following, device)

    def _hand_on(self, lane: _Lane[Any]) -> None:
        """Give the baton to the first job after lane that can run, lane itself being the last to be asked."""
        start = lane.index + 1
        in_order = (*self._lanes[start:], *self._lanes[:start])
        ready = (other for other in in_order if not other.is_done and other.wanted is None)
        following = self._running = next(ready, None)
        if following is not None and following is not lane:
            following.wake.set()


def _sleep(lane: _Lane[Any]) -> None:
    # The baton's holder is written before the event is set, so a wake-up cleared here too early is seen in the loop.
    lane.wake.wait()
    lane.wake.clear()
