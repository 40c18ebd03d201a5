"""Jobs in processes of their own, for a program that waits for their end: ComfyUI's node, and a pair of experts.

Each process is the command `devicebridge` with a job file. Its events are read from the run folder as it writes them,
its result at the end from the last checkpoint. A stop reaches all: each ends its step, saves, and is waited for.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from ..config.job import JobConfig, save_for_process
from ..encoding.encode import never
from ..events import EventTail, Listener
from ..runs.queue import train_command
from ..system.processes import Running, start
from ..system.stopping import STOPPED, Requests
from ..system.telling import errors_in
from ..training.loop import checkpoint_folder
from ..training.state import list_checkpoints, load_checkpoint
from .resume import TrainingResult, read_result

_log = logging.getLogger(__name__)
LOG = "processes.log"
_POLL_S = 0.2
_SAVING_S = 300.0  # where nobody waits for them any more: a step has to end and a checkpoint to be written
_WARNING = "WARNING "  # begins lines of our command's; those that go on are indented
_IS_WINDOWS = sys.platform == "win32"
_ENDED_BEFORE_IT_LISTENED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_CONSEQUENCES = ("another rank has ended or hangs", " gave no sign of life for ")


class JobProcess:
    """A command at work on a job. What it prints is in processes.log of the run folder, and its warnings are ours.

    Args:
        file: the job file, where no browser sends files; the command runs beside it.
        name: begins what is said of it; "" for nothing.
    """

    def __init__(
        self, job: JobConfig, command: Sequence[str | Path], file: Path, on_event: Listener, name: str = ""
    ) -> None:
        self.job, self.name = job, name
        self.is_over = self.is_finished = False
        self.error = ""
        self._command, self._file, self._on_event = command, file, on_event
        self._is_asked = False
        self._folder = Path(job.output.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tail: EventTail
        self._running: Running
        self._printed: TextIO
        self._unfinished, self._is_warned = "", False  # its last line, and whether the one before was of a warning

    @contextmanager
    def started(self) -> Iterator[None]:
        """While it may run."""
        log, begin = self._folder / LOG, partial(start, stop_timeout_s=_SAVING_S, orphan_timeout_s=_SAVING_S)
        self._tail = EventTail(self._folder)
        with (
            log.open("wb") as output,
            log.open(encoding="utf-8", errors="replace") as self._printed,
            begin(self._command, folder=self._file.parent, output=output) as self._running,
        ):
            yield

    def hear(self) -> None:
        """Pass on what it tells, and note how it ended."""
        code = self._running.exit_code  # before the last look at the events
        for event in self._tail.new():
            self._on_event(event)
        *lines, self._unfinished = (self._unfinished + self._printed.read()).split("\n")
        for line in lines:
            self._is_warned = line.startswith(_WARNING) or (self._is_warned and line.startswith(" "))
            if self._is_warned:
                _log.warning("%s%s", f"{self.name}: " if self.name else "", line.removeprefix(_WARNING))
        if code is None:
            return
        self.is_over, self.is_finished = True, code == 0
        if code and code != STOPPED and not (self._is_asked and code in _ENDED_BEFORE_IT_LISTENED):
            # What the rank that failed first said; others only lose it.
            log, timeout_s = self._folder / LOG, self.job.parallel.timeout_s
            text = log.read_text(encoding="utf-8", errors="replace")
            errors = errors_in(text)
            causes = [each for each in errors if not any(part in each for part in _CONSEQUENCES)]
            if re.search(r"^Timeout \(", text, re.MULTILINE):  # faulthandler's, before it ends a rank
                causes.append(
                    f"a process took longer than parallel.timeout_s ({timeout_s:g} s); raise it if that was work"
                )
            cause = next(iter(causes or errors), "nothing was said")
            self.error = f"{cause} (exit code {code}; all that the processes printed is in {log})"

    def ask_to_stop(self) -> None:
        """Have it end its step and save; more than once, for a run that begins forgets what was asked before."""
        if _IS_WINDOWS or self.name:  # a signal reaches a compiler's processes as well, which then fail
            Requests(self._folder).ask("stop")
        elif not self._is_asked:
            self._running.terminate()
        self._is_asked = True

    def result(self) -> TrainingResult:
        """What it has left."""
        status = "finished" if self.is_finished else "stopped"
        kept = list_checkpoints(checkpoint_folder(self.job))
        path = self._folder / self.job.output.file_name
        if not kept or not path.is_file():
            return TrainingResult(status, resume_hint="nothing was trained yet; start the job again")
        return read_result(path, load_checkpoint(kept[-1]), status)


def run_all(processes: Sequence[JobProcess], should_stop: Callable[[], bool]) -> None:
    """Run all at the same time until all have ended; a stop, or the failure of one, stops all."""
    with ExitStack() as stack:
        for each in processes:
            stack.enter_context(each.started())
        is_stopping = False
        while under_way := [each for each in processes if not each.is_over]:
            for each in under_way:
                each.hear()
            is_stopping = is_stopping or should_stop() or any(each.error for each in processes)
            for each in under_way:
                if is_stopping and not each.is_over:
                    each.ask_to_stop()
            if not all(each.is_over for each in processes):
                time.sleep(_POLL_S)


def run_in_processes(
    job: JobConfig,
    *,
    resume: bool,
    on_event: Listener,
    should_stop: Callable[[], bool] = never,
    native: Sequence[str] = (),
) -> TrainingResult:
    """As run_job, by job.parallel.processes processes, which `devicebridge train` starts (cli/launch.py).

    Args:
        native: beginning of the command for a job that needs ComfyUI; () lets the command find one.
    Raises: RuntimeError with what the processes said, if they failed.
    """
    with tempfile.TemporaryDirectory(prefix="devicebridge-") as private:
        file = Path(private) / "job.toml"
        save_for_process(job, file)
        process = JobProcess(job, train_command(job, file, native, resume=resume), file, on_event)
        run_all([process], should_stop)
    if process.error:
        raise RuntimeError(process.error)
    return process.result()
