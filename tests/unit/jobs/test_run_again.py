"""A job whose folder holds runs already: the finished one is returned, a changed one starts beside it."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from devicebridge.jobs import job as job_module
from devicebridge.jobs.job import run_job
from devicebridge.jobs.resume import next_run
from devicebridge.runs.record import recorded_run
from devicebridge.tests.tiny_pipeline import make_tiny_job, run_steps
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("short_texts")


def _job(tmp_path: Path, **train: object):
    return make_tiny_job(tmp_path, train={"steps": 2, "batch_size": 2, "seed": 3, **train})


def _changed(job, section: str, **values: object):
    return dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **values)})


@pytest.fixture
def finished(tmp_path):
    job = _job(tmp_path)
    return job, run_job(job)


def test_a_first_run_is_the_job_itself(tmp_path):
    job = _job(tmp_path)
    run = next_run(job, resume=False)
    assert (run.job, run.resume, run.finished, run.note) == (job, False, None, "")


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_run_gives_its_lora_without_loading_the_model(finished, monkeypatch, resume):
    job, trained = finished
    monkeypatch.setattr(job_module, "build_trainer", lambda *args: pytest.fail("nothing is to be trained"))
    again = next_run(job, resume=resume).finished
    assert (again.status, again.step, again.losses) == ("finished", 2, trained.losses)
    assert (again.lora_path, again.checkpoint) == (trained.lora_path, trained.checkpoint)
    assert (again.eval_before, again.eval_after) == (trained.eval_before, trained.eval_after)
    assert again.lora.keys() == trained.lora.keys()
    assert all(torch.equal(again.lora[name], tensor) for name, tensor in trained.lora.items())


def test_a_changed_job_runs_beside_the_finished_one_and_is_found_again(finished):
    job, _ = finished
    changed = _changed(job, "optimizer", learning_rate=5e-3)
    run = next_run(changed, resume=False)
    assert Path(run.job.output.folder).name == "run_2" and run.job.output.name == f"{job.output.name}_2"
    assert "optimizer.learning_rate: 0.001 -> 0.005" in run.note and not run.resume
    trained = run_job(run.job)
    assert next_run(changed, resume=False).finished.losses == trained.losses
    assert next_run(job, resume=False).finished.losses != trained.losses
    longer = next_run(_changed(job, "train", steps=3), resume=False)
    assert Path(longer.job.output.folder).name == "run_3" and "train.steps: 2 -> 3" in longer.note


def test_changed_images_start_a_new_run(finished, tmp_path):
    job, _ = finished
    (tmp_path / "data" / "image_0.txt").write_text("another caption")
    run = next_run(job, resume=False)
    assert Path(run.job.output.folder).name == "run_2" and "captions" in run.note


def test_a_stopped_run_asks_for_resume(tmp_path):
    job = _job(tmp_path, steps=9)
    run_steps(job)
    with pytest.raises(ValueError, match=r"stopped after step 1 of 9; turn on resume to go on"):
        next_run(job, resume=False)
    for resume in (True, None):
        run = next_run(job, resume=resume)
        assert (run.job, run.resume, run.finished) == (job, True, None)
    other = next_run(_changed(job, "train", steps=10), resume=None)
    assert (other.job.output.name, other.resume) == (f"{job.output.name}_2", False), "it has other settings"


def test_a_run_that_is_under_way_is_refused_and_a_changed_one_starts_beside_it(tmp_path):
    job = _job(tmp_path)
    with recorded_run(Path(job.output.folder), job, ["cpu"]):
        with pytest.raises(ValueError, match="that is under way; wait for its end"):
            next_run(job, resume=False)
        run = next_run(_changed(job, "train", seed=4), resume=False)
    assert Path(run.job.output.folder).name == "run_2"
    assert next_run(job, resume=False).job == job, "a run that has ended and left nothing is begun again"


def test_a_lora_file_that_is_gone_or_of_another_type_is_written_again(finished):
    job, trained = finished
    other = _changed(job, "output", lora_dtype="float16")
    run = next_run(other, resume=False)
    assert (run.resume, run.finished) == (True, None)
    run_job(run.job, resume=True)
    assert torch.float16 in {tensor.dtype for tensor in load_file(trained.lora_path).values()}
    assert next_run(other, resume=False).finished is not None and next_run(job, resume=False).finished is None
    trained.lora_path.unlink()
    assert next_run(job, resume=False).resume


def test_a_resumed_run_with_a_number_is_named(finished):
    job, _ = finished
    run = Path(job.output.folder)
    second = run.with_name(f"{run.name}_2")
    shutil.copytree(run, second)
    try:
        longer = _changed(job, "train", steps=3)
        assert second.name in next_run(longer, resume=True).note
    finally:
        shutil.rmtree(second)
    found = next_run(longer, resume=True)
    assert (found.job, found.resume, found.finished, found.note) == (longer, True, None, "")
