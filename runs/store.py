"""All runs below one folder, as ComfyUI's page and `devicebridge jobs` show them. A run, a checkpoint or a picture that
somebody asks for by name is looked for among those that are there. No path is made of a name, and no link is followed,
so no name leads anywhere else."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.ranges import LORA_ENDING, STATE_FILES
from ..system.files import is_number
from .progress import Progress, thinned
from .record import RUN_FILE, RunRecord, read_record

_Stamp = tuple[int, int, int]
_DEPTH = 3
_MARKS = {"run.json", "checkpoints"}
NO_RUNS = {"cache", "checkpoints", "samples", "tensorboard"}  # folders that are no run, whatever they hold
_LONGEST = 40  # characters of a word in a run's name
_MOST_SHOWN = 200
_CHECKPOINT = re.compile(r"step-(\d{6,12})")
_SAMPLE = re.compile(r"(\d{1,12})_(\d{1,6})\.(png|webp|jpg|mp4)")
_MOST_SAMPLES = 2000


class NotThere(ValueError):
    status = 404  # of HTTP


class Busy(ValueError):
    status = 409


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or with folder None the LoRA that the run left at its end."""

    step: int
    folder: Path | None
    lora: Path | None


class RunStore:
    """The runs below a folder, of a ComfyUI output/devicebridge, which need not exist. Not for threads at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: list[str] = []  # at the last look
        self._progress: dict[str, Progress] = {}
        self._records: dict[str, tuple[_Stamp, RunRecord | None]] = {}

    def ids(self) -> list[str]:
        """Names of all runs, relative to the root with "/", the newest first."""
        self.runs = find_runs(self.root)
        return self.runs

    def shown(self) -> list[str]:
        """The newest 200, and those that are under way."""
        return list(dict.fromkeys([*self.ids()[:_MOST_SHOWN], *self.running()]))

    def running(self) -> dict[str, RunRecord]:
        """Of the runs that were there at the last look all those under way."""
        return {run: record for run in self.runs if (record := self.record(run)) and record.status == "running"}

    def find(self, run: object) -> Path:
        """The folder of a run, looked for among all only if it is not where it was. Raises: NotThere."""
        folder, own = self.root / str(run), Path(os.path.realpath(self.root), str(run))
        is_there = run in self.runs and folder.is_dir() and Path(os.path.realpath(folder)) == own
        if not is_there and run not in self.ids():
            raise NotThere("there is no run of this name")
        return folder

    def progress(self, run: str) -> Progress:
        """What its events tell, up to date."""
        self.progress_is_new(run)
        return self._progress[run]

    def progress_is_new(self, run: str) -> bool:
        """Whether its events have changed since the last look."""
        if run not in self._progress:
            self._progress[run] = Progress(self.root / run / "events.jsonl")
        return self._progress[run].update()

    def num_files(self, run: str) -> int:
        """Of samples, checkpoints and LoRAs."""
        folder = self.root / run
        kept = list_checkpoints(folder)
        return len(_sample_files(folder)) + len(kept) + sum(each.lora is not None for each in kept)

    def summary(self, run: str) -> dict[str, Any]:
        progress, record = self.progress(run), self.record(run)
        is_done = progress.total and progress.step >= progress.total  # of a run older than records
        state = record.state if record else "finished" if is_done else "stopped"
        total = progress.total or (record.steps if record else 0)
        message = record.message if record and state == "failed" else ""
        if record is None and os.path.lexists(self.root / run / RUN_FILE):
            message = f"its {RUN_FILE} is no record of a run; what is shown is what its events tell"
        return {
            "run": run,
            "state": state,
            "phase": progress.phase if state == "running" else "",
            "progress": dict(progress.phase_progress) if state == "running" else {},
            "step": progress.step,
            "total": total,
            "loss": progress.steps[-1][1] if progress.steps else None,
            "learning_rate": progress.steps[-1][2] if progress.steps else None,
            "step_s": progress.step_s,
            "left_s": progress.left_s if state == "running" else None,
            "devices": list(record.devices) if record else [],
            "message": message,
            "pid": record.process.pid if record and state == "running" else None,
            "can_resume": bool(record and record.job and state != "running" and progress.step < total),
            "settings": settings_of(record.job) if record and state != "running" and progress.step else {},
            "changes": list(progress.changes.items()),
            "num_samples": len(_sample_files(self.root / run)),
        }

    def details(self, run: str, most_points: int = 600) -> dict[str, Any]:
        """The summary with curves, memory, checkpoints and samples. Raises: NotThere."""
        folder = self.find(run)
        summary, progress = self.summary(run), self.progress(run)
        return {
            **summary,
            "steps": thinned(progress.steps, most_points),
            "evals": thinned(progress.evals, most_points),
            "forecast": progress.forecast,
            "memory": progress.memory,
            "blocks": progress.blocks,
            "checkpoints": [
                {"step": each.step, "is_final": each.folder is None, "lora": each.lora.name if each.lora else None}
                for each in list_checkpoints(folder)
            ],
            "samples": [
                {"file": file.name, "step": step, "index": index, "prompt": progress.prompts.get(file.name, "")}
                for step, index, file in _sample_files(folder)[-_MOST_SAMPLES:]
            ],
        }

    def record(self, run: str) -> RunRecord | None:
        """What the run says of itself, with the status "crashed" once its process is gone; None if it says nothing."""
        try:
            status = os.stat(os.path.join(self.root, run, RUN_FILE))
        except OSError:
            return None
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        known, record = self._records.get(run, (None, None))
        if known != stamp:
            record = read_record(self.root / run)
        if record is not None and record.status != record.state:
            record = replace(record, status=record.state)  # no process comes back
        self._records[run] = (stamp, record)
        return record

    def lora(self, run: object, step: object) -> Path:
        """The LoRA file of a checkpoint, or with step None of the finished run. Raises: NotThere."""
        for each in list_checkpoints(self.find(run)):
            if each.lora is not None and step == (None if each.folder is None else each.step):
                return each.lora
        raise NotThere("there is no LoRA of this step")

    def sample(self, run: object, name: object) -> Path:
        """The file of a sample. Raises: NotThere."""
        for _, _, file in _sample_files(self.find(run)):
            if file.name == name:
                return file
        raise NotThere("there is no sample of this name")

    def delete_checkpoint(self, run: object, step: object) -> None:
        """Raises: NotThere; Busy for the one that a run under way would be resumed from."""
        folder = self.find(run)
        kept = [each for each in list_checkpoints(folder) if each.folder is not None]
        chosen = next((each for each in kept if each.step == step), None)
        if chosen is None or chosen.folder is None:
            raise NotThere("there is no checkpoint of this step")
        record = self.record(folder.relative_to(self.root).as_posix())
        if chosen is kept[-1] and record is not None and record.state == "running":
            raise Busy("a crash of this training would be resumed from its newest checkpoint; stop it first")
        hidden = chosen.folder.with_name(f".{chosen.folder.name}.deleted")
        chosen.folder.rename(hidden)  # whenever this is interrupted, it is whole or not listed
        shutil.rmtree(hidden)


# What the page changes of a run that goes on.
SETTINGS = ("train.steps", "optimizer.learning_rate", "schedule.name")


def settings_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a job's plain values that are as they should be, by key."""
    split = {key: key.split(".") for key in SETTINGS}
    found = {
        key: job[section].get(name) for key, (section, name) in split.items() if isinstance(job.get(section), dict)
    }
    return {key: each for key, each in found.items() if is_number(each) or (isinstance(each, str) and len(each) < 40)}


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Oldest first, and at the end the LoRA that a finished or stopped run has left."""
    found = []
    for entry in _entries(run / "checkpoints"):
        named = _CHECKPOINT.fullmatch(entry.name)
        if named and entry.is_dir(follow_symlinks=False):
            found.append(Checkpoint(int(named[1]), Path(entry.path), _lora_in(Path(entry.path))))
    found.sort(key=lambda each: each.step)
    final = _lora_in(run)
    return found if final is None else [*found, Checkpoint(found[-1].step if found else 0, None, final)]


def _sample_files(run: Path) -> list[tuple[int, int, Path]]:
    """Step, index and file of every sample, in their order."""
    found = []
    for entry in _entries(run / "samples"):
        named = _SAMPLE.fullmatch(entry.name)
        if named and entry.is_file(follow_symlinks=False):
            found.append((int(named[1]), int(named[2]), Path(entry.path)))
    return sorted(found)


def _lora_in(folder: Path) -> Path | None:
    for entry in _entries(folder):
        is_lora = entry.name.endswith(".safetensors") and entry.name not in STATE_FILES
        if is_lora and entry.is_file(follow_symlinks=False):
            return Path(entry.path)
    return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, by name; of a link or of what is no folder nothing."""
    try:
        with os.scandir(folder) as entries:
            return [] if folder.is_symlink() else sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


