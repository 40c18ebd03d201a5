"""Shares by what fits, against every share there is."""

from __future__ import annotations

import itertools
import random

import pytest
from devicebridge.families.tensor_plan import proportional
from devicebridge.parallel.local.fitting_shares import fit_groups, settle_groups


def every_share(num_groups: int, num_devices: int) -> list[tuple[int, ...]]:
    """All ways to give each of so many devices at least one group."""
    cuts = itertools.combinations(range(1, num_groups), num_devices - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *each, num_groups))) for each in cuts]


def _distance(counts, exact) -> float:
    return sum((count - wanted) ** 2 for count, wanted in zip(counts, exact, strict=True))


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_numbers_are_the_nearest_to_the_weights_of_all(num_devices) -> None:
    """Also where some may have no more than a limit."""
    draw = random.Random(num_devices)
    for _ in range(200):
        total = draw.randint(num_devices, 14)
        weights = [draw.choice((0.0, 1.0, draw.random(), 5 * draw.random())) for _ in range(num_devices - 1)] + [1.0]
        most = draw.choice(([], [draw.randint(1, total) for _ in weights]))
        allowed = [each for each in every_share(total, num_devices) if all(map(int.__le__, each, most or each))]
        if not allowed:
            continue
        exact = [total * weight / sum(weights) for weight in weights]
        found = proportional(total, weights, most)
        assert tuple(found) in allowed
        assert _distance(found, exact) <= min(_distance(each, exact) for each in allowed) + 1e-9


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_a_share_fits_if_any_does_and_is_the_nearest_to_the_proportion(num_devices) -> None:
    draw = random.Random(num_devices)
    outcomes = set()
    for _ in range(400):
        num_groups = draw.randint(num_devices, 14)
        most = [draw.uniform(-1, 1.6 * num_groups / num_devices + 1) for _ in range(num_devices)]
        shares = every_share(num_groups, num_devices)
        fitting = [each for each in shares if all(count <= room for count, room in zip(each, most, strict=True))]
        found = tuple(fit_groups(num_groups, most))
        even = tuple(proportional(num_groups, [1.0] * num_devices))
        outcomes.add((bool(fitting), even in fitting))
        if even in fitting:
            assert found == even
        elif fitting:
            assert found in fitting
            exact = [num_groups * room / sum(most) for room in most]
            assert _distance(found, exact) <= min(_distance(each, exact) for each in fitting) + 1e-9
        else:
            assert found in shares
    assert outcomes == {(True, True), (True, False), (False, False)}


def test_where_nothing_fits_shares_are_in_proportion() -> None:
    assert fit_groups(48, [10.0, 30.0]) == [12, 36]
    assert fit_groups(48, [-3.0, 30.0]) == [1, 47]
    assert fit_groups(48, [-3.0, -1.0]) == [24, 24]


def test_full_devices_are_as_full_as_each_other() -> None:
    """Room for 60 and 20 groups of 48: three quarters and a quarter, not as many as the smaller one can take."""
    assert fit_groups(48, [60.0, 20.0]) == [36, 12]
    assert fit_groups(48, [60.0, 24.0]) == [24, 24]


@pytest.mark.parametrize("num_devices", [2, 3])
def test_blocks_of_several_kinds_are_settled_by_their_real_sizes(num_devices) -> None:
    """Some kinds have few heads, so their shares are rounded coarsely, to one side or the other."""
    draw = random.Random(num_devices)
    settled = 0
    for _ in range(150):
        kinds = [(draw.choice((24, 12)), 1.0), (draw.choice((3, 4, 5, 8)), draw.uniform(1.0, 6.0))]
        num_groups = max(count for count, _ in kinds)
        each = sum(count * size for count, size in kinds) / num_groups

        def sizes(groups, kinds=kinds):
            shares = [proportional(count, list(map(float, groups))) for count, _ in kinds]
            return [
                sum(s[rank] * size for s, (_, size) in zip(shares, kinds, strict=True)) for rank in range(num_devices)
            ]

        rooms = [draw.uniform(0.5, 1.5) * num_groups * each / num_devices for _ in range(num_devices)]
        first = fit_groups(num_groups, [room / each for room in rooms])
        found = settle_groups(first, rooms, sizes)

        def fits(groups, rooms=rooms, sizes=sizes):
            return all(size <= room for size, room in zip(sizes(groups), rooms, strict=True))

        settled += fits(found) and not fits(first)
        if any(map(fits, every_share(num_groups, num_devices))):
            assert fits(found), (kinds, rooms, first, found)
        assert sum(found) == num_groups and min(found) >= 1
    assert settled > 0
