"""A job in several processes as the node that waits for it hears of its end; the command is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from devicebridge.jobs.in_processes import run_in_processes
from devicebridge.jobs.job import check_job
from devicebridge.tests.tiny_pipeline import make_tiny_job

_SAVES_AND_FAILS = """
import pathlib, signal, sys, time
def end(*args):
    print("devicebridge: the disk is full", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path(__file__).with_name("is_up").touch()
time.sleep(60)
"""
_ENDS_AT_ONCE = _SAVES_AND_FAILS.replace("signal.signal(signal.SIGTERM, end)", "")


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """How a stand-in ends that is asked to stop as soon as it listens."""
    program, is_up = tmp_path / "program.py", tmp_path / "is_up"
    program.write_text(code)
    monkeypatch.setattr("devicebridge.runs.queue._MAIN", program)
    job = make_tiny_job(tmp_path, parallel={"processes": 2})
    return run_in_processes(job, resume=False, on_event=lambda event: None, should_stop=is_up.exists).status


def test_what_fails_while_a_stop_is_saved_is_told(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="the disk is full .exit code 1"):
        _run(tmp_path, monkeypatch, _SAVES_AND_FAILS)


def test_processes_that_a_stop_ends_before_they_listen_are_stopped(tmp_path, monkeypatch):
    assert _run(tmp_path, monkeypatch, _ENDS_AT_ONCE) == "stopped"


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_captions_of_a_job_that_shares_weights_are_encoded_by_one_process(tmp_path, strategy):
    job = make_tiny_job(tmp_path, parallel={"strategy": strategy, "processes": 2})
    assert check_job(job, is_to_train=False).job.parallel.processes == 2
    with pytest.raises(ValueError, match="shares the weights among parallel.processes = 2 processes"):
        check_job(job)


_TELLS = (
    "import os, pathlib, sys; pathlib.Path(__file__).with_name('told').write_text(f'{os.getcwd()}\\n{sys.argv[2]}')"
)


def test_no_process_works_or_reads_its_job_where_browsers_send_files(tmp_path, monkeypatch):
    assert _run(tmp_path, monkeypatch, _TELLS) == "finished"
    folder, file = (Path(line) for line in (tmp_path / "told").read_text().splitlines())
    assert file.parent == folder and not folder.is_relative_to(tmp_path)
    assert not folder.exists() and not list((tmp_path / "run").glob("*.toml"))
