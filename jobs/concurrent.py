"""Both experts of a pair trained at the same time, each in a process of its own.

Processes, for each has its own random numbers, settings of torch and interpreter lock, and none takes the other along
when it crashes. Both jobs are checked, and captions and latents computed, by a first process that is gone before the
models load: this one never starts CUDA, which would take memory of every card. What the processes tell is merged into
one log, each event with its expert's name. Where there is one device only, the processes run one after the other.

A stop reaches both: each finishes its step, saves, and is waited for. When one fails, the other is stopped in the same
way, and the error says which it was. Both are resumed together; one that is done has nothing left to do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.job import JobConfig, load_job, save_job
from ..encoding.encode import never
from ..events import EventLog, Listener
from ..system import processes
from .experts import Expert, are_together, expert_jobs
from .run_lock import run_lock
from .worker import WorkerResult, worker_command

_log = logging.getLogger(__name__)
_KILLED_AFTER_S = 30.0  # of a second interrupt; the first one waits for the checkpoint
_KILLED_AFTER_OURS_S = 300.0  # where this process was killed: a step has to end and a checkpoint to be written


@dataclass(frozen=True)
class PairResult:
    """How both trainings ended, by expert; {} if the job was stopped before they began."""

    experts: Mapping[str, WorkerResult]
    is_finished: bool


def run_pair(
    job: JobConfig,
    devices: Sequence[str],
    *,
    resume: bool = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
) -> PairResult:
    """Train both experts to their end, or until should_stop() is true; then both are saved.

    Args:
        devices: of both, in order.
        on_event: hears everything; values has the "expert".
    Raises: ValueError for a job that cannot be run as written; RuntimeError naming the expert whose training
        failed, or the process that runs in the same folder.
    """
    with run_lock(Path(job.output.folder)):
        return _run_pair(job, expert_jobs(job, devices), resume=resume, on_event=on_event, should_stop=should_stop)


def _run_pair(
    job: JobConfig,
    experts: Sequence[Expert],
    *,
    resume: bool,
    on_event: Listener | None,
    should_stop: Callable[[], bool],
) -> PairResult:
    share = len(experts) if are_together(experts) else 1
    tasks = [_Task(expert.name, _write(expert.job), host_share=share) for expert in experts]
    with EventLog(Path(job.output.folder), on_event) as events:
        crew = _Crew(events, resume, should_stop)
        cached = crew.run([_Task("caches", tasks[0].file, also_checks=tasks[1].file)])
        if not _are_finished(cached):
            return PairResult({}, False)
        found = crew.run(tasks) if are_together(experts) else _in_turn(crew, tasks)
    return PairResult(found, len(found) == len(tasks) and _are_finished(found))


def _write(job: JobConfig) -> Path:
    """The job as a file in its folder, for its process and for whoever wants to run it alone."""
    file = Path(job.output.folder) / "job.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_job(job, file)
    if load_job(file) != job:
        raise ValueError(f"{file} does not say the same as the job; give absolute paths in it")
    return file


def _in_turn(crew: _Crew, tasks: Sequence[_Task]) -> dict[str, WorkerResult]:
    found: dict[str, WorkerResult] = {}
    for task in tasks:
        found |= crew.run([task])
        if not _are_finished(found):
            break
    return found


def _are_finished(found: Mapping[str, WorkerResult]) -> bool:
    return all(result.status == "finished" for result in found.values())


@dataclass(frozen=True)
class _Task:
    """Args:
    also_checks: of a process that fills the caches, and trains nothing, another job to check first.
    host_share: trainings that share the host's free memory.
    """

    name: str
    file: Path
    also_checks: Path | None = None
    host_share: int = 1


@dataclass
class _Worker:
    """A process under way; what it tells comes through the queue, None at its end."""

    task: _Task
    running: processes.Running
    stop_file: Path
    result: WorkerResult | None = None
    error: str = ""
    is_ended: bool = False


@dataclass
class _Crew:
    """Runs some processes at a time."""

    events: EventLog
    resume: bool
    should_stop: Callable[[], bool]
    _told: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = field(default_factory=queue.Queue)

    def run(self, tasks: Sequence[_Task]) -> dict[str, WorkerResult]:
        """All at once, until all have ended; by name. Raises: RuntimeError if one failed."""
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(self._started(task)) for task in tasks]
            while not all(worker.is_ended for worker in workers):
                if self.should_stop() or any(worker.error for worker in workers):
                    _stop(workers)
                with contextlib.suppress(queue.Empty):
                    self._hear(*self._told.get(timeout=0.2))
        _raise_first(workers)
        return {worker.task.name: worker.result for worker in workers if worker.result is not None}

    @contextlib.contextmanager
    def _started(self, task: _Task) -> Iterator[_Worker]:
        stop_file = task.file.with_name("stop")
        stop_file.unlink(missing_ok=True)  # of a run that was killed
        command = worker_command(
            task.file, stop_file, resume=self.resume, also_checks=task.also_checks, host_share=task.host_share
        )
        with processes.start(command, stop_timeout_s=_KILLED_AFTER_S, orphan_timeout_s=_KILLED_AFTER_OURS_S) as running:
            worker = _Worker(task, running, stop_file)
            reader = threading.Thread(target=self._listen, args=(worker,), name=f"devicebridge-{task.name}")
            reader.start()
            try:
                yield worker
            finally:
                running.stop()  # of one that has ended, nothing; its output ends with it
                reader.join()
                stop_file.unlink(missing_ok=True)

    def _listen(self, worker: _Worker) -> None:
        """In a thread: every line that is an event, then None."""

        def on_line(line: str) -> None:
            told = _parsed(line)
            if told is not None:
                self._told.put((worker, told))

        with contextlib.suppress(ValueError):  # closed by stop()
            worker.running.each_line(on_line)
        self._told.put((worker, None))

    def _hear(self, worker: _Worker, told: dict[str, Any] | None) -> None:
        name = worker.task.name
        if told is None:
            worker.is_ended = True
            if worker.result is None and not worker.error:
                worker.error = f"its process ended with exit code {worker.running.wait()} and said nothing"
        elif told["kind"] == "result":
            worker.result = WorkerResult(**told["values"])
        elif told["kind"] == "error":
            worker.error = told["values"]["message"]
        elif told["kind"] == "log":
            _log.log(told["values"]["level"], "%s: %s", name, told["values"]["message"])
        else:
            self.events.emit(told["kind"], told["step"], told["total"], expert=name, **told["values"])


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if not worker.is_ended:
            worker.stop_file.touch()


def _parsed(line: str) -> dict[str, Any] | None:
    """What a worker told; None for what a library printed."""
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) and told.keys() == {"kind", "step", "total", "values"} else None


def _raise_first(workers: Sequence[_Worker]) -> None:
    """Raises: RuntimeError of the worker that failed, with where the other stands."""
    failed = next((worker for worker in workers if worker.error), None)
    if failed is None:
        return
    others = [
        f"; {worker.task.name} was stopped and saved after step {worker.result.step}"
        for worker in workers
        if worker.result is not None and worker.result.step
    ]
    raise RuntimeError(f"{failed.task.name}: {failed.error}{''.join(others)}")
