"""Whole jobs with a copy of the model per emulated card: what they train, and how they resume."""

import dataclasses
import threading
from contextlib import ExitStack
from functools import partial

import pytest
from devicebridge import assembly
from devicebridge.config.job import ParallelConfig, make_job
from devicebridge.jobs import job as job_module
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.job import check_job, run_job
from devicebridge.parallel.local import workers
from devicebridge.parallel.local.data_parallel import DataParallel
from devicebridge.patches.compile_blocks import CompiledBlocks
from devicebridge.planning.cards import Card
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.tiny_pipeline import assert_same_run, make_cards_job, run_on_cards, run_steps

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts")


_job = partial(
    make_cards_job, train={"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 3, "seed": 3},
    parallel={"strategy": "data"}, evaluation={"folder": ""},
)  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "tolerance"), [("none", 1e-6), pytest.param("int8-compute", 1e-4, marks=pytest.mark.long)]
)
def test_a_job_trains_as_on_one_card(tmp_path, scheme, tolerance):
    """Also evaluation; only sums are made in another order. Rounding to 8 bits makes a last bit larger."""
    held_out = {"folder": str(tmp_path / "held_out"), "quantiles": [0.5]}
    sections = {"lora": {"dropout": 0.0}, "model": {"quantize": scheme}, "evaluation": held_out}
    one = run_on_cards(_job(tmp_path, "one", **sections, split={"devices": ["lazy:0"]}, parallel={"strategy": "none"}))
    two = run_on_cards(_job(tmp_path, "two", **sections))
    assert two.losses[0] == one.losses[0] and len(set(two.losses)) == 2
    assert two.losses == pytest.approx(one.losses, rel=tolerance)
    assert two.eval_before == one.eval_before and two.eval_after == pytest.approx(one.eval_after, rel=tolerance)
    assert two.eval_after != two.eval_before


def test_a_run_with_dropout_resumes_bit_for_bit(tmp_path):
    split = {"devices": ["lazy:0", "lazy:1", "lazy:2"], "blocks_without_checkpointing": [1, 0, 2]}
    seen = []
    straight = run_on_cards(_job(tmp_path, "straight", split=split), on_event=seen.append)
    loading = next(event.values for event in seen if event.values.get("name") == "loading")
    assert loading["placement"].endswith("blocks on each of lazy:0, lazy:1, lazy:2")
    job = _job(tmp_path, "stopped", split=split)
    run_steps(job, cards=3)
    # "auto" keeps what the run began with
    resumed = run_on_cards(dataclasses.replace(job, parallel=ParallelConfig(strategy="auto")), resume=True)
    assert_same_run(resumed, straight)


def test_the_first_of_a_shape_on_each_card_is_compiled_alone(tmp_path, monkeypatch):
    """As if blocks were compiled: every card has graphs of its own, and torch compiles for one thread at a time."""
    monkeypatch.setattr(assembly, "compile_if_possible", lambda *arguments: CompiledBlocks(ExitStack()))
    plain_take, plain_begin = workers.Prefetch.take, workers.StageOrder.begin
    plain_run, runs = DataParallel.run, []  # one before the first step compares gradients
    at, seen = threading.local(), []

    def count(replicas, microbatches):
        runs.append(len(microbatches))
        return plain_run(replicas, microbatches)

    def remember(prefetch, index):
        prepared = plain_take(prefetch, index)
        at.shape = tuple(prepared.noisy.shape)
        return prepared

    def watch(order, stage, work, is_alone):
        seen.append((stage, at.shape, len(runs), is_alone))
        plain_begin(order, stage, work, is_alone)

    monkeypatch.setattr(DataParallel, "run", count)
    monkeypatch.setattr(workers.Prefetch, "take", remember)
    monkeypatch.setattr(workers.StageOrder, "begin", watch)
    train = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 3, "compile": "auto"}
    run_on_cards(_job(tmp_path, "run", train=train, data={"resolutions": [32, 48]}))
    assert runs[-3:] == [3, 3, 3]
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    for stage, shape, run, is_alone in seen:
        assert is_alone == (first.setdefault((stage, shape), run) == run)
    begins = {shape: {run for (_, other), run in first.items() if other == shape} for _, shape in first}
    assert any(len(runs) == 2 for runs in begins.values())  # a shape came to one card before the other


