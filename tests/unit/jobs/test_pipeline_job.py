"""Whole jobs with several micro-batches in flight: the same files as without, stopped, resumed and rescheduled."""

import dataclasses
import gc
from functools import partial

import pytest
from devicebridge.config.job import ParallelConfig
from devicebridge.jobs.job import check_job, run_job
from devicebridge.parallel.local import bridge
from devicebridge.parallel.offload.activations import ActivationOffload
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import assert_same_run, make_cards_job, run_on_cards, run_steps

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts")


TRAIN = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 3, "seed": 3}


_job = partial(make_cards_job, train=TRAIN)


def test_every_schedule_writes_the_same_lora_and_resumes_any_other(tmp_path):
    """With dropout, which draws from the cards' generators; evaluation runs in between."""
    plain = run_on_cards(_job(tmp_path, "none", parallel={"strategy": "none"}))
    assert plain.status == "finished" and len(set(plain.losses)) == 3
    for schedule in ("auto", "pipeline"):
        found = run_on_cards(_job(tmp_path, schedule, parallel={"strategy": schedule}))
        assert_same_run(found, plain)
    job = _job(tmp_path, "stopped", parallel={"strategy": "pipeline"})
    run_steps(job, cards=2)
    ahead = ParallelConfig(strategy="pipeline", microbatches_ahead=3)
    resumed = run_on_cards(dataclasses.replace(job, parallel=ahead), resume=True)
    assert_same_run(resumed, plain)


def test_offloaded_inputs_change_nothing_but_memory(tmp_path, monkeypatch):
    """Whole runs, stopped with and resumed without; every buffer is freed at the end."""
    made = []

    class Watched(ActivationOffload):
        def __init__(self, devices, *, min_bytes):
            super().__init__(devices, min_bytes=1)
            made.append(self)

    monkeypatch.setattr(bridge, "ActivationOffload", Watched)
    train = {**TRAIN, "steps": 2}
    plain = run_on_cards(_job(tmp_path, "plain", train={**train, "offload_activations": "off"}))
    assert made == []
    job = _job(tmp_path, "offloaded", train={**train, "offload_activations": "on"})
    held = []
    stopped = run_on_cards(job, should_stop=lambda: bool(made) and (held.append(made[-1].host_bytes) or held[-1] > 0))
    assert stopped.step == 1 and held[-1] > 0
    again = dataclasses.replace(job.train, offload_activations="off")
    resumed = run_on_cards(dataclasses.replace(job, train=again), resume=True)
    assert_same_run(resumed, plain)
    gc.collect()
    assert len(made) == 1 and made[0].host_bytes == 0


TWO, ONE = ["lazy:0", "lazy:1"], ["lazy:0"]


@pytest.mark.parametrize(
    ("devices", "accumulation", "schedule", "expected"),
    [
        (TWO, 4, "auto", 1), (TWO, 4, "pipeline", 1), (TWO, 4, "none", None), (TWO, 1, "auto", None),
        (ONE, 4, "auto", None), (ONE, 4, "pipeline", None),
        (["lazy:0", "cpu"], 4, "auto", None),  # all threads of the host draw from its one generator
    ],
)  # fmt: skip
def test_which_schedule_a_job_gets(tmp_path, caplog, devices, accumulation, schedule, expected):
    train = {"steps": 1, "gradient_accumulation_steps": accumulation}
    job = _job(tmp_path, "run", split={"devices": devices}, train=train, parallel={"strategy": schedule})
    with emulated_cards():
        plan = check_job(job)
        assert plan.execution.ahead == expected
        assert plan.placement.tail_device == plan.placement.used_devices[-1 if expected else 0]
    assert ("left out" in caplog.text) == (expected is None and schedule == "pipeline")


def test_a_compiled_job_is_refused_nothing_and_leaves_no_setting_behind(tmp_path, caplog):
    """Emulated cards cannot compile: the job runs as it is, and says so once."""
    plain = run_on_cards(_job(tmp_path, "none"))
    found = run_on_cards(_job(tmp_path, "auto", train={**TRAIN, "compile": "auto"}))
    assert found.losses == plain.losses and caplog.text.count("not compiled") == 1


KEEPS_ALL = {"gradient_checkpointing": False}


@pytest.mark.parametrize(
    ("strategy", "split", "train", "message"),
    [
        ("auto", {"blocks_without_checkpointing": [1, 1, 1]}, {}, "give one each"),
        ("auto", {"blocks_without_checkpointing": [50, 0]}, {}, "asks 50 blocks"),
        ("auto", {"devices": ["cpu"]}, {"offload_activations": "on"}, "the model is on the CPU"),
        *(("auto", {"blocks_without_checkpointing": [n, n]}, KEEPS_ALL, "remove one") for n in (1, 0)),
        ("auto", {"offloaded_blocks": [1, 1]}, KEEPS_ALL, "remove one"),
        ("auto", {"offloaded_blocks": [1]}, {}, "offloaded_blocks has 1 values"),
        ("auto", {"offloaded_blocks": [3, 0], "blocks_without_checkpointing": [1, 0]}, {}, "that do not keep"),
        ("auto", {"devices": ["lazy:0", "cpu"], "offloaded_blocks": [0, 1]}, {}, "in host memory anyway"),
        ("data", {"balance": "time"}, {}, "remove one of the two"),
        ("data", {"blocks_without_checkpointing": [1, 1, 1]}, {}, "give one each"),
        ("data", {"blocks_without_checkpointing": [0, 50]}, {}, "asks 50 blocks of lazy:1"),
        ("data", {"memory_limit_gb": [1.0, 1e-6]}, {}, "of weights on lazy:1, which may hold 0.00 GB"),
        ("tokens", {}, {}, r'strategy = "tokens" was asked for, but .* the tokens of diffusers'),
        ("tokens", {"blocks_without_checkpointing": [0, 1]}, {}, "give each the same number"),
        ("tokens", {"offloaded_blocks": [1, 2]}, {}, "offloaded_blocks = .* give each the same number"),
        *((each, {"balance": "manual", "split_at": [2]}, {}, "says where to cut") for each in ("data", "tokens")),
    ],
)
def test_what_a_strategy_cannot_do_is_refused_before_anything_is_loaded(tmp_path, strategy, split, train, message):
    split, sections = {"devices": TWO, **split}, {"train": {**TRAIN, **train}, "parallel": {"strategy": strategy}}
    with emulated_cards(), pytest.raises(ValueError, match=message):
        check_job(_job(tmp_path, "run", split=split, **sections))


def test_dora_is_not_compiled(tmp_path, caplog):
    sections = {"split": {"devices": ["cpu"]}, "train": {"steps": 1, "compile": "auto"}, "lora": {"dora": True}}
    assert run_job(_job(tmp_path, "run", **sections)).status == "finished" and "cannot trace PEFT's DoRA" in caplog.text
