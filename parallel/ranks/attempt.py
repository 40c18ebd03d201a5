"""Which start of a job the ranks are in, agreed between them before they connect.

torchrun keeps one store while it starts ranks anew, and in it lie the addresses of ranks that are gone. What it says of
restarts does not tell them apart: each machine counts only those that a failure of its own began. So the first rank
numbers the starts, and tells each rank that asks by a name which no earlier process has had. An answer to one that is
gone is read by nobody. The first rank goes on when all have heard it. torchrun has ended every rank of a start before
it begins the next.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from .place import RankPlace

_POLL_S = 0.05
_LIMIT_S = 1800.0  # one machine may take long to begin: imports from a slow disk


def agreed_attempt(store: Any, place: RankPlace, limit_s: float = _LIMIT_S) -> int:
    """How often ranks have met in this store, this time included; all ranks.

    Args:
        store: torchrun's, the same for all.
    Raises: RuntimeError if not all ranks come in time.
    """
    deadline = time.monotonic() + limit_s
    attempt = _numbered(store, place, deadline) if place.rank == 0 else _asked_for(store, place, deadline)
    store.set(f"heard {attempt} {place.rank}", "1")
    return attempt


def _numbered(store: Any, place: RankPlace, deadline: float) -> int:
    """Of the first rank: a new number, when every other one has heard it."""
    attempt, answered = int(store.add("attempts", 1)), set()
    waiting = set(range(1, place.num_ranks))
    while waiting:
        _pause(deadline, f"ranks {sorted(waiting)} have not come")
        for rank in sorted(waiting):
            name = store.get(f"asks {rank}") if store.check([f"asks {rank}"]) else b""
            if name and name not in answered:
                store.set(f"answer {name.decode()}", str(attempt))
                answered.add(name)
            if store.check([f"heard {attempt} {rank}"]):
                waiting.remove(rank)
    return attempt


def _asked_for(store: Any, place: RankPlace, deadline: float) -> int:
    name = uuid.uuid4().hex
    store.set(f"asks {place.rank}", name)
    while not store.check([f"answer {name}"]):
        _pause(deadline, "the first rank does not answer")
    return int(store.get(f"answer {name}"))


def _pause(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(why)
    time.sleep(_POLL_S)
