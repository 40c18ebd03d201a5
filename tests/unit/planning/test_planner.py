"""The planner on full-size models and on made-up costs: what it chooses, what it refuses, what it says would help."""

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from devicebridge.cli.main import main
from devicebridge.config.job import OptimizerConfig, save_job
from devicebridge.config.model import Strategy, has_stages, holds_copies, shards_weights, shares_rows
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.checked_job import ReadJob
from devicebridge.jobs.job import check_job, run_job
from devicebridge.jobs.read_job import subject_of
from devicebridge.jobs.resolve import Machine, plan_on
from devicebridge.planning import cards as cards_module
from devicebridge.planning import question as question_module
from devicebridge.planning.cards import SHARE_OF_PRODUCT, Card, cards_of, kind_called, parse_cards
from devicebridge.planning.costs import BlockCost, ModelCosts
from devicebridge.planning.memory import Optimizer, optimizer_bytes
from devicebridge.planning.plan import (
    TrainingPlan,
    compare,
    describe_comparison,
    describe_pace,
    draw_plan,
    parts_of,
    plan_training,
    plan_values,
    step_seconds,
)
from devicebridge.planning.question import STRATEGIES, Question, make_square
from devicebridge.planning.search import HOST_SHARE, UNHIDDEN, _sizes, needed_at_least, what_helps
from devicebridge.planning.times import SCHEME_TIMES
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.plans import MadeUpCosts, full_size, make_cards, make_plan_job, make_question, published_info
from devicebridge.tests.tiny_pipeline import make_tiny_job

GB = 10**9
ONES = [1.0] * 10
pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")


def _ask(cards: str, bucket: tuple[int, int] = (512, 512), **given: Any) -> Question:
    return make_question(full_size(), parse_cards(cards), bucket, **given)


def _plan(cards: str, bucket: tuple[int, int] = (512, 512), **given: Any) -> TrainingPlan:
    return plan_training(_ask(cards, bucket, **given))


def _helps(question: Question) -> list[str]:
    """What makes a job fit that does not."""
    with pytest.raises(ValueError, match="^does not fit: "):
        plan_training(question)
    return what_helps(question)


def test_every_strategy_is_a_candidate():
    """But those that a job must ask for: one that is left out would be chosen for nobody."""
    asked = {each for each in get_args(Strategy) if shards_weights(each)}
    assert {*STRATEGIES} == {*get_args(Strategy)} - asked


@pytest.mark.parametrize("question", [holds_copies, shares_rows, has_stages, shards_weights])
def test_no_question_about_a_strategy_takes_an_unknown_one_for_another(question: Any) -> None:
    assert {question(each) for each in get_args(Strategy)} == {True, False}
    with pytest.raises(KeyError):
        question("newer")


def test_two_cards_of_24_gb_take_flux2_in_8_bits():
    plan = _plan("24GB,24GB")
    assert all(device.needed <= 0.95 * 24 * GB for device in plan.devices)
    assert sum(device.num_blocks for device in plan.devices) == 56 == len(plan.placement.devices)
    assert sum(plan.uncheckpointed) > 0
    assert sum(device.weights for device in plan.devices) == pytest.approx(33.06 * GB, rel=1e-3)


