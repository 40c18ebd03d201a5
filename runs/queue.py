"""Trainings in processes of their own: a queue on the disk, with order, in which every job holds the cards it names.

A job of the queue is a file below <root>/.jobs. Whoever looks after the queue (a ComfyUI with this folder) starts jobs
when their cards are free, and may end and come back: jobs go on without it, and are found again by their process. Two
that look after one queue take turns by a lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..config.job import JobConfig, load_job, save_for_process
from ..system.files import write_atomically
from ..system.json_file import expect, read_json_object
from ..system.locks import alone
from ..system.processes import ProcessMark, start_detached
from ..system.requests import Requests
from .record import QUEUED, read_record
from .store import Busy, NotThere, RunStore

_START = (
    "import runpy, sys; runpy.run_path(sys.argv[1])['load_pack'](); "
    "from devicebridge.cli.main import main; sys.exit(main(sys.argv[2:]))"
)
_BOOTSTRAP = Path(__file__).resolve().parent.parent / "bootstrap.py"
_FOLDER, _JOB_FILE, LOG = ".jobs", "background.toml", "background.log"
_WAIT_S = 10.0  # for another that looks after the queue: it starts processes, and does not wait for them
_MOST_LOG = 4000  # bytes from its end that a message is looked for in
JobState = Literal["waiting", "starting", "failed"]
Held = Mapping[str, str]  # card -> who holds it, as a sentence's end


def nothing_held() -> Held:
    """Of a program that keeps no model on any card."""
    return {}


@dataclass(frozen=True)
class QueuedJob:
    """A training that waits, or that was started and has not told of itself in its run's record yet.

    Args:
        run: its run's name in the store.
        devices: every card it uses.
        order: the smallest is started first.
        is_resumed: it goes on from its newest checkpoint.
        process: once it was started.
        message: why it failed.
        is_stopped: it was asked to stop before it could hear.
    """

    id: str
    run: str
    devices: tuple[str, ...]
    order: float
    is_resumed: bool = False
    state: JobState = "waiting"
    process: ProcessMark | None = None
    message: str = ""
    is_stopped: bool = False


class JobQueue:
    """The queue of a store's runs.

    Args:
        others: what else uses cards, of this program: ComfyUI's models.
        native: beginning of the command for a job that needs ComfyUI; () lets the command find one.
    """

    def __init__(self, store: RunStore, others: Callable[[], Held] = nothing_held, native: Sequence[str] = ()) -> None:
        self.store = store
        self._others = others
        self._native = tuple(native)
        self._folder = store.root / _FOLDER

    def jobs(self) -> list[QueuedJob]:
        """All, in their order."""
        found = []
        for file in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            with contextlib.suppress(OSError, ValueError):
                found.append(_read(file))
        return sorted(found, key=lambda job: job.order)

    def find(self, job_id: object) -> QueuedJob:
        """Raises: NotThere."""
        for job in self.jobs():
            if job.id == job_id:
                return job
        raise NotThere("there is no such job in the queue")

    def add(self, job: JobConfig, devices: Sequence[str], *, is_resumed: bool) -> QueuedJob:
        """Put a training at the end of the queue, or in the place of one of its run that still waits. Its job file is
        written into its run's folder.

        Args:
            devices: every card it will use.
        Raises: Busy if that run is under way or was started; ValueError for a run folder outside the store.
        """
        folder = Path(job.output.folder)
        if not folder.is_relative_to(self.store.root):
            raise ValueError(f"{folder} is not below {self.store.root}; a training in the background writes there")
        run = folder.relative_to(self.store.root).as_posix()
        with self._alone(wait_s=_WAIT_S) as is_ours:  # or a job that is started meanwhile would be taken out
            if not is_ours:
                raise Busy("the queue is starting other trainings; try again in a moment")
            earlier = self._earlier(run, folder)
            save_for_process(job, folder / _JOB_FILE)
            last = max((each.order for each in self.jobs()), default=0.0) + 1.0
            order = earlier.order if earlier is not None and earlier.state == "waiting" else last
            queued = QueuedJob(uuid.uuid4().hex, run, tuple(devices), order, is_resumed)
            if earlier is not None:
                self._remove(earlier)
            self._write(queued)
        return queued

    def _earlier(self, run: str, folder: Path) -> QueuedJob | None:
        """What the queue has of this run, which a new job takes the place of. Raises: Busy for one that was started."""
        record = read_record(folder)
        if record is not None and record.state == "running":
            raise Busy(f"{run} is under way; stop it, or wait for its end")
        found = next((each for each in self.jobs() if each.run == run), None)
        if found is not None and found.state == "starting":
            raise Busy(f"{run} is starting; press Stop at it in the sidebar's tab DeviceBridge, then Run again")
        return found

    def remove(self, job_id: object) -> None:
        """Take a job that waits or has failed out of the queue. Raises: NotThere; Busy if it has been started."""
        job = self.find(job_id)
        if job.state == "starting":
            raise Busy("this job has been started; stop its run")
        self._remove(job)

    def move(self, job_id: object, *, is_earlier: bool) -> None:
        """Change places with the job before or after; at the ends a no-op. Raises: NotThere."""
        job, jobs = self.find(job_id), self.jobs()
        place = [each.id for each in jobs].index(job.id)
        other = place - 1 if is_earlier else place + 1
        if 0 <= other < len(jobs):
            self._write(replace(job, order=jobs[other].order))
            self._write(replace(jobs[other], order=job.order))

    def stop_before_its_record(self, run: str) -> bool:
        """Remember that a job that is starting is to be stopped; whether there is one."""
        for job in self.jobs():
            if job.run == run and job.state == "starting":
                self._write(replace(job, is_stopped=True))
                return True
        return False

    def describe(self) -> list[dict[str, Any]]:
        """Plain values for the page and the terminal; "why" says what a job waits for."""
        jobs, found = self.jobs(), []
        held = self.held() if _has_waiting(jobs) else {}
        for job in jobs:
            why = job.message if job.state != "waiting" else explain(job.devices, held)
            values = {"id": job.id, "run": job.run, "devices": list(job.devices), "state": job.state, "why": why}
            found.append({**values, "is_resumed": job.is_resumed})
            if job.state == "waiting":
                held = {**{card: f"the queued run {job.run} comes first on" for card in job.devices}, **held}
        return found

    def held(self) -> Held:
        """Which cards are in use now, and by whom."""
        found = dict(self._others())
        self.store.ids()
        for run in self.store.running():
            if (record := self.store.record(run)) is not None:
                found |= {card: f"the run {run} trains on" for card in record.devices}
        for job in self.jobs():
            if job.state == "starting":
                found |= {card: f"the run {job.run} is starting on" for card in job.devices}
        return found

    def tick(self) -> list[str]:
        """Look after the queue: start what can be started, note what has ended; names of runs that changed.

        A no-op while another process does so.
        """
        if not self.jobs():
            return []
        with self._alone() as is_ours:
            if not is_ours:
                return []
            changed = [job.run for job in self.jobs() if job.state == "starting" and self._follow(job)]
            held = dict(self.held()) if _has_waiting(self.jobs()) else {}
            for job in self.jobs():
                if job.state != "waiting":
                    continue
                if not explain(job.devices, held):
                    self._start(job)
                    changed.append(job.run)
                held |= {card: "" for card in job.devices}  # its own now, or kept for it
            return changed

    def _alone(self, wait_s: float = 0.0) -> AbstractContextManager[bool]:
        """Whether nobody else looks after the queue, after waiting so long for the end of that."""
        return alone(self._folder / ".lock", wait_s)

    def _start(self, job: QueuedJob) -> None:
        folder = self.store.root / job.run
        Requests(folder).clear()
        flags = ["--resume"] if job.is_resumed else []
        own = (sys.executable, "-c", _START, str(_BOOTSTRAP))
        is_native = self._native and _needs_comfyui(folder / _JOB_FILE)
        command = [*(self._native if is_native else own), "train", str(folder / _JOB_FILE), *flags]
        try:
            process = start_detached(command, folder / LOG, {QUEUED: job.id})
        except OSError as error:
            self._write(replace(job, state="failed", message=str(error)))
            return
        self._write(replace(job, state="starting", process=process))

    def _follow(self, job: QueuedJob) -> bool:
        """Whether a job that was started has got its record, or has ended without one."""
        record = read_record(self.store.root / job.run)
        if record is not None and record.queued == job.id:
            if job.is_stopped:
                Requests(self.store.root / job.run).ask("stop")
            self._remove(job)
            return True
        if job.process is not None and job.process.is_alive(self.store.root / job.run / LOG):
            return False
        if job.is_stopped:
            self._remove(job)
        else:
            self._write(replace(job, state="failed", message=_last_words(self.store.root / job.run / LOG)))
        return True

    def _write(self, job: QueuedJob) -> None:
        write_atomically(self._folder / f"{job.id}.json", json.dumps(asdict(job)).encode())

    def _remove(self, job: QueuedJob) -> None:
        (self._folder / f"{job.id}.json").unlink(missing_ok=True)


def _has_waiting(jobs: Sequence[QueuedJob]) -> bool:
    return any(job.state == "waiting" for job in jobs)


def _needs_comfyui(file: Path) -> bool:
    """Of a job file; of one that cannot be read the job itself tells."""
    with contextlib.suppress(ValueError):
        return load_job(file).needs_comfyui
    return False


def explain(devices: Sequence[str], held: Held) -> str:
    """Why a job that names these cards cannot start now, and what to do; "" if it can."""
    taken = [
        f"{held[card]} {card}" if held[card] else f"{card} is kept for an earlier job"
        for card in devices
        if card in held
    ]
    if not taken:
        return ""
    return f"{'; '.join(dict.fromkeys(taken))}. Wait until it is free, free it, or choose other cards"


def _last_words(log: Path) -> str:
    """What a process printed at its end: from the line on in which the command tells of an error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LOG))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        text = ""
    _, told, words = text.rpartition("devicebridge: ")
    return words.strip() if told else "its process ended and said nothing; see " + str(log)


def _read(file: Path) -> QueuedJob:
    """Raises: OSError; ValueError."""
    values = read_json_object(file)
    kinds: dict[str, type | tuple[type, ...]] = {"id": str, "run": str, "devices": list, "order": (int, float)}
    kinds |= {"is_resumed": bool, "state": str, "message": str, "is_stopped": bool}
    read = {name: expect(values.get(name), kind, f"{file}: {name}") for name, kind in kinds.items()}
    if read["state"] not in get_args(JobState) or f"{read['id']}.json" != file.name:
        raise ValueError(f"{file} is no job of a queue")
    process = values.get("process")
    return QueuedJob(
        **{**read, "devices": tuple(expect(each, str, f"{file}: devices") for each in read["devices"])},
        process=None if process is None else ProcessMark.read(process),
    )
