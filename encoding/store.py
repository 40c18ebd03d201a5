"""A folder of cached tensors, one safetensors file per entry under a key that names its content (key.py); what is cut,
foreign or damaged is a miss. Who computes an entry claims it: a lock of the system, which ends with its process. A run
holds such a lock, too, and pruning spares all entries meanwhile. Without locks work may be done twice, and is warned
of."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from ..checkpoints import weight_file
from ..checkpoints.header import FileHeader, read_file_header
from ..system.files import TEMPORARY_SUFFIX, what_helps, write_atomically
from ..system.locks import Claim, take_claim

logger = logging.getLogger(__name__)

State = Literal["whole", "missing", "damaged"]

_CHECKSUM = "checksum"
_KEY_NAME = "key"
_SUFFIX = ".safetensors"
_LOCK_SUFFIX = ".lock"
_RUNS = ".runs"
POLL_S = 0.2  # how often work that others have claimed is looked at, once nothing else remains
_OLD_S = 60.0  # after which no writer without a claim is at work on a temporary file: writing takes a moment
_KEY = re.compile(r"[0-9a-f]{3,}")


class CacheStore:
    """Entries under `folder`, which is made with the first. Keys are hexadecimal; two digits name the sub-folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.claims_folder = self.folder / ".claims"

    def path(self, key: str) -> Path:
        """Where this entry lies or would lie. Raises: ValueError for a key that is not lower-case hexadecimal."""
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
        """Whether the entry is there with its full length; reads the header only."""
        return _read_header(self.path(key)) is not None

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """The entry's tensors on the CPU, or None for a miss. Reads the whole file and checks it."""
        path = self.path(key)
        header = _read_header(path)
        return None if header is None else _read_checked(path, header.metadata)

    def shapes(self, key: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the entry's tensors by name, from its header; {} for a miss."""
        header = _read_header(self.path(key))
        return {} if header is None else {name: entry.shape for name, entry in header.tensors.items()}

    def check(self, key: str) -> State:
        """What this entry is, read whole; a damaged one is removed where that is allowed."""
        absent: State = "damaged" if self.path(key).exists() else "missing"
        return absent if self.get(key) is None else "whole"

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry, over a damaged one. Raises: ValueError for one without tensors; OSError naming the file."""
        if not tensors:
            raise ValueError(f"cache entry {key} has no tensors")
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        path, metadata = self.path(key), {_KEY_NAME: key, _CHECKSUM: _checksum(plain, key)}
        try:
            write_atomically(path, weight_file.tensors_in_pieces(plain, metadata))
        except OSError as error:
            # Windows refuses to replace a file that someone has open; that someone has the same entry.
            if not (os.name == "nt" and isinstance(error, PermissionError) and key in self):
                raise unwritable(path, error) from error

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

    # ---- claims

    def claim(self, key: str) -> Claim | None:
        """Claim an entry; None if another process or thread has it. Raises: OSError naming the file."""
        path = self.claims_folder / f"{key}{_LOCK_SUFFIX}"
        try:
            claim = take_claim(path)
        except OSError as error:
            raise unwritable(path, error) from error
        if claim is not None and claim.was_left:
            self._remove_temporary(key)
        return claim

    def _remove_temporary(self, key: str) -> None:
        """Delete what killed writers of an entry left; nobody may be writing it now."""
        for path in self.path(key).parent.glob(f".{key}{_SUFFIX}.*{TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()

    def remove_left(self) -> None:
        """Remove what killed processes have left: lock files nobody holds, and temporary files of their entries."""
        locks = {path.name.removesuffix(_LOCK_SUFFIX) for path in self.claims_folder.glob(f"*{_LOCK_SUFFIX}")}
        old = set()
        for path in self.folder.glob(f"??/.*{_SUFFIX}.*{TEMPORARY_SUFFIX}"):
            key = path.name[1:].partition(".")[0]
            with contextlib.suppress(FileNotFoundError):  # it has got its name just now
                if _KEY.fullmatch(key) and time.time() - path.stat().st_mtime > _OLD_S:
                    old.add(key)
        for key in locks | old:
            claim = self.claim(key)
            if claim is None:
                continue
            if key in old:  # another's were removed as it was claimed
                self._remove_temporary(key)
            claim.release()

    def has_living_runs(self) -> bool:
        """Whether runs may read the store; deletes what killed ones have left. Raises: OSError."""
        if not self.folder.is_dir():
            return False
        self.remove_left()
        claims = list(map(take_claim, (self.folder / _RUNS).glob(f"*{_LOCK_SUFFIX}")))
        for claim in filter(None, claims):
            claim.release()
        return not all(claim and claim.is_sure for claim in claims)

    @contextmanager
    def living_run(self) -> Iterator[None]:
        """Keep pruning from the entries inside; what killed runs have left in the store is deleted first."""
        folder, claim = self.folder / _RUNS, None
        try:
            self.has_living_runs()
            claim = take_claim(folder / f"{uuid.uuid4().hex}{_LOCK_SUFFIX}")
        except OSError as error:  # nobody prunes a folder that cannot be written
            logger.debug("runs are not listed in %s: %s", self.folder, error)
        try:
            yield
        finally:
            if claim is not None:
                claim.release()
                with contextlib.suppress(OSError):
                    folder.rmdir()  # of the last of them


def unwritable(path: Path, error: OSError) -> OSError:
    """The same error with the file's name, which a failed write() does not give, and with what would help."""
    return OSError(
        error.errno,
        f"{path} cannot be written ({error.strerror or error}); {what_helps(error)}, or set cache.folder to a "
        "folder elsewhere. What was computed until now is kept",
    )


def claimed_batches(
    store: CacheStore,
    keys: Iterable[str],
    size: int,
    on_found: Callable[[], None],
    stop_if_requested: Callable[[], None],
) -> Generator[list[str], None, None]:
    """Entries to compute and store now, up to `size` at a time, claimed until the next are requested; ends when every
    entry is done, by whomever, or was handed out. on_found: called for each that turned out to be done.
    stop_if_requested: called before every batch and while waiting; raises to stop."""
    remaining, num_said = list(keys), 0
    while remaining:
        queue, remaining, has_worked = deque(remaining), [], False
        while queue:
            batch: dict[str, Claim] = {}
            try:
                while queue and len(batch) < size:
                    key = queue.popleft()
                    claim = store.claim(key)
                    if claim is None:
                        remaining.append(key)
                    elif key in store:
                        claim.release()
                        on_found()
                    else:
                        batch[key] = claim
                if batch:
                    has_worked = True
                    yield list(batch)
            finally:
                for claim in batch.values():
                    claim.release()
            stop_if_requested()
        if remaining and not has_worked:
            if len(remaining) != num_said:
                num_said = len(remaining)
                logger.info("waiting for %d entries that other processes are computing", num_said)
            stop_if_requested()
            time.sleep(POLL_S)


def _read_header(path: Path) -> FileHeader | None:
    """Of an entry whose length and name are right, else None. Earlier versions wrote no key into entries."""
    header, key = None, path.name.removesuffix(_SUFFIX)
    try:
        if path.is_file() or not os.path.lexists(path):  # opening a pipe would keep us waiting
            with open(path, "rb") as file:
                header = read_file_header(file)
    except FileNotFoundError:
        return None
    except ValueError:  # not JSON, or not a safetensors header
        pass
    names = {_CHECKSUM} if header is None or _KEY_NAME not in header.metadata else {_CHECKSUM, _KEY_NAME}
    is_ours = header is not None and header.tensors and header.metadata.keys() == names
    if header is None or not is_ours or header.metadata.get(_KEY_NAME, key) != key:
        logger.warning("cache entry %s is torn, foreign or another one's, and will be computed again", path)
        return None
    return header


def _read_checked(path: Path, metadata: Mapping[str, str]) -> dict[str, torch.Tensor] | None:
    """The tensors of an entry if they are those that were written, else None, and the file is removed."""
    with contextlib.suppress(ValueError, FileNotFoundError):  # a flipped byte in the header; deleted just now
        tensors = weight_file.load_tensors(path)
        if _checksum(tensors, metadata.get(_KEY_NAME, "")) == metadata[_CHECKSUM]:
            return tensors
    now = _read_header(path)
    if now is not None and now.metadata != metadata:  # written anew between the two reads by another process
        return _read_checked(path, now.metadata)
    logger.warning("cache entry %s is damaged (checksum differs) and will be computed again", path)
    with contextlib.suppress(OSError):  # else `in` would keep calling it whole; where it cannot go, put writes over it
        path.unlink()
    return None


def _checksum(tensors: Mapping[str, torch.Tensor], text: str = "") -> str:
    """CRC-32 over a text, and names, types, shapes and bytes. It finds accidents, which is all a cache must fear."""
    value = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
