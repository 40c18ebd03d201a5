"""run.json in a run's folder: what runs or ran there, in which process, and how it ended. A record that says "running"
while its process is gone is that of a crash. Of a process that cannot be seen from here, in another container or
computer, the lock on its run's folder tells, which the system takes back when its owner ends."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from ..config.job import JobConfig, job_to_dict, load_job, save_for_process
from ..events import first_line
from ..system.files import read_ordinary, remove_leftovers, what_helps, write_atomically
from ..system.locks import take_claim
from ..system.processes import ProcessMark, mark_of
from ..system.stopping import Requests

Status = Literal["running", "finished", "stopped", "failed", "crashed"]
RUN_FILE = "run.json"
RUN_LOCK = ".run.lock"  # held in its folder by whatever runs there
QUEUED = "DEVICEBRIDGE_QUEUED"  # in the environment of a process that the queue has started: its job's id
_MOST_RECORD = 1 << 24  # bytes
_MOST_MESSAGE = 2000  # characters
_MOST_STEPS = 1 << 62


# An escape of what is no UTF-8, as names of files have it, which pydantic's reader refuses.
_NO_UTF8 = re.compile(rb"\\ud[89a-f][0-9a-f]{2}")


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(allow_inf_nan=False))
class RunRecord:
    """What a run says of itself. status: "running" as long as nothing else was written; state tells whether that is so.
    devices: of its blocks, in order. steps: to the end. job, message: as job_to_dict gives it, to resume from; why it
    failed. queued: id of the queue's job that started it; "" of one that the queue did not start.
    folder: where it was read; None of one that was not."""

    status: Status
    process: ProcessMark
    devices: tuple[str, ...]
    steps: Annotated[int, pydantic.Field(lt=_MOST_STEPS)]
    job: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    queued: str = ""
    folder: Path | None = None

    @property
    def state(self) -> Status:
        """The status, with "crashed" for a run whose process is gone."""
        if self.status != "running" or self.process.is_alive(self.folder and self.folder / RUN_LOCK):
            return self.status
        return "crashed"


_RECORDS = pydantic.TypeAdapter(RunRecord)


@dataclass
class Recording:
    """The record of the run that this process is in; setting `status` says how it ends."""

    status: Status = "finished"


@contextmanager
def recorded_run(folder: Path, job: JobConfig, devices: Sequence[str]) -> Iterator[Recording]:
    """Say in the folder that a run is under way, and at the end how it ended; requests to it are then forgotten.
    Raises: OSError naming the file if the disk refuses at the start."""
    queued = os.environ.get(QUEUED, "")
    record = RunRecord("running", mark_of(), tuple(devices), job.train.steps, job_to_dict(job), queued=queued)
    _write(folder, record)
    recording, message = Recording(), ""
    try:
        yield recording
    except BaseException as error:
        recording.status, message = "failed", first_line(error)[:_MOST_MESSAGE]
        raise
    finally:
        Requests(folder).clear()
        with contextlib.suppress(OSError):  # a full disk has been reported; this run is then one that crashed
            _write(folder, replace(record, status=recording.status, message=message))


def _write(folder: Path, record: RunRecord) -> None:
    values = {name: value for name, value in asdict(record).items() if name != "folder"}
    write_atomically(folder / RUN_FILE, json.dumps(values).encode())


def read_record(folder: Path) -> RunRecord | None:
    """The record of a run folder; None where there is none, or none that can be read."""
    try:
        text = read_ordinary(folder / RUN_FILE, _MOST_RECORD, "a record")
        record, plain = _RECORDS.validate_json(_NO_UTF8.sub(b"?", text), strict=True), json.loads(text)
        return replace(record, job=plain.get("job", {}), message=plain.get("message", ""), folder=folder)
    except (OSError, ValueError):
        return None


# ---- the jobs of runs that this ComfyUI has started, in a folder that no request can write: what a run is resumed


@dataclass(frozen=True)
class KeptJobs:
    """A job file for each run, named after its folder; beside it lies the output of its process."""

    folder: Path

    def file(self, run: Path) -> Path:
        name, place = re.sub(r"[^A-Za-z0-9_-]", "_", run.name)[:60], os.path.realpath(run)
        return self.folder / f"{name}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.toml"

    def keep(self, job: JobConfig) -> Path:
        """Remember the job as the one of its run; its file. Raises: OSError; ValueError as save_for_process."""
        file = self.file(Path(job.output.folder))
        save_for_process(job, file)
        return file

    def find(self, run: Path) -> JobConfig | None:
        """The job of a run, by its folder; None for one that was started elsewhere. Raises: ValueError."""
        file = self.file(run)
        return load_job(file) if file.is_file() else None


# ---- one run at a time in a folder


_LOOK_S = 0.2  # whoever looks whether a run lives holds its lock for a moment


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold an output folder, made if it is not there; sweeps what a killed run has left in it.
    Raises: RuntimeError naming the process that holds it; ValueError for a folder that cannot be written."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = take_claim(folder / RUN_LOCK, _LOOK_S)
    except OSError as error:
        why = f"output.folder {folder} cannot be written ({error.strerror or error})"
        raise ValueError(f"{why}; {what_helps(error)}, or choose another") from error
    if claim is None:
        owner = ""
        with contextlib.suppress(OSError, ValueError):  # Windows lets nobody read it
            owner = (folder / RUN_LOCK).read_text(encoding="utf-8")
        helps = "wait for that run to end, stop it (it saves what is done), or choose another output.folder"
        raise RuntimeError(f"{folder} is in use by {owner or 'another run'}; {helps}")
    try:
        remove_leftovers(folder)
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # it serves a message only; what a full disk means is said when saving
            claim.file.truncate(0)
            claim.file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode())
            claim.file.flush()
        yield
    finally:
        claim.release()
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing was begun
