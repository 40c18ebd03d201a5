"""Trainings in processes of their own: a queue on the disk, with order, in which every job holds the cards it names.
The queue is one file under a lock. Whoever looks after it (a ComfyUI) starts jobs when their cards are free, and may
end and come back. The file, and the job of each run that was started, lie where no request can write: a browser can
send into the folder of the runs, too, so what that says is shown, and never started (decision 48)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pydantic

from ..config.job import JobConfig, Resume, job_to_dict, make_job, resume_flags
from ..system.files import expect, read_json_object, write_atomically
from ..system.locks import alone, is_locked
from ..system.processes import ProcessMark, start_detached
from ..system.stopping import Request, Requests
from ..system.telling import errors_in
from .record import QUEUED, KeptJobs, read_record
from .store import Busy, NotThere, RunStore

_MAIN = Path(__file__).resolve().parent.parent / "__main__.py"
MEMORY = "__devicebridge"  # in ComfyUI's user folder
_QUEUE, _LOCK, _JOBS = "queue.json", ".lock", "jobs"
_AGAIN = "remove it, and the queue is empty"
_CUT_SHORT = "ComfyUI ended while it started this training; see whether it runs, and resume it if not"
_this_process = threading.Lock()  # also where the file system has none
_WAIT_S = 10.0  # for another that looks after the queue: it starts processes, and does not wait for them
_BEGINS = "== job {}\n"  # stands in a log before what the process of that job prints
_MOST_LOG = 4000  # bytes from its end that a message is looked for in
JobState = Literal["waiting", "starting", "failed"]
Held = Mapping[str, str]  # card -> who holds it, as a sentence's end


def _may_start_nothing(job: JobConfig) -> None:
    """Of a program that only looks at a queue."""
    raise ValueError("trainings in the background are started by ComfyUI alone")


@pydantic.dataclasses.dataclass(frozen=True)
class QueuedJob:
    """A training that waits, or that was started and has not appeared in its run's record yet.
    root, run: of the store that its run is in, and its name there. devices: every card it uses. job: as job_to_dict
    gives it. is_resumed: it goes on from its newest checkpoint, and how. process, message: once it was started; why it
    failed. is_stopped: a stop was requested before it could hear."""

    id: str
    root: str
    run: str
    devices: tuple[str, ...]
    job: Mapping[str, Any]
    is_resumed: Resume = False
    state: JobState = "waiting"
    process: ProcessMark | None = None
    message: str = ""
    is_stopped: bool = False


_JOBS_OF_FILE = pydantic.TypeAdapter(QueuedJob)


@dataclass
class JobQueue:
    """The queue of a store's runs.
    place: folder in which it is remembered, where no request can write; it need not exist.
    check: raises ValueError for a job that must not be started. others: what else of this program uses cards."""

    store: RunStore
    place: Path
    check: Callable[[JobConfig], None] = _may_start_nothing
    others: Callable[[], Held] = dict

    def __post_init__(self) -> None:
        self.kept = KeptJobs(self.place / _JOBS)

    def jobs(self) -> list[QueuedJob]:
        """Those of this store, in their order. Raises: ValueError naming the file if it cannot be read."""
        return [job for job in self._all() if job.root == str(self.store.root)]

    def find(self, job_id: object) -> QueuedJob:
        """Raises: NotThere."""
        for job in self.jobs():
            if job.id == job_id:
                return job
        raise NotThere("there is no such job in the queue")

    def add(self, job: JobConfig, devices: Sequence[str], *, is_resumed: Resume) -> QueuedJob:
        """Put a training at the end of the queue, or in the place of one of its run that still waits.
        Raises: Busy if that run is under way or was started; ValueError for a run folder outside the store, or a job
        that must not be started."""
        run = self._run_of(job)
        self.check(job)
        with self._held():
            root, name = str(self.store.root), uuid.uuid4().hex
            queued = QueuedJob(name, root, run, tuple(devices), job_to_dict(job), is_resumed)
            record = read_record(self.folder(run))
            if record is not None and record.state == "running":
                raise Busy(f"{run} is under way; stop it, or wait for its end")
            earlier = next((each for each in self.jobs() if each.run == run), None)
            if earlier is not None and earlier.state == "starting":
                raise Busy(f"{run} is starting; press Stop at it in the sidebar's tab DeviceBridge, then Run again")
            if earlier is not None and earlier.state == "waiting":
                self._save([queued if each == earlier else each for each in self._all()])
            else:
                self._save([*(each for each in self._all() if each != earlier), queued])
        return queued

    def remove(self, job_id: object) -> None:
        """Take a job that waits or has failed out of the queue. Raises: NotThere; Busy if it has been started."""
        with self._held():
            job = self.find(job_id)
            if job.state == "starting":
                raise Busy("this job has been started; stop its run")
            self._remove(job)

    def move(self, job_id: object, *, is_earlier: bool) -> None:
        """Change places with the job before or after; at the ends a no-op. Raises: NotThere; Busy."""
        with self._held():
            job, own = self.find(job_id), self.jobs()
            other = own.index(job) + (-1 if is_earlier else 1)
            if 0 <= other < len(own):
                swapped = {job.id: own[other], own[other].id: job}
                self._save([swapped.get(each.id, each) for each in self._all()])

    def ask(self, run: str, what: Request) -> None:
        """Have a training do something at the end of its step; one that is starting is told to stop once it can hear.
        Raises: NotThere; Busy for a run that is not under way, or while the queue starts others."""

        def starting() -> list[QueuedJob]:
            return [job for job in self._readable() if job.run == run and job.state == "starting"]

        if what == "stop" and starting():  # which most are not: no need to wait for another that looks after the queue
            with self._held():
                for job in (found := starting()):
                    self._change(job, is_stopped=True)
            if found:
                return
        folder, record = self.store.find(run), self.store.record(run)
        if record is None or record.state != "running":
            raise Busy(f"{run} is not under way")
        Requests(folder).ask(what)

    def _readable(self) -> list[QueuedJob]:
        """As jobs(); none where the queue cannot be read, which describe() tells."""
        with contextlib.suppress(OSError, ValueError):
            return self.jobs()
        return []

    def describe(self) -> list[dict[str, Any]]:
        """Plain values for the page and the terminal; "why" says what a job waits for."""
        try:
            jobs, found = self.jobs(), []
        except (OSError, ValueError) as error:
            shown = {"state": "failed", "why": str(error)}
            return [{"id": "", "run": _QUEUE, "devices": [], "is_resumed": False, **shown}]
        reasons = {job.id: why for job, why in self._waiting(jobs)}
        for job in jobs:
            values = {name: getattr(job, name) for name in ("id", "run", "state", "is_resumed")}
            found.append({**values, "devices": list(job.devices), "why": reasons.get(job.id, job.message)})
        return found

    def _waiting(self, jobs: Sequence[QueuedJob]) -> Iterator[tuple[QueuedJob, str]]:
        """Those that wait, in order, and why; "" for one that need not. A job's cards are kept from those after it."""
        waiting = [job for job in jobs if job.state == "waiting"]
        held = self.held() if waiting else {}
        for job in waiting:
            yield job, explain(job.devices, held)
            held = {**{card: f"the queued run {job.run} comes first on" for card in job.devices}, **held}

    def held(self) -> Held:
        """Which cards are in use now, and by whom."""
        found = dict(self.others())
        self.store.ids()
        for run, record in self.store.running().items():
            found |= {card: f"the run {run} trains on" for card in record.devices}
        for job in self.jobs():
            if job.state == "starting":
                found |= {card: f"the run {job.run} is starting on" for card in job.devices}
        return found

    def tick(self) -> list[str]:
        """Look after the queue: start what can be started, note what has ended; names of runs that changed.
        A no-op while another process does so."""
        changed: list[str] = []
        if not self._readable():
            return changed
        with contextlib.suppress(Busy), self._held(0.0):
            changed += [job.run for job in self.jobs() if job.state == "starting" and self._follow(job)]
            for job, why in self._waiting(self.jobs()):
                if not why:
                    self._start(job)
                    changed.append(job.run)
        return changed

    def folder(self, run: str) -> Path:
        """Of a run, there or not. Raises: ValueError for a name that leads out of the store, also by a link."""
        root = Path(os.path.realpath(self.store.root))
        inside = root / run
        is_itself = _real(inside) == os.path.normcase(inside)
        if inside == root or not inside.is_relative_to(root) or not is_itself:
            raise ValueError(f"the run {run!r} leads out of {self.store.root}, or over a link; give it another name")
        return self.store.root / run

    def _run_of(self, job: JobConfig) -> str:
        """Its run's name, also where the job names the store over a link. Raises: ValueError for one outside it."""
        folder, root = Path(job.output.folder), _real(self.store.root)
        above = next((each for each in reversed(folder.parents) if _real(each) == root), None)
        if above is None:
            raise ValueError(f"{folder} is not below {self.store.root}; a training in the background writes there")
        run = folder.relative_to(above).as_posix()
        self.folder(run)
        return run

    @contextlib.contextmanager
    def _held(self, wait_s: float = _WAIT_S) -> Iterator[None]:
        """Nobody else changes the queue inside, or looks after it. Raises: Busy after waiting so long."""
        with _this_process, alone(self.place / _LOCK, wait_s) as is_ours:
            if not is_ours:
                raise Busy("the queue is starting other trainings; try again in a moment")
            yield

    def _start(self, job: QueuedJob) -> None:
        try:
            config = make_job(job.job)
            self.check(config)
            if (run := self._run_of(config)) != job.run:
                raise ValueError(f"its job writes into the run {run!r}; start it anew")
            Requests(self.folder(run)).clear()
            file = self.kept.keep(config)
            self._change(job, state="starting")  # first, or a kill in between would start it twice
            command, log = train_command(config, file, resume=job.is_resumed), file.with_suffix(".log")
            with log.open("a", encoding="ascii") as output:
                output.write(_BEGINS.format(job.id))
            process = start_detached(command, log, {QUEUED: job.id})
        except (OSError, ValueError) as error:
            self._change(job, state="failed", message=str(error))
        else:
            self._change(job, state="starting", process=process)

    def _follow(self, job: QueuedJob) -> bool:
        """Whether a job that was started has got its record, or has ended without one."""
        folder = self.store.root / job.run
        record = read_record(folder)
        if record is not None and record.queued == job.id:
            if job.is_stopped:
                Requests(folder).ask("stop")
            self._remove(job)
            return True
        log = self.kept.file(folder).with_suffix(".log")
        if job.process is not None and job.process.is_alive(log):
            return False
        with contextlib.suppress(OSError):  # a kill may have kept us from noting a process, which holds its log
            if job.process is None and is_locked(log):
                return False
        if job.is_stopped:
            self._remove(job)
        else:
            text = ""
            with contextlib.suppress(OSError), log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LOG))
                text = file.read().decode("utf-8", "replace")
            errors = errors_in(text.rpartition(_BEGINS.format(job.id))[2])
            last = errors[-1] if errors else f"its process ended and said nothing; see {log}"
            self._change(job, state="failed", message=last if job.process else _CUT_SHORT)
        return True

    def _all(self) -> list[QueuedJob]:
        """Of every store. Raises: ValueError naming the file if it cannot be read."""
        file = self.place / _QUEUE
        try:
            values = read_json_object(file, _AGAIN)
        except FileNotFoundError:
            return []
        found = []
        for each in expect(values.get("jobs"), list, f"{file}: jobs", _AGAIN):
            with contextlib.suppress(ValueError):
                found.append(_JOBS_OF_FILE.validate_python(each))
        return found

    def _save(self, jobs: Sequence[QueuedJob]) -> None:
        write_atomically(self.place / _QUEUE, json.dumps({"jobs": [asdict(job) for job in jobs]}).encode())

    def _change(self, job: QueuedJob, **changes: Any) -> None:
        self._save([replace(each, **changes) if each.id == job.id else each for each in self._all()])

    def _remove(self, job: QueuedJob) -> None:
        self._save([each for each in self._all() if each.id != job.id])


