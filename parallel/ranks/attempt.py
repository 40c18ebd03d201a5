"""Which start of a job the ranks are in, agreed between them before they connect.

torchrun keeps one store while it starts ranks anew, and in it lie the addresses of ranks that are gone; each machine
counts only those restarts that a failure of its own began. So the first rank numbers the starts, and tells each rank
that asks by a name which no earlier process has had. All go on when the newest asker of every rank has heard the
number. If one was asked to stop before, none does.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from ...system.stopping import Stopped, never
from .place import RankPlace

_POLL_S = 0.05
_LIMIT_S = 1800.0  # one machine may take long to begin: imports from a slow disk
_STOP, _ALL = "stop", "all"  # what a start came to; the first also in the place of a name

Pause = Callable[[str], None]  # given what is waited for


def agreed_attempt(
    store: Any, place: RankPlace, own_stop: Callable[[], bool] = never, limit_s: float = _LIMIT_S
) -> int:
    """How often ranks have met in this store, torchrun's, this time included; all ranks.

    Raises: Stopped if a rank was asked to stop before all had come; RuntimeError if not all ranks come in time.
    """
    deadline = time.monotonic() + limit_s

    def pause(why: str) -> None:
        if own_stop():
            raise _stopped()
        if time.monotonic() > deadline:
            raise RuntimeError(why)
        time.sleep(_POLL_S)

    return _numbered(store, place, pause) if place.rank == 0 else _asked_for(store, place, pause)


def _numbered(store: Any, place: RankPlace, pause: Pause) -> int:
    """Of the first rank: a new number, when every other one has heard it."""
    attempt = int(store.add("attempts", 1))
    try:
        while True:
            names = {rank: _read(store, f"asks {rank}") for rank in range(1, place.num_ranks)}  # of the newest askers
            for rank, name in names.items():
                if name == _STOP:
                    store.set(f"asks {rank}", "")  # of this start alone
                elif name:
                    store.set(f"answer {name}", str(attempt))
            if _STOP in names.values() or _read(store, f"met {attempt}") == _STOP:
                raise _stopped()
            waiting = [r for r, name in names.items() if not name or not _read(store, f"heard {attempt} {name}")]
            if not waiting:
                break
            pause(f"ranks {waiting} have not come")
    except Stopped:
        _decided(store, attempt, _STOP)
        raise
    if _decided(store, attempt, _ALL) == _STOP:
        raise _stopped()
    return attempt


def _asked_for(store: Any, place: RankPlace, pause: Pause) -> int:
    name = uuid.uuid4().hex
    store.set(f"asks {place.rank}", name)
    try:
        attempt = int(_awaited(store, f"answer {name}", partial(pause, "the first rank does not answer")))
    except Stopped:
        store.set(f"asks {place.rank}", _STOP)
        raise
    store.set(f"heard {attempt} {name}", "1")
    try:
        found = _awaited(store, f"met {attempt}", partial(pause, "other ranks have not come"))
    except Stopped:
        found = _decided(store, attempt, _STOP)  # where all are there already, all stop together, later
    if found == _STOP:
        raise _stopped()
    return attempt


def _decided(store: Any, attempt: int, outcome: str) -> str:
    """This outcome, unless another rank was earlier."""
    return str(store.compare_set(f"met {attempt}", "", outcome).decode())


def _read(store: Any, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _awaited(store: Any, key: str, pause: Callable[[], None]) -> str:
    while not store.check([key]):
        pause()
    return _read(store, key)


def _stopped() -> Stopped:
    return Stopped("stopped before all processes of the job had begun; start it again")
