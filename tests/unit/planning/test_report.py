"""What a plan says of itself, where it is more than its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from devicebridge.planning.cards import Card
from devicebridge.planning.dry_run_block import BlockCost
from devicebridge.planning.plan_training import TrainingPlan, plan_training
from devicebridge.planning.report import describe_plan
from devicebridge.tests.plans import MadeUpCosts, MadeUpTimes, make_cards, make_question

BLOCK = BlockCost(10**9, 0, 0, 10**7, {}, 10**7, 10**8, 10**7, 10**8, 2 * 10**8, 2 * 10**8, input_sizes=(10**7,))


def _plan(cards: list[Card], **sections: dict[str, object]) -> TrainingPlan:
    """Of ten blocks of 1 GB."""
    return plan_training(make_question(MadeUpCosts(BLOCK), cards, given_times=MadeUpTimes([1.0] * 10), **sections))


@pytest.mark.parametrize(
    ("scheme", "is_asked", "is_said"),
    [("fp8-compute", False, True), ("fp8-compute", True, False), ("none", False, False)],
)
def test_a_plan_for_cards_that_nobody_could_ask_says_what_fp8_needs(scheme, is_asked, is_said):
    plan = _plan(make_cards(80), model={"quantize": scheme})
    plan = replace(plan, cards=tuple(replace(card, has_context=is_asked) for card in plan.cards))
    assert ("RTX 40" in describe_plan(plan)) is is_said


def test_what_fits_without_streaming_is_named_by_how_much_longer_it_takes():
    cards = make_cards(5, 12, speeds=(1.0, 0.1))
    plan, resident = _plan(cards), _plan(cards, split={"offloaded_blocks": [0, 0]})
    (said,) = (reason for reason in plan.reasons if reason.startswith("host memory"))
    times = re.search(r"would take ([0-9.]+) times as long", said)
    assert any(plan.offloaded) and times is not None
    assert float(times[1]) == pytest.approx(resident.step_s / plan.step_s, abs=0.006)
