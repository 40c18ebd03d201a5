"""Plans of cards that share out the rows of each micro-batch."""

from dataclasses import replace
from typing import Any

import pytest
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.token_plan import BlockRows, TokenPlan
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.costs import BlockCost, StepCost
from devicebridge.planning.dry_run import NoForecast, Work
from devicebridge.planning.plan import TrainingPlan, plan_training, step_seconds
from devicebridge.planning.search import is_possible, needed_at_least
from devicebridge.tests.plans import MadeUpCosts, make_cards, make_question

GB, MB = 10**9, 10**6
# Ten of them: 1 GB and 1 s each, 0.1 GB of LoRA.
BLOCK = BlockCost(GB, 100 * MB, 25 * MB, 10 * MB, {}, 10 * MB, 100 * MB, 10 * MB, 100 * MB, 200 * MB, 200 * MB)
TOKENS = {"parallel": {"strategy": "tokens"}}
PLAN = TokenPlan({"blocks": BlockRows("x=x@1", "=x")})


class Sharing(MadeUpCosts):
    """Of a class that has a token plan; where rows are shared out a block at work takes less."""

    def __init__(self, block: BlockCost, halved_by: int = 1, *, is_whole: bool = False, keys: float = 0.0) -> None:
        super().__init__(block, keys=keys)
        self.family = replace(self.family, native=NativeModel("toy.Toy", tokens=PLAN))
        self._halved_by, self._is_whole = halved_by, is_whole

    def dry_run(self, work: Work, kernels: Any) -> StepCost:
        found = super().dry_run(work, kernels)
        if not work.row_shares:
            return found
        block = found.blocks[0]
        names = ("recompute", "backward")
        less = replace(block, **{name: getattr(block, name) // self._halved_by for name in names})
        return replace(found, blocks=(less,) * len(found.blocks), is_whole=self._is_whole)


def _ask(cards: list[Card], **sections: Any) -> Any:
    given = {"model": {"quantize": "none"}, "link": 1e12} | sections
    return make_question(Sharing(BLOCK, keys=given.pop("keys", 0.0)), cards, **given)


def _plan(cards: list[Card], **sections: Any) -> TrainingPlan:
    return plan_training(_ask(cards, **sections))


def test_weights_that_do_not_fit_stream_alike_on_all_cards_and_are_in_host_memory_once() -> None:
    assert _plan(make_cards(100, 100), **TOKENS).offloaded == (0, 0)
    plan = _plan(make_cards(100, 12), **TOKENS)
    assert plan.setting.strategy == "tokens" and plan.uncheckpointed == (0, 0)
    assert plan.offloaded[0] == plan.offloaded[1] > 2
    assert all(device.needed <= device.usable for device in plan.devices)
    assert plan.host_bytes == (plan.offloaded[0] + 1) * GB  # and one block on its way from the file
    room = (plan.offloaded[0] + 1) * GB / 0.9
    assert _plan(make_cards(100, 12), host_bytes=int(room + 1), **TOKENS).offloaded == plan.offloaded
    with pytest.raises(ValueError, match="host memory"):
        _plan(make_cards(100, 12), host_bytes=int(room - 2.5e9), **TOKENS)


def test_what_is_missing_counts_blocks_that_stream() -> None:
    found = needed_at_least(_ask(make_cards(4, 4), **TOKENS))
    assert found is not None and [stage.num_offloaded for stage in found.devices] == [10, 10]
    assert all(stage.share > 1 for stage in found.devices)


@pytest.mark.parametrize("streamed", [0, 4])
def test_seconds_are_shared_work_and_what_travels_or_streams(streamed: int) -> None:
    """By hand, of blocks that are computed three times: half a second and half of the keys, per pass."""
    split = {"blocks_without_checkpointing": [0, 0], "offloaded_blocks": [streamed] * 2}
    given = {"keys": 24e9 * 0.1, "link": 1e9, "split": split, **TOKENS}  # 0.1 s for a half over the assumed link
    computing, streaming = 3 * 10 * (0.5 + 0.1), 2 * streamed
    expected = max(computing, streaming) + 0.3 * min(computing, streaming)
    assert _plan(make_cards(100, 100), **given).step_s == pytest.approx(expected)
    given["train"] = {"gradient_accumulation_steps": 3}
    assert _plan(make_cards(100, 100), **given).step_s == pytest.approx(3 * expected)


def _open(cards: list[Card], accumulation: int, keys: float = 0.0, **sections: Any) -> TrainingPlan:
    return _plan(cards, keys=keys, train={"gradient_accumulation_steps": accumulation}, **sections)


def test_cards_share_out_the_rows_of_a_single_micro_batch() -> None:
    plan = _open(make_cards(100, 100), 1)
    assert plan.setting.strategy == "tokens" and plan.placement.row_shares == (1.0, 1.0)
    assert "one card at a time" in plan.notes[0]
    assert plan.step_s == pytest.approx(10)  # blocks keep their activations: a forward and a backward of half


def test_faster_cards_have_more_rows() -> None:
    """A card of 2.3 times the other's speed has 2.25 of 3.25 rows, so the other computes 1 of 3.25 of each block."""
    cards = make_cards(100, 100, speeds=(2.3, 1.0))
    plan = _plan(cards, **TOKENS)
    assert plan.placement.row_shares == (2.25, 1.0) and "2.25:1" in plan.setting.describe()
    assert plan.step_s == pytest.approx(2 * 10 / 3.25)
    keys = _plan(cards, keys=24e9 * 0.1, **TOKENS)  # the slower card has 2.25 of 3.25 keys of others, 0.2 s for all
    assert keys.step_s == pytest.approx(2 * 10 * (1 / 3.25 + 0.2 * 2.25 / 3.25))


def test_shares_are_equal_where_the_faster_card_has_too_little_memory_for_more() -> None:
    class Activations(Sharing):
        def dry_run(self, work: Work, kernels: Any) -> StepCost:
            found, shares = super().dry_run(work, kernels), work.row_shares or (1.0,)
            moving = int(30 * GB * shares[0] / sum(shares))
            return replace(found, blocks=(replace(found.blocks[0], recompute=moving, backward=moving),) * 10)

    cards = make_cards(25, 100, speeds=(2.0, 1.0))
    plan = plan_training(make_question(Activations(BLOCK), cards, model={"quantize": "none"}, link=1e12, **TOKENS))
    assert plan.placement.row_shares == (1.0, 1.0)


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_of_several_micro_batches_each_has_a_card(accumulation: int) -> None:
    assert _open(make_cards(100, 100), accumulation).setting.strategy == "data"
    assert _open(make_cards(100, 100), accumulation, parallel={"strategy": "pipeline"}).setting.strategy == "pipeline"


@pytest.mark.parametrize(("travelling", "strategy"), [(0.35, "tokens"), (0.45, "none")])
def test_they_do_not_for_a_tenth(travelling: float, strategy: str) -> None:
    """Of a block that takes one card 1 s, 0.5 s and what travels are clearly less up to 0.9 s."""
    assert _open(make_cards(100, 100), 1, keys=travelling * 24e9).setting.strategy == strategy


def test_eight_bit_state_is_not_taken_for_the_sake_of_speed() -> None:
    assert _open(make_cards(15, 15), 1, link=1e9, optimizer={"name": "auto"}).setting.optimizer == "adamw"


def test_they_do_where_nothing_else_fits() -> None:
    """A block at work takes 30 GB, or half of that where its rows are shared out; streaming does not help."""
    block = replace(BLOCK, recompute=30 * GB, backward=30 * GB)
    costs = Sharing(block, halved_by=2, keys=100e9)
    question = make_question(costs, make_cards(30, 30), model={"quantize": "none"}, link=1e12)
    plan = plan_training(question)
    assert plan.setting.strategy == "tokens" and "nothing else fits" in plan.notes[0]
    assert {each.strategy for each, found in plan.looked_at if found is None} == {"none"}


def test_a_sample_that_cannot_be_shared_out_is_one_cards() -> None:
    costs = Sharing(BLOCK, is_whole=True)
    plan = plan_training(make_question(costs, make_cards(100, 100), model={"quantize": "none"}))
    assert plan.setting.strategy == "none"
    named = plan_training(make_question(costs, make_cards(100, 100), model={"quantize": "none"}, **TOKENS))
    assert named.step_s == pytest.approx(plan.step_s)


def test_rows_that_are_refused_are_left_alone_unless_they_were_asked_for() -> None:
    class Refused(Sharing):
        def dry_run(self, work: Work, kernels: Any) -> StepCost:
            if work.row_shares:
                raise NoForecast("a model", "rows of a mask")
            return super().dry_run(work, kernels)

    def asked(**sections: Any) -> Any:
        return make_question(Refused(BLOCK), make_cards(100, 100), model={"quantize": "none"}, **sections)

    assert plan_training(asked()).setting.strategy == "none"
    with pytest.raises(NoForecast):
        plan_training(asked(**TOKENS))


@pytest.mark.parametrize(
    "sections",
    [
        {"split": {"balance": "manual", "split_at": [5]}}, {"split": {"blocks_without_checkpointing": [1, 2]}},
        {"split": {"offloaded_blocks": [1, 1]}}, {"train": {"gradient_accumulation_steps": 1, "compile": "auto"}},
    ],
)  # fmt: skip
def test_what_the_user_says_of_a_split_is_kept_to(sections: Any) -> None:
    assert _plan(make_cards(100, 100), **sections).setting.strategy == "none"


def test_a_class_without_a_token_plan_is_not_looked_at() -> None:
    plan = plan_training(make_question(MadeUpCosts(BLOCK), make_cards(100, 100), model={"quantize": "none"}))
    assert {each.strategy for each, _ in plan.looked_at} == {"none"}


def test_seconds_that_travel_do_not_depend_on_the_cards_products() -> None:
    """Of cards of a known kind, at their own link: 24e9 bytes of keys, half of which come, three times per block."""
    for names, link in (("2x3090", 12e9), ("2xH200", 300e9)):
        split = {"blocks_without_checkpointing": [0, 0]}
        plans = [_plan(parse_cards(names), keys=keys, split=split, **TOKENS) for keys in (0.0, 24e9)]
        apart = step_seconds(plans[1])[0] - step_seconds(plans[0])[0]
        assert apart == pytest.approx(30 * 12e9 / link)


def test_the_longest_clip_is_the_last_that_fits() -> None:
    """Of 1 GB per frame while a block is at work, half of it where two cards share out rows."""

    class Clips(Sharing):
        def dry_run(self, work: Work, kernels: Any) -> StepCost:
            found = super().dry_run(work, kernels)
            frames, shared = work.latent_shape[1], len(work.row_shares) or 1
            longer = replace(found.blocks[0], recompute=frames * GB // shared, backward=frames * GB // shared)
            return replace(found, blocks=(longer,) * len(found.blocks))

    def longest(cards: list[Card], **sections: Any) -> int:
        question = make_question(Clips(BLOCK), cards, model={"quantize": "none"}, **sections)
        frames = next(n for n in range(100, 0, -1) if is_possible(question.changed(frames=n)))
        plan_training(question.changed(frames=frames))
        with pytest.raises(ValueError, match="does not fit"):
            plan_training(question.changed(frames=frames + 1))
        return frames

    one, split = longest(make_cards(30)), longest(make_cards(30, 30), parallel={"strategy": "none"})
    assert 20 < one <= split < 30 and longest(make_cards(30, 30)) >= 2 * one
