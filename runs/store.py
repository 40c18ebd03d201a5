"""All runs below one folder, as ComfyUI's page and `devicebridge jobs` show them.

A run, a checkpoint or a picture that somebody asks for by name is looked for among those that are there. No path is
made of a name, and no link is followed, so no name leads anywhere else.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.ranges import STATE_FILES
from .progress import Progress, thinned
from .record import RunRecord, read_record

_DEPTH = 3
_MARKS = ("run.json", "checkpoints")
NO_RUNS = {"cache", "checkpoints", "samples", "tensorboard"}  # folders that are no run, whatever they hold
_CHECKPOINT = re.compile(r"step-(\d{6,})")
_SAMPLE = re.compile(r"(\d{1,12})_(\d{1,6})\.(png|webp|jpg|mp4)")
_MOST_SAMPLES = 2000


class NotThere(ValueError):
    """Nothing of that name is in the store."""


class Busy(ValueError):
    """What is asked for cannot be done as things stand."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or with folder None the LoRA that the run left at its end."""

    step: int
    folder: Path | None
    lora: Path | None


class RunStore:
    """The runs below a folder, which need not exist. Not for several threads at once.

    Args:
        root: of a ComfyUI, output/devicebridge.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._progress: dict[str, Progress] = {}
        self._records: dict[str, tuple[int, RunRecord | None]] = {}  # by the time of the file

    def ids(self) -> list[str]:
        """Names of all runs, relative to the root with "/", the newest first."""
        found = [(path.stat().st_mtime, _id_of(path, self.root)) for path in _run_folders(self.root, _DEPTH)]
        return [name for _, name in sorted(found, reverse=True)]

    def find(self, run: object) -> Path:
        """The folder of a run. Raises: NotThere."""
        for path in _run_folders(self.root, _DEPTH):
            if _id_of(path, self.root) == run:
                return path
        raise NotThere("there is no run of this name")

    def progress(self, run: str) -> Progress:
        """What its events tell, up to date."""
        found = self._progress.setdefault(run, Progress(self.root / run / "events.jsonl"))
        found.update()
        return found

    def progress_is_new(self, run: str) -> bool:
        """Whether its events have told something since the last look."""
        return self._progress.setdefault(run, Progress(self.root / run / "events.jsonl")).update()

    def num_files(self, run: str) -> int:
        """Of samples, checkpoints and LoRAs."""
        folder = self.root / run
        kept = list_checkpoints(folder)
        return len(_sample_files(folder)) + len(kept) + sum(each.lora is not None for each in kept)

    def summary(self, run: str) -> dict[str, Any]:
        """What a list of runs shows; plain values."""
        progress, record = self.progress(run), self.record(run)
        state = record.state if record else _state_before_records(progress)
        total = progress.total or (record.steps if record else 0)
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
            "message": record.message if record and state == "failed" else "",
            "pid": record.process.pid if record and state == "running" else None,
            "can_resume": bool(record and record.job and state != "running" and progress.step < total),
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
                {"file": file.name, "step": step, "index": index, **_told(progress, file.name)}
                for step, index, file in _sample_files(folder)[-_MOST_SAMPLES:]
            ],
        }

    def record(self, run: str) -> RunRecord | None:
        """What the run says of itself; None if it says nothing."""
        try:
            changed = (self.root / run / "run.json").stat().st_mtime_ns
        except OSError:
            return None
        known, record = self._records.get(run, (0, None))
        if known != changed:
            record = read_record(self.root / run)
            self._records[run] = (changed, record)
        return record

    def lora(self, run: object, step: object) -> Path:
        """The LoRA file of a checkpoint, or with step None of the finished run. Raises: NotThere."""
        for each in list_checkpoints(self.find(run)):
            if each.lora is not None and (each.folder is None if step is None else each.folder and each.step == step):
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
        record = self.record(_id_of(folder, self.root))
        if chosen is kept[-1] and record is not None and record.state == "running":
            raise Busy(
                "the newest checkpoint of a running training is what a crash would be resumed from; stop it first"
            )
        hidden = chosen.folder.with_name(f".{chosen.folder.name}.deleted")
        chosen.folder.rename(hidden)  # whenever this is interrupted, it is whole or not listed
        shutil.rmtree(hidden)


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """Oldest first, and at the end the LoRA that a finished or stopped run has left."""
    found = []
    for folder in _entries(run / "checkpoints"):
        named = _CHECKPOINT.fullmatch(folder.name)
        if named and _is_folder(folder):
            found.append(Checkpoint(int(named[1]), folder, _lora_in(folder)))
    found.sort(key=lambda each: each.step)
    final = _lora_in(run)
    return found if final is None else [*found, Checkpoint(found[-1].step if found else 0, None, final)]


def _state_before_records(progress: Progress) -> str:
    """Of a run that an older version of this pack has written."""
    return "finished" if progress.total and progress.step >= progress.total else "stopped"


def _told(progress: Progress, name: str) -> dict[str, Any]:
    return {"prompt": progress.samples.get(name, {}).get("prompt", "")}


def _sample_files(run: Path) -> list[tuple[int, int, Path]]:
    """Step, index and file of every sample, in their order."""
    found = []
    for file in _entries(run / "samples"):
        named = _SAMPLE.fullmatch(file.name)
        if named and file.is_file() and not file.is_symlink():
            found.append((int(named[1]), int(named[2]), file))
    return sorted(found)


def _lora_in(folder: Path) -> Path | None:
    for file in sorted(_entries(folder)):
        is_lora = file.suffix == ".safetensors" and file.name not in STATE_FILES
        if is_lora and file.is_file() and not file.is_symlink():
            return file
    return None


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    for path in _entries(folder):
        if path.name.startswith(".") or path.name in NO_RUNS or not _is_folder(path):
            continue
        if any((path / mark).exists() for mark in _MARKS):
            yield path
        if depth > 1:
            yield from _run_folders(path, depth - 1)


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder; of a link or of what is no folder nothing."""
    try:
        return [Path(entry.path) for entry in os.scandir(folder)] if _is_folder(folder) else []
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _id_of(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
