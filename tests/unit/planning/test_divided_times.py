"""Exchanges of divided blocks, as they are counted."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of
from devicebridge.planning.divided_times import count_exchanges
from devicebridge.tests.toy import TINY

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_exchanges_are_the_meetings_of_a_divided_block(name: str) -> None:
    family, model = FAMILIES[name], TINY[name].make_model(seed=0)
    found = []
    for block_list in family.block_lists:
        for block in getattr(model, block_list.name):
            plan = find_plan(family.tensor, block)
            assert plan is not None
            shares = shares_of(block, plan, (1, 1))
            shard = divide_block(copy.deepcopy(block), plan, shares, 0)
            found.append(len(shard.meetings))
    assert count_exchanges(model, family) == found and all(found)
