"""Pace: work done by time taken, loading and what was there already left out."""

import pytest
from devicebridge.system.progress import Pace, describe_duration, describe_progress


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_only_work_counts():
    clock = _Clock()
    pace = Pace(clock)
    pace.update(40)  # found
    assert pace.per_second is None and pace.left_s(50) is None
    clock.now_s += 300  # loading
    pace.restart()
    for done in (41, 42):
        clock.now_s += 15
        pace.update(done)
    assert pace.per_second == pytest.approx(1 / 15) and pace.left_s(50) == pytest.approx(120)
    pace.update(48)  # found by another encoder
    assert pace.per_second is None
    clock.now_s += 4
    pace.update(49)
    assert pace.left_s(50) == pytest.approx(4)


@pytest.mark.parametrize("found", [0, 1])
def test_the_first_count_is_never_work(found):
    clock = _Clock()
    pace = Pace(clock)
    clock.now_s += 0.001
    pace.update(found)
    clock.now_s += 0.001
    assert pace.per_second is None and pace.left_s(5) is None
    clock.now_s += 9.999
    pace.update(found + 1)
    assert pace.per_second == pytest.approx(0.1)


def test_words():
    assert describe_progress(1, 2, "images", 12.345) == "images 1/2, 12.3 images/s"
    assert describe_progress(1, 2, "captions", 1 / 15) == "captions 1/2, 0.067 captions/s"
    assert [describe_duration(s) for s in (44.6, 720, 11_100)] == ["45 s", "12 min", "3 h 05 min"]
