"""Several forwards of one divided model, one for each device, that meet at every block.

Where pictures make no batch, as with prompts of unequal length, each is a forward of its own. One after the other, all
devices would compute each of them. In lockstep every device computes its own forward's blocks alone, with the weights
that are gathered for all (whole_blocks.py). A forward is a greenlet of the caller's thread: it runs up to its next
block, where it lets the others go on. When all have come to the same block, that is computed for all of them at once.

A forward that is at an earlier block goes on alone until it reaches the others. When one has ended, all devices compute
the rest of each other forward together, one after the other.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..devices import device_module
from ..transfer import current_streams
from .device_workers import greenlet, letting_others_go_on, modes_of_thread
from .recorded_calls import switches

B = TypeVar("B")
R = TypeVar("R")


class Forwards(Protocol):
    """A bridge, one of whose forwards can rest while another one goes on in the same thread."""

    @property
    def devices(self) -> tuple[torch.device, ...]: ...

    def swap(self, forward: dict[str, Any] | None) -> dict[str, Any]:
        """Go on with this forward (None: with one that has not begun).

        Returns: what was kept of the forward until now.
        """

    def end(self) -> None:
        """End the forward; a second call is a no-op."""


class _Forward(Generic[B]):
    """Args: kept: by the bridge, while it rests. brought: to a meeting. is_computed: whether that was."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self.greenlet = greenlet.greenlet(job)
        self.greenlet.gr_context = contextvars.copy_context()
        self.kept: dict[str, Any] | None = None
        self.brought: B | None = None
        self.is_computed = False
        self.result: Any = None


class Lockstep(Generic[B]):
    """One run of forwards.

    Args:
        bridge: of the model.
        compute: computes what forwards have brought, in the order of devices; False if it cannot.
        place: of what a forward brings, in the order in which forwards come to it.
        waits: whether forwards meet; else what each brings is computed by itself.
    """

    def __init__(
        self,
        bridge: Forwards,
        compute: Callable[[Sequence[B]], bool],
        place: Callable[[B], int],
        *,
        waits: bool = True,
    ) -> None:
        self._bridge, self._compute, self._place, self._waits = bridge, compute, place, waits
        self._modes = modes_of_thread(bridge.devices)
        self._forwards: list[_Forward[B]] = []
        self._is_over = False  # the rest goes on without meeting
        self._is_stopping = False

    def run(self, jobs: Sequence[Callable[[], R]]) -> list[R]:
        """Run jobs, one forward each, one for each device.

        Raises: the first exception of a job; the other ones have ended then.
        """
        self._around = self._surroundings()
        self._forwards = [_Forward(job) for job in jobs]
        with letting_others_go_on() as self._caller:
            try:
                while left := [each for each in self._forwards if not each.greenlet.dead]:
                    for forward in left:
                        if forward.brought is None:
                            self._go_on(forward)
                    self._meet()
                return [forward.result for forward in self._forwards]
            finally:
                self._is_stopping = True
                for forward in self._forwards:
                    self._stop(forward)
                self._forwards.clear()

    def rank(self) -> int | None:
        """Of the forward that asks; None if it is none of these, or cannot wait for the others here."""
        if self._is_over or self._surroundings() != self._around:
            return None
        current = greenlet.getcurrent()
        return next((rank for rank, each in enumerate(self._forwards) if each.greenlet is current), None)

    def meet(self, rank: int, brought: B | None) -> bool:
        """Wait for the other forwards. Args: brought: to be computed; with nothing there is no waiting.

        Returns: whether what all have brought was computed.
        """
        if brought is None:
            return False
        if not self._waits:
            return self._compute([brought])
        forward = self._forwards[rank]
        forward.brought = brought
        self._caller.switch()
        if self._is_stopping:
            raise greenlet.GreenletExit
        return forward.is_computed

    def _meet(self) -> None:
        """Forwards that are at the first place go on; for all of them at once that is computed first."""
        waiting = [(self._place(each.brought), each) for each in self._forwards if each.brought is not None]
        here = [each for place, each in waiting if place == min(waiting, key=itemgetter(0))[0]]
        are_all, is_computed = len(here) == len(self._forwards), False
        if are_all and not self._is_over:
            is_computed = self._compute([each.brought for each in here if each.brought is not None])
        self._is_over = self._is_over or len(waiting) < len(self._forwards) or (are_all and not is_computed)
        for forward in here:
            forward.brought, forward.is_computed = None, is_computed

    def _surroundings(self) -> tuple[object, ...]:
        """What one forward could change for the others where it waits."""
        streams = current_streams(self._bridge.devices)
        module: Any = device_module(self._bridge.devices[0])
        return self._modes(), switches(), streams, module.current_device() if streams else None

    def _go_on(self, forward: _Forward[B]) -> None:
        """Up to its next meeting, or its end."""
        outside = self._bridge.swap(forward.kept)
        try:
            result = forward.greenlet.switch()
            if forward.greenlet.dead:
                forward.result = result
        finally:
            forward.kept = self._bridge.swap(outside)

    def _stop(self, forward: _Forward[B]) -> None:
        outside = self._bridge.swap(forward.kept)
        try:
            for _ in range(3):  # code that catches everything may go on
                if forward.greenlet:  # begun and not ended
                    with suppress(BaseException):  # the first one is raised
                        forward.greenlet.throw(greenlet.GreenletExit)
            self._bridge.end()
        finally:
            self._bridge.swap(outside)
