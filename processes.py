"""Every process this pack starts is started here, from a list of arguments and never through a shell.

Who wants to know what the pack runs on a machine reads this file and its callers. A started process leads its own
group, so that stopping it stops what it started in turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_IS_WINDOWS = os.name == "nt"


@dataclass(frozen=True)
class Finished:
    """What a process left behind: its exit code and its standard output."""

    exit_code: int
    output: str


class Running:
    """A process in its own group; leaving the `with` block stops the group whatever happens."""

    def __init__(self, process: subprocess.Popen[str], stop_timeout_s: float) -> None:
        self._process = process
        self._stop_timeout_s = stop_timeout_s
        self._is_stopped = False

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or None if it still runs after timeout_s."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Ask the whole group to end, without waiting."""
        self._signal_group(kill=False)

    def stop(self) -> None:
        """Ask the whole group to end, then end it; a second call is a no-op."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            if self.exit_code is None:
                self.terminate()
                self.wait(self._stop_timeout_s)
        finally:  # an interrupt while waiting ends it at once
            self._signal_group(kill=True)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def each_line(self, on_line: Callable[[str], None]) -> int:
        """Hand over every line of standard output until the process ends; returns its exit code."""
        assert self._process.stdout is not None, "started with its output elsewhere"
        for line in self._process.stdout:
            on_line(line.rstrip("\n"))
        return self._process.wait()

    def _signal_group(self, *, kill: bool) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if _IS_WINDOWS:
                self._process.kill() if kill else self._process.terminate()
            else:
                os.killpg(self._process.pid, signal.SIGKILL if kill else signal.SIGTERM)


def start(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
    stop_timeout_s: float = 10.0,
) -> Running:
    """Start a program without waiting for it.

    Args:
        command: program and arguments.
        folder: where it runs; None for here.
        environment: added to ours.
        output: open file for standard output and errors; None keeps standard output for each_line.
        stop_timeout_s: seconds between asking it to stop and killing it.
    Raises: OSError if the program cannot be started.
    """
    group: dict[str, Any] = {"start_new_session": True}
    if _IS_WINDOWS:
        group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined]
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=output if output is not None else subprocess.PIPE,
        stderr=subprocess.STDOUT if output is not None else subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
        **group,
    )
    return Running(process, stop_timeout_s)


def run(
    command: Sequence[str | Path],
    *,
    timeout_s: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished | None:
    """Run a short program and return its exit code and standard output; None if it cannot start or takes too long."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Finished(done.returncode, done.stdout)