@pytest.mark.parametrize("train", [{"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 1}])
def test_blocks_stream_where_the_fastest_card_is_too_small_for_what_it_should_compute(train):
    """However the cards are named; the slow one alone would be the slower plan."""
    speeds = {"model": {"quantize": "int8-compute"}, "train": {"steps": 10} | train}
    for cards, fast in (("24GiB@1,24GiB@0.3", 0), ("24GiB@0.3,24GiB@1", 1)):
        plan = _plan(cards, (1024, 1024), **speeds)
        resident = _plan(cards, (1024, 1024), **speeds, split={"offloaded_blocks": [0, 0]})
        assert plan.offloaded[fast] > 0 and plan.offloaded[1 - fast] == 0
        assert 1.1 * plan.step_s < resident.step_s


def test_another_card_or_more_memory_makes_no_plan_slower():
    """But for what copies from host memory must gain to be taken."""
    train = {"steps": 10, "gradient_accumulation_steps": 4}
    order = (("16GB,16GB", "24GB,24GB"), ("24GB,12GB", "24GB,24GB"), ("24GB,24GB", "48GB,48GB"))
    for smaller, larger in (*order, ("24GB", "24GB,24GB@0.3")):
        before, after = (_plan(cards, (1024, 1024), train=train) for cards in (smaller, larger))
        assert after.step_s <= 1.1 * before.step_s, (smaller, larger)


def test_what_does_not_fit_is_refused_with_what_would_help():
    """64 GB of weights: a smaller picture or rank would not do."""
    resident = {"split": {"offloaded_blocks": [0, 0]}}
    full = {"model": {"quantize": "none"}, "data": {"resolutions": [1024]}}
    helps = _helps(_ask("24GB,24GB", (1024, 1024), **full, **resident))
    assert helps == ["split.offloaded_blocks = []", 'model.quantize = "fp8-compute"']
    _plan("24GB,24GB", (1024, 1024), model={"quantize": "fp8-compute"}, **resident)  # what it said is true
    assert sum(_plan("24GB,24GB", (1024, 1024), **full).offloaded) > 0


def test_no_more_than_three_changes_are_named():
    split = {"offloaded_blocks": [0, 0], "blocks_without_checkpointing": [3, 3]}
    helps = _helps(_ask("23GB,23GB", (1024, 1024), data={"resolutions": [1024]}, split=split))
    assert helps[0] == "split.blocks_without_checkpointing = []" and len(helps) == 3


def test_texts_that_take_much_of_the_disk_are_forecast():
    """FLUX.2 keeps 512 tokens of 15360 numbers of 2 bytes; 3 captions of each of 30 images, and the empty one."""
    info, job = published_info(), make_plan_job(model={"quantize": "fp8-compute"})
    assert info.variant is not None
    square = make_square(job.data, info.variant, info.family.latent_of(info.variant))
    samples = [dataclasses.replace(square, caption=f"{n}", others=(f"{n} a", f"{n} b")) for n in range(30)]
    for count, is_said in ((30, True), (20, False)):
        read = ReadJob(job, info, info.variant, full_size()._model, (), tuple(samples[:count]))
        notes = plan_on(job, subject_of(read), Machine((), tuple(parse_cards("80GB")))).notes
        size = (3 * count + 1) * 512 * 15360 * 2 / 1e9
        assert [f"{size:.1f} GB of the disk" in note for note in notes] == [True] * is_said


def test_a_batch_or_a_size_that_is_too_large_is_named():
    sections = {"train": {"batch_size": 4}, "data": {"resolutions": [1024]}, "split": {"offloaded_blocks": [0, 0]}}
    helps = _helps(_ask("24GB,24GB", (1024, 1024), **sections))
    assert "train.batch_size = 1 with train.gradient_accumulation_steps = 4" in helps
    assert any(each.startswith("data.resolutions = [") for each in helps)
    for data in ({"folders": [{"path": "x", "resolutions": [1024]}]}, {"folders": [], "encoded": "x"}):
        assert not any(_sizes(_ask("24GB,24GB", (1024, 1024), data=data, lora={"start_from": "x"})))


def test_auto_takes_the_fastest_scheme_and_the_users_choice_stays():
    plan = _plan("80GB,80GB", model={"quantize": "auto"})
    slower = {each.scheme: found.step_s / plan.step_s for each, found in plan.looked_at if found}
    assert plan.setting.scheme == "fp8-compute" and slower["none"] > slower["int8-compute"] > 1
    assert _plan("80GB,80GB", model={"quantize": "none"}).setting.scheme == "none"


def test_8_bit_optimizer_state_is_for_what_does_not_fit_otherwise():
    """Also where what fits is faster with blocks that stream."""
    sections = {"model": {"quantize": "fp8-compute"}, "lora": {"rank": 100}, "optimizer": {"name": "auto"}}
    plan = _plan("24GiB@1,24GiB@0.72", (1024, 1024), **sections)
    assert plan.setting.optimizer == "adamw" and any(plan.offloaded)
    assert _plan("24GB,24GB", optimizer={"name": "auto"}).setting.optimizer == "adamw"
    assert _plan("19.4GB,19.4GB", optimizer={"name": "auto"}).setting.optimizer == "adamw8bit"
    question = _ask("19.4GB,19.4GB", optimizer={"name": "adamw"}, split={"offloaded_blocks": [0, 0]})
    assert 'optimizer.name = "adamw8bit"' in _helps(question)


def test_settings_of_the_user_are_kept_and_only_checked():
    manual = {"split": {"balance": "manual", "split_at": [20], "blocks_without_checkpointing": [1, 2]}}
    plan = _plan("40GB,40GB", **manual)
    assert plan.placement.devices.count(torch.device("cuda:0")) == 20 and plan.uncheckpointed == (1, 2)
    swapped = _plan("24GB,24GB", split={"offloaded_blocks": [10, 10], "blocks_without_checkpointing": [0, 0]})
    assert swapped.offloaded == (10, 10) and plan_values(swapped)["setting"]["offloaded_blocks"] == [10, 10]
    question = _ask("26GB,26GB", split={"balance": "manual", "split_at": [40], "offloaded_blocks": [0, 0]})
    assert 'split.balance = "memory" with split.split_at = []' in _helps(question)
    with pytest.raises(ValueError, match="blocks_without_checkpointing has 1 values"):
        _plan("40GB,40GB", split={"blocks_without_checkpointing": [1]})
    full = _plan("80GB,80GB", train={"gradient_checkpointing": False})
    assert full.uncheckpointed == tuple(device.num_blocks for device in full.devices)


def test_limits_of_the_user_bind_weights_and_let_the_rest_be_tried():
    plan = _plan("10GB,10GB", split={"memory_limit_gb": [20.0, 20.0], "offloaded_blocks": [0, 0]})
    assert plan.warning and plan.uncheckpointed == (0, 0)
    assert any(device.needed > 10 * GB for device in plan.devices)
    question = _ask("80GB,80GB", split={"memory_limit_gb": [10.0, 10.0], "offloaded_blocks": [0, 0]})
    assert "split.memory_limit_gb = []" in _helps(question)
    plan = _plan("80GB,80GB", split={"memory_limit_gb": [10.0, 10.0]})
    assert any(plan.offloaded) and all(device.weights <= 10 * GB for device in plan.devices)


def test_a_limit_lets_nothing_be_tried_that_needs_more_than_what_fits():
    """Copies of the whole model are the fastest where nothing is too large; they need twice the cards' memory here."""
    for limit in ([], [22.0, 22.0]):
        sections = {"train": {"gradient_accumulation_steps": 4}, "split": {"memory_limit_gb": limit}}
        cards = parse_cards("24GB,24GB")
        plan = plan_training(make_question(full_size("wan"), cards, (480, 832), frames=81, **sections))
        assert plan.setting.strategy == "pipeline" and not plan.warning
        assert all(device.needed <= 24 * GB for device in plan.devices)


def test_more_kept_or_streamed_blocks_than_there_are_is_said():
    for split in (
        {"blocks_without_checkpointing": [0, 99]},
        {"blocks_without_checkpointing": [30, 30], "offloaded_blocks": [5, 5]},
    ):
        with pytest.raises(ValueError, match="a card needs a block for each"):
            _plan("80GB,80GB", split=split)


def test_host_memory_is_a_limit_too():
    cards = "24GB,12GB"
    assert any(_plan(cards).offloaded) and _plan(cards, host_bytes=64 * GB).offloaded == _plan(cards).offloaded
    given = {"split": {"offloaded_blocks": [0, 20], "blocks_without_checkpointing": [0, 0]}}
    for question in (_ask(cards, host_bytes=4 * GB), _ask(cards, host_bytes=4 * GB, **given)):
        _helps(question)
    best = needed_at_least(_ask(cards, host_bytes=4 * GB))
    assert best is not None and best.host_bytes > 4 * GB and not best.fits_host(4 * GB)
    assert all(stage.share <= 1 for stage in best.devices)  # the cards have room
    _plan("24GB,24GB", host_bytes=0)  # nothing streams


def _made_up(cards, units, *, count=10, inputs=10**7, halves=False, link=1000000000000.0, **given) -> Question:
    """Blocks of 1 GB, or where they are quantized of half as much."""
    size = 10**8, 10**7, 10**8, 2 * 10**8, 2 * 10**8
    block = BlockCost(1000 * 10**6, 0, 0, inputs, {}, 10**7, *size, input_sizes=(inputs,))
    halved = dataclasses.replace(block, weights=500 * 10**6) if halves else None
    given = {"model": {"quantize": "none"}} | given
    return make_question(MadeUpCosts(block, count, halved, units), cards, link=link, **given)


def test_a_pipeline_is_cut_where_its_slowest_stage_is_shortest():
    """Against every cut there is."""
    units = [1.0, 5.0, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0]
    cards = make_cards(100, 100, 100, speeds=(1.0, 1.0, 0.5))
    train = {"gradient_accumulation_steps": 8, "gradient_checkpointing": False}
    plan = plan_training(_made_up(cards, units, parallel={"strategy": "pipeline"}, train=train))

    def slowest(a: int, b: int) -> float:
        return max(2 * sum(units[:a]), 2 * sum(units[a:b]), 4 * sum(units[b:]))

    best = min(slowest(a, b) for a, b in itertools.combinations(range(1, 10), 2))
    counts = [device.num_blocks for device in plan.devices]
    assert slowest(counts[0], counts[0] + counts[1]) == best
    total = 2 * sum(units[: -counts[2]]) + 4 * sum(units[-counts[2] :])
    assert plan.step_s == pytest.approx(total + 7 * max(best, total / 3))


def test_a_pipeline_is_chosen_by_itself():
    cards = make_cards(9, 9)  # 10 GB of weights
    off = {"parallel": {"strategy": "none"}, "train": {"gradient_accumulation_steps": 4}}
    one = plan_training(_made_up(cards, ONES, **off))
    assert one.setting.strategy == "none"
    two = plan_training(_made_up(cards, ONES, train={"gradient_accumulation_steps": 4}))
    assert (two.setting.strategy, two.setting.ahead) == ("pipeline", 1)
    assert two.step_s < one.step_s and [d.held for d in two.devices] == [3, 1]
    assert plan_training(_made_up(cards, ONES)).setting.strategy == "none"  # nothing to overlap


def test_without_a_pipeline_equal_cards_are_filled_evenly_and_a_faster_one_more():
    even = plan_training(_made_up(make_cards(6.5, 6.5), ONES))
    assert [device.num_blocks for device in even.devices] == [5, 5]
    split = {"blocks_without_checkpointing": [0, 0]}
    faster = plan_training(_made_up(make_cards(12, 12, speeds=(1.0, 0.5)), ONES, split=split))
    assert [device.num_blocks for device in faster.devices] == [9, 1]


def test_as_many_blocks_keep_their_activations_as_leave_headroom():
    """By hand: 5 blocks of 1 GB, inputs 0.05, context and workspace 0.567, 0.1 GB a kept block, 0.2 at work, 10 %."""
    plan = plan_training(_made_up(make_cards(6.6, 6.6), ONES))

    def needed(kept: int) -> float:
        return 5 + 0.5 + 2 * 32 * 2**20 / 1e9 + 1.1 * (0.05 + 0.2 + 0.1 * max(0, kept - 1))

    most = max(kept for kept in range(6) if needed(kept) <= 0.95 * 6.6)
    assert plan.uncheckpointed == (most, most) and 0 < most < 5
    assert plan.step_s == pytest.approx(3 * 10 - 2 * most)


def test_as_few_blocks_stream_as_fit_and_copies_may_take_longer():
    """10 blocks of 1 GB on a card of 8: by hand as above, 0.1 GB of inputs. Two slots cost two blocks."""
    needed = 10 + 0.5 + 2 * 32 * 2**20 / 1e9 + 1.1 * (0.1 + 0.2)
    fewest = next(count for count in range(3, 11) if needed - count + 2 <= 0.95 * 8)
    fast = plan_training(_made_up(make_cards(8), ONES))
    assert fast.offloaded == (fewest,) and fast.step_s == pytest.approx(30, rel=1e-3)
    assert fast.host_bytes == (fewest + 1) * GB
    slow = plan_training(_made_up(make_cards(8), ONES, link=GB / 4))
    assert slow.step_s == pytest.approx(2 * fewest * 4 + UNHIDDEN * 30)
    too_small = _made_up(make_cards(2.4), ONES, train={"batch_size": 64, "gradient_accumulation_steps": 64})
    assert not any("batch_size" in each for each in _helps(too_small))  # for which a job has no micro-batches enough
    ((stage,),) = [best.devices for best in [needed_at_least(too_small)] if best]
    assert stage.num_offloaded == 10 and stage.weights == 2 * GB and stage.share > 1


def test_a_forward_without_the_lora_is_a_pass_more_of_blocks_and_of_copies():
    """10 blocks of a second: a forward, it again, a backward, and the one of objective.masked_prior."""
    held: Any = {"objective": {"masked_prior": 0.5}}
    whole = _made_up(make_cards(100), ONES, split={"blocks_without_checkpointing": [0]}, **held)
    assert plan_training(whole).step_s == pytest.approx(40)
    slow = plan_training(_made_up(make_cards(8), ONES, link=GB / 4, **held))
    assert slow.step_s == pytest.approx(3 * slow.offloaded[0] * 4 + UNHIDDEN * 40)


def test_a_cut_that_takes_less_of_the_host_is_found():
    """The first card is so fast that it would take all blocks, and the host has no room for as many."""
    cards = make_cards(5, 5, speeds=(10.0, 1.0))
    most = plan_training(_made_up(cards, ONES))
    host_bytes = int(0.9 * most.host_bytes / HOST_SHARE)
    less = plan_training(_made_up(cards, ONES, host_bytes=host_bytes))
    assert less.host_bytes <= HOST_SHARE * host_bytes < most.host_bytes
    assert less.step_s >= most.step_s


def test_a_slower_scheme_in_memory_loses_against_a_faster_one_from_the_host(monkeypatch):
    """And the other way round: what fits wins unless it is slower."""
    monkeypatch.setitem(SCHEME_TIMES, "fp8", 2.0)
    auto = {"model": {"quantize": "auto"}}
    cards = make_cards(8, refuses=frozenset({"fp8-compute", "int8-compute", "int8"}))
    for link, scheme, is_streaming in ((1e12, "none", True), (GB / 4, "fp8", False)):
        plan = plan_training(_made_up(cards, ONES, link=link, halves=True, **auto))
        assert plan.setting.scheme == scheme and any(plan.offloaded) == is_streaming


def _ask_offloading(*sizes_gb: float, link: float = 1e12, **changes: Any) -> Question:
    """Without blocks that stream from there, too."""
    cards = make_cards(*sizes_gb)
    split = {"offloaded_blocks": [0] * len(cards)} | changes.pop("split", {})
    return _made_up(cards, ONES, inputs=5 * 10**8, split=split, link=link, **changes)


def _offloading(*sizes_gb: float, **changes: Any) -> TrainingPlan:
    return plan_training(_ask_offloading(*sizes_gb, **changes))


def test_inputs_are_offloaded_where_nothing_fits_otherwise():
    """By hand: 10 GB of blocks, 5 of inputs and a tenth, 0.8 besides; with three blocks' inputs on the card 12.5."""
    assert [each.offloads for each, _ in _offloading(18).looked_at] == [False]
    plan = _offloading(14)
    (device,) = plan.devices
    away = 10 - device.num_uncheckpointed
    assert plan.setting.offloads and device.checkpoints == (2 + device.num_uncheckpointed) * 5 * 10**8
    assert plan.host_bytes == plan.offloaded_inputs == away * 5 * 10**8
    assert [found for each, found in plan.looked_at if not each.offloads] == [None]
    values = plan_values(plan)
    assert values["setting"]["offload_activations"] is True and values["offloaded_bytes"] > 0
    assert 'train.offload_activations = "auto"' in _helps(_ask_offloading(14, train={"offload_activations": "off"}))


def test_offloading_is_the_users_to_set_and_a_slow_link_counts_both_ways():
    """5 GB there and back at 0.1 GB/s against 30 seconds of blocks."""
    on = {"train": {"offload_activations": "on"}, "split": {"blocks_without_checkpointing": [0]}}
    for link, seconds in ((1e12, 30), (1e9, 30), (1e8, 100)):
        plan = _offloading(80, link=link, **on)
        assert plan.setting.offloads and plan.step_s == pytest.approx(seconds)
    assert not _offloading(80, train={"gradient_checkpointing": False}).setting.offloads


@pytest.mark.parametrize(("link", "expected"), [(1e12, ("pipeline", True)), (1e7, ("none", False))])
def test_a_pipeline_that_fits_only_so_is_weighed_against_none(link, expected):
    """1F1B holds two micro-batches or more on the first card, 2.5 GB each: 5 + 2.8 fits 9 GB, 5 + 5.5 does not."""
    plan = _offloading(9, 9, link=link, train={"gradient_accumulation_steps": 8})
    assert (plan.setting.strategy, plan.setting.offloads) == expected


@pytest.mark.parametrize("asked", ["auto", "on"])
def test_host_memory_that_is_not_there_is_not_pinned(asked):
    train = {"offload_activations": asked}
    kept = {"blocks_without_checkpointing": [0]}
    assert _offloading(14, train=train, split=kept, host_bytes=7 * GB).setting.offloads
    _helps(_ask_offloading(14, train=train, split=kept, host_bytes=6 * GB))


def test_what_is_no_card_is_refused():
    for text in ("24", "GB", "0GB", "24GB@0", "", "1.2.3GB", "9090", "2x", "24GB,", "-1x24GB", f"{'9' * 400}GB"):
        with pytest.raises(ValueError, match="is no card; write"):
            parse_cards(text)


def test_cards_that_are_alike_are_counted():
    assert parse_cards("2x24GB") == parse_cards("24GB,24GB") == parse_cards("2X24gb") == parse_cards("2 × 24 GB")
    assert parse_cards("2 x 16 GiB") == parse_cards("16gib,16GiB")
    cards = parse_cards("2x24GB@1, 12GiB@0.5, 1x.5GB")
    assert [(card.name, card.total_bytes, card.speed) for card in cards] == [
        ("cuda:0", 24 * GB, 1.0), ("cuda:1", 24 * GB, 1.0), ("cuda:2", 12 * 2**30, 0.5), ("cuda:3", GB // 2, 1.0),
    ]  # fmt: skip
    assert len(parse_cards("64x8GB")) == 64


@pytest.mark.parametrize(
    "text, found", [("0x24GB", "0 to 0"), ("24GB,0x24GB", "0 to 1"), ("65x8GB", "65 to 0"), ("9GB,64x8GB", "64 to 1")]
)
def test_no_cards_and_more_than_a_host_has_are_refused(text, found):
    with pytest.raises(ValueError, match=f"adds {found} cards; add at least 1, and no more than 64 in all"):
        parse_cards(text)


def test_optimizer_state_is_known_or_measured():
    assert optimizer_bytes(OptimizerConfig("adamw"), "float32") == Optimizer(8, 4)
    assert optimizer_bytes(OptimizerConfig("adamw", options={"amsgrad": True}), "bfloat16") == Optimizer(6, 2)
    assert optimizer_bytes(OptimizerConfig("adamw"), "bfloat16", ema=True) == Optimizer(8, 2)
    assert optimizer_bytes(OptimizerConfig("adamw8bit"), "float32").state == pytest.approx(2.03, abs=0.01)
    assert optimizer_bytes(OptimizerConfig("torch.optim.Adagrad"), "float32").state == pytest.approx(4, abs=0.01)
    question = _made_up(make_cards(80), ONES, optimizer={"name": "torch.optim.SGD", "options": {"momentum": 0.9}})
    assert question.forecaster(question.settings()[0]).optimizer.state == 4


def test_a_picture_has_a_bar_per_card():
    plan = _plan("24GB,24GB")
    shown = {colour: count for count, colour in draw_plan(plan).getcolors(maxcolors=2**20)}
    share = parts_of(plan.devices[0])["weights"] / plan.devices[0].usable
    assert shown[(0, 0x72, 0xB2)] > 2 * 0.8 * share * 640 * 30  # both bars are mostly weights


def test_forecast_and_measured_stand_side_by_side():
    plan = _plan("24GB,24GB")
    peak = plan.devices[0].allocated / 1e9
    compared = compare(plan.devices, {"cuda:0": {"peak": peak / 1.1, "reserved": peak}})
    first, second = describe_comparison(compared)
    assert first.endswith("(forecast +10.0 %)") and "measured" not in second
    json.dumps(compared)


def _known_cards(monkeypatch: pytest.MonkeyPatch, *sizes: int, first_speed: float = 1.0) -> None:
    """As if the job's devices were cards of these sizes, in bytes; only the first's speed is not 1."""

    def cards(devices: list[torch.device]) -> list[Card]:
        speeds = (first_speed, *(1.0 for _ in sizes[1:]))
        return [Card(*each) for each in zip(devices, sizes, sizes, speeds, strict=True)]

    monkeypatch.setattr(resolve_module, "cards_of", cards)


def test_every_job_is_planned_before_it_loads(tmp_path, monkeypatch):
    two = {"split": {"devices": ["lazy:0", "lazy:1"]}, "cache": {"vae_device": "cpu"}, "train": {"steps": 2}}
    with emulated_cards():
        _known_cards(monkeypatch, 10**9, 10**9)
        job = make_tiny_job(tmp_path, **two, evaluation={"folder": ""}, optimizer={"name": "auto"})
        plan = check_job(job)
        assert plan.training is not None and plan.placement == plan.training.placement
        assert plan.execution.kept_blocks == (2, 2) and plan.job.optimizer.name == "adamw"
        seen = []
        result = run_job(job, on_event=seen.append)
        forecasts = [event.values["devices"] for event in seen if event.kind == "forecast"]
        assert len(forecasts) == 2 and len(result.memory) == 2
        _known_cards(monkeypatch, 10**6, 10**6)
        with pytest.raises(ValueError, match="^does not fit: "):
            check_job(dataclasses.replace(job, output=dataclasses.replace(job.output, folder=str(tmp_path / "b"))))
        assert check_job(job, is_to_train=False).training is None


def test_a_resumed_run_keeps_its_cut(tmp_path, monkeypatch):
    two = {"split": {"devices": ["lazy:0", "lazy:1"]}, "cache": {"vae_device": "cpu"}, "evaluation": {"folder": ""}}
    with emulated_cards():
        _known_cards(monkeypatch, 10**9, 10**9, first_speed=2.0)
        sections = two | {"train": {"steps": 2, "batch_size": 2}, "optimizer": {"name": "auto"}}
        job = make_tiny_job(tmp_path, **sections, output={"folder": str(tmp_path / "resumed")})
        steps: list[Any] = []
        stopped = run_job(job, on_event=steps.append, should_stop=lambda: any(e.kind == "step" for e in steps))
        cut = check_job(job).placement.devices.count(torch.device("lazy:0"))
        _known_cards(monkeypatch, 10**9, 10**9, first_speed=0.5)
        assert check_job(job).placement.devices.count(torch.device("lazy:0")) != cut  # if it were chosen anew
        placed: list[Any] = []
        resumed = run_job(job, resume=True, on_event=placed.append)
    assert (stopped.step, resumed.step) == (1, 2)
    loading = next(e.values["placement"] for e in placed if e.values.get("name") == "loading")
    assert loading.startswith(f"lazy:0: {cut} blocks")


def test_a_plan_is_the_same_in_the_inference_mode_of_comfyuis_nodes():
    info = published_info()
    with torch.inference_mode():
        inside = plan_training(make_question(ModelCosts(info, info.variant), parse_cards("24GB,24GB")))
    assert inside.devices == _plan("24GB,24GB").devices


def test_this_machines_cards_as_they_are(monkeypatch):
    """Capped, half full, of different speed; asked as torch's CUDA module would answer."""
    monkeypatch.setattr(cards_module, "total_bytes", lambda device: 100 * GB)
    monkeypatch.setattr(cards_module, "free_bytes", lambda device: 60 * GB)
    monkeypatch.setattr(cards_module, "refusal", lambda settings, devices: "" if "int8" in settings.scheme else "no")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda d: (0.25, 1.0)[d.index], raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GB)
    monkeypatch.setattr(cards_module, "device_title", lambda device: "NVIDIA GeForce RTX 3090")
    assert cards_of([torch.device("cpu")]) is None  # for which nothing is planned
    first, second = cards_of([torch.device("cuda:0"), torch.device("cuda:1")]) or []
    assert (first.usable_bytes, second.usable_bytes) == (24 * GB, 60 * GB) and first.speed == second.speed == 1.0
    assert first.refuses == {"fp8", "fp8-compute"} and first.has_context


def _here(monkeypatch, titles, measured):
    """Cards that torch calls so; measured: seconds' worth of products by title, or what measuring raises."""

    def machine_speed(devices):
        asked.append([titles[device.index] for device in devices])
        if isinstance(measured, Exception):
            raise measured
        return SimpleNamespace(flops_per_s=[measured[titles[device.index]] for device in devices])

    asked = []
    for name in ("total_bytes", "free_bytes"):
        monkeypatch.setattr(cards_module, name, lambda device: 24 * GB)
    monkeypatch.setattr(cards_module, "refusal", lambda settings, devices: "")
    monkeypatch.setattr(cards_module, "device_title", lambda device: titles[device.index])
    monkeypatch.setattr(cards_module, "machine_speed", machine_speed)
    return cards_of([torch.device("xpu", index) for index in range(len(titles))]), asked


def test_cards_of_published_speed_are_not_measured(monkeypatch):
    cards, asked = _here(monkeypatch, ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"], RuntimeError("unasked"))
    assert [card.speed for card in cards] == [pytest.approx(165.2 / 71), 1.0] and not asked
    assert [card.flops_per_s for card in cards] == pytest.approx([0.46 * 165.2e12, 0.46 * 71e12])


def test_a_card_that_nobody_knows_has_all_measured_once_for_each_model(monkeypatch):
    titles = ["RTX 4090", "New Card", "New Card"]
    cards, asked = _here(monkeypatch, titles, {"RTX 4090": 150e12, "New Card": 50e12})
    assert sorted(asked) == [["New Card"], ["RTX 4090"]]
    assert [card.speed for card in cards] == pytest.approx([3, 1, 1])
    assert cards[0].flops_per_s == pytest.approx(SHARE_OF_PRODUCT * 150e12)


def test_cards_that_cannot_be_measured_are_equally_fast(monkeypatch, caplog):
    cards, _ = _here(monkeypatch, ["RTX 4090", "New Card"], torch.OutOfMemoryError("no room\nat all"))
    assert [card.speed for card in cards] == [1.0, 1.0] and cards[1].flops_per_s == 0
    assert "no room" in caplog.text


def test_a_product_gives_an_h200_the_speed_that_it_trained_at():
    """690e12 operations per second of a large product were measured there."""
    assert kind_called("H200").flops_per_s == pytest.approx(SHARE_OF_PRODUCT * 690e12, rel=0.01)


def test_a_plan_of_measured_cards_says_so_and_a_run_is_compared_with_it(monkeypatch):
    cards, _ = _here(monkeypatch, ["New Card"], {"New Card": 50e12 / SHARE_OF_PRODUCT})
    plan = plan_training(_made_up(cards, [0.1] * 10, count=10))
    assert step_seconds(plan) == (pytest.approx(plan.step_s), "estimated from a matrix product measured on the cards")
    assert plan_values(plan)["estimated_step_s"] == pytest.approx(plan.step_s)
    line = describe_pace(plan, [99.0, 4.0, 4.0, 50.0])
    assert "measured 4 s" in line and f"forecast {100 * (plan.step_s / 4 - 1):+.1f} %" in line
    assert describe_pace(plan, [3.0]) == ""
    unknown = dataclasses.replace(plan, question=plan.question.changed(cards=tuple(make_cards(24))))
    assert step_seconds(unknown)[0] is None and describe_pace(unknown, [3.0, 3.0]) == ""


def test_a_card_that_is_here_says_itself_why_it_refuses_a_scheme(monkeypatch):
    monkeypatch.setattr(question_module, "refusal", lambda settings, devices: f"{settings.scheme}: too old")
    cards = make_cards(8, refuses=frozenset({"fp8-compute"}))
    for has_context, message in ((True, "^fp8-compute: too old$"), (False, "no products in fp8-compute; use int8-")):
        here = [dataclasses.replace(card, has_context=has_context) for card in cards]
        with pytest.raises(ValueError, match=message):
            plan_training(make_question(full_size(), here))


def test_parts_of_a_plan_add_up_and_a_machine_without_gpus_needs_cards(tmp_path, capsys):
    save_job(make_tiny_job(tmp_path), tmp_path / "job.toml")
    job = str(tmp_path / "job.toml")
    assert main(["plan", job, "--cards", "2GB", "--json", "--resolution", "64"]) == 0
    values = json.loads(capsys.readouterr().out)
    (device,) = values["devices"]
    assert sum(device["bytes"].values()) == device["needed"] and values["pixels"]["height"] <= 96
    assert main(["plan", job]) == 2
    assert "--cards" in capsys.readouterr().err
