"""Processes are stopped with everything they started, and only processes.py starts any."""

from __future__ import annotations

import ast
import os
import sys
import time
from pathlib import Path

import pytest
from devicebridge import processes

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import pathlib, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""


def _wait_for(path: Path) -> int:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError("the process did not start")


def _ends(pid: int) -> bool:
    """Whether the process is gone, or a zombie that only waits to be collected, within some seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        status = Path(f"/proc/{pid}/stat")
        if status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX")
@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
def test_leaving_the_block_ends_the_process_and_its_children(tmp_path: Path, manner: str) -> None:
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(pid_file), manner]
    with pytest.raises(KeyboardInterrupt), processes.start(command, stop_timeout_s=0.5) as process:
        child = _wait_for(pid_file)
        left = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - left < 20, "it ended by itself"
    assert process.exit_code is not None
    assert _ends(child)


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_a_process_is_asked_before_it_is_ended(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[2]).write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).write_text("1")
time.sleep(60)
"""
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    with processes.start([sys.executable, "-c", code, str(ready), str(saved)]) as process:
        _wait_for(ready)
    assert saved.read_text() == "saved"
    assert process.exit_code == 0


def test_an_interrupt_while_waiting_for_the_end_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    with processes.start([sys.executable, "-c", code], stop_timeout_s=0.2) as process:
        assert process._process.stdout is not None and process._process.stdout.readline() == "ready\n"

        def interrupted(timeout_s: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(process, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.stop()
        assert process._process.wait(timeout=10) != 0


def test_lines_and_exit_code_come_back() -> None:
    lines: list[str] = []
    code = "import os; print('one'); print(os.environ['WORD']); raise SystemExit(3)"
    with processes.start([sys.executable, "-c", code], environment={"WORD": "two"}) as process:
        assert process.each_line(lines.append) == 3
    assert lines == ["one", "two"]


def test_a_short_program_is_run() -> None:
    finished = processes.run([sys.executable, "-c", "print('out'); raise SystemExit(2)"], timeout_s=30)
    assert finished == processes.Finished(2, "out\n")
    assert processes.run(["/no/such/program"], timeout_s=1) is None
    assert processes.run([sys.executable, "-c", "import time; time.sleep(30)"], timeout_s=0.2) is None


def _shipped_files() -> list[Path]:
    left_out = {"tests", "benchmarks", "scripts", "docs", "examples", "build", "dist"}
    files = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return [path for path in files if path.parts[0] not in left_out and not path.parts[0].startswith(".")]


def test_only_processes_py_starts_processes_and_never_through_a_shell() -> None:
    """The registry's scanner looks at every file that does; one small file is soon read."""
    guilty = [path.as_posix() for path in _shipped_files() if _starts_processes(path)]
    assert guilty == ["processes.py"]
    assert "shell=" not in (ROOT / "processes.py").read_text(encoding="utf-8")


def _starts_processes(path: Path) -> bool:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import) and {alias.name for alias in node.names} & {"subprocess", "multiprocessing"}:
            return True
        if isinstance(node, ast.ImportFrom) and node.module in {"subprocess", "multiprocessing"}:
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.system", "os.popen", "os.fork"}:
            return True
    return False
