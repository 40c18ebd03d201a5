"""A folder of cached tensors: one safetensors file per entry, never used when it is not whole.

An entry is written once under a key that names its content (see key.py) and never changes, so nothing is locked to read
or write one: two writers of one key write the same bytes, and either rename wins. (Who computes what is another
question, see claims.py.) Four defects are distinguished from a whole entry:

    a file cut short          the length in its header does not match the file: seen by `in` and by get
    a file with foreign bytes the header does not parse, or is not ours: seen by `in` and by get
    another entry's file      the key in the header is not the file's name: seen by `in` and by get
    a file with flipped bytes the checksum in the header does not match: seen by get, which reads everything

All four are misses; the entry is computed again and written over. A link is an entry without tensors that names other
entries and reads as the union of their tensors: a caption seen by two text encoders is one entry to the training
loop, yet changing one encoder leaves the other's work in place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..checkpoints.header import FileHeader, read_file_header
from ..system.files import TEMPORARY_SUFFIX, save_tensors_atomically, what_helps

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

State = Literal["whole", "missing", "damaged"]
Stamp = tuple[int, int]  # number and time of a file; every writing makes a new file

_CHECKSUM = "checksum"
_KEY_NAME = "key"
_PARTS = "parts"
_SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{3,}")


class CacheStore:
    """Entries under `folder`, which is made with the first entry.

    Keys are hexadecimal; the first two digits name the sub-folder, so that no folder holds many thousands of files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, key: str) -> Path:
        """Where this entry lies or would lie.

        Raises: ValueError if the key is not lower-case hexadecimal, which also keeps it inside the folder.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"a cache key is lower-case hexadecimal, not {key!r}")
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    def keys(self) -> Iterator[str]:
        """Keys of all entries, damaged ones included; other files in the folder are not looked at."""
        for path in self.folder.glob(f"??/*{_SUFFIX}"):
            key = path.name.removesuffix(_SUFFIX)
            if _KEY.fullmatch(key) and key.startswith(path.parent.name):
                yield key

    def __contains__(self, key: str) -> bool:
        """Whether the entry, and every entry it links to, is there with its full length; reads the headers only."""
        header = _read_header(self.path(key))
        return header is not None and all(part in self for part in _parts(header))

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """The entry's tensors on the CPU, or None for a miss. Reads the whole file and checks it."""
        path = self.path(key)
        header = _read_header(path)
        if header is None:
            return None
        parts = _parts(header)
        if not parts:
            return _read_checked(path, header)
        found: dict[str, torch.Tensor] = {}
        for part in parts:
            tensors = self.get(part)
            if tensors is None:
                return None
            assert not found.keys() & tensors.keys(), f"two cached parts share a name: {sorted(tensors)}"
            found.update(tensors)
        return found

    def shapes(self, key: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the entry's tensors by name, from its header; {} for a miss."""
        header = _read_header(self.path(key))
        if header is None:
            return {}
        if parts := _parts(header):
            return {name: shape for part in parts for name, shape in self.shapes(part).items()}
        with open(self.path(key), "rb") as file:
            return {name: entry.shape for name, entry in read_file_header(file).tensors.items()}

    def with_parts(self, keys: Iterable[str]) -> set[str]:
        """These entries and those they link to; reads headers only."""
        found = set(keys)
        for key in list(found):
            found.update(_parts(_read_header(self.path(key)) or {}))
        return found

    def check(self, key: str) -> State:
        """What this entry is, read whole; the entries it links to are not followed.

        A damaged one is removed where that is allowed, so that `in` does not call it whole and it is computed again.
        """
        path = self.path(key)
        header = _read_header(path)
        if header is None:
            return "damaged" if path.exists() else "missing"
        return "whole" if _parts(header) or _read_checked(path, header) is not None else "damaged"

    def stamp(self, key: str) -> Stamp | None:
        """What tells one writing of an entry from the next, whatever the clock says; None if it is not there."""
        try:
            status = self.path(key).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def stamps(self) -> dict[str, Stamp]:
        """Of all entries."""
        return {key: stamp for key in self.keys() if (stamp := self.stamp(key)) is not None}

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry, over a damaged one if there is one.

        Raises: ValueError for an entry without tensors; OSError naming the file if the disk refuses.
        """
        if not tensors:
            raise ValueError(f"cache entry {key} has no tensors; link() is for entries made of others")
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        self._save(key, plain, {_KEY_NAME: key, _CHECKSUM: _checksum(plain, key)})

    def link(self, key: str, parts: Sequence[str]) -> None:
        """Make `key` an entry that holds the tensors of these entries; their tensor names must differ."""
        if not parts or key in parts:
            raise ValueError(f"cache entry {key} must link to other entries, not to {list(parts)}")
        listed = json.dumps(list(parts))
        self._save(key, {}, {_KEY_NAME: key, _PARTS: listed, _CHECKSUM: _checksum({}, key + listed)})

    def remove(self, key: str) -> int:
        """Delete an entry; returns its bytes, 0 if it is not there."""
        path = self.path(key)
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise unwritable(path, error) from error
        return num_bytes

    def remove_leftovers(self, key: str) -> None:
        """Delete the temporary files of this entry's killed writers. Nobody may be writing it now: see claims.py."""
        path = self.path(key)
        for temporary in path.parent.glob(f".{path.name}.*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                temporary.unlink()

    def temporary_files(self) -> Iterator[tuple[str, Path]]:
        """Key and path of every file that is being written, or was when its writer was killed."""
        for path in self.folder.glob(f"??/.*{_SUFFIX}.*{TEMPORARY_SUFFIX}"):
            key = path.name[1:].partition(".")[0]
            if _KEY.fullmatch(key):
                yield key, path

    def _save(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        path = self.path(key)
        try:
            save_tensors_atomically(path, tensors, metadata)
        except OSError as error:
            # Windows refuses to replace a file that someone has open; that someone has the same entry.
            if os.name == "nt" and isinstance(error, PermissionError) and key in self:
                return
            raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> OSError:
    """The same error with the file's name, which a failed write() does not give, and with what would help."""
    return OSError(
        error.errno,
        f"{path} cannot be written ({error.strerror or error}); {what_helps(error)}, or set cache.folder to a "
        "folder elsewhere. What was computed until now is kept",
    )


def _read_header(path: Path) -> dict[str, str] | None:
    """The metadata of an entry whose length is right and whose name is its own, else None."""
    header = None
    try:
        if path.is_file() or not os.path.lexists(path):  # opening a pipe would keep us waiting
            with open(path, "rb") as file:
                header = read_file_header(file)
    except FileNotFoundError:
        return None
    except ValueError:  # not JSON, or not a safetensors header
        pass
    if header is None or not _is_ours(header, path.name.removesuffix(_SUFFIX)):
        logger.warning("cache entry %s is torn, foreign or another one's, and will be computed again", path)
        return None
    return dict(header.metadata)


def _is_ours(header: FileHeader, key: str) -> bool:
    """Entries that were written before their key was in them are read as well."""
    metadata = header.metadata
    if metadata.get(_KEY_NAME, key) != key or not metadata.keys() <= {_KEY_NAME, _CHECKSUM, _PARTS}:
        return False
    if _PARTS in metadata:
        listed = metadata[_PARTS]
        return not header.tensors and metadata.get(_CHECKSUM) == _checksum({}, metadata.get(_KEY_NAME, "") + listed)
    return bool(header.tensors) and _CHECKSUM in metadata


def _read_tensors(path: Path) -> dict[str, torch.Tensor] | None:
    from ..checkpoints.weight_file import load_tensors

    try:
        return load_tensors(path)
    except (ValueError, FileNotFoundError):  # a flipped byte in the header; or another process deleted it just now
        return None


def _read_checked(path: Path, header: Mapping[str, str]) -> dict[str, torch.Tensor] | None:
    """The tensors of an entry if they are those that were written, else None, and the file is removed."""
    tensors = _read_tensors(path)
    if tensors is not None and _checksum(tensors, header.get(_KEY_NAME, "")) == header[_CHECKSUM]:
        return tensors
    header_now = _read_header(path)
    if header_now is not None and header_now != header:  # written anew between the two reads, by --regenerate say
        return _read_checked(path, header_now)
    logger.warning("cache entry %s is damaged (checksum differs) and will be computed again", path)
    with contextlib.suppress(OSError):  # else `in` would keep calling it whole; where it cannot go, put writes over it
        path.unlink()
    return None


def _parts(header: Mapping[str, str]) -> list[str]:
    return json.loads(header[_PARTS]) if _PARTS in header else []


def _checksum(tensors: Mapping[str, torch.Tensor], text: str = "") -> str:
    """CRC-32 over a text, and names, types, shapes and bytes. It finds accidents, which is all a cache must fear."""
    import torch

    value = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
