"""Every process this pack starts is started here, from a list of arguments and never through a shell.

It ends with us, however we end, SIGKILL included, and so does what it started in turn; but for those of start_detached.
For that this file is also a program, the guard, in a process group with the command. Its standard input is a pipe whose
other end is ours alone. When the system closes that, the guard asks the group to end, gives the command time to save,
and kills the rest. (Linux's parent-death signal reaches no grandchild.) On Windows a job object does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger(__name__)
_IS_WINDOWS = os.name == "nt"
_SAME_START_S = 1.0  # what clocks may disagree by
_MOST_PID = 1 << 32
_ENCODING = {"PYTHONIOENCODING": "utf-8:backslashreplace"}  # of what a process prints, and we read


@dataclass
class Running:
    """A process in its own group; leaving the `with` block stops the group whatever happens."""

    _process: subprocess.Popen[str]
    _release: Callable[[], object]  # closes what the system closes when we end
    _stop_timeout_s: float
    _is_stopped: bool = False

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; on POSIX 128 + its number for a signal."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the whole group to end, without waiting."""
        self._end_group(is_asked=True)

    def stop(self) -> None:
        """Ask the whole group to end, then end it; a second call is a no-op."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            if self.exit_code is None:
                self.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._stop_timeout_s)
        finally:  # an interrupt while waiting ends it at once
            self._end_group()
        self._process.wait()
        self._release()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def each_line(self, on_line: Callable[[str], None]) -> int:
        """Hand over every line of standard output until the process ends; returns its exit code."""
        assert self._process.stdout is not None, "started with its output elsewhere"
        for line in self._process.stdout:
            on_line(line.rstrip("\n"))
        return self._process.wait()

    def _end_group(self, *, is_asked: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if _IS_WINDOWS:
                self._process.terminate() if is_asked else self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGTERM if is_asked else signal.SIGKILL)


def start(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
    stop_timeout_s: float = 10.0,
) -> Running:
    """Start a program without waiting for it. environment: added to ours. output: open file for standard output and
    errors; None keeps standard output for each_line. stop_timeout_s: seconds between SIGTERM and SIGKILL.
    Raises: OSError if the program cannot be started."""
    options: dict[str, Any] = {
        "cwd": folder,
        "env": {**os.environ, **_ENCODING, **(environment or {})},
        "stdout": output if output is not None else subprocess.PIPE,
        "stderr": subprocess.STDOUT if output is not None else subprocess.DEVNULL,
        "text": True,
        "encoding": "utf-8",
        "errors": "replace",
    }
    parts = _parts(command)
    if _IS_WINDOWS:
        flags = subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined]
        process = subprocess.Popen(parts, stdin=subprocess.DEVNULL, creationflags=flags, **options)
        return Running(process, end_with_us(int(process._handle)), stop_timeout_s)  # type: ignore[attr-defined]
    guard = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(stop_timeout_s), *parts]
    process = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True, **options)
    assert process.stdin is not None
    lifeline, process.stdin = process.stdin, None
    return Running(process, lifeline.close, stop_timeout_s)


def _parts(command: Sequence[str | Path]) -> list[str]:
    """Raises: FileNotFoundError naming a program that is not there; neither execv nor Windows names it."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(command[0]))
    return [str(part) for part in command]


def python_command(code: str, *arguments: str | Path, python: str | Path = sys.executable) -> list[str | Path]:
    """A command that runs Python code which finds no module in the working folder, where others may write. (-P is of
    Python 3.11; -I also leaves out what the user has installed for himself.)"""
    return [python, "-c", f"import sys; sys.path[:] = filter(None, sys.path); {code}", *arguments]


