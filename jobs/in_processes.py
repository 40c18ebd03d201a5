"""Jobs in processes of their own, for a program that waits for their end: ComfyUI's node, and a pair of experts (Wan
2.2 A14B). Each process is the command `devicebridge` with a job file; events and result are read from its run folder.
This process never starts CUDA, which takes memory."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from ..checkpoints.checkpoint import read_checkpoint
from ..config.job import JobConfig, Resume, save_for_process
from ..config.model import PER_DEVICE
from ..events import Event, EventLog, EventTail, Listener
from ..families.registry import FAMILIES
from ..families.spec import Variant
from ..runs.queue import own_command, train_command
from ..runs.record import run_lock
from ..system.processes import start
from ..system.stopping import STOPPED, Requests, never
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
    """A command at work on a job. What it prints is in processes.log of the run folder; its warnings are ours. file:
    the job file, where no browser sends files; the command runs beside it. name: begins what is said of it."""

    def __init__(
        self, job: JobConfig, command: Sequence[str | Path], file: Path, on_event: Listener, name: str = ""
    ) -> None:
        self.job, self.name = job, name
        self.is_over = self.is_finished = False
        self.error = ""
        self._command, self._file, self._on_event = command, file, on_event
        self._is_asked = False
        self._folder = Path(job.output.folder)
        self._log = self._folder / LOG
        self._folder.mkdir(parents=True, exist_ok=True)
        self._unfinished, self._is_warned = "", False  # its last line, and whether the one before was of a warning

    @contextmanager
    def started(self) -> Iterator[None]:
        """While it may run."""
        self._tail = EventTail(self._folder)
        with (
            self._log.open("wb") as output,
            self._log.open(encoding="utf-8", errors="replace") as self._printed,
            start(self._command, folder=self._file.parent, output=output, stop_timeout_s=_SAVING_S) as self._running,
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
            text = self._log.read_text(encoding="utf-8", errors="replace")
            errors = errors_in(text)
            if "\nTimeout (" in f"\n{text}":  # faulthandler's, before it ends a rank
                limit = f"parallel.timeout_s ({self.job.parallel.timeout_s:g} s)"
                errors.append(f"a process took longer than {limit}; raise it if that was work")
            causes = (each for each in errors if not any(part in each for part in _CONSEQUENCES))
            cause = next(causes, (errors or ["nothing was said"])[0])  # of the rank that failed first; others lose it
            self.error = f"{cause} (exit code {code}; all that the processes printed is in {self._log})"

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
    resume: Resume,
    on_event: Listener,
    should_stop: Callable[[], bool] = never,
) -> TrainingResult:
    """As run_job, by job.parallel.processes processes, which `devicebridge train` starts (cli/launch.py).
    Raises: RuntimeError with what the processes said, if they failed."""
    with tempfile.TemporaryDirectory(prefix="devicebridge-") as private:
        file = Path(private) / "job.toml"
        save_for_process(job, file)
        process = JobProcess(job, train_command(job, file, resume=resume), file, on_event)
        run_all([process], should_stop)
    if process.error:
        raise RuntimeError(process.error)
    return process.result()


def expert_jobs(job: JobConfig, devices: Sequence[str]) -> dict[str, JobConfig]:
    """The jobs of "high_noise" and "low_noise", in this order. The first half of the devices is the first one's.
    Raises: ValueError for no half of a pair, the same expert twice, or other than one setting per device."""
    first = read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = first.variant or first.family.variants[0]
    if not variant.partner:
        pairs = ", ".join(each.name for family in FAMILIES.values() for each in family.variants if each.partner)
        found = f"model.second_expert is of a pair, but {job.model.path} is {variant.name}, which is whole"
        raise ValueError(f"{found}; remove it, or name with model.variant which it is: {pairs}")
    partner = first.family.variant(variant.partner)
    second = read_checkpoint(job.model.second_expert, first.family.name, partner.name)
    if {file.resolve() for file in first.files} == {file.resolve() for file in second.files}:
        found = f"model.path {job.model.path} and model.second_expert {job.model.second_expert} are the same files"
        helps = "name the other expert's, or for both the model folder that holds transformer and transformer_2"
        raise ValueError(f"{found}; {helps}")
    parts = sorted([(variant, job.model.path), (partner, job.model.second_expert)], key=lambda e: -e[0].sigma_range[1])
    middle = (len(devices) + 1) // 2
    shares = (slice(middle), slice(middle, None)) if len(devices) > 1 else (slice(1), slice(1))
    names = ("high_noise", "low_noise")
    return {
        name: _expert_job(job, name, each, path, devices, share)
        for name, (each, path), share in zip(names, parts, shares, strict=True)
    }


def num_at_once(experts: Mapping[str, JobConfig]) -> int:
    """How many of the two are trained at a time: both if they have no device in common."""
    first, second = (set(job.split.devices) for job in experts.values())
    return 1 if first & second else 2


def _expert_job(
    job: JobConfig, name: str, variant: Variant, path: str, devices: Sequence[str], share: slice
) -> JobConfig:
    folder = Path(job.output.folder)
    for setting in PER_DEVICE:
        if (count := len(getattr(job.split, setting))) not in (0, len(devices)):
            raise ValueError(f"split.{setting} has {count} values for {', '.join(devices)} of both; give one each")
    own = {setting: getattr(job.split, setting)[share] for setting in PER_DEVICE}
    return replace(
        job,
        model=replace(job.model, path=path, second_expert="", variant=variant.name),
        split=replace(job.split, devices=tuple(devices[share]), **own),
        cache=replace(job.cache, folder=job.cache.folder or str(folder / "cache")),
        output=replace(job.output, folder=str(folder / name), name=f"{job.output.name}_{name}"),
    )


def run_pair(
    job: JobConfig,
    devices: Sequence[str],
    *,
    resume: Resume = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
) -> dict[str, TrainingResult]:
    """Train both experts to their end, or until should_stop() is true or one fails; both are saved. How those that were
    begun ended, by expert. With one device they follow each other. Events have the "expert". Raises: ValueError for a
    job that cannot run; RuntimeError naming the expert that failed, or the process that runs in the same folder."""
    folder = Path(job.output.folder)
    with run_lock(folder), tempfile.TemporaryDirectory(prefix="devicebridge-") as private, ExitStack() as stack:
        experts = expert_jobs(job, devices)
        events = stack.enter_context(EventLog(folder, on_event))
        at_once = num_at_once(experts)
        files = {name: Path(private) / name / "job.toml" for name in experts}
        for name, each in experts.items():
            save_for_process(each, files[name])
            # For whoever wants to run it alone. No process reads it: it may lie where browsers send files.
            save_for_process(each, Path(each.output.folder) / "job.toml")

        def process(name: str, expert: str, *command: str | Path) -> JobProcess:
            def pass_on(event: Event) -> None:
                events.emit(event.kind, event.step, event.total, **{**event.values, "expert": name})

            return JobProcess(experts[expert], command, files[expert], pass_on, name)

        def training(name: str) -> JobProcess:
            command = train_command(experts[name], files[name], resume=resume)
            return process(name, name, *command, "--host-share", str(at_once))

        caches = process("caches", next(iter(experts)), *own_command(needs_comfyui=False), "cache", *files.values())
        trainings, done = list(map(training, experts)), list[JobProcess]()
        for at_a_time in [[caches], trainings] if at_once > 1 else [[caches], *([each] for each in trainings)]:
            if not all(each.is_finished for each in done):
                continue
            run_all(at_a_time, should_stop)
            done += at_a_time
            if failed := next((each for each in at_a_time if each.error), None):
                steps = {each.name: each.result().step for each in at_a_time if not each.error}
                saved = (f"; {name} was stopped and saved after step {step}" for name, step in steps.items() if step)
                raise RuntimeError(f"{failed.name}: {failed.error}{''.join(saved)}")
        return {each.name: each.result() for each in done[1:]}
