"""When the planner divides every block among the cards, and what each of them is forecast to hold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.divided_times import EXCHANGE_S, LAUNCH_S, DividedTimes
from devicebridge.planning.plan_training import TrainingPlan, plan_training
from devicebridge.planning.report import plan_values
from devicebridge.planning.search import find_fastest
from devicebridge.tests.plans import full_size, make_question

GB = 10**9
pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")


@dataclass
class _Times:
    """Every block takes as long; cards reach each other at this speed."""

    seconds: float
    links: float | None

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        return self.seconds, self.seconds

    def ends(self, card: Card, scheme: str) -> tuple[float, float]:
        return 0.0, 0.0

    def link(self, card: Card) -> float:
        return 12e9

    def between(self, source: Card, target: Card) -> float | None:
        return self.links


def _plan(
    family: str = "flux2", cards: str = "80GB,80GB", times: _Times | None = None, side: int = 1024, **sections: Any
) -> TrainingPlan:
    given = {} if times is None else {"given_times": times}
    return plan_training(make_question(full_size(family), parse_cards(cards), (side, side), **given, **sections))


_TENSOR = {"strategy": "tensor"}
_FULL = {"quantize": "none"}


@pytest.mark.parametrize(("links", "expected"), [(200e9, "tensor"), (4e9, "none"), (None, "none")])
def test_one_microbatch_is_computed_by_all_cards_where_the_link_is_fast_and_was_measured(links, expected):
    plan = _plan(times=_Times(0.012, links), model=_FULL)
    assert plan.setting.strategy == expected
    assert bool(plan.placement.shards) == (expected == "tensor")


def test_short_blocks_wait_for_the_host_and_are_not_divided():
    """The host launches for both cards: 2864 and 3848 operations of forwards and backwards, 80 exchanges in each."""
    fast = _Times(0.001, 200e9)
    assert _plan(times=fast, model=_FULL).setting.strategy == "none"
    none_kept = {"blocks_without_checkpointing": [0, 0]}
    forced = _plan(times=fast, model=_FULL, parallel=_TENSOR, split=none_kept)
    launches = 2 * 2864 + 3848
    assert forced.step_s == pytest.approx(2 * (launches * LAUNCH_S + 3 * 80 * EXCHANGE_S), rel=0.01)


def test_several_microbatches_fill_a_pipeline_and_nothing_is_divided():
    plan = _plan(times=_Times(0.012, 25e9), model=_FULL, train={"gradient_accumulation_steps": 16})
    assert plan.setting.strategy != "tensor"


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


def test_compiling_and_dropout_leave_blocks_whole():
    times = _Times(0.012, 200e9)
    for sections in ({"train": {"compile": "auto"}}, {"lora": {"dropout": 0.1}}, {"lora": {"dora": True}}):
        assert _plan(times=times, model=_FULL, **sections).setting.strategy != "tensor"


def test_a_plan_says_which_cards_have_shares():
    plan = _plan(parallel=_TENSOR, model=_FULL)
    setting = plan_values(plan)["setting"]
    assert setting["strategy"] == "tensor" and setting["shards"] == ["cuda:0", "cuda:1"] and setting["split_at"] == []
    assert any(reason.startswith("tensor parallel:") for reason in plan.reasons)


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


def test_a_card_computes_its_share_of_a_block():
    whole, cards = _Times(0.3, 1e12), tuple(parse_cards("80GB,80GB"))
    none = [0.0] * 56
    times = DividedTimes(whole, cards, (36, 12), none, none, [0] * 56, lambda scheme: [(0, 0)] * 56)
    assert [times.of(0, card, "none")[0] for card in cards] == pytest.approx([0.225, 0.075])


@pytest.mark.parametrize(("count", "times"), [(2, 1.0), (4, 1.5)])
def test_four_cards_send_large_sums_slice_by_slice(count, times):
    whole, cards = _Times(0.3, 1e9), tuple(parse_cards(",".join(["80GB"] * count)))
    none, sent = [0.0] * 56, 8 * 2**23
    found = DividedTimes(whole, cards, (1,) * count, [sent] * 56, none, [8] * 56, lambda scheme: [(0, 0)] * 56)
    small = dataclasses.replace(found, num_exchanges=[9] * 56)
    assert found.of(0, cards[0], "none")[0] == pytest.approx(0.3 / count + times * sent / 1e9)
    assert small.of(0, cards[0], "none")[0] == pytest.approx(0.3 / count + (count - 1) * sent / 1e9)
