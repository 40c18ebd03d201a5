"""How a job of two processes ends: asked to stop, killed, hung, out of memory; and two of them at once."""

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from devicebridge.config.job import save_job
from devicebridge.jobs.in_processes import run_in_processes
from devicebridge.jobs.job import run_job
from devicebridge.system.stopping import Requests
from devicebridge.tests.ranks.launching import ENVIRONMENT, HERE, none_left, ranks_of, read_until, start_cli, torchrun
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
    train = {"steps": steps, "batch_size": 1, "gradient_accumulation_steps": 2, **sections.pop("train", {})}
    output = {"folder": str(folder / name), "save_every_steps": 2}
    evaluation = sections.pop("evaluation", {"folder": ""})
    job = make_tiny_job(folder, "wan", train=train, output=output, evaluation=evaluation, **sections)
    file = folder / f"{name}.toml"
    save_job(job, file)
    return job, file


def _run_faulty(file, fault, **options):
    """A job of two ranks of which one fails; see faulty_rank.py."""
    environment = {**ENVIRONMENT, "FAULT": fault}
    command = torchrun(HERE / "faulty_rank.py", "train", file, count=2, **options)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


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


@pytest.fixture
def private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_sigterm_to_one_rank_saves_once_and_ends_all_as_the_node_hears(folder, private):
    job, file = _job(folder, "asked", parallel={"processes": 2})
    heard = []

    def hear(event):
        heard.append(event)
        if event.kind == "step" and event.step == 3:
            ranks_of(private)[1].send_signal(signal.SIGTERM)

    result = run_in_processes(job, resume=False, on_event=hear)
    steps = [event for event in heard if event.kind == "step"]
    assert (result.status, result.step, result.losses) == ("stopped", len(steps), [e.values["loss"] for e in steps])
    assert result.step == _newest(job) and result.lora.keys() and result.lora_path.is_file()
    assert all(sum(e.values["rank_losses"]) / 2 == pytest.approx(e.values["loss"], rel=1e-6) for e in steps)
    output = (folder / "asked" / "processes.log").read_text()
    assert "start the same job with resume to continue" in output and "Traceback" not in output
    assert json.loads((folder / "asked" / "run.json").read_text())["status"] == "stopped"
    assert none_left(private) and _goes_on(job)


@pytest.mark.long
@pytest.mark.parametrize("by", ["cancel", "page"])
def test_cancel_and_the_pages_stop_end_all_ranks_of_a_node(folder, private, by):
    job, _ = _job(folder, f"by_{by}", parallel={"processes": 2, "strategy": "fsdp"})
    steps = []

    def hear(event):
        steps.extend([event.step] if event.kind == "step" else [])
        if by == "page" and event.step == 3:
            Requests(Path(job.output.folder)).ask("stop")

    result = run_in_processes(job, resume=False, on_event=hear, should_stop=lambda: by == "cancel" and len(steps) > 2)
    assert result.status == "stopped" and result.step == _newest(job) == len(steps) < 1000
    assert none_left(private)


@pytest.mark.long
def test_a_stop_is_heard_while_another_rank_encodes_captions(folder):
    """The rank that is asked only waits, and the one that encodes is not asked."""
    job, file = _job(folder, "captions", cache={"folder": str(folder / "other_cache")})
    environment = {**ENVIRONMENT, "FAULT": "captions 1 3", "PYTHONUNBUFFERED": "1"}
    command = torchrun(HERE / "faulty_rank.py", "train", file, count=2)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        read_until(run, "== captions")
        time.sleep(1)
        ranks_of(file)[1].send_signal(signal.SIGTERM)
        asked = time.monotonic()
        output, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and "captions and latents done so far are kept" in output
    assert time.monotonic() - asked < 12 and not list_checkpoints(checkpoint_folder(job))  # all captions take 18 s


@pytest.mark.long
def test_a_compiler_that_fails_on_one_rank_of_fsdp_ends_the_job_with_its_traceback(folder):
    _, file = _job(folder, "compiler", parallel={"strategy": "fsdp"}, train={"compile": "auto"})
    done = _run_faulty(file, "compiler 1 0")
    assert done.returncode == 1 and none_left(file, seconds=1)
    assert 'set train.compile to "off"' in done.stderr and "in make_no_code" in done.stderr


def test_a_killed_rank_ends_the_job_and_leaves_its_last_save(folder):
    job, file = _job(folder, "killed", parallel={"strategy": "fsdp"})
    process = start_cli("train", file, "--nproc", 2)
    read_until(process, "saved ")
    ranks_of(file)[1].send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, 130) and "SIGKILL" in output
    assert "rank 0: another rank has ended" in output
    assert none_left(file)
    free = dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, strategy="auto"))
    assert _newest(job) >= 2 and _goes_on(free)


@pytest.mark.long
def test_a_rank_that_hangs_tells_where_and_torchrun_starts_all_anew(folder):
    job, file = _job(folder, "sleep", steps=6, parallel={"timeout_s": 15.0})
    done = _run_faulty(file, "sleep 1 3", restarts=1)
    assert done.returncode == 0, done.stderr
    assert "Timeout (0:00:15)!" in done.stderr and "in sleep_for_ever" in done.stderr
    events = (folder / "sleep" / "events.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, events) if event["kind"] == "step"]
    assert [event["step"] for event in found] in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 3, 4, 5, 6])  # from its last save on
    expected = run_job(_job(folder, "undisturbed", steps=6)[0]).losses
    assert [event["loss"] for event in found[-3:]] == pytest.approx(expected[-3:], rel=1e-5)


# Where it hangs -> the job, and which rank after which step.
HANGS = {
    "an evaluation": ({"parallel": {"strategy": "fsdp"}, "evaluation": {"every_steps": 1}}, "evaluates 1 2"),
    "a save": ({}, "saves 0 6"), "the end of a step": ({"parallel": {"strategy": "fsdp"}}, "ends 1 3"),
    "a step of a sample picture": ({"samples": {"prompts": ["a cat"], "every_steps": 1, "steps": 1}}, "draws 0 3"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", HANGS)
def test_a_rank_that_hangs_between_two_steps_ends_the_job(kind, folder):
    sections, fault = HANGS[kind]
    parallel = {"timeout_s": 15.0, **sections.get("parallel", {})}
    job, file = _job(folder, fault.replace(" ", "_"), **{**sections, "parallel": parallel})
    done = _run_faulty(file, fault)
    assert done.returncode == 1 and none_left(file)
    assert "Timeout (0:00:" in done.stderr and "in sleep_for_ever" in done.stderr
    free = dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, strategy="auto"))
    assert _goes_on(free)


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_and_ends_the_job(folder):
    """It cannot end itself: another one kills it, and saves what was done since the last save."""
    job, file = _job(folder, "stopped", parallel={"strategy": "fsdp", "timeout_s": 20.0})
    done = _run_faulty(file, "stopped 1 21")
    assert done.returncode == 1 and none_left(file)
    assert "rank 0: rank 1 gave no sign of life" in done.stderr and _newest(job) == 21
    assert _goes_on(dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, strategy="auto")))


@pytest.mark.long
def test_a_rank_without_memory_ends_the_job_and_the_others_save(folder):
    job, file = _job(folder, "oom")
    done = _run_faulty(file, "oom 1 3")
    assert done.returncode == 1
    assert "rank 1: no memory is left, says the test" in done.stderr and "in fail_in_a_forward" in done.stderr
    assert "rank 0: another rank has ended" in done.stderr
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
    read_until(process, "step 1/")
    process.kill()
    process.stdout.close()
    process.wait()
    assert none_left(file, seconds=60)
