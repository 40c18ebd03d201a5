"""One run at a time in an output folder, and what a killed one leaves in it."""

import errno
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from devicebridge.jobs.in_processes import run_pair
from devicebridge.jobs.job import run_job
from devicebridge.runs.record import RUN_LOCK, run_lock
from devicebridge.system import locks
from devicebridge.system.locks import NoLocks
from devicebridge.tests.tiny_pipeline import make_tiny_job

pytestmark = pytest.mark.usefixtures("short_texts")
ROOT = Path(__file__).resolve().parents[3]
_HOLD = """
import runpy, sys, time
runpy.run_path(sys.argv[1])["load_pack"]()
from pathlib import Path
from devicebridge.runs.record import run_lock

with run_lock(Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_held_by_one_process_and_free_when_that_is_killed(tmp_path):
    command = [sys.executable, "-c", _HOLD, str(ROOT / "bootstrap.py"), str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    try:
        owner = rf"run is in use by process {process.pid} on {socket.gethostname()}, since \d{{4}}-.*; wait for that"
        with pytest.raises(RuntimeError, match=owner), run_lock(tmp_path / "run"):
            pass
    finally:
        process.kill()
        process.communicate()
    with run_lock(tmp_path / "run"):
        pass
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_the_folder_of_a_living_one_is_refused_and_changes_nothing(resume, tmp_path):
    """Before the first checkpoint, with resume as without; the first run ends as if there had been no second."""
    straight = run_job(make_tiny_job(tmp_path, output={"folder": str(tmp_path / "straight")}))
    job = make_tiny_job(tmp_path)
    refused = []

    def start_another(event):
        if event.kind == "step" and event.step == 1:
            with pytest.raises(RuntimeError, match=f"is in use by process {os.getpid()}") as caught:
                run_job(job, resume=resume)
            refused.append(caught)

    result = run_job(job, on_event=start_another)
    assert len(refused) == 1 and result.lora_path.read_bytes() == straight.lora_path.read_bytes()
    assert run_job(job, resume=True).status == "finished"


def test_both_experts_are_refused_in_a_folder_that_is_held(tmp_path):
    with run_lock(tmp_path / "run"), pytest.raises(RuntimeError, match="is in use by process"):
        run_pair(make_tiny_job(tmp_path), ["cpu"])


def test_what_killed_writers_left_is_swept_and_nothing_else(tmp_path):
    run, name = tmp_path / "run", uuid.uuid4().hex
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "checkpoints" / ".step-000004.77.tmp").mkdir()
    (run / "checkpoints" / ".step-000001.77.old").mkdir()
    left = [
        run / f".lora.safetensors.{name}.tmp", run / "checkpoints" / "step-000002" / f".lora.safetensors.{name}.tmp",
        run / "checkpoints" / ".step-000004.77.tmp", run / "checkpoints" / ".step-000001.77.old",
    ]  # fmt: skip
    for path in left[:2]:
        path.write_text("half")
    others = [run / "mine.tmp", run / ".hidden.tmp", run / ".lora.safetensors.1234.tmp"]
    for path in others:
        path.write_text("mine")
    with pytest.raises(ValueError, match="holds the checkpoints of an earlier run"):
        run_job(make_tiny_job(tmp_path))
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_a_job_that_is_refused_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="cannot be imported"):
        run_job(make_tiny_job(tmp_path, optimizer={"name": "torch.optim.Nope"}))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "run").write_text("mine")
    with (
        pytest.raises(ValueError, match=rf"output.folder {tmp_path / 'run'} cannot be written"),
        run_lock(tmp_path / "run"),
    ):
        pass


def test_without_locks_a_run_goes_on_and_one_warning_says_so(tmp_path, monkeypatch, caplog):
    def refuse(file):
        raise NoLocks(95, "Operation not supported")

    monkeypatch.setattr(locks, "try_lock", refuse)
    with run_lock(tmp_path / "run"), run_lock(tmp_path / "run"):
        pass
    assert caplog.text.count("file system without locks (Operation not supported)") == 1


def test_windows_locks_the_same_byte_whatever_the_holder_has_written(tmp_path, monkeypatch):
    """msvcrt.locking locks where the file stands, and one opened to append stands at its end; so does this one."""
    held = set()

    def locking(number, mode, count):
        place = os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR)
        if place in held:
            raise OSError(errno.EACCES, "Permission denied")
        held.add(place)

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(LK_NBLCK=2, locking=locking))
    monkeypatch.setattr(sys, "platform", "win32")
    with run_lock(tmp_path / "run"):
        assert locks.is_locked(tmp_path / "run" / RUN_LOCK)
        with pytest.raises(RuntimeError, match="is in use by"), run_lock(tmp_path / "run"):
            pass
