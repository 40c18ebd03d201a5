"""What this process's nodes have put on disk: while all of it is there, ComfyUI need not run them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path


class KeptFiles:
    """Files by the folder they are kept in.

    Which dataset a node was given is not known when ComfyUI asks for a fingerprint, so all of a folder count.
    """

    def __init__(self) -> None:
        self._files: dict[str, set[Path]] = {}
        self._losses: Counter[str] = Counter()

    def remember(self, folder: str | Path, files: Iterable[Path]) -> None:
        """These are there now."""
        self._files.setdefault(str(folder), set()).update(files)

    def losses(self, folder: str | Path) -> int:
        """How often something of the folder was found gone: another number means that its node must run again."""
        known = self._files.get(str(folder), set())
        if not all(file.is_file() for file in known):
            known.clear()  # what is still needed is remembered by the node that runs now
            self._losses[str(folder)] += 1
        return self._losses[str(folder)]


KEPT = KeptFiles()


def file_state(path: str) -> list[int | str]:
    """Equal while a file, or the files of a folder, are the same; their content is not read."""
    if not path:
        return []
    place = Path(path)
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    found: list[int | str] = [path]
    for file in files:
        if file.is_file():
            status = file.stat()
            found += [status.st_size, status.st_mtime_ns]
    return found
