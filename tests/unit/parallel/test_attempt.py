"""Ranks agree on which start of a job they are in, whatever earlier ones have left in torchrun's store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from devicebridge.parallel.ranks.attempt import agreed_attempt
from devicebridge.parallel.ranks.place import RankPlace


def _agreed(store, ranks, count, limit_s=30.0):
    """What these of so many ranks find, each in a thread."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        places = [RankPlace(rank, count, 0, 1) for rank in ranks]
        asked = [threads.submit(agreed_attempt, store, place, limit_s) for place in places]
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