def test_a_run_of_one_model_is_not_resumed_on_copies(tmp_path):
    job = _job(tmp_path, "run", parallel={"strategy": "none"})
    run_steps(job, cards=3)
    with pytest.raises(ValueError, match="would not be the same run"):
        run_on_cards(dataclasses.replace(job, parallel=ParallelConfig(strategy="data")), resume=True)


def test_what_the_planner_thinks_today_changes_no_resumed_run(tmp_path, monkeypatch):
    """Cards alike ask for replicas, a slow second card for a cut."""

    def see(second_speed):
        size = 10**9
        speeds = {"lazy:0": 1.0, "lazy:1": second_speed}
        known = lambda devices: [Card(device, size, size, speeds[str(device)]) for device in devices]  # noqa: E731
        monkeypatch.setattr(resolve_module, "cards_of", known)

    train = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 4}
    for began, today, is_copied in ((1.0, 0.02, True), (0.02, 1.0, False)):
        split = {"devices": ["lazy:0", "lazy:1"]}
        job = _job(tmp_path, f"{began}", parallel={"strategy": "auto"}, train=train, split=split)
        placed = []
        with emulated_cards(2):
            see(began)
            assert bool(check_job(job).placement.replicas) == is_copied
            run_steps(job)
            see(today)
            assert bool(check_job(job).placement.replicas) != is_copied  # if it were chosen anew
            assert run_job(job, resume=True, on_event=placed.append).step == 2
        loading = next(event.values["placement"] for event in placed if event.values.get("name") == "loading")
        assert ("each of" in loading) == is_copied


@pytest.mark.parametrize(
    ("devices", "accumulation", "strategy", "expected"),
    [
        (["lazy:0", "lazy:1"], 3, "data", CARDS[:2]), (["lazy:0", "lazy:1"], 1, "data", ()),
        *((devices, 3, strategy, ()) for devices in (["lazy:0"], ["lazy:0", "cpu"]) for strategy in ("data", "tokens")),
    ],
)  # fmt: skip
def test_when_a_job_gets_replicas(tmp_path, caplog, devices, accumulation, strategy, expected):
    sections = {"split": {"devices": devices}, "parallel": {"strategy": strategy}}
    train = {"steps": 1, "gradient_accumulation_steps": accumulation}
    job = _job(tmp_path, "run", train=train, **sections)
    with emulated_cards():
        plan = check_job(job)
    assert plan.placement.replicas == tuple(expected) and plan.execution.ahead is None and plan.placement.tail == ()
    assert ("left out" in caplog.text) == (not expected)
    assert strategy == "data" or plan.execution.strategy == "none"


def test_without_a_planner_nobody_gets_replicas_unasked(tmp_path):
    with emulated_cards():
        assert check_job(_job(tmp_path, "run", parallel={"strategy": "auto"})).placement.replicas == ()


def test_lora_on_what_the_tail_reads_is_no_matter_to_replicas_and_stages(tmp_path):
    lora, train = {"targets": ["*time_embedder*", "*to_q"]}, {"steps": 1, "gradient_accumulation_steps": 2}
    sections = {"lora": lora, "train": train}
    with emulated_cards():
        assert check_job(_job(tmp_path, "run", "wan", **sections)).placement.replicas
        staged = check_job(_job(tmp_path, "run", "wan", parallel={"strategy": "pipeline"}, **sections))
        assert staged.execution.ahead is not None


def test_a_job_of_an_earlier_release_is_resumed_over_all_cards(tmp_path, monkeypatch):
    """Its checkpoints know no replicas."""
    monkeypatch.setattr(job_module, "placement_facts", lambda where: {"placement": [str(d) for d in where.devices]})
    job = _job(tmp_path, "run", parallel={"strategy": "auto"})
    run_steps(job, cards=3)
    assert run_on_cards(job, resume=True).step == 2
    assert make_job({**dataclasses.asdict(job)}) == job
