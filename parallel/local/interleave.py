"""Several forwards in flight at once: over one split model, or a whole one on each card. Inference only.

While one computes on the second card of a split model, the next is on the first. Every forward (a job) has a worker.
One token goes round and only its holder runs, so patches and wrappers never meet each other. It is handed on at every
block, to the next job in order that can run; at borders only, a card's full launch queue would keep the host from
feeding the others. A job that waits for a device holds none, so there is no deadlock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from ..transfer import Arrivals, copy_to, settle
from .bridge import Bridge
from .tokens import HERE
from .workers import Coordinator, ThreadPool

T = TypeVar("T")


class Interleave:
    """Runs forwards through a bridged model interleaved; one run at a time per bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge, self._local = bridge, _Local()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs, each one forward pass through the model, interleaved; their results in the order of the jobs.
        Raises: the first exception of a job, after all have ended; RuntimeError inside another run."""
        with self.bridge.interleaved(self):
            if len(jobs) < 2:
                return [job() for job in jobs]
            run = Coordinator(self.bridge.pool, self.bridge.devices)
            states = [_JobState(index, self.bridge.main_device) for index in range(len(jobs))]
            policy = RoundRobin(run, states)
            results: dict[int, T] = {}

            def work(state: _JobState, job: Callable[[], T]) -> None:
                self._local.state, self._local.policy = state, policy
                try:
                    policy.begin(state)
                    results[state.index] = job()
                finally:
                    self.bridge.end()  # whatever the job left
                    self._local.state = self._local.policy = None

            run.run([partial(work, state, job) for state, job in zip(states, jobs, strict=True)], policy.leave)
            return [results[index] for index in range(len(jobs))]

    # ---- what the bridge asks where a forward crosses

    def arrive(self, device: torch.device) -> None:
        """Let the other jobs go on, hold device, and have its current stream wait for what was copied to it. For a
        thread that is no job's this is a no-op. Raises: Stopped if the run is to end."""
        state, policy = self._local.state, self._local.policy
        if state is None or policy is None:
            return
        policy.pass_on(state, device)
        settle(state.arrivals)

    def copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on device which its current stream must not use before the next arrive or settle."""
        if self._local.state is None:
            return copy_to(tensor, device)
        return self.bridge.side_streams.copy(tensor, device, self._local.state.arrivals)

    def settle(self) -> None:
        if self._local.state is not None:
            settle(self._local.state.arrivals)


@dataclass(eq=False)
class _JobState:
    index: int
    device: torch.device | None
    arrivals: Arrivals = field(default_factory=dict)


class _Local(threading.local):
    state: _JobState | None = None
    policy: RoundRobin | None = None


class RoundRobin:
    """Who runs, and who holds which device."""

    def __init__(self, run: Coordinator, states: Sequence[_JobState]) -> None:
        self._run = run
        self._states = states
        self._holder: _JobState | None = states[0]
        # The first in a device's queue holds the device.
        self._queues: defaultdict[torch.device | None, deque[_JobState]] = defaultdict(deque)
        for state in states:
            self._queues[state.device].append(state)

    def begin(self, state: _JobState) -> None:
        """Wait for the token the first time. Raises: Stopped if the run is to end, then possibly without it."""
        with self._run.when(lambda: self._holder is state):
            pass

    def pass_on(self, state: _JobState, device: torch.device) -> None:
        """Let go of another device, hand the token on, and return with it and with device held. Raises: Stopped, with
        the token, if the run is to end."""
        with self._run.when():
            if state.device != device:
                self._queues[state.device].remove(state)
                state.device = device
                self._queues[device].append(state)
            self._hand_on(state)
            self._run.wait(lambda: self._holder is state)

    def leave(self, index: int) -> None:
        state = self._states[index]
        with self._run.changing():
            self._queues[state.device].remove(state)
            state.device = None
            if self._holder is state:
                self._hand_on(state)

    def _hand_on(self, state: _JobState) -> None:
        """To the first job after this one that holds its device, this one being the last to be asked."""
        in_order = (*self._states[state.index + 1 :], *self._states[: state.index + 1])
        ready = (each for each in in_order if each.device is not None and self._queues[each.device][0] is each)
        self._holder = next(ready, None)


class Wholes:
    """Runs as many jobs at once as there are devices, each with forwards of its own device's model. The code around a
    forward runs on the main device, whose current stream all threads have in common. So no forward begins before every
    device has its inputs (`meet`): the main device's own kernels would be ahead of them there."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices, self._pool, self._here = tuple(devices), ThreadPool(), _Job()

    @property
    def rank(self) -> int | None:
        """Whose job this thread does; None outside of one."""
        return self._here.rank

    def meet(self) -> None:
        """Return when every rank is about to begin as many forwards as this one, or has done its job. Raises:
        workers.Stopped if another rank's job has failed."""
        self._here.meet()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the jobs return, by rank. Their threads take over this one's modes, current device and streams. Raises:
        the first exception of a job. The others end at their next block whose hooks are a TokenParallel's."""
        run = Coordinator(self._pool, self._devices)
        begun, results, before = [0.0] * len(jobs), dict[int, T](), HERE.on_block

        def meet(rank: int) -> None:
            with run.changing():
                begun[rank] += 1
            with run.when(lambda: min(begun) >= begun[rank]):
                pass

        def check() -> None:
            with run.when():
                pass

        def work(rank: int, job: Callable[[], T]) -> None:
            self._here.rank, self._here.meet, HERE.on_block = rank, partial(meet, rank), check
            try:
                results[rank] = job()
            finally:
                self._here.rank, HERE.on_block = None, before
                with run.changing():
                    begun[rank] = float("inf")

        run.run([partial(work, rank, job) for rank, job in enumerate(jobs)])
        return [results[rank] for rank in range(len(jobs))]


class _Job(threading.local):
    rank: int | None = None
    meet: Callable[[], None] = staticmethod(lambda: None)
