"""A job in several processes as the node that waits for it hears of its end; the command is a stand-in."""

from pathlib import Path

import pytest
from devicebridge.jobs.in_processes import JobProcess, run_in_processes
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


_TELLS = (
    "import os, pathlib, sys; pathlib.Path(__file__).with_name('told').write_text(f'{os.getcwd()}\\n{sys.argv[2]}')"
)


def test_no_process_works_or_reads_its_job_where_browsers_send_files(tmp_path, monkeypatch):
    assert _run(tmp_path, monkeypatch, _TELLS) == "finished"
    folder, file = (Path(line) for line in (tmp_path / "told").read_text().splitlines())
    assert file.parent == folder and not folder.is_relative_to(tmp_path)
    assert not folder.exists() and not list((tmp_path / "run").glob("*.toml"))


class _Printed:
    """What a process prints, as it is found at each look."""

    exit_code = None

    def __init__(self, *parts):
        self._parts = list(parts)

    def read(self):
        return self._parts.pop(0)

    def new(self):
        return []


def test_warnings_are_told_whole_and_with_the_lines_that_follow(tmp_path, caplog):
    process = JobProcess(make_tiny_job(tmp_path), [], tmp_path / "job.toml", lambda event: None, "low")
    process._printed = process._tail = process._running = _Printed(
        "step 1\nWARN", "ING 2 images:\n  a.p", "ng\n", "  b.png\nstep 2\n  no more\n"
    )
    for _ in range(4):
        process.hear()
    assert caplog.messages == ["low: 2 images:", "low:   a.png", "low:   b.png"]


_PRINTS = "import sys; print({!r}); sys.exit(1)"
_LOST = "devicebridge: rank 0: another rank has ended or hangs (closed)\nThe steps done are saved in /s\n"


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (
            "devicebridge: 2 images cannot be read:\n a.png\n b.png\nstep 3/4",
            "2 images cannot be read:\n a.png\n b.png (",
        ),
        (f"Timeout (0:15:00)!\nThread 1:\n{_LOST}", "a process took longer than parallel.timeout_s (77 s); raise it"),
        (f"{_LOST}devicebridge: rank 1: no room\n", "rank 1: no room (exit code 1"),
        (_LOST, "rank 0: another rank has ended or hangs (closed)\nThe steps done are saved in /s (exit code 1"),
    ],
)
def test_a_failure_is_told_by_its_cause_with_all_its_lines(printed, said, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(_PRINTS.format(printed))
    monkeypatch.setattr("devicebridge.runs.queue._MAIN", program)
    job = make_tiny_job(tmp_path, parallel={"processes": 2, "timeout_s": 77.0})
    with pytest.raises(RuntimeError) as failed:
        run_in_processes(job, resume=False, on_event=lambda event: None)
    assert str(failed.value).startswith(said)