def run(command: Sequence[str | Path], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> str | None:
    """Standard output of a short program; None if it cannot start, takes too long, or ends with another code than 0."""
    try:
        with start(command, environment=environment, stop_timeout_s=0.0) as running:
            output, _ = running._process.communicate(timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return output if running.exit_code == 0 else None


def go_on_as(command: Sequence[str | Path]) -> int:
    """Run a program in place of this one, with its terminal and its signals. Returns its exit code on Windows alone,
    where this process waits. Raises: OSError if it cannot be started."""
    parts = _parts(command)
    sys.stdout.flush()
    sys.stderr.flush()
    if not _IS_WINDOWS:
        os.execv(parts[0], parts)
    process = subprocess.Popen(parts)
    end_with_us(int(process._handle))  # type: ignore[attr-defined]
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the console has interrupted the other one as well, which saves
            return process.wait()


# ---- processes that outlive us ----


@dataclass(frozen=True)
class ProcessMark:
    """Names one process. started: seconds since 1970 by a clock that may be set. host: a name that may be changed."""

    pid: int
    started: float
    host: str

    def __post_init__(self) -> None:
        if not 0 < self.pid < _MOST_PID:
            raise ValueError(f"{self.pid} is no number of a process")

    def is_alive(self, held: Path | None = None) -> bool:
        """Whether that very process runs. held: a file that it keeps locked, which tells of one in another container or
        computer, or whose clock was set; without it, or without locks, one of another host counts as alive."""
        is_ours = self.host == platform.node()
        if is_ours and (found := _process(self.pid)) is not None and abs(found - self.started) < _SAME_START_S:
            return True
        from .locks import is_locked

        try:
            return not is_ours if held is None else is_locked(held)
        except OSError:
            return not is_ours


def mark_of(pid: int = 0) -> ProcessMark:
    """The process that has this number now; 0 for this one."""
    pid = pid or os.getpid()
    return ProcessMark(pid, _process(pid) or 0.0, platform.node())


def _process(pid: int) -> float | None:
    """When it started; None if it does not run."""
    import psutil  # the guard below runs without it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (psutil.Error, ValueError, OverflowError):  # the latter two of what is no number of a process
        return None


def start_detached(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> ProcessMark:
    """Start a program that outlives us, in a session of its own. What it prints is added to the log, in whose folder it
    runs, and which is locked until it ends, but on Windows. Raises: OSError if it cannot be started."""
    from .locks import try_lock

    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": log.parent}
    options["env"] = {**os.environ, **_ENCODING, **(environment or {})}
    if _IS_WINDOWS:
        flags = ("CREATE_NEW_PROCESS_GROUP", "DETACHED_PROCESS", "CREATE_BREAKAWAY_FROM_JOB")
        options["creationflags"] = sum(getattr(subprocess, name) for name in flags)
    else:
        options["start_new_session"] = True
    with log.open("ab") as output:
        if not _IS_WINDOWS:  # elsewhere a lock belongs to the open file, which the program gets from us
            with contextlib.suppress(OSError):
                try_lock(output)
        process = subprocess.Popen([str(part) for part in command], stdout=output, **options)
    threading.Thread(target=process.wait, name="devicebridge-reaper", daemon=True).start()  # no zombie stays
    return mark_of(process.pid)


# ---- the guard, a program of its own ----


def _guard(stop_timeout_s: float, command: list[str]) -> int:
    """Start the command, and wait for its end, or for that of our standard input; returns the command's exit code."""
    assert sys.platform != "win32"
    early: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays in force
            signal.signal(number, lambda number, frame: early.append(number))  # which no program inherits
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for asked in early:  # before the command was there to hear it
        child.send_signal(asked)
    ended: queue.SimpleQueue[int | bytes] = queue.SimpleQueue()
    for wait in (child.wait, lambda: os.read(0, 1)):
        threading.Thread(target=lambda wait=wait: ended.put(wait()), daemon=True).start()
    code = ended.get()
    if isinstance(code, int):
        return code if code >= 0 else 128 - code
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(queue.Empty):
        ended.get(timeout=stop_timeout_s)
    os.killpg(0, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(_guard(float(sys.argv[1]), sys.argv[2:]))


# ---- windows' way to let a process end with us: a job object

_KILL_ON_JOB_CLOSE = 0x2000
_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation, of 144 bytes with LimitFlags at 16


def end_with_us(process: int) -> Callable[[], object]:
    """Put a process, by its handle, and what it starts, into a job of its own; the function ends them all. Where the
    system refuses, a warning says so, and the function does nothing."""
    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
    limits = bytes(16) + _KILL_ON_JOB_CLOSE.to_bytes(4, "little") + bytes(124)
    is_in_job = (
        job
        and kernel.SetInformationJobObject(job, _EXTENDED_LIMITS, limits, len(limits))
        and kernel.AssignProcessToJobObject(job, ctypes.c_void_p(process))
    )
    if not is_in_job:
        _log.warning("Windows gave no job object; a process started here goes on if this one is killed")
    return lambda: kernel.CloseHandle(job) if job else None
