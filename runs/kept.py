"""The jobs of runs that this ComfyUI has started, in a folder that no request can write: what a run is resumed from."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from ..config.job import JobConfig, load_job, save_for_process


class KeptJobs:
    """A job file for each run, named after its folder; beside it lies the output of its process.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, run: Path) -> Path:
        """Of a run, by its folder."""
        name, place = re.sub(r"[^A-Za-z0-9_-]", "_", run.name)[:60], os.path.realpath(run)
        return self._folder / f"{name}-{hashlib.sha256(os.fsencode(place)).hexdigest()[:16]}.toml"

    def keep(self, job: JobConfig) -> Path:
        """Remember the job as the one of its run; its file. Raises: OSError; ValueError as save_for_process."""
        file = self.file(Path(job.output.folder))
        save_for_process(job, file)
        return file

    def find(self, run: Path) -> JobConfig | None:
        """The job of a run, by its folder; None for one that was started elsewhere. Raises: ValueError."""
        file = self.file(run)
        return load_job(file) if file.is_file() else None
