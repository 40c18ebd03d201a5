"""Folders that a job writes to, looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.job import JobConfig


def check_places(job: JobConfig) -> None:
    """Raises: ValueError naming the setting, if its folder is a file or lies in one, or cannot be written."""
    _check_place("output.folder", job.output.folder)
    if not os.access(_nearest(Path(job.output.folder)), os.W_OK | os.X_OK):
        raise ValueError(f"output.folder {job.output.folder} cannot be written; choose another, or make it writable")
    for key, folder in (("cache.folder", job.cache.folder), ("model.quantized_cache", job.model.quantized_cache)):
        if folder:
            _check_place(key, folder)


def _check_place(key: str, folder: str) -> None:
    nearest = _nearest(Path(folder))
    if not nearest.is_dir():
        raise ValueError(f"{key} {folder} was asked for, but {nearest} is a file; choose a folder")


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest above it that is there."""
    return next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), Path())
