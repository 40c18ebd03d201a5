"""The folders of runs below one folder, found again without listing all of them.

A folder is listed again only where its time has changed. So thousands of runs that have ended cost a look at the time
of each of their folders, and a glance a look at a tenth of them.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ..config.ranges import LORA_ENDING

_DEPTH = 3
_TURNS = 10  # glances, after which all folders were looked at
_MARKS = {"run.json", "checkpoints"}
NO_RUNS = {"cache", "checkpoints", "samples", "tensorboard"}  # folders that are no run, whatever they hold
_LONGEST = 40  # characters of a word in a run's name

_UNSETTLED_NS = 3_000_000_000  # in which two changes may have one time, on the disks with the coarsest


def plain_name(text: str) -> str:
    """Of a run, as a person writes it."""
    return text.strip().removesuffix(LORA_ENDING)


def run_name(name: str, trigger_word: str, images: str) -> str:
    """What the run and the LoRA of a training of four choices are called. images: a folder's name."""
    words = (re.sub(r"[^\w-]+", "_", each.strip()).strip("_")[:_LONGEST] for each in (trigger_word, Path(images).name))
    found = plain_name(name) or next(filter(None, words), "my_lora")
    return f"{found}_lora" if found.casefold() in NO_RUNS else found


@dataclass(frozen=True)
class _Folder:
    """What a folder held when it was listed.

    Args:
        changed: its time then, in ns.
        is_settled: whatever changes it later changes its time.
        inside: names of folders in it that may hold runs.
    """

    changed: int = 0
    is_settled: bool = False
    is_run: bool = False
    inside: frozenset[str] = frozenset()


class RunFolders:
    """Folders below a root that hold runs, by their names relative to it, with "/". No link is followed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known = {"": _Folder()}
        self._changed: set[str] = set()
        self._turn = 0

    def names(self, *, glance: bool = False) -> list[str]:
        """Of all runs, the newest first.

        Args:
            glance: look at runs by turns, and only at other folders each time: where new ones appear.
        """
        self._turn += 1
        for index, name in enumerate(list(self._known)):  # what a look finds, it has looked at
            if not glance or (index + self._turn) % _TURNS == 0 or name not in self:
                self._look(name)
        runs = ((known.changed, name) for name, known in self._known.items() if known.is_run)
        return [name for _, name in sorted(runs, reverse=True)]

    def __contains__(self, run: str) -> bool:
        """Whether it was there at the last look."""
        return run in self._known and self._known[run].is_run

    def find(self, run: object) -> Path | None:
        """The folder of a run that is there now."""
        if not isinstance(run, str):
            return None
        if run not in self._known:
            self.names()
        parts = run.split("/")
        for end in range(len(parts) + 1):  # what is above it may be a link by now
            self._look("/".join(parts[:end]))
        return self._root / run if run in self else None

    def take_changed(self) -> set[str]:
        """Runs whose folders were found new or changed since the last call."""
        found, self._changed = self._changed, set()
        return found

    def _look(self, name: str) -> None:
        """See what a known folder holds now, where it may have changed."""
        known = self._known.get(name)
        if known is None:
            return
        path = os.path.join(self._root, name)
        try:
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError
            if known.is_settled and known.changed == status.st_mtime_ns:
                return
            is_run, inside, above = False, set(), f"{name}/" if name else ""
            with os.scandir(path) as entries:
                for entry in entries:
                    is_run = is_run or (bool(name) and entry.name in _MARKS)
                    is_ours = not entry.name.startswith(".") and entry.name not in NO_RUNS
                    if is_ours and above.count("/") < _DEPTH and entry.is_dir(follow_symlinks=False):
                        inside.add(above + entry.name)
        except OSError:
            self._forget(name)
            return
        is_settled = abs(time.time_ns() - status.st_mtime_ns) > _UNSETTLED_NS
        self._known[name] = _Folder(status.st_mtime_ns, is_settled, is_run, frozenset(inside))
        if is_run:
            self._changed.add(name)
        for gone in known.inside - inside:
            self._forget(gone)
        for new in inside - self._known.keys():
            self._known[new] = _Folder()
            self._look(new)

    def _forget(self, name: str) -> None:
        for each in self._known.pop(name, _Folder()).inside:
            self._forget(each)
        self._known.setdefault("", _Folder())