# ---- folders and names of runs


def plain_name(text: str) -> str:
    """Of a run, as a person writes it."""
    return text.strip().removesuffix(LORA_ENDING)


def run_name(name: str, trigger_word: str, images: str) -> str:
    """What the run and the LoRA of a training of four choices are called. images: a folder's name."""
    words = (re.sub(r"[^\w-]+", "_", each.strip()).strip("_")[:_LONGEST] for each in (trigger_word, Path(images).name))
    found = plain_name(name) or next(filter(None, words), "my_lora")
    return f"{found}_lora" if found.casefold() in NO_RUNS else found


def find_runs(root: Path) -> list[str]:
    """Names of all folders below a root that hold runs, relative to it, with "/", the newest first. No link is
    followed."""
    found, left = [], [""]
    while left:
        path = os.path.join(root, name := left.pop())
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to read
            with os.scandir(path) as listed:
                entries = list(listed)
            if name and any(entry.name in _MARKS for entry in entries):
                found.append((os.stat(path).st_mtime_ns, name))
            for entry in entries if name.count("/") < _DEPTH - 1 else ():
                if entry.name not in NO_RUNS and entry.name[0] != "." and entry.is_dir(follow_symlinks=False):
                    left.append(f"{name}/{entry.name}".lstrip("/"))
    return [name for _, name in sorted(found, reverse=True)]
