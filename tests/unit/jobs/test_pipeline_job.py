"""Whole jobs with several micro-batches in flight: the same files as without, stopped, resumed and rescheduled."""

import dataclasses
import gc
from functools import partial

import pytest
from devicebridge.config.job import ParallelConfig
from devicebridge.jobs.job import check_job, run_job
from devicebridge.parallel.local import block_split
from devicebridge.parallel.offload.activations import ActivationOffload
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_cards_job, run_on_cards, run_steps

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts")


TRAIN = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 3, "seed": 3}


_job = partial(make_cards_job, train=TRAIN)


def test_every_schedule_writes_the_same_lora_and_resumes_any_other(tmp_path):
    """With dropout, which draws from the cards' generators; evaluation runs in between."""
    plain = run_on_cards(_job(tmp_path, "none", parallel={"strategy": "none"}))
    assert plain.status == "finished" and len(set(plain.losses)) == 3
    for schedule in ("auto", "pipeline"):
        found = run_on_cards(_job(tmp_path, schedule, parallel={"strategy": schedule}))
        assert found.losses == plain.losses and found.eval_after == plain.eval_after
        assert found.lora_path.read_bytes() == plain.lora_path.read_bytes()
    job = _job(tmp_path, "stopped", parallel={"strategy": "pipeline"})
    run_steps(job, cards=2)
    resumed = run_on_cards(
        dataclasses.replace(job, parallel=ParallelConfig(strategy="pipeline", microbatches_ahead=3)), resume=True
    )
    assert resumed.losses == plain.losses and resumed.eval_before == plain.eval_before
    assert resumed.lora_path.read_bytes() == plain.lora_path.read_bytes()


def test_offloaded_inputs_change_nothing_but_memory(tmp_path, monkeypatch):
    """Whole runs, stopped with and resumed without; every buffer is freed at the end."""
    made = []

    class Watched(ActivationOffload):
        def __init__(self, *, min_bytes):
            super().__init__(min_bytes=1)
            made.append(self)

    monkeypatch.setattr(block_split, "ActivationOffload", Watched)
    train = {**TRAIN, "steps": 2}
    plain = run_on_cards(_job(tmp_path, "plain", train={**train, "offload_activations": "off"}))
    assert made == []
    job = _job(tmp_path, "offloaded", train={**train, "offload_activations": "on"})
    held = []
    stopped = run_on_cards(job, should_stop=lambda: bool(made) and (held.append(made[-1].host_bytes) or held[-1] > 0))
    assert stopped.step == 1 and held[-1] > 0
    again = dataclasses.replace(job.train, offload_activations="off")
    resumed = run_on_cards(dataclasses.replace(job, train=again), resume=True)
    assert resumed.losses == plain.losses and resumed.eval_after == plain.eval_after
    assert resumed.lora_path.read_bytes() == plain.lora_path.read_bytes()
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
    train = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 3, "seed": 3, "compile": "auto"}
    found = run_on_cards(_job(tmp_path, "auto", train=train))
    assert found.losses == plain.losses and caplog.text.count("not compiled") == 1


KEEPS_ALL = {"train": {"steps": 1, "gradient_checkpointing": False}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"split": {"blocks_without_checkpointing": [1, 1, 1]}}, "give one each"),
        ({"split": {"blocks_without_checkpointing": [50, 0]}}, "asks 50 blocks"),
        (
            {"split": {"devices": ["cpu"]}, "train": {"steps": 1, "offload_activations": "on"}},
            "the model is on the CPU",
        ),
        ({"split": {"blocks_without_checkpointing": [1, 1]}, **KEEPS_ALL}, "remove one"),
        ({"split": {"blocks_without_checkpointing": [0, 0]}, **KEEPS_ALL}, "remove one"),
        ({"split": {"offloaded_blocks": [1, 1]}, **KEEPS_ALL}, "remove one"),
        ({"split": {"offloaded_blocks": [1]}}, "offloaded_blocks has 1 values"),
        ({"split": {"offloaded_blocks": [3, 0], "blocks_without_checkpointing": [1, 0]}}, "that do not keep"),
        ({"split": {"devices": ["lazy:0", "cpu"], "offloaded_blocks": [0, 1]}}, "in host memory anyway"),
    ],
)
def test_what_blocks_cannot_do_is_refused_before_anything_is_loaded(tmp_path, sections, message):
    sections["split"] = {"devices": ["lazy:0", "lazy:1"], **sections["split"]}
    job = _job(tmp_path, "run", **sections)
    with emulated_cards(), pytest.raises(ValueError, match=message):
        check_job(job)


def test_dora_is_not_compiled(tmp_path, caplog):
    train = {"steps": 1, "compile": "auto"}
    job = _job(tmp_path, "run", split={"devices": ["cpu"]}, lora={"dora": True}, train=train)
    assert run_job(job).status == "finished" and "cannot trace PEFT's DoRA" in caplog.text
