"""When the planner gives every card a copy of the model, what it says of it, and how the user overrules it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.config.job import make_job
from devicebridge.families.registry import find_family
from devicebridge.planning import planner as planner_module
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.dry_run import BlockCost, Rehearsal
from devicebridge.planning.plan_training import plan_training
from devicebridge.planning.planner import Planner, TrainingPlan
from devicebridge.planning.report import describe_plan, draw_plan, plan_values

GB = 10**9
MB = 10**6
pytestmark = pytest.mark.usefixtures("one_thread", "rehearsed_once")


def _planner(family_name: str, cards: list[Card], times: Any = None, **sections: dict[str, Any]) -> Planner:
    values: dict[str, Any] = {
        "model": {"path": "x", "quantize": "fp8-compute"},
        "data": {"folders": [{"path": "x"}], "resolutions": [512]},
        "lora": {"rank": 32},
        "train": {"steps": 10, "gradient_accumulation_steps": 2},
        "output": {"folder": "x"},
    }
    job = make_job({name: values.get(name, {}) | sections.get(name, {}) for name in values.keys() | sections.keys()})
    family = find_family(family_name)
    variant = family.variants[0]
    info = CheckpointInfo(Path("x"), family, variant, variant.transformer_config, "diffusers", {}, None)
    return Planner(job, info, variant, cards, (512, 512), times=times)


def _plan(family_name: str, cards: str = "24GB,24GB", **sections: dict[str, Any]) -> TrainingPlan:
    return plan_training(_planner(family_name, parse_cards(cards), **sections))


# ---- full-size models


@pytest.mark.parametrize("scheme", ["fp8-compute", "int8-compute"])
def test_two_cards_of_24_gb_each_take_all_of_flux1_in_8_bits(scheme):
    plan = _plan("flux1", model={"quantize": scheme})
    cards = (torch.device("cuda", 0), torch.device("cuda", 1))
    assert plan.setting.schedule == "replicas" and plan.placement.replicas == cards
    home, other = plan.forecast.devices
    assert home.num_blocks == other.num_blocks == 57 and home.weights == other.weights > 11 * GB
    assert home.optimizer == 2 * home.lora > 0 == other.optimizer
    assert other.num_kept >= home.num_kept and max(home.needed, other.needed) <= 0.95 * 24 * GB
    assert any(reason.startswith("schedule replicas: 1f1b would take") for reason in plan.reasons)
    assert any("holds the whole model" in reason for reason in plan.reasons)


def test_what_one_card_cannot_hold_is_split():
    plan = _plan("flux2")
    assert plan.setting.schedule == "1f1b" and plan.placement.replicas == ()
    assert "schedule 1f1b: replicas do not fit" in plan.reasons and not plan.hints


def test_a_step_of_one_micro_batch_keeps_one_card_busy_and_the_plan_says_what_would_help():
    plan = _plan("flux1", train={"gradient_accumulation_steps": 1})
    assert plan.setting.schedule == "none"
    (hint,) = plan.hints
    assert "train.gradient_accumulation_steps = 4" in hint
    several = _plan("flux1", train={"gradient_accumulation_steps": 4})
    assert several.setting.schedule != "none" and several.step_s < 4 * plan.step_s  # what it said is true
    assert not several.hints


def test_running_ahead_is_for_1f1b():
    for strategy in ("none", "data"):
        plan = _plan("flux1", parallel={"strategy": strategy, "microbatches_ahead": 3})
        assert "parallel.microbatches_ahead = 3: without effect, only a pipeline runs ahead" in plan.reasons
    assert "without effect" not in describe_plan(
        _plan("flux1", parallel={"strategy": "pipeline", "microbatches_ahead": 3})
    )


@pytest.mark.parametrize("cards", ["80GB,80GB", "48GB,48GB", "48GB,48GB,48GB"])
def test_of_cuts_that_take_equally_long_the_fullest_card_is_the_emptiest(cards):
    """Sums of the same times in another order are not to decide."""

    def fullest(plan):
        return max(device.needed for device in plan.forecast.devices)

    settings = {"train": {"gradient_accumulation_steps": 1}, "parallel": {"strategy": "none"}}
    plan = _plan("flux1", cards, **settings)
    counts = [device.num_blocks for device in plan.forecast.devices]
    for index, shift in itertools.product(range(len(counts) - 1), (-5, -2, -1, 1, 2, 5)):
        cuts = list(itertools.accumulate(counts))[:-1]
        cuts[index] += shift
        other = _plan("flux1", cards, **settings, split={"balance": "manual", "split_at": cuts})
        assert other.step_s >= plan.step_s
        assert fullest(other) >= fullest(plan) or other.step_s > plan.step_s, cuts


def test_a_longer_step_fills_a_pipeline_whose_blocks_keep_their_activations():
    """Half a model leaves room for them: by some per cent it is faster than copies that recompute."""
    plan = _plan("flux1", train={"gradient_accumulation_steps": 4})
    assert plan.setting.schedule == "1f1b" and sum(plan.kept_blocks) > 50
    assert any(reason.startswith("schedule 1f1b: replicas would take 1.0") for reason in plan.reasons)


def test_the_user_overrules_it_both_ways():
    split = _plan("flux1", parallel={"strategy": "pipeline"})
    assert split.setting.schedule == "1f1b"
    manual = _plan("flux1", split={"balance": "manual", "split_at": [20]})
    assert manual.setting.schedule == "1f1b"
    forced = _plan("flux1", train={"gradient_accumulation_steps": 8}, parallel={"strategy": "data"})
    assert forced.setting.schedule == "replicas"
    with pytest.raises(ValueError) as refusal:
        _plan("flux2", parallel={"strategy": "data"})
    text = str(refusal.value)
    assert "cuda:1: 56 blocks" in text and text.count("are missing") == 2
    assert 'parallel.strategy = "auto"' in text and "another card" not in text  # which would have to hold it, too


def test_it_is_shown_as_it_is():
    plan = _plan("flux1")
    text = describe_plan(plan)
    assert "fp8-compute, replicas; all 57 blocks on each of cuda:0, cuda:1" in text
    setting = plan_values(plan)["setting"]
    assert setting["replicas"] == ["cuda:0", "cuda:1"] and setting["split_at"] == []
    assert draw_plan(plan).height > 100


# ---- made-up costs


class _Times:
    """Blocks of so many seconds on a card of speed 1."""

    def __init__(self, units: list[float]) -> None:
        self.units = units

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        return self.units[block] / card.speed, self.units[block] / card.speed

    def link(self, card: Card) -> float:
        return 1e10

    def ends(self, card: Card, scheme: str) -> tuple[float, float]:
        return 0.0, 0.0


def _made_up(monkeypatch: pytest.MonkeyPatch, cards: list[Card], **sections: dict[str, Any]) -> TrainingPlan:
    """Ten blocks of 1 GB and 1 s, 0.1 GB of LoRA each."""
    block = BlockCost(GB, 100 * MB, 25 * MB, 10 * MB, {}, 10 * MB, 100 * MB, 10 * MB, 100 * MB, 200 * MB, 200 * MB)
    names = tuple(f"transformer_blocks.{index}" for index in range(10))
    rehearsal = Rehearsal(names, (block,) * 10, 0, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(planner_module, "rehearse_training", lambda *args: rehearsal)
    monkeypatch.setattr(planner_module, "block_names", lambda *args: names)
    sections["model"] = {"quantize": "none"}
    return plan_training(_planner("flux2", cards, _Times([1.0] * 10), **sections))


def _cards(*sizes_gb: float, speeds: tuple[float, ...] = ()) -> list[Card]:
    speeds = speeds or (1.0,) * len(sizes_gb)
    return [
        Card(torch.device("cuda", i), int(gb * GB), int(gb * GB), speed)
        for i, (gb, speed) in enumerate(zip(sizes_gb, speeds, strict=True))
    ]


@pytest.mark.parametrize(
    ("accumulation", "speeds", "expected"),
    [
        (4, (1.0, 1.0), 2),
        (5, (1.0, 1.0), 3),
        (6, (1.0, 1.0, 1.0), 2),
        (2, (1.0, 1.0, 0.1), 1),  # the slow one has nothing to do
        (5, (1.0, 0.5), 4),
    ],
)
def test_a_step_lasts_as_long_as_the_card_with_the_most_to_do(monkeypatch, accumulation, speeds, expected):
    sections = {
        "train": {"gradient_accumulation_steps": accumulation},
        "parallel": {"strategy": "data"},
        "split": {"blocks_without_checkpointing": [0] * len(speeds)},
    }
    plan = _made_up(monkeypatch, _cards(*[100] * len(speeds), speeds=speeds), **sections)
    assert plan.relative_time == pytest.approx(expected / accumulation)
    assert all(device.held == 1 for device in plan.forecast.devices)


def test_a_card_that_is_too_slow_or_too_small_is_split_with(monkeypatch):
    four = {"train": {"gradient_accumulation_steps": 4}}
    assert _made_up(monkeypatch, _cards(100, 100), **four).setting.schedule == "replicas"
    assert _made_up(monkeypatch, _cards(100, 100, speeds=(1.0, 0.1)), **four).setting.schedule != "replicas"
    assert _made_up(monkeypatch, _cards(100, 9), **four).setting.schedule == "1f1b"


def test_the_peak_of_a_tight_card_is_what_its_parts_are(monkeypatch):
    """By hand. Weights 10, LoRA 1, gradients 1, on home 2 of optimizer; then either the backward of the last block, or
    the sums: as much again as the gradients."""
    sections = {
        "train": {"gradient_accumulation_steps": 4},
        "parallel": {"strategy": "data"},
        "split": {"blocks_without_checkpointing": [0, 0]},
    }
    home, other = _made_up(monkeypatch, _cards(100, 100), **sections).forecast.devices
    assert home.moment == other.moment == "optimizer step"
    assert home.allocated - home.workspace == 15 * GB and other.allocated - other.workspace == 13 * GB


def test_limits_and_kept_blocks_are_each_cards_own(monkeypatch):
    sections = {
        "train": {"gradient_accumulation_steps": 4},
        "parallel": {"strategy": "data"},
        "split": {"blocks_without_checkpointing": [3, 7]},
    }
    plan = _made_up(monkeypatch, _cards(100, 100), **sections)
    assert plan.kept_blocks == (3, 7) and [device.num_kept for device in plan.forecast.devices] == [3, 7]
    sections["split"] = {"memory_limit_gb": [20.0, 5.0]}
    with pytest.raises(ValueError, match="memory_limit_gb allows"):
        _made_up(monkeypatch, _cards(100, 100), **sections)
    sections["split"] = {"memory_limit_gb": [20.0]}
    with pytest.raises(ValueError, match="memory_limit_gb has 1 values"):
        _made_up(monkeypatch, _cards(100, 100), **sections)


@pytest.mark.parametrize(
    ("cards", "accumulation", "why"),
    [("24GB,24GB", 1, "there is one micro-batch in a step"), ("80GB", 4, "there is one card")],
)
@pytest.mark.parametrize("strategy", ["data", "pipeline"])
def test_a_schedule_that_has_nothing_to_do_is_said_to_be_without_effect(
    cards: str, accumulation: int, why: str, strategy: str
) -> None:
    given = {"parallel": {"strategy": strategy}, "train": {"gradient_accumulation_steps": accumulation}}
    assert f'parallel.strategy = "{strategy}": without effect, {why}' in describe_plan(_plan("flux1", cards, **given))
    for said in (_plan("flux1", **{**given, "train": {"gradient_accumulation_steps": 4}}), _plan("flux1", cards)):
        assert "without effect" not in describe_plan(said)
