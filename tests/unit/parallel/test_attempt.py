"""Ranks agree on which start of a job they are in, whatever earlier ones have left in torchrun's store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from devicebridge.parallel.ranks.attempt import agreed_attempt
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.system.stopping import Stopped, never

LIMIT_S = 30.0


def _asking(threads, store, rank, count, own_stop=never, limit_s=LIMIT_S):
    return threads.submit(agreed_attempt, store, RankPlace(rank, count, 0, 1), own_stop, limit_s)


def _agreed(store, ranks, count, limit_s=LIMIT_S):
    with ThreadPoolExecutor(len(ranks)) as threads:
        asked = [_asking(threads, store, rank, count, limit_s=limit_s) for rank in ranks]
        return [each.result() for each in asked]


def test_every_start_has_a_number_of_its_own_and_all_ranks_the_same():
    store = dist.HashStore()
    assert _agreed(store, range(3), 3) == [1, 1, 1]
    assert _agreed(store, [2, 0, 1], 3) == [2, 2, 2]
    assert _agreed(store, range(2), 2) == [3, 3]  # a machine has gone
    assert _agreed(store, [0], 1) == [4]


@pytest.mark.parametrize("came", [[0], [1], [0, 2]])
def test_a_start_to_which_not_all_came_does_not_mislead_the_next(came):
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="have not come|does not answer"):
        _agreed(store, came, 3, limit_s=0.3)
    found = _agreed(store, range(3), 3)
    assert found == [1 + (0 in came)] * 3
    assert _agreed(store, range(3), 3) == [found[0] + 1] * 3


def _until(is_so):
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def _has_heard(store, rank):
    """Whether the rank's newest asker knows the number of the first start."""
    return store.check([f"asks {rank}"]) and store.check([f"heard 1 {store.get(f'asks {rank}').decode()}"])


@pytest.mark.parametrize(
    ("came", "stopped", "is_there"),
    [
        ([0, 1], 0, lambda store: _has_heard(store, 1)),
        ([0, 1], 1, lambda store: _has_heard(store, 1)),
        ([1], 1, lambda store: store.check(["asks 1"])),  # and nobody has answered
    ],
)
def test_a_stop_is_heard_by_all_that_wait_for_the_third(came, stopped, is_there):
    store, stop = dist.HashStore(), threading.Event()
    with ThreadPoolExecutor(3) as threads:
        stops = {stopped: stop.is_set}
        asked = [_asking(threads, store, rank, 3, own_stop=stops.get(rank, never)) for rank in came]
        _until(lambda: is_there(store))
        stop.set()
        for each in asked:
            with pytest.raises(Stopped):
                each.result(LIMIT_S / 2)
    if 0 not in came:  # the first rank hears it when it comes, and of that start alone
        with pytest.raises(Stopped):
            _agreed(store, [0], 3)
    assert _agreed(store, range(3), 3) == [2] * 3


def test_where_all_have_come_a_stop_is_left_to_what_follows():
    """Else one would leave while the others connect, and they would wait for it."""
    store = dist.HashStore()

    def own_stop():
        if _has_heard(store, 1):
            _until(lambda: store.check(["met 1"]))  # after this rank has looked
        return _has_heard(store, 1)

    with ThreadPoolExecutor(2) as threads:
        asked = [_asking(threads, store, 0, 2), _asking(threads, store, 1, 2, own_stop=own_stop)]
        assert [each.result(LIMIT_S) for each in asked] == [1, 1]


class _EndedError(Exception):
    """As if the process were killed."""


def test_a_rank_that_begins_again_is_told_the_number_too():
    """By its name: what the earlier process of that rank has heard, this one has not."""
    store, is_killed = dist.HashStore(), threading.Event()

    def end():
        if is_killed.is_set():
            raise _EndedError
        return False

    with ThreadPoolExecutor(4) as threads:
        first, killed = _asking(threads, store, 0, 3), _asking(threads, store, 1, 3, own_stop=end)
        _until(lambda: _has_heard(store, 1))
        is_killed.set()
        with pytest.raises(_EndedError):
            killed.result(LIMIT_S)
        others = [_asking(threads, store, rank, 3) for rank in (1, 2)]
        assert [each.result(LIMIT_S) for each in (first, *others)] == [1, 1, 1]
