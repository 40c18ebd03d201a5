"""When the planner divides every block among the cards, and what each of them is forecast to hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.divided_times import HOST_BACKWARD_S, HOST_FORWARD_S
from devicebridge.planning.plan_training import TrainingPlan, plan_training
from devicebridge.planning.report import plan_values
from devicebridge.tests.plans import full_size, make_question

GB = 10**9
pytestmark = pytest.mark.usefixtures("one_thread")


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
    fast = _Times(HOST_FORWARD_S, 200e9)
    assert _plan(times=fast, model=_FULL).setting.strategy == "none"
    none_kept = {"blocks_without_checkpointing": [0, 0]}
    forced = _plan(times=fast, model=_FULL, parallel=_TENSOR, split=none_kept)
    assert forced.step_s == pytest.approx(56 * 2 * (2 * HOST_FORWARD_S + HOST_BACKWARD_S), rel=1e-6)


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
