"""What folders hold, looked at with an end: a dataset named "/" or the home folder must not keep anybody waiting."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_ENTRIES = 200_000
_ASK_EVERY = 1000


def go_on() -> None:
    """An `ask` for a look that nobody stops."""


def links_below(folder: Path) -> Iterator[Path]:
    """Every link in a folder and in all below it, hidden ones too; none in a folder that is not there."""
    left = [folder]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False):
                    left.append(Path(entry.path))


@dataclass
class Looked:
    """Entries that one look into a folder and its sub-folders has seen.

    Args:
        ask: called now and then; raises to stop.
    """

    ask: Callable[[], None] = go_on
    num_seen: int = 0

    def entries(self, folder: Path) -> list[Path]:
        """Files and folders in this one that are not hidden, sorted by name.

        Raises: ValueError if this look has seen too many; OSError if the folder cannot be read.
        """
        found = []
        self.ask()
        with os.scandir(folder) as entries:
            for entry in entries:
                self.num_seen += 1
                if self.num_seen > MAX_ENTRIES:
                    raise ValueError(
                        f"{folder} and what was looked through before hold more than {MAX_ENTRIES} files and folders, "
                        "which is no dataset; name the folder in which the images lie"
                    )
                if self.num_seen % _ASK_EVERY == 0:
                    self.ask()
                if not entry.name.startswith("."):
                    found.append(entry.name)
        return [folder / name for name in sorted(found)]
