"""Sample pictures of a job that several processes train: the first one decides, decodes and writes."""

from __future__ import annotations

from collections.abc import Callable

from ..parallel.ranks.group import Ranks
from .sampler import Sampler


class RankSamples:
    """See Samples of training/loop.py; every rank has one, and all call it at the same points."""

    def __init__(self, sampler: Sampler, ranks: Ranks) -> None:
        self._sampler, self._ranks = sampler, ranks

    def is_due(self, step: int, *, is_start: bool = False) -> bool:
        return self._ranks.from_first(lambda: self._sampler.is_due(step, is_start=is_start))

    def draw(self, step: int, should_stop: Callable[[], bool]) -> None:
        """By the first rank, or where each has a share of the weights by all; the others wait for its pictures."""
        with self._ranks.doing():
            if self._sampler.in_lockstep:
                self._sampler.draw(step, should_stop)
            elif self._ranks.is_first:
                self._sampler.draw(step, self._ranks.is_stop_asked)
        self._ranks.wait()
