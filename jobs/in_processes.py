"""A job in several processes of this machine, for a program that waits for its end: ComfyUI's node.

The command `devicebridge train` is started with a job file and starts the others (cli/launch.py). Its events are read
from the run folder as the first of them writes them, its result at the end from the last checkpoint.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..config.job import JobConfig, save_for_process
from ..encoding.encode import never
from ..events import EventTail, Listener
from ..runs.queue import train_command
from ..system.processes import Running, start
from ..system.requests import Requests
from ..system.stopping import STOPPED
from ..training.loop import checkpoint_folder
from ..training.state import list_checkpoints, load_checkpoint
from .result import TrainingResult
from .run_again import read_result

LOG = "processes.log"
_POLL_S = 0.2
_SAVING_S = 300.0  # where nobody waits for them any more: a step has to end and a checkpoint to be written
_TOLD = "devicebridge: "  # begins a line of our command's that says what went wrong
_IS_WINDOWS = sys.platform == "win32"
_ENDED_BEFORE_IT_LISTENED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_CONSEQUENCES = ("another rank has ended or hangs", " gave no sign of life for ")


def run_in_processes(
    job: JobConfig,
    *,
    resume: bool,
    on_event: Listener,
    should_stop: Callable[[], bool] = never,
    native: Sequence[str] = (),
) -> TrainingResult:
    """As run_job, by job.parallel.processes processes; what they print is in processes.log of the run folder.

    Args:
        native: beginning of the command for a job that needs ComfyUI; () lets the command find one.
    Raises: RuntimeError with what the processes said, if they failed.
    """
    folder = Path(job.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log, tail = folder / LOG, EventTail(folder)
    begin = partial(start, stop_timeout_s=_SAVING_S, orphan_timeout_s=_SAVING_S)
    with tempfile.TemporaryDirectory(prefix="devicebridge-") as private:  # no browser sends files there
        file = Path(private) / "job.toml"
        save_for_process(job, file)
        command = train_command(job, file, native, resume=resume)
        with log.open("wb") as output, begin(command, folder=file.parent, output=output) as running:
            is_asked = _follow(running, folder, tail, on_event, should_stop)
            code = running.exit_code
    if code and code != STOPPED and not (is_asked and code in _ENDED_BEFORE_IT_LISTENED):
        raise RuntimeError(_why(log, code))
    return _result(job, "stopped" if code else "finished")


def _follow(
    running: Running, folder: Path, tail: EventTail, on_event: Listener, should_stop: Callable[[], bool]
) -> bool:
    """Hear events until the command has ended; whether it was asked to end."""
    is_asked, is_over = False, False
    while not is_over:
        is_over = running.exit_code is not None  # before the last look at the events
        for event in tail.new():
            on_event(event)
        if not is_over and (is_asked or should_stop()):
            if _IS_WINDOWS:  # where no signal asks; once more each time, for a run that begins forgets what was asked
                Requests(folder).ask("stop")
            elif not is_asked:
                running.terminate()  # which it passes on: all finish the step and save
            is_asked = True
        time.sleep(0 if is_over else _POLL_S)
    return is_asked


def _result(job: JobConfig, status: str) -> TrainingResult:
    kept = list_checkpoints(checkpoint_folder(job))
    path = Path(job.output.folder) / job.output.file_name
    if not kept or not path.is_file():
        return TrainingResult(status, resume_hint="nothing was trained yet; start the job again")
    return read_result(path, load_checkpoint(kept[-1]), status)


def _why(log: Path, code: int | None) -> str:
    """What the rank that failed first said; others only lose it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.removeprefix(_TOLD) for line in lines if line.startswith(_TOLD)]
    causes = (line for line in told if not any(each in line for each in _CONSEQUENCES))
    cause = next(causes, (told or ["nothing was said"])[0])
    return f"{cause} (exit code {code}; all that the processes printed is in {log})"
