"""A folder of cached tensors: one safetensors file per entry, never used when it is not whole.

An entry is written once under a key that names its content (see key.py) and never changes, so there is nothing to lock:
two writers of one key write the same bytes, and either rename wins. Three defects are told apart from a whole entry:

    a file cut short          the length in its header does not match the file: seen by `in` and by get
    a file with foreign bytes the header does not parse, or is not ours: seen by `in` and by get
    a file with flipped bytes the checksum in the header does not match: seen by get, which reads everything

All three are misses; the entry is computed again and written over. A link is an entry without tensors that names other
entries and reads as all of their tensors together: a caption seen by two text encoders is one entry to the training
loop, yet changing one encoder leaves the other's work in place.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..files import save_tensors_atomically

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CHECKSUM = "checksum"
_PARTS = "parts"
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian


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
        if len(key) < 3 or set(key) - set("0123456789abcdef"):
            raise ValueError(f"a cache key is lower-case hexadecimal, not {key!r}")
        return self.folder / key[:2] / f"{key}.safetensors"

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
        if parts := _parts(header):
            return self._get_parts(parts)
        tensors = _read_tensors(path)
        if tensors is None or _checksum(tensors) != header[_CHECKSUM]:
            logger.warning("cache entry %s is damaged (checksum differs) and will be computed again", path)
            path.unlink(missing_ok=True)  # else `in` would keep calling it whole
            return None
        return tensors

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry, over a damaged one if there is one.

        Raises: ValueError for an entry without tensors; OSError if the disk refuses.
        """
        if not tensors:
            raise ValueError(f"cache entry {key} has no tensors; link() is for entries made of others")
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        self._save(key, plain, {_CHECKSUM: _checksum(plain)})

    def link(self, key: str, parts: Sequence[str]) -> None:
        """Make `key` an entry that holds the tensors of these entries; their tensor names must differ."""
        if not parts or key in parts:
            raise ValueError(f"cache entry {key} must link to other entries, not to {list(parts)}")
        listed = json.dumps(list(parts))
        self._save(key, {}, {_PARTS: listed, _CHECKSUM: _checksum({}, listed)})

    def _get_parts(self, parts: Sequence[str]) -> dict[str, torch.Tensor] | None:
        together: dict[str, torch.Tensor] = {}
        for part in parts:
            tensors = self.get(part)
            if tensors is None:
                return None
            assert not together.keys() & tensors.keys(), f"two cached parts share a name: {sorted(tensors)}"
            together.update(tensors)
        return together

    def _save(self, key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        try:
            save_tensors_atomically(self.path(key), tensors, metadata)
        except PermissionError:
            # Windows refuses to replace a file that someone has open; that someone has the same entry.
            if os.name != "nt" or key not in self:
                raise


def _read_header(path: Path) -> dict[str, str] | None:
    """The metadata of an entry whose length is right, else None."""
    try:
        with open(path, "rb") as file:
            metadata = _parse_header(file)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):  # not JSON, or not a safetensors header
        metadata = None
    if metadata is None:
        logger.warning("cache entry %s is torn or foreign and will be computed again", path)
    return metadata


def _parse_header(file: BinaryIO) -> dict[str, str] | None:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > size - _LENGTH_BYTES:
        return None
    header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    data_end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    is_whole = size == _LENGTH_BYTES + length + data_end
    return metadata if is_whole and _is_ours(header, metadata) else None


def _is_ours(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bool:
    if _PARTS in metadata:
        return not tensors and metadata.get(_CHECKSUM) == _checksum({}, metadata[_PARTS])
    return bool(tensors) and _CHECKSUM in metadata


def _read_tensors(path: Path) -> dict[str, torch.Tensor] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(path.read_bytes())
    except (SafetensorError, FileNotFoundError):  # a flipped byte in the header; or another process deleted it just now
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
