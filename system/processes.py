"""Every process this pack starts is started here, from a list of arguments and never through a shell.

A started process leads its own group, so that stopping it stops what it started in turn. But for those of
start_detached, which outlive us on purpose, it ends with us, however we end, SIGKILL included. For that this file is
also a program, the guard, between us and what we start. It holds the read end of a pipe whose write end is ours alone.
When we end, the system closes that, and the guard asks the whole group to end (SIGTERM), gives it time to save, and
kills it. Linux's parent-death signal would not do: it reaches no grandchild, and comes when the *thread* that started
the process ends. On Windows a job object does it (at the end of this file).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_IS_WINDOWS = os.name == "nt"
_POLL_S = 0.05
_SAME_START_S = 1.0  # what clocks may disagree by
_MOST_PID = 1 << 32
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ENCODING = {"PYTHONIOENCODING": "utf-8:backslashreplace"}  # of what a process prints, and we read


@dataclass
class Running:
    """A process in its own group; leaving the `with` block stops the group whatever happens."""

    _process: subprocess.Popen[str]
    _group: int
    _release: Callable[[], None]  # closes what the system closes when we end
    _stop_timeout_s: float
    _is_stopped: bool = False

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
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
                os.killpg(self._group, signal.SIGTERM if is_asked else signal.SIGKILL)


def start(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
    stop_timeout_s: float = 10.0,
    orphan_timeout_s: float = 10.0,
) -> Running:
    """Start a program without waiting for it. It ends when we do.

    Args:
        command: program and arguments.
        folder: where it runs; None for here.
        environment: added to ours.
        output: open file for standard output and errors; None keeps standard output for each_line.
        stop_timeout_s: seconds between asking it to stop and killing it.
        orphan_timeout_s: the same where we have ended without stopping it.
    Raises: OSError if the program cannot be started.
    """
    options: dict[str, Any] = {
        "cwd": folder,
        "env": {**os.environ, **_ENCODING, **(environment or {})},
        "stdin": subprocess.DEVNULL,
        "stdout": output if output is not None else subprocess.PIPE,
        "stderr": subprocess.STDOUT if output is not None else subprocess.DEVNULL,
        "text": True,
        "encoding": "utf-8",
        "errors": "replace",
    }
    parts = [str(part) for part in command]
    if _IS_WINDOWS:
        flags = subprocess.CREATE_NEW_PROCESS_GROUP  # type: ignore[attr-defined]
        process = subprocess.Popen(parts, creationflags=flags, **options)
        ends = end_with_us(int(process._handle))  # type: ignore[attr-defined]
        return Running(process, process.pid, ends, stop_timeout_s)
    lifeline, ours = os.pipe()
    try:
        process, group = _start_guarded(parts, options, lifeline, orphan_timeout_s)
    except BaseException:  # an interrupt too: a guard that has started sees our end closed
        os.close(ours)
        raise
    finally:
        os.close(lifeline)
    return Running(process, group, lambda: os.close(ours), stop_timeout_s)


def _start_guarded(
    command: list[str], options: dict[str, Any], lifeline: int, orphan_timeout_s: float
) -> tuple[subprocess.Popen[str], int]:
    """The guard, which ends with the command's exit code, and the command's process group."""
    reads, tells = os.pipe()
    guard = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    guard += [str(lifeline), str(tells), str(orphan_timeout_s), *command]
    with open(reads, encoding="ascii") as answers:
        try:
            process = subprocess.Popen(guard, start_new_session=True, pass_fds=(lifeline, tells), **options)
        finally:
            os.close(tells)
        kind, _, number = answers.read().partition(" ")
    if kind == "group":
        return process, int(number)
    if process.stdout is not None:
        process.stdout.close()
    code = process.wait()
    if kind == "error":
        raise OSError(int(number), os.strerror(int(number)), command[0])
    raise OSError(f"{command[0]} was not started: {sys.executable}, which was to start it, ended with code {code}")


def python_command(code: str, *arguments: str | Path, python: str | Path = sys.executable) -> list[str | Path]:
    """A command that runs Python code which finds no module in the working folder, where others may write.

    (-P does that, too, and is of Python 3.11. -I also leaves out what the user has installed for himself.)
    """
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
    """Run a program in place of this one, with its terminal and its signals; the exit code.

    Returns on Windows alone, where no program takes another's place: there this one waits, and the other ends with it.

    Raises: OSError if it cannot be started.
    """
    parts = [str(part) for part in command]
    sys.stdout.flush()
    sys.stderr.flush()
    if not _IS_WINDOWS:
        os.execv(parts[0], parts)
    process = subprocess.Popen(parts)
    release = end_with_us(int(process._handle))  # type: ignore[attr-defined]
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the console has interrupted the other one as well, which saves
            continue
        release()
        return code


# ---- processes that outlive us ----


@dataclass(frozen=True)
class ProcessMark:
    """Names one process for ever.

    Args:
        pid: its number.
        started: when, in seconds since 1970 by a clock that may be set.
        host: name of its computer, which may be changed.
        birth: what nobody changes: the start of its kernel, its container, and when in that kernel's time it started.
            "" where the system does not tell (Linux does), and in files of earlier versions.
    """

    pid: int
    started: float
    host: str
    birth: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.pid < _MOST_PID:
            raise ValueError(f"{self.pid} is no number of a process")

    def is_alive(self, held: Path | None = None) -> bool:
        """Whether that very process runs.

        Args:
            held: a file that it keeps locked. That tells of a process which cannot be seen from here, in another
                container or computer; without it, or without locks, one of a host of another name counts as alive.
        """
        if self.birth and self.birth.rpartition(" ")[0] == _kernel():
            return _birth(self.pid) == self.birth
        from .locks import is_locked

        is_ours = self.host == platform.node()
        if is_ours and not (self.birth and _kernel()):
            return (found := _process(self.pid)) is not None and abs(found - self.started) < _SAME_START_S
        try:
            return not is_ours if held is None else is_locked(held)
        except OSError:
            return not is_ours


def own_mark() -> ProcessMark:
    """This process."""
    return _mark_of(os.getpid())


def _mark_of(pid: int) -> ProcessMark:
    return ProcessMark(pid, _process(pid) or 0.0, platform.node(), _birth(pid))


def _process(pid: int) -> float | None:
    """When it started; None if it does not run."""
    import psutil  # the guard below runs without it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (psutil.Error, ValueError, OverflowError):  # the latter two of what is no number of a process
        return None


@functools.cache
def _kernel() -> str:
    """This start of the Linux kernel, and the container whose processes share their numbers; "" elsewhere."""
    with contextlib.suppress(OSError):
        return f"{_BOOT.read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _birth(pid: int) -> str:
    """See ProcessMark; "" of one that does not run."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"{_kernel()} {int(rest[18])}" if _kernel() and state not in (b"Z", b"X") else ""
    return ""