def _real(path: Path) -> str:
    """To compare: without links, and without case where the system takes none for another name."""
    return os.path.normcase(os.path.realpath(path))


def explain(devices: Sequence[str], held: Held) -> str:
    """Why a job that names these cards cannot start now, and what to do; "" if it can."""
    why = [f"{held[card]} {card}" for card in devices if card in held]
    return f"{'; '.join(why)}. Wait until it is free, free it, or choose other cards" if why else ""


# ---- how a command of ours begins


_START = Path(__file__).resolve().parent.parent / "nodes" / "host" / "native" / "start.py"


def train_command(job: JobConfig, file: Path, *, resume: Resume) -> list[str]:
    """`devicebridge train` of a job that this file holds."""
    return [*own_command(needs_comfyui=job.needs_comfyui), "train", str(file), *resume_flags(resume)]


def own_command(*, needs_comfyui: bool) -> list[str]:
    """The beginning of a command with this Python; with this process's ComfyUI in it, and the same folders, where that
    is needed and there is one. A command finds one itself otherwise."""
    if not (needs_comfyui and is_native_process()):
        return [sys.executable, str(_MAIN)]
    folder_paths: Any = sys.modules["folder_paths"]
    code = Path(folder_paths.__file__).resolve().parent
    return native_command(sys.executable, code, folder_paths.base_path)


def native_command(python: str | Path, folder: str | Path, base: str | Path) -> list[str]:
    """The beginning of a command, with the folder of ComfyUI's code, and the base in which its models lie."""
    return [str(python), str(_START), str(folder), str(base)]


def is_native_process() -> bool:
    """Whether this process has ComfyUI in it."""
    return "folder_paths" in sys.modules and "comfy.cli_args" in sys.modules
