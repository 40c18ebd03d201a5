"""Several forwards in flight at once: over one split model, or a whole one on each card. Inference only."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from ..transfer import Arrivals, settle
from .bridge import Bridge, Traffic
from .tokens import HERE
from .workers import Coordinator, ThreadPool

T = TypeVar("T")


class Interleave(Traffic):
    """Runs forwards through a bridged model interleaved: while one is on the second card, the next is on the first."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge, self._here = bridge, _Here()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs, each one forward pass through the model, interleaved; their results in the order of the jobs.
        Raises: the first exception of a job, after all have ended; RuntimeError inside another run."""
        with self.bridge.interleaved(self):
            if len(jobs) < 2:
                return [job() for job in jobs]
            run = Coordinator(self.bridge.pool, self.bridge.devices)
            policy = RoundRobin(run, len(jobs), self.bridge.main_device)

            def work(index: int, job: Callable[[], T]) -> T:
                self._here.arrivals, self._here.pass_on = {}, partial(policy.pass_on, index)
                try:
                    policy.begin(index)
                    return job()
                finally:
                    self.bridge.end()  # whatever the job left
                    self._here.arrivals = None
                    del self._here.pass_on  # it holds the run, and so the pool of this very thread

            return run.run([partial(work, *each) for each in enumerate(jobs)], policy.leave)

    @property
    def arrivals(self) -> Arrivals | None:
        return self._here.arrivals

    def arrive(self, device: torch.device) -> None:
        """Let the other jobs go on, hold device, and have its current stream wait for what was copied to it. For a
        thread that is no job's this is a no-op. Raises: Stopped if the run is to end."""
        if self._here.arrivals is not None:
            self._here.pass_on(device)
            settle(self._here.arrivals)


class _Here(threading.local):
    arrivals: Arrivals | None = None  # of the thread's job
    pass_on: Callable[[torch.device], None]


class RoundRobin:
    """Who of several jobs, each with a worker, runs, and who holds which device. One token goes round and only its
    holder runs, so patches and wrappers never meet. It is handed on at every block, to the next job in order
    that can run; at borders only, a card's full launch queue would keep the host from feeding the others. A job that
    waits for a device holds none, so there is no deadlock."""

    def __init__(self, run: Coordinator, num_jobs: int, device: torch.device) -> None:
        self._run, self._holder = run, 0
        self._places: list[torch.device | None] = [device] * num_jobs
        # The first in a device's queue holds the device.
        self._queues: defaultdict[torch.device | None, deque[int]] = defaultdict(
            deque, {device: deque(range(num_jobs))}
        )

    def begin(self, job: int) -> None:
        """Wait for the token the first time. Raises: Stopped if the run is to end, then possibly without it."""
        with self._run.when(lambda: self._holder == job):
            pass

    def pass_on(self, job: int, device: torch.device) -> None:
        """Let go of another device, hand the token on, and return with it and with device held. Raises: Stopped, with
        the token, if the run is to end."""
        with self._run.when():
            if self._places[job] != device:
                self._move(job, device)
            self._hand_on(job)
            self._run.wait(lambda: self._holder == job)

    def leave(self, job: int) -> None:
        with self._run.changing():
            self._move(job, None)
            if self._holder == job:
                self._hand_on(job)

    def _move(self, job: int, device: torch.device | None) -> None:
        self._queues[self._places[job]].remove(job)
        self._places[job] = device
        self._queues[device].append(job)

    def _hand_on(self, job: int) -> None:
        """To the first job after this one that holds its device, this one being the last to be asked."""
        count = len(self._places)
        in_order = (each % count for each in range(job + 1, job + 1 + count))
        ready = (each for each in in_order if (place := self._places[each]) and self._queues[place][0] == each)
        self._holder = next(ready, -1)


class Wholes:
    """Runs as many jobs at once as there are devices, each with forwards of its own device's model. The code around a
    forward runs on the main device, whose current stream all threads have in common. So no forward begins before every
    device has its inputs (`barrier`): the main device's own kernels would be ahead of them there."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices, self._pool, self._here = tuple(devices), ThreadPool(), _Job()

    @property
    def rank(self) -> int | None:
        """Whose job this thread does; None outside of one."""
        return self._here.rank

    def barrier(self) -> None:
        """Return when every rank is about to begin as many forwards as this one, or has done its job. Raises:
        workers.Stopped if another rank's job has failed."""
        self._here.barrier()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the jobs return, by rank. Their threads take over this one's modes, current device and streams. Raises:
        the first exception of a job. The others end at their next block whose hooks are a TokenParallel's."""
        run = Coordinator(self._pool, self._devices)
        begun, before = [0.0] * len(jobs), HERE.on_block

        def barrier(rank: int) -> None:
            with run.changing():
                begun[rank] += 1
            with run.when(lambda: min(begun) >= begun[rank]):
                pass

        def check() -> None:
            with run.when():
                pass

        def work(rank: int, job: Callable[[], T]) -> T:
            self._here.rank, self._here.barrier, HERE.on_block = rank, partial(barrier, rank), check
            try:
                return job()
            finally:
                self._here.rank, HERE.on_block = None, before
                with run.changing():
                    begun[rank] = float("inf")

        return run.run([partial(work, *each) for each in enumerate(jobs)])


class _Job(threading.local):
    rank: int | None = None
    barrier: Callable[[], None] = staticmethod(lambda: None)
