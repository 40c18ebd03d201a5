"""How a job of two processes ends: asked to stop, killed, hung, out of memory; and two of them at once."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys

import pytest
from devicebridge.config.job import save_job
from devicebridge.jobs.job import run_job
from devicebridge.tests.ranks.launching import (
    ENVIRONMENT,
    HERE,
    none_left,
    ranks_of,
    read_until,
    start_cli,
    torchrun,
)
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.loop import checkpoint_folder
from devicebridge.training.state import list_checkpoints

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs gloo over a loopback device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With captions and latents of all jobs."""
    folder = tmp_path_factory.mktemp("ends")
    run_job(_job(folder, "first", steps=1)[0])
    return folder


def _job(folder, name, *, steps=2000, **sections):
    train = {"steps": steps, "batch_size": 1, "gradient_accumulation_steps": 2}
    output = {"folder": str(folder / name), "save_every_steps": 2}
    job = make_tiny_job(folder, "wan", train=train, output=output, evaluation={"folder": ""}, **sections)
    file = folder / f"{name}.toml"
    save_job(job, file)
    return job, file


def _newest(job):
    found = list_checkpoints(checkpoint_folder(job))
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _goes_on(job):
    """Whether what is saved can be resumed, here by one process, with the losses of a run that was never stopped."""
    step = _newest(job)
    assert step > 0
    longer = dataclasses.replace(job, train=dataclasses.replace(job.train, steps=step + 2))
    found = run_job(longer, resume=True)
    whole = dataclasses.replace(longer, output=dataclasses.replace(longer.output, folder=f"{job.output.folder}-whole"))
    assert found.losses == pytest.approx(run_job(whole).losses, rel=1e-5)
    return True


def test_sigterm_to_one_rank_saves_once_and_ends_all_with_130(folder):
    job, file = _job(folder, "asked")
    process = start_cli("train", file, "--nproc", 2)
    read_until(process, "step 3/")
    ranks_of(file)[1].send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert "start the same job with resume to continue" in output and "Traceback" not in output
    record = json.loads((folder / "asked" / "run.json").read_text())
    losses = [line for line in (folder / "asked" / "events.jsonl").read_text().splitlines() if '"kind": "step"' in line]
    assert record["status"] == "stopped" and _newest(job) == len(losses)
    assert none_left(file) and _goes_on(job)


def test_a_killed_rank_ends_the_job_and_leaves_its_last_save(folder):
    job, file = _job(folder, "killed", parallel={"strategy": "fsdp"})
    process = start_cli("train", file, "--nproc", 2)
    read_until(process, "saved ")
    read_until(process, "step 3/")
    ranks_of(file)[1].send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, 130) and "SIGKILL" in output
    assert none_left(file)
    free = dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, strategy="auto"))
    assert _newest(job) >= 2 and _goes_on(free)


@pytest.mark.parametrize("what", ["sleep", pytest.param("oom", marks=pytest.mark.long)])
def test_a_rank_that_fails_tells_where_and_the_others_end(folder, what):
    job, file = _job(folder, what, parallel={"hang_timeout_s": 1.0})
    environment = {**ENVIRONMENT, "FAULT": f"{what} 1 3"}
    command = torchrun(HERE / "faulty_rank.py", "train", file, count=2)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    told = done.stderr
    assert done.returncode == 1
    if what == "sleep":
        assert "rank 1 is ended: this step has not ended" in told and "in sleep_for_ever" in told
    else:
        assert "rank 1: no memory is left, says the test" in told and "in fail_in_a_forward" in told
        assert "rank 0: another rank has ended or hangs" in told
    assert none_left(file)
    assert _newest(job) >= 2 and _goes_on(job)


@pytest.mark.long
def test_two_jobs_at_once_do_not_meet(folder):
    jobs = [_job(folder, f"twin{index}", steps=2 + index) for index in range(2)]
    processes = [start_cli("train", file, "--nproc", 2) for _, file in jobs]
    for (job, _), process in zip(jobs, processes, strict=True):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert _newest(job) == job.train.steps


@pytest.mark.long
def test_when_the_command_is_killed_no_process_is_left(folder):
    _, file = _job(folder, "orphaned")
    process = start_cli("train", file, "--nproc", 2)
    read_until(process, "step 2/")
    process.kill()
    process.stdout.close()
    process.wait()
    assert none_left(file, seconds=60)
