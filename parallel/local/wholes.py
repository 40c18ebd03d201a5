"""Several forwards at once, a whole one on each device, each in a thread of its own.

The code around a forward runs on the main device, whose current stream all threads have in common. So no forward begins
before every device has its inputs: the main device's own kernels would be ahead of them in that stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from .tokens import HERE
from .workers import Coordinator, ThreadPool

T = TypeVar("T")


class Wholes:
    """Runs as many jobs at once as there are devices. Args: devices: by rank, the main device first."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices, self._pool, self._here = tuple(devices), ThreadPool(), _Here()

    @property
    def rank(self) -> int | None:
        """Whose job this thread does; None outside of one."""
        return self._here.rank

    def meet(self) -> None:
        """Return when every rank is about to begin as many forwards as this one, or has done its job.

        Raises: workers.Stopped if another rank's job has failed.
        """
        self._here.meet()

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """What the jobs return, by rank. Their threads take over this one's modes, current device and streams.

        Raises: the first exception of a job. The others end at their next block whose hooks are a TokenParallel's.
        """
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
                self._here.rank, self._here.meet, HERE.on_block = None, _meet_nobody, before
                with run.changing():
                    begun[rank] = float("inf")

        run.run([partial(work, rank, job) for rank, job in enumerate(jobs)])
        return [results[rank] for rank in range(len(jobs))]


def _meet_nobody() -> None:
    pass


class _Here(threading.local):
    rank: int | None = None
    meet: Callable[[], None] = staticmethod(_meet_nobody)
