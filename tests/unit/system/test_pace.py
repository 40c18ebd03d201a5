"""Pace: work done by time taken, loading and what was there already left out."""

import pytest
from devicebridge.system.progress import Pace, describe_duration, describe_progress


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


UNKNOWN = {"per_second": None, "left_s": None}


def test_only_work_counts():
    clock = _Clock()
    pace = Pace(clock)
    assert pace.update(40, 50) == UNKNOWN  # found
    clock.now_s += 300  # loading
    pace.restart()
    for done in (41, 42):
        clock.now_s += 15
        found = pace.update(done, 50)
    assert found == {"per_second": pytest.approx(1 / 15), "left_s": pytest.approx(120)}
    assert pace.update(48, 50) == UNKNOWN  # found by another encoder
    clock.now_s += 4
    assert pace.update(49, 50)["left_s"] == pytest.approx(4)


@pytest.mark.parametrize("found", [0, 1])
def test_the_first_count_is_never_work(found):
    clock = _Clock()
    pace = Pace(clock)
    clock.now_s += 0.001
    assert pace.update(found, 5) == UNKNOWN
    clock.now_s += 10
    assert pace.update(found + 1, 5)["per_second"] == pytest.approx(0.1)


def test_words():
    assert describe_progress(1, 2, "images", 12.345) == "images 1/2, 12.3 images/s"
    assert describe_progress(1, 2, "captions", 1 / 15) == "captions 1/2, 0.067 captions/s"
    assert [describe_duration(s) for s in (44.6, 89, 90, 11_100)] == ["45 s", "89 s", "2 min", "3 h 05 min"]
