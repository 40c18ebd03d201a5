"""Whole forwards at once: who waits for whom, what threads take over, and how a failing one ends the others."""

import threading
from typing import Any

import pytest
import torch
from devicebridge.parallel.local.interleave import Wholes
from devicebridge.parallel.local.tokens import HERE

CPU = torch.device("cpu")


def test_results_come_by_rank_from_threads_in_the_callers_modes() -> None:
    wholes = Wholes([CPU] * 3)

    def job() -> tuple[Any, ...]:
        return wholes.rank, torch.is_inference_mode_enabled(), threading.get_ident()

    with torch.inference_mode():
        found = wholes.run([job] * 3)
    assert [each[:2] for each in found] == [(rank, True) for rank in range(3)]
    assert len({each[2] for each in found} | {threading.get_ident()}) == 4
    assert wholes.rank is None


def test_no_forward_begins_before_all_ranks_have_its_inputs_or_are_done() -> None:
    wholes, seen = Wholes([CPU] * 2), list[tuple[str, int]]()

    def job(num_forwards: int, delay: float) -> None:
        for _ in range(num_forwards):
            threading.Event().wait(delay)
            seen.append(("ready", wholes.rank or 0))
            wholes.meet()
            seen.append(("begins", wholes.rank or 0))

    wholes.run([lambda: job(3, 0.0), lambda: job(1, 0.05)])
    assert [what for what, _ in seen[:3]] == ["ready", "ready", "begins"]
    assert seen.count(("begins", 0)) == 3


@pytest.mark.parametrize("error", [ValueError("it fails"), KeyboardInterrupt()])
def test_a_failing_rank_ends_the_others_at_their_next_block(error: BaseException) -> None:
    wholes, failed, passed = Wholes([CPU] * 3), threading.Event(), list[str]()

    def at_a_block() -> None:
        failed.wait(10)
        while True:  # the run is told a moment after the job has raised
            HERE.on_block()

    def at_a_meeting() -> None:
        wholes.meet()
        passed.append("the meeting")

    def fail() -> None:
        failed.set()
        raise error

    with pytest.raises(type(error)):
        wholes.run([at_a_block, at_a_meeting, fail])
    assert not passed
    assert wholes.run([lambda: 1, lambda: 2]) == [1, 2]
