"""When the planner divides every block among the cards, and what each of them is forecast to hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.plan import TrainingPlan, plan_training, plan_values
from devicebridge.planning.question import Setting
from devicebridge.planning.search import find_fastest
from devicebridge.planning.times import ASSUMED_FLOPS_PER_S, ASSUMED_LINK_BYTES_PER_S, DividedBlock
from devicebridge.tests.plans import MadeUpCosts, full_size, make_question

GB = 10**9
pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")


def _plan(family: str = "flux2", cards: str = "80GB,80GB", side: int = 1024, **sections: Any) -> TrainingPlan:
    return plan_training(make_question(full_size(family), parse_cards(cards), (side, side), **sections))


_TENSOR = {"strategy": "tensor"}
_FULL = {"quantize": "none"}


def test_blocks_are_divided_only_if_the_job_says_so():
    assert _plan(model=_FULL).setting.strategy != "tensor"
    assert _plan(model=_FULL, parallel=_TENSOR).setting.strategy == "tensor"


@pytest.mark.parametrize("family", ["flux2", "flux1", "wan"])
def test_a_card_holds_its_share_of_the_blocks_and_all_else(family):
    recomputed = {"blocks_without_checkpointing": [0]}
    one = _plan(family, "500GB", parallel={"strategy": "none"}, model=_FULL, split=recomputed).devices[0]
    recomputed = {"blocks_without_checkpointing": [0, 0]}
    plan = _plan(family, "500GB,500GB", parallel=_TENSOR, model=_FULL, split=recomputed)
    first, second = plan.devices
    assert first.num_blocks == second.num_blocks == one.num_blocks
    assert 0.5 < first.weights / one.weights < 0.56 and first.weights == second.weights
    # Half of the whole LoRA with its optimizer state, and slices of it
    assert 0.5 * one.optimizer == pytest.approx(first.optimizer, rel=0.01)
    assert 0.9 * one.lora < first.lora < 1.4 * one.lora
    assert first.needed < 0.65 * one.needed


def test_four_cards_of_24_gb_hold_flux2_in_full_precision_where_two_cannot():
    assert _plan(cards="4x24GB", side=512, parallel=_TENSOR, model=_FULL).setting.strategy == "tensor"
    with pytest.raises(ValueError, match="does not fit"):
        _plan(cards="24GB,24GB", side=512, parallel=_TENSOR, model=_FULL)


def test_all_cards_keep_the_activations_of_the_same_blocks():
    plan = _plan(cards="80GB,48GB", side=512, parallel=_TENSOR)
    assert len(set(plan.uncheckpointed)) == 1 and plan.uncheckpointed[0] > 0


def test_a_plan_says_which_cards_have_shares():
    plan = _plan(parallel=_TENSOR, model=_FULL)
    setting = plan_values(plan)["setting"]
    assert setting["strategy"] == "tensor" and setting["shards"] == ["cuda:0", "cuda:1"] and setting["split_at"] == []


# ---- cards of unequal memory


def _heads(plan: TrainingPlan) -> tuple[int, ...]:
    return plan.placement.shares


def test_a_run_that_is_resumed_keeps_its_shares():
    cards = tuple(parse_cards("80GB,80GB"))
    question = make_question(full_size(), cards, (512, 512), parallel=_TENSOR, model=_FULL)
    resumed = dataclasses.replace(question, given_shares=(30, 18))
    assert _heads(plan_training(question)) == () and _heads(plan_training(resumed)) == (30, 18)
    smaller = dataclasses.replace(resumed, cards=tuple(parse_cards("40GB,80GB")))
    assert find_fastest(smaller)[0] is None
    assert find_fastest(dataclasses.replace(smaller, given_shares=()))[0] is not None  # even ones fit


def _times(shares: tuple[int, ...], sent: float = 0.0, num_exchanges: int = 8, whole: float = 0.0) -> list[float]:
    """Seconds of each card for the forward of a block that takes one of them 0.3 s. whole: what all compute of it."""
    costs = MadeUpCosts(None, 1, units=(0.3,))
    found = DividedBlock(whole * ASSUMED_FLOPS_PER_S, sent, num_exchanges)
    costs.divided = lambda *work: [found]
    cards = parse_cards(f"{len(shares)}x80GB")
    question = make_question(costs, cards, parallel=_TENSOR)
    question = dataclasses.replace(question, given_shares=shares)
    setting = Setting("none", "adamw", "tensor", 0)
    return [question.of_card(index, setting).seconds(card, "none")[0] for index, card in enumerate(cards)]


def test_a_card_computes_its_share_of_a_block():
    assert _times((36, 12)) == pytest.approx([0.225, 0.075])
    assert _times((36, 12), whole=0.1) == pytest.approx([0.25, 0.15])


@pytest.mark.parametrize(("count", "times"), [(2, 1.0), (4, 1.5)])
def test_four_cards_send_large_sums_slice_by_slice(count, times):
    sent = 8 * 2**23
    large, small = (_times((1,) * count, sent, exchanges)[0] for exchanges in (8, 9))
    assert large == pytest.approx(0.3 / count + times * sent / ASSUMED_LINK_BYTES_PER_S)
    assert small == pytest.approx(0.3 / count + (count - 1) * sent / ASSUMED_LINK_BYTES_PER_S)
