"""Files written so that a reader sees the old content or the new one; JSON of others; folders looked through."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".tmp"
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
CACHE_VARIABLE = "DEVICEBRIDGE_CACHE"


def user_cache_folder() -> Path:
    """$DEVICEBRIDGE_CACHE, else a folder in the platform's place for caches. It need not exist."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE]).expanduser()
    known = {"win32": ("LOCALAPPDATA", "~/AppData/Local"), "darwin": ("", "~/Library/Caches")}
    variable, usual = known.get(sys.platform, ("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get(variable) or usual).expanduser() / "devicebridge"


def read_ordinary(path: Path, most_bytes: int, wanted: str) -> bytes:
    """The content of an ordinary file; a pipe would keep us waiting. Raises: OSError if it cannot be read; ValueError,
    without its name, for what is not `wanted`, or a larger file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"is no ordinary file; give {wanted}")
    if status.st_size > most_bytes:
        raise ValueError(f"has {status.st_size} bytes, too many; give {wanted} of up to {most_bytes}")
    return path.read_bytes()


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace `path` by these bytes, which may come in pieces; missing folders are made. A rename is atomic only inside
    one folder's file system; without the folder's flush a power cut can undo it.
    Raises: OSError naming the file if the disk refuses; the old file is then still there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        with open(temporary, "xb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None:  # which a full disk does not give
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_leftovers(folder: Path, min_age_s: float = -math.inf) -> None:
    """Delete what writers that were killed have left in a folder. Whoever is writing there has younger files."""
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if _TEMPORARY.fullmatch(path.name) and time.time() - path.stat().st_mtime > min_age_s:
                shutil.rmtree(path) if path.is_dir() else path.unlink()  # a folder: of earlier versions


def what_helps(error: OSError) -> str:
    """What would let a failed write succeed."""
    return "make room there" if error.errno in _NO_ROOM else "make its folder writable"


def sync_folder(folder: Path) -> None:
    """Wait until the disk holds the names in this folder; a no-op on Windows, which orders renames itself."""
    if os.name != "nt":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- jSON objects from files of others; whatever is wrong with one is said with the file's name


_MOST_BYTES = 100_000_000
_MOST = 1e100  # the product of two is still a finite float
_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def read_json_object(file: Path, remedy: str = "download it again") -> dict[str, Any]:
    """The object that a JSON file holds. Raises: ValueError naming file and remedy if it is none; FileNotFoundError."""
    try:
        text = read_ordinary(file, _MOST_BYTES, "a JSON file")
    except ValueError as error:
        raise ValueError(f"{file} {error}; {remedy}") from error
    return parse_json_object(text, str(file), remedy)


def parse_json_object(text: bytes | str, what: str, remedy: str = "download it again") -> dict[str, Any]:
    """The same for a text of `what`. Raises: ValueError for one that is no JSON, no object, or says one name twice."""
    return expect(parse_json(text, what, remedy), dict, what, remedy)


def parse_json(text: bytes | str, what: str, remedy: str = "download it again") -> Any:
    """As parse_json_object, of whatever JSON says."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_twice)
    except (ValueError, RecursionError) as error:  # the latter for brackets inside brackets inside brackets
        raise ValueError(f"{what} is no JSON ({error}); {remedy}") from error


def is_number(value: Any) -> bool:
    """Whether this is a number to count with: neither true nor false, nor infinite, nor one that no float holds."""
    return type(value) in (int, float) and -_MOST < value < _MOST


def expect(value: Any, kind: type | tuple[type, ...], what: str, remedy: str = "download it again") -> Any:
    """The value, if it is of this kind, as which is_number takes numbers. Raises: ValueError."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) in (int, float) and not is_number(value):
        raise ValueError(f"{what} is a number that is not finite, or too large; {remedy}")
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return value
    wanted = " or ".join(dict.fromkeys(_NAMES[each] for each in kinds))
    found = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    raise ValueError(f"{what} is {found} in JSON, not {wanted}; {remedy}")


def _refuse_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it says {name!r} twice")
        found[name] = value
    return found


# ---- what folders hold, looked at with an end: a dataset named "/" or the home folder must not keep anybody waiting


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
    """Entries that one look into a folder and its sub-folders has seen; ask is called now and then, raises to stop."""

    ask: Callable[[], None] = go_on
    num_seen: int = 0

    def entries(self, folder: Path) -> list[Path]:
        """Files and folders in this one that are not hidden, sorted by name.
        Raises: ValueError if this look has seen too many; OSError if the folder cannot be read."""
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
