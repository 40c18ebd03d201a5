"""A command that starts another as several processes, and what the two say to each other: files of a folder.

A file in place of a signal: torchrun passes a signal on, but kills what has not ended within half a minute, and a step
may take longer than that.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

_VARIABLE = "DEVICEBRIDGE_LAUNCH"
_PARENT = "DEVICEBRIDGE_PARENT"


class Launch:
    """The folder of one launch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def environment(self) -> Mapping[str, str]:
        """By which the processes find it."""
        return {_VARIABLE: str(self._folder)}

    def ask_to_stop(self) -> None:
        (self._folder / "stop").touch()

    def is_asked_to_stop(self) -> bool:
        return (self._folder / "stop").exists()

    def is_first_to_say(self, text: str) -> bool:
        """Whether no other process has asked this of the same text before."""
        try:
            (self._folder / f"said-{zlib.crc32(text.encode())}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def say_code(self, code: int) -> None:
        """What the command is to end with, if all processes end well."""
        (self._folder / "code").write_text(str(code), encoding="ascii")

    def code(self) -> int:
        """What a process has said; 0 if none has."""
        file = self._folder / "code"
        return int(file.read_text(encoding="ascii")) if file.exists() else 0


def find_launch() -> Launch | None:
    """The launch that this process is of; None if torchrun was called by somebody else."""
    folder = os.environ.get(_VARIABLE, "")
    return Launch(Path(folder)) if folder and Path(folder).is_dir() else None


def note_parent() -> None:
    """Who started this process, for parent_at_start; to be called first of all. A program that takes the place of this
    one finds it, too."""
    if not os.environ.get(_PARENT, "").startswith(f"{os.getpid()} "):
        os.environ[_PARENT] = f"{os.getpid()} {os.getppid()}"


def parent_at_start() -> int:
    """Number of the process that started this one, as far as it was noted; it may have ended since."""
    process, _, parent = os.environ.get(_PARENT, "").partition(" ")
    return int(parent) if process == str(os.getpid()) else os.getppid()
