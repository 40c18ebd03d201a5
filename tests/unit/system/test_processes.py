"""Processes are stopped with everything they started, and only processes.py starts any."""

import ast
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import psutil
import pytest
from devicebridge.cli.launch import torchrun_command
from devicebridge.config.job import make_job, save_job
from devicebridge.runs.queue import native_command, train_command
from devicebridge.system import processes
from devicebridge.tests.unit.config.test_ranges import MINIMAL
from devicebridge.tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
PARENT = """
import pathlib, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


STARTER = """
import pathlib, runpy, sys, threading, time
runpy.run_path(sys.argv[1])["load_pack"]()
from devicebridge.system import processes
held = []
def start():
    held.append(processes.start(sys.argv[3:], stop_timeout_s=float(sys.argv[2])))
thread = threading.Thread(target=start)
thread.start()
thread.join()
print("started", flush=True)
time.sleep(60)
"""
SAVER = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(0.3)
    pathlib.Path(sys.argv[2]).write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).write_text("1")
time.sleep(60)
"""


def _start_and_be_killed(number: int, timeout_s: float, *command: str, ready: Path) -> int:
    """A process of ours starts the command in a thread that ends, and gets the signal; returns what is in ready."""
    arguments = [sys.executable, "-c", STARTER, str(ROOT / "bootstrap.py"), str(timeout_s), *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == "started\n"
        answer = int(until(lambda: _text(ready)))
        starter.send_signal(number)
        assert starter.wait(timeout=10) == -number
    return answer


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _is_over(pid: int) -> bool:
    """Whether the process is gone, or a zombie that only waits to be collected."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _ends(pid: int) -> bool:
    return until(lambda: _is_over(pid))


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
def test_leaving_the_block_ends_the_process_and_its_children(tmp_path: Path, manner: str) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(pid_file), manner]
    with pytest.raises(KeyboardInterrupt), processes.start(command, stop_timeout_s=0.5) as process:
        child = int(until(lambda: _text(pid_file)))
        left = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - left < 20, "it ended by itself"
    assert process.exit_code is not None
    assert _ends(child)


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_process_is_asked_before_it_is_ended(tmp_path: Path) -> None:
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    with processes.start([sys.executable, "-c", SAVER, str(ready), str(saved)]) as process:
        until(lambda: _text(ready))
    assert saved.read_text() == "saved"
    assert process.exit_code == 0


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
@pytest.mark.parametrize(
    ("name", "manner"),
    [("SIGKILL", "stubborn"), *(pytest.param(e, "obedient", marks=pytest.mark.long) for e in ("SIGHUP", "SIGSEGV"))],
)
def test_a_process_and_its_children_end_with_us_however_we_end(tmp_path: Path, name: str, manner: str) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(pid_file), manner]
    assert _ends(_start_and_be_killed(getattr(signal, name), 0.5, *command, ready=pid_file))


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_process_whose_starter_was_killed_has_time_to_save(tmp_path: Path) -> None:
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    _start_and_be_killed(signal.SIGKILL, 20.0, sys.executable, "-c", SAVER, str(ready), str(saved), ready=ready)
    assert until(lambda: _text(saved)) == "saved"


EARLY = """
import os, runpy, signal, subprocess, sys
start = subprocess.Popen
def asked_before(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return start(*arguments, **options)
subprocess.Popen = asked_before
sys.exit(runpy.run_path(sys.argv[1])["_guard"](1.0, [sys.executable, "-c", "import time; time.sleep(60)"]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_stop_that_comes_before_the_command_is_there_is_not_lost() -> None:
    guard = [sys.executable, "-c", EARLY, str(ROOT / "system" / "processes.py")]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_process_stopped_leaves_no_file_descriptor_and_no_guard(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        return {name for name in os.listdir("/dev/fd") if os.path.exists(f"/dev/fd/{name}")}

    before = open_files()
    with processes.start([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        guard = process._process.pid
    for start in (processes.start, processes.go_on_as):
        with pytest.raises(FileNotFoundError, match="/no/such/program"):
            start(["/no/such/program"])
    assert open_files() == before
    assert _is_over(guard) and process.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_nohup_stays_in_force_and_other_signals_are_as_usual() -> None:
    code = "import signal; print(*(signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGHUP, signal.SIGTERM)))"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert processes.run([sys.executable, "-c", code], timeout_s=30) == "True False\n"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert processes.run([sys.executable, "-c", code], timeout_s=30) == "False False\n"


def test_the_job_object_ends_its_processes_with_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of Windows, on any system; the sizes and numbers are those of its headers on 64 bits."""
    kernel = mock.MagicMock()
    for name in ("CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject", "CloseHandle"):
        getattr(kernel, name).return_value = 77
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, use_last_error: kernel, raising=False)
    processes.end_with_us(5)()
    ((_, (_, _), _), (_, (job, kind, limits, size), _), (_, (_, process), _), (name, (handle,), _)) = kernel.mock_calls
    assert (job.value, kind, size, len(limits)) == (77, 9, 144, 144)
    assert int.from_bytes(limits[16:20], "little") == 0x2000 and not any(limits[20:])
    assert (process.value, name, handle.value) == (5, "CloseHandle", 77)


def test_an_interrupt_while_waiting_for_the_end_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    with processes.start([sys.executable, "-c", code], stop_timeout_s=0.2) as process:
        assert process._process.stdout is not None and process._process.stdout.readline() == "ready\n"

        def interrupted(timeout_s: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(process._process, "wait", interrupted)
            process.stop()
        assert process._process.wait(timeout=10) != 0


def test_lines_and_exit_code_come_back() -> None:
    lines: list[str] = []
    code = "import os; print('one'); print(os.environ['WORD']); raise SystemExit(3)"
    with processes.start([sys.executable, "-c", code], environment={"WORD": "two"}) as process:
        assert process.each_line(lines.append) == 3
    assert lines == ["one", "two"]


def test_a_short_program_is_run() -> None:
    assert processes.run([sys.executable, "-c", "print('out')"], timeout_s=30) == "out\n"
    assert processes.run([sys.executable, "-c", "print('out'); raise SystemExit(2)"], timeout_s=30) is None
    assert processes.run(["/no/such/program"], timeout_s=1) is None
    assert processes.run([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.2) is None


def _shipped_files() -> list[Path]:
    left_out = {"tests", "benchmarks", "scripts", "docs", "examples", "build", "dist"}
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return [path for path in files if path.parts[0] not in left_out and not path.parts[0].startswith(".")]


def test_only_processes_py_starts_processes_and_never_through_a_shell() -> None:
    """The registry's scanner looks at every file that does; one small file is soon read."""
    guilty = [path.as_posix() for path in _shipped_files() if _starts_processes(path)]
    assert guilty == ["system/processes.py"]
    assert "shell=" not in (ROOT / "system" / "processes.py").read_text(encoding="utf-8")


_STARTS = r"os\.(system|popen|fork|exec|spawn|posix_spawn)\w*"


def _starts_processes(path: Path) -> bool:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else {getattr(node, "module", "")}
        call = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if names & {"subprocess", "multiprocessing"} or re.fullmatch(_STARTS, call):
            return True
    return False


def test_what_a_process_prints_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Whatever this system's encoding is: every character is spelt, and none ends the process."""
    code = "import sys; print(sys.stdout.encoding, sys.stdout.errors, '\\u0436')"
    assert processes.run([sys.executable, "-c", code], timeout_s=60) == "utf-8 backslashreplace \u0436\n"
    mark = processes.start_detached([sys.executable, "-c", code], tmp_path / "log")
    while mark.is_alive():
        time.sleep(0.02)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "utf-8 backslashreplace \u0436\n"


SHADOW = "import os; os.close(os.open(os.environ['SHADOWED'], os.O_CREAT))"
SHADOWED = ("runpy", "pathlib", "json", "torch", "tomlkit", "pydantic", "prodigyopt", "numpy", "site", "devicebridge")


def _starts(tmp_path: Path) -> dict[str, Sequence[str | Path]]:
    """Every Python process that the pack starts, with as little to do as each can have."""
    job = tmp_path / "job.toml"
    made = make_job({**MINIMAL, "optimizer": {"name": "prodigy"}})
    save_job(made, job)
    return {
        "queue": train_command(made, job, resume=False),
        "ranks": torchrun_command(1, job, resume=False),
        "native": [*native_command(sys.executable, tmp_path / "nothing", tmp_path), "train", job],
        "question": processes.python_command("import json, pathlib, runpy"),
    }


@pytest.mark.parametrize("name", ["queue", "ranks", "native", "question"])
def test_a_started_process_imports_nothing_from_its_working_folder(tmp_path: Path, name: str) -> None:
    """Nor from a folder named in it: what lies there may have been sent by a browser."""
    folder, shadowed = tmp_path / "working", tmp_path / "shadowed"
    folder.mkdir()
    for module in SHADOWED:
        (folder / f"{module}.py").write_text(SHADOW)
    environment = {**os.environ, "SHADOWED": str(shadowed)}
    command = list(map(str, _starts(tmp_path)[name]))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert not shadowed.exists(), done.stderr[-2000:]


def test_a_process_that_goes_on_without_us_works_beside_its_log(tmp_path: Path) -> None:
    code = "import os, sys; sys.stdout.write(os.getcwd())"
    processes.start_detached([sys.executable, "-c", code], tmp_path / "log")
    assert until(lambda: _text(tmp_path / "log"), 60) == str(tmp_path.resolve())
