"""Both experts of a pair trained at the same time, each in a process of its own.

Each process has its own random numbers, settings of torch and interpreter lock, and does not take the other along when
it crashes. A first process checks both jobs and fills the caches, and is gone before the models load. This process
never starts CUDA, which would take memory of every card. What the processes tell goes into one log, each event with its
expert's name. With one device the processes run one after the other.

A stop reaches both: each finishes its step, saves, and is waited for. When one fails, the other is stopped in the same
way, and the error says which it was. Both are resumed together; one that is done has nothing left to do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.job import JobConfig, save_for_process
from ..encoding.encode import never
from ..events import EventLog, Listener
from ..system import processes
from .experts import expert_jobs, num_at_once
from .result import TrainingResult
from .run_lock import run_lock
from .worker import worker_command

_log = logging.getLogger(__name__)
_KILLED_AFTER_S = 30.0  # of a second interrupt; the first one waits for the checkpoint
_KILLED_AFTER_OURS_S = 300.0  # where this process was killed: a step has to end and a checkpoint to be written


@dataclass(frozen=True)
class PairResult:
    """How both trainings ended, by expert, without tensors; {} if the job was stopped before they began."""

    experts: Mapping[str, TrainingResult]
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
    folder = Path(job.output.folder)
    with run_lock(folder), tempfile.TemporaryDirectory(prefix="devicebridge-") as private:
        experts = expert_jobs(job, devices)
        at_once = num_at_once(experts)
        files = {expert.name: _write(expert.job, Path(private)) for expert in experts}
        first, second = files.values()

        def worker(name: str, file: Path, also_checks: Path | None = None) -> _Worker:
            stop_file = file.with_name("stop")
            command = worker_command(file, stop_file, resume=resume, also_checks=also_checks, host_share=at_once)
            return _Worker(name, stop_file, command)

        found: dict[str, TrainingResult] = {}
        with EventLog(folder, on_event) as events:
            runner = _Runner(events, should_stop)
            is_finished = _are_finished(runner.run([worker("caches", first, also_checks=second)]))
            for names in [list(files)] if at_once > 1 else [[name] for name in files]:
                if is_finished:
                    found |= runner.run([worker(name, files[name]) for name in names])
                    is_finished = _are_finished(found)
        return PairResult(found, is_finished)


def _write(job: JobConfig, private: Path) -> Path:
    """The job as a file for its process, and as one in its folder for whoever wants to run it alone.

    No process reads the latter: it may lie where ComfyUI saves what browsers send.
    """
    folder = Path(job.output.folder)
    file = private / folder.name / "job.toml"
    for each in (folder / file.name, file):
        save_for_process(job, each)
    return file


def _are_finished(found: Mapping[str, TrainingResult]) -> bool:
    return all(result.status == "finished" for result in found.values())


@dataclass
class _Worker:
    """A process, and how it ended."""

    name: str
    stop_file: Path
    command: Sequence[str | Path]
    result: TrainingResult | None = None
    error: str = ""
    is_ended: bool = False


@dataclass
class _Runner:
    """Runs some processes at a time. What they tell comes through a queue, the exit code at the end of each."""

    events: EventLog
    should_stop: Callable[[], bool]
    _told: queue.Queue[tuple[_Worker, dict[str, Any] | int]] = field(default_factory=queue.Queue)

    def run(self, workers: Sequence[_Worker]) -> dict[str, TrainingResult]:
        """Run all at once until all have ended; results by name. Raises: RuntimeError if one failed."""
        with contextlib.ExitStack() as stack:
            for worker in workers:
                stack.enter_context(self._started(worker))
            while not all(worker.is_ended for worker in workers):
                if self.should_stop() or any(worker.error for worker in workers):
                    for worker in workers:
                        if not worker.is_ended:
                            worker.stop_file.touch()
                with contextlib.suppress(queue.Empty):
                    self._hear(*self._told.get(timeout=0.2))
        _raise_first(workers)
        return {worker.name: worker.result for worker in workers if worker.result is not None}

    @contextlib.contextmanager
    def _started(self, worker: _Worker) -> Iterator[None]:
        worker.stop_file.unlink(missing_ok=True)  # of a run that was killed
        with processes.start(
            worker.command,
            folder=worker.stop_file.parent,
            stop_timeout_s=_KILLED_AFTER_S,
            orphan_timeout_s=_KILLED_AFTER_OURS_S,
        ) as running:
            reader = threading.Thread(target=self._listen, args=(worker, running), name=f"devicebridge-{worker.name}")
            reader.start()
            try:
                yield
            finally:
                running.stop()  # of one that has ended, nothing; its output ends with it
                reader.join()
                worker.stop_file.unlink(missing_ok=True)

    def _listen(self, worker: _Worker, running: processes.Running) -> None:
        """In a thread: queue every line that is an event, then the exit code."""

        def on_line(line: str) -> None:
            told = _parsed(line)
            if told is not None:
                self._told.put((worker, told))

        code = 0
        with contextlib.suppress(ValueError):  # closed by stop()
            code = running.each_line(on_line)
        self._told.put((worker, code))

    def _hear(self, worker: _Worker, told: dict[str, Any] | int) -> None:
        if isinstance(told, int):
            worker.is_ended = True
            if worker.result is None and not worker.error:
                worker.error = f"its process ended with exit code {told} and said nothing"
            return
        kind, values = told["kind"], told["values"]
        if kind == "result":
            path = values.get("lora_path")
            worker.result = TrainingResult(**{**values, "lora_path": Path(path) if path else None})
        elif kind == "error":
            worker.error = values["message"]
        elif kind == "log":
            _log.log(values["level"], "%s: %s", worker.name, values["message"])
        else:
            self.events.emit(kind, told["step"], told["total"], expert=worker.name, **values)


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
        f"; {worker.name} was stopped and saved after step {worker.result.step}"
        for worker in workers
        if worker.result is not None and worker.result.step
    ]
    raise RuntimeError(f"{failed.name}: {failed.error}{''.join(others)}")