def start_detached(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None
) -> ProcessMark:
    """Start a program that goes on when we end, in a session of its own, and no longer belongs to us.

    Args:
        log: what it prints is added to this file, in whose folder it runs. But on Windows the file is locked until the
            program has ended.
        environment: added to ours.
    Raises: OSError if it cannot be started.
    """
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
    return _mark_of(process.pid)


# ---- the guard, a program of its own ----


def _guard(lifeline: int, tells: int, orphan_timeout_s: float, command: list[str]) -> int:
    """Start the command in its own group, and wait for its end, or for the end of the process that started us.

    Says "group <its id>" or "error <errno>" through tells. Returns the command's exit code.
    """
    assert sys.platform != "win32"
    polite = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    defaults = [number for number in polite if signal.getsignal(number) is not signal.SIG_IGN]  # nohup stays in force
    for number in polite:
        signal.signal(number, signal.SIG_IGN)
    for inherited in (lifeline, tells):
        os.set_inheritable(inherited, False)
    woken, wakes = os.pipe()  # woken can be read from whenever a child has ended
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        child = os.posix_spawnp(
            command[0], command, os.environ, setpgroup=0, setsigdef=[*defaults, signal.SIGPIPE, signal.SIGXFSZ]
        )
        answer = f"group {child}"
    except OSError as error:
        child, answer = 0, f"error {error.errno}"
    with contextlib.suppress(BrokenPipeError):  # nobody is there any more, as the lifeline will say too
        os.write(tells, answer.encode())
    os.close(tells)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its output ends with it, not with us
    if not child:
        return 127
    while True:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready:
            return _end_orphans(child, orphan_timeout_s)
        os.read(woken, 512)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return _end_like(os.waitstatus_to_exitcode(status))


def _end_orphans(group: int, timeout_s: float) -> int:
    """Ask all of a group to end, and kill what is left of it after timeout_s. Its leader is a child of ours."""
    assert sys.platform != "win32"
    end = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(group, os.WNOHANG)
            os.killpg(group, 0)
            time.sleep(_POLL_S)
        os.killpg(group, signal.SIGKILL)
    return 128 + signal.SIGTERM


def _end_like(code: int) -> int:
    """The exit code; where a signal ended the command, end by that signal too, without a second core dump."""
    assert sys.platform != "win32"
    if code >= 0:
        return code
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    sys.exit(_guard(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))


# ---- windows' way to let a process end with us: a job object


_log = logging.getLogger(__name__)

_KILL_ON_JOB_CLOSE = 0x2000
_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation


class _BasicLimits(ctypes.Structure):
    _fields_ = [
        ("per_process_user_time", ctypes.c_int64),
        ("per_job_user_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
    ]


class _ExtendedLimits(ctypes.Structure):
    _fields_ = [
        ("basic", _BasicLimits),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    ]


def end_with_us(process: int) -> Callable[[], None]:
    """Put a process, and what it will start, into a job of its own; the returned function ends them all.

    Where the system refuses, a warning says so, and the function does nothing.

    Args:
        process: handle.
    """
    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.CreateJobObjectW.restype = ctypes.c_void_p
    kernel.CreateJobObjectW.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p)
    kernel.SetInformationJobObject.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
    kernel.AssignProcessToJobObject.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    kernel.CloseHandle.argtypes = (ctypes.c_void_p,)
    limits = _ExtendedLimits()
    limits.basic.flags = _KILL_ON_JOB_CLOSE
    job = kernel.CreateJobObjectW(None, None)
    is_in_job = (
        job
        and kernel.SetInformationJobObject(job, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits))
        and kernel.AssignProcessToJobObject(job, process)
    )
    if not is_in_job:
        _log.warning("Windows gave no job object; a process started here goes on if this one is killed")
    return lambda: kernel.CloseHandle(job) if job else None
