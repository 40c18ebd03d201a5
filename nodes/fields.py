"""Turning what a user typed into text fields into parts of a job config."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..system.listing import Looked

T = TypeVar("T")
AUTO = "auto"


def read_list(text: str, kind: Callable[[str], T], what: str) -> tuple[T, ...]:
    """Comma-separated values; empty text gives ().

    Raises: ValueError that shows the part which is no such value.
    """
    values = []
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        try:
            values.append(kind(part))
        except ValueError as error:
            raise ValueError(f"{what}: {part!r} in {text!r} is no {_KIND_NAMES.get(kind, 'value')}") from error
    return tuple(values)


_KIND_NAMES: dict[Callable[[str], object], str] = {int: "whole number", float: "number"}


def read_patterns(text: str) -> tuple[str, ...]:
    """One pattern per line or between commas; empty text gives ()."""
    return tuple(part.strip() for line in text.splitlines() for part in line.split(",") if part.strip())


def read_auto(text: str) -> str:
    """The text, or "" for "auto" and for an empty field: what the config calls its default."""
    text = text.strip()
    return "" if text.lower() == AUTO else text


def read_number_or_name(text: str) -> float | str:
    """A number where the text is one, else the text; "" for "auto"."""
    text = read_auto(text)
    try:
        return float(text)
    except ValueError:
        return text


def folder_state(folder: Path, ask: Callable[[], None]) -> list[tuple[str, int, int]]:
    """Name, size in bytes and time of change of every file of a dataset folder, sorted: equal while nothing changed.

    Args:
        ask: called now and then; raises to stop.
    Raises: ValueError for a folder that holds far more than a dataset.
    """
    looked = Looked(ask)
    entries = looked.entries(folder)
    folders = [entry for entry in entries if entry.is_dir() and os.access(entry, os.R_OK | os.X_OK)]
    found = []
    for path in (*entries, *(file for entry in folders for file in looked.entries(entry))):
        if path.is_file():
            status = path.stat()
            found.append((path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns))
    return found


def make_part(kind: Callable[..., T], **values: Any) -> T:
    """One section of a job config.

    Raises: ValueError with one line per setting that the section refuses.
    """
    from pydantic import ValidationError

    from ..config.ranges import problems_of

    try:
        return kind(**values)
    except ValidationError as error:
        lines = [f"{_setting(problem)}{problem['msg'].removeprefix('Value error, ')}" for problem in problems_of(error)]
        raise ValueError("\n".join(lines)) from error


def _setting(problem: Any) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    return f"{name} {problem['input']!r}: " if name else ""
