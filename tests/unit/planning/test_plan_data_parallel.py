"""When the planner gives every card a copy of the model, and how the user overrules it."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.costs import BlockCost
from devicebridge.planning.plan import TrainingPlan, plan_training, plan_values
from devicebridge.planning.question import Question
from devicebridge.planning.search import needed_at_least, what_helps
from devicebridge.planning.times import ASSUMED_LINK_BYTES_PER_S
from devicebridge.tests.plans import MadeUpCosts, full_size, make_cards, make_question

GB = 10**9
MB = 10**6
pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")


def _ask(family_name: str, cards: str = "24GB,24GB", **sections: Any) -> Question:
    sections["train"] = {"gradient_accumulation_steps": 2} | sections.get("train", {})
    return make_question(full_size(family_name), parse_cards(cards), **sections)


def _plan(family_name: str, cards: str = "24GB,24GB", **sections: Any) -> TrainingPlan:
    return plan_training(_ask(family_name, cards, **sections))


def _times_longer(plan: TrainingPlan, strategy: str) -> float | None:
    """Than the chosen one, of the best with this strategy; None if none fits."""
    tried = [found for each, found in plan.looked_at if each.strategy == strategy]
    assert tried
    return min((found.step_s / plan.step_s for found in tried if found is not None), default=None)


@pytest.mark.parametrize("scheme", ["fp8-compute", "int8-compute"])
def test_two_cards_of_24_gb_each_take_all_of_flux1_in_8_bits(scheme):
    plan = _plan("flux1", model={"quantize": scheme})
    cards = (torch.device("cuda", 0), torch.device("cuda", 1))
    assert plan.setting.strategy == "data" and plan.placement.replicas == cards
    first, other = plan.devices
    assert first.num_blocks == other.num_blocks == 57 and first.weights == other.weights > 11 * GB
    assert first.optimizer == 2 * first.lora > 0 == other.optimizer
    assert other.num_uncheckpointed >= first.num_uncheckpointed and max(first.needed, other.needed) <= 0.95 * 24 * GB
    assert _times_longer(plan, "pipeline") > 1
    setting = plan_values(plan)["setting"]
    assert setting["replicas"] == ["cuda:0", "cuda:1"] and setting["split_at"] == []


def test_what_one_card_cannot_hold_is_split():
    plan = _plan("flux2")
    assert plan.setting.strategy == "pipeline" and plan.placement.replicas == ()
    assert _times_longer(plan, "data") is None and not plan.notes


@pytest.mark.parametrize(("strategy", "ahead"), [("none", 0), ("data", 0), ("pipeline", 3)])
def test_running_ahead_is_for_a_pipeline(strategy, ahead):
    plan = _plan("flux1", parallel={"strategy": strategy, "microbatches_ahead": 3})
    assert (plan.setting.strategy, plan.setting.ahead) == (strategy, ahead)
    assert any("parallel.microbatches_ahead" in note for note in plan.notes) == (ahead == 0)


@pytest.mark.parametrize("cards", ["80GB,80GB", "48GB,48GB", "48GB,48GB,48GB"])
def test_of_cuts_that_take_equally_long_the_fullest_card_is_the_emptiest(cards):
    """Sums of the same times in another order are not to decide."""

    def fullest(plan):
        return max(device.needed for device in plan.devices)

    settings = {"train": {"gradient_accumulation_steps": 1}, "parallel": {"strategy": "none"}}
    plan = _plan("flux1", cards, **settings)
    counts = [device.num_blocks for device in plan.devices]
    for index, shift in itertools.product(range(len(counts) - 1), (-5, -2, -1, 1, 2, 5)):
        cuts = list(itertools.accumulate(counts))[:-1]
        cuts[index] += shift
        other = _plan("flux1", cards, **settings, split={"balance": "manual", "split_at": cuts})
        assert other.step_s >= plan.step_s
        assert fullest(other) >= fullest(plan) or other.step_s > plan.step_s, cuts


def test_a_longer_step_fills_a_pipeline_whose_blocks_keep_their_activations():
    """Half a model leaves room for them: by some per cent it is faster than copies that recompute."""
    plan = _plan("flux1", train={"gradient_accumulation_steps": 4})
    assert plan.setting.strategy == "pipeline" and sum(plan.uncheckpointed) > 50
    assert 1 < _times_longer(plan, "data") < 1.1


def test_the_user_overrules_it_both_ways():
    for sections in ({"parallel": {"strategy": "pipeline"}}, {"split": {"balance": "manual", "split_at": [20]}}):
        assert _plan("flux1", **sections).setting.strategy == "pipeline"
    forced = _plan("flux1", train={"gradient_accumulation_steps": 8}, parallel={"strategy": "data"})
    assert forced.setting.strategy == "data"
    question = _ask("flux2", parallel={"strategy": "data"})
    with pytest.raises(ValueError, match="^does not fit: "):
        plan_training(question)
    found = needed_at_least(question)
    assert found is not None and [stage.num_blocks for stage in found.devices] == [56, 56]
    assert all(stage.share > 1 for stage in found.devices)
    assert 'parallel.strategy = "auto"' in what_helps(question)


def _made_up(cards: list[Card], **sections: dict[str, Any]) -> TrainingPlan:
    """Ten blocks of 1 GB and 1 s, 0.1 GB of LoRA each."""
    block = BlockCost(GB, 100 * MB, 25 * MB, 10 * MB, {}, 10 * MB, 100 * MB, 10 * MB, 100 * MB, 200 * MB, 200 * MB)
    given = {"model": {"quantize": "none"}, "train": {"gradient_accumulation_steps": 2}} | sections
    return plan_training(make_question(MadeUpCosts(block), cards, link=1e10, **given))


FOUR = {"train": {"gradient_accumulation_steps": 4}}


def _data(cards: list[Card], **sections: dict[str, Any]) -> TrainingPlan:
    return _made_up(cards, **{**FOUR, "parallel": {"strategy": "data"}, **sections})


@pytest.mark.parametrize(
    ("accumulation", "speeds", "expected"),
    [
        (4, (1.0, 1.0), 2), (5, (1.0, 1.0), 3), (6, (1.0, 1.0, 1.0), 2), (5, (1.0, 0.5), 4),
        (2, (1.0, 1.0, 0.1), 1),  # the slow one has nothing to do
    ],
)  # fmt: skip
def test_a_step_lasts_as_long_as_the_card_with_the_most_to_do(accumulation, speeds, expected):
    train, split = {"gradient_accumulation_steps": accumulation}, {"blocks_without_checkpointing": [0] * len(speeds)}
    plan = _data(make_cards(*[100] * len(speeds), speeds=speeds), train=train, split=split)
    assert plan.step_s == pytest.approx(30 * expected)
    assert all(device.held == 1 for device in plan.devices)


def test_a_card_that_is_too_slow_or_too_small_is_split_with():
    assert _made_up(make_cards(100, 100), **FOUR).setting.strategy == "data"
    assert _made_up(make_cards(100, 100, speeds=(1.0, 0.1)), **FOUR).setting.strategy != "data"
    assert _made_up(make_cards(100, 9), **FOUR).setting.strategy == "pipeline"


def test_the_peak_of_a_tight_card_is_what_its_parts_are():
    """By hand. Weights 10, LoRA 1, gradients 1, on first 2 of optimizer; then either the backward of the last block, or
    the sums: as much again as the gradients."""
    first, other = _data(make_cards(100, 100), split={"blocks_without_checkpointing": [0, 0]}).devices
    assert first.moment == other.moment == "optimizer step"
    assert first.allocated - first.workspace == 15 * GB and other.allocated - other.workspace == 13 * GB


def test_limits_and_kept_blocks_are_each_cards_own():
    assert _data(make_cards(100, 100), split={"blocks_without_checkpointing": [3, 7]}).uncheckpointed == (3, 7)
    for limits, message in (([20.0, 5.0], "memory_limit_gb allows"), ([20.0], "memory_limit_gb has 1 values")):
        with pytest.raises(ValueError, match=message):
            _data(make_cards(100, 100), split={"memory_limit_gb": limits})


@pytest.mark.parametrize(("cards", "accumulation"), [("24GB,24GB", 1), ("80GB", 4)])
@pytest.mark.parametrize("strategy", ["data", "pipeline"])
def test_a_strategy_that_has_nothing_to_do_is_said_to_be_without_effect(cards, accumulation, strategy):
    given = {"parallel": {"strategy": strategy}, "train": {"gradient_accumulation_steps": accumulation}}
    plan = _plan("flux1", cards, **given)
    assert plan.setting.strategy == "none" and any(f'parallel.strategy = "{strategy}": ' in note for note in plan.notes)
    for said in (_plan("flux1", **{**given, "train": {"gradient_accumulation_steps": 4}}), _plan("flux1", cards)):
        assert not any("without effect" in note for note in said.notes)


def test_cards_that_share_out_tokens_take_a_share_of_each_block_and_keep_as_many():
    """By hand: a block of 1 s is half of that and 0.1 s of keys and values, three times where it is recomputed."""
    sections = {"model": {"quantize": "none"}, "parallel": {"strategy": "tokens"}}
    block = BlockCost(GB, 100 * MB, 25 * MB, 10 * MB, {}, 10 * MB, 2 * GB, 10 * MB, 100 * MB, 2 * GB, 2 * GB)
    costs = MadeUpCosts(block)
    costs.key_bytes = lambda *work: [0.2 * ASSUMED_LINK_BYTES_PER_S] * 10  # of the other card half
    plan = plan_training(make_question(costs, make_cards(100, 20), **sections))
    small, kept = plan.devices[1], plan.uncheckpointed
    assert plan.placement.strategy == "tokens" and len(plan.placement.replicas) == 2
    assert kept[0] == kept[1] > 0 and small.needed > 17 * GB
    assert plan.step_s == pytest.approx(0.6 * (3 * 10 - kept[0]))


@pytest.mark.parametrize(("strategy", "drawing"), [("data", [True, False]), ("tokens", [True, True])])
def test_cards_that_share_out_tokens_all_draw_sample_pictures(strategy, drawing):
    question = replace(_ask("flux1"), picture=(1024, 1024, 1))
    setting = replace(question.settings()[0], strategy=strategy)
    assert [question.of_card(index, setting).picture is not None for index in range(2)] == drawing
