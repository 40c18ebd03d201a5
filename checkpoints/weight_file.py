"""Weights in a safetensors or GGUF file, tensor by tensor, mapped: the safetensors library asks for memory behind every
page, which Linux refuses where the file (64 GB of FLUX.2) is larger than memory and swap."""

from __future__ import annotations

import json
import mmap
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

import torch

from ..quantization.stored import restore
from ..system.files import write_atomically
from ..system.stopping import alive
from .header import (
    AGAIN,
    FILE_TYPES,
    TORCH_TYPES,
    FileHeader,
    TensorRecord,
    read_file_header,
    read_open_header,
    refuse_no_file,
)

_PIECE_BYTES = 2**24  # of a copy
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; Python has the name since 3.13


def load_tensors(file: Path, remedy: str = AGAIN) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU, each in memory of its own. Raises: as open_weights."""
    if file.exists():  # else opening it says that it is not there
        refuse_no_file(file)
    tensors = {}
    with open(file, "rb") as stream:
        header = read_file_header(stream, remedy)
        for name, entry in header.tensors.items():
            content = torch.empty(entry.end - entry.start, dtype=torch.uint8)
            stream.seek(header.data_start + entry.start)
            if stream.readinto(content.numpy().data) < len(content):  # type: ignore[attr-defined]
                raise ValueError(f"{file} ends inside {name}; {remedy}")
            tensors[name] = _typed(header, name, content)
    return tensors


@dataclass(frozen=True)
class WeightReader:
    """An open file. Its tensors are views of it, or copies where it could be mapped for reading alone."""

    header: FileHeader
    content: mmap.mmap

    def release(self) -> None:
        """Let go of memory that holds what was read. It is read anew when looked at."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.content.madvise(mmap.MADV_DONTNEED)

    def all_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.header.tensors}

    def get_tensor(self, name: str) -> torch.Tensor:
        """On the CPU; rows that nobody looks at are not read. What is packed in whole rows has a row of bytes each."""
        entry = self.header.tensors[name]
        start, count = self.header.data_start + entry.start, entry.end - entry.start
        if not count:
            content = torch.empty(0, dtype=torch.uint8)
        elif memoryview(self.content).readonly:
            content = torch.frombuffer(bytearray(self.content[start : start + count]), dtype=torch.uint8)
        else:
            content = torch.frombuffer(self.content, dtype=torch.uint8, count=count, offset=start)
        return _typed(self.header, name, content)


def _mapped(stream: IO[bytes]) -> mmap.mmap:
    """A page that somebody writes to becomes this process's own, and the file stays as it is. Linux reserves no memory
    for the others; a system that does so and has too little maps the file for reading alone."""
    try:
        if sys.platform != "linux":
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        return mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def open_weights(file: Path, *, is_model: bool = False) -> Iterator[WeightReader]:
    """A safetensors file; of a model also a GGUF file. Raises: ValueError naming it if it is something else, cut short
    or damaged; OSError if it cannot be opened."""
    if file.exists():  # else opening it says that it is not there
        refuse_no_file(file)
    with open(file, "rb") as stream:
        header = (read_open_header if is_model else read_file_header)(stream)
        yield WeightReader(header, _mapped(stream))


def _typed(header: FileHeader, name: str, content: torch.Tensor) -> torch.Tensor:
    entry = header.tensors[name]
    if entry.dtype not in TORCH_TYPES:
        raise ValueError(f"{name} of {header.file} has type {entry.dtype}, not one of {', '.join(TORCH_TYPES)}")
    if entry.packing == entry.dtype:
        return content.view(entry.shape[0], -1)
    if entry.packing:
        return restore(content[None], None, None, entry.packing, torch.float32).reshape(entry.shape)
    return content.view(TORCH_TYPES[entry.dtype]).reshape(entry.shape)


def by_file(records: Mapping[str, TensorRecord]) -> dict[Path, dict[str, TensorRecord]]:
    files: dict[Path, dict[str, TensorRecord]] = {}
    for name, record in records.items():
        files.setdefault(record.file, {})[name] = record
    return files


def read_records(records: Mapping[str, TensorRecord]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as the files have them, rows in the model's order; file by file, one at a time."""
    for file, of_file in by_file(records).items():
        with open_weights(file, is_model=True) as reader:
            for name, found in of_file.items():  # what is read is not held here
                yield name, read_rows(reader, found, 0, found.shape[0]) if found.shape else reader.get_tensor(found.key)


def read_rows(reader: WeightReader, record: TensorRecord, start: int, end: int) -> torch.Tensor:
    """Rows start to end, in the model's order; no others are read, but all pieces. A number is a row. [rows, ...]"""
    rows = reader.get_tensor(record.key)
    if not record.shape:
        return rows[None]
    if record.pieces:
        return torch.cat([rows[slice(*each)] for each in record.pieces])[start:end]
    first, half = record.rows[0] if record.rows else 0, record.shape[0] // 2
    if not record.swap_halves:
        return rows[first + start : first + end]
    front = rows[first + start + half : first + min(end, half) + half] if start < half else None
    back = rows[first + max(start, half) - half : first + end - half] if end > half else None
    return torch.cat([part for part in (front, back) if part is not None])


def find_zero_weights(records: Mapping[str, TensorRecord]) -> list[str]:
    """Names of the matrices that hold zeros only, as a download into a prepared file leaves them where it broke off. Of
    others three rows are read at most. Raises: ValueError naming a file whose weights cannot be read."""
    found = []
    for file, inside in by_file(records).items():
        try:
            with open_weights(file, is_model=True) as reader:
                for name, record in inside.items():
                    if len(record.shape) < 2:
                        continue
                    tensor = reader.get_tensor(record.key)
                    first, end = record.rows or (0, tensor.shape[0])
                    rows = (*{first, (first + end) // 2, end - 1}, *range(first, end))
                    # by their bytes, which types without arithmetic have too
                    if not any(tensor[row : row + 1].contiguous().view(torch.uint8).any() for row in rows):
                        found.append(name)
        except OSError as error:
            raise ValueError(f"{file} cannot be read ({error}); download it again") from error
    return found


def refuse_zeros(path: Path, records: Mapping[str, TensorRecord]) -> None:
    """Raises: ValueError naming the path if its weights are zeros and nothing else; ends at the first that is not."""
    matrices = {name: record for name, record in records.items() if len(record.shape) > 1}
    if matrices and all(find_zero_weights({name: record}) for name, record in matrices.items()):
        raise ValueError(f"{path} holds nothing but zeros; download it again")


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
    """A safetensors file of tensors on the CPU as they come, one in memory at a time, atomically; numbers lie in front.
    Raises: OSError naming the file if the disk refuses; ValueError for a name that comes twice."""
    entries: _Entries = {}
    numbers = bytearray()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=path.parent) as spool:
            for name, tensor in tensors:
                if name in entries:
                    raise ValueError(f"{path} would have {name} twice")
                content = _bytes_of(tensor)
                start = spool.tell() if tensor.ndim else len(numbers)
                entries[name] = FILE_TYPES[tensor.dtype], list(tensor.shape), start, len(content)
                if tensor.ndim:
                    spool.write(content)
                else:
                    numbers += content
            spool.seek(0)
            pieces = iter(lambda: spool.read(_PIECE_BYTES), b"")
            write_atomically(path, chain((_header_bytes(entries, metadata, len(numbers)), bytes(numbers)), pieces))
    except OSError as error:
        error.filename = error.filename or str(path)  # which a full disk does not give
        raise


def tensors_in_pieces(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {}) -> Iterator[bytes]:
    """A safetensors file of these, on any device, wide types first, as aligned; one at a time is on the CPU."""
    ordered = dict(sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0])))
    entries, end = _Entries(), 0
    for name, tensor in ordered.items():
        entries[name] = FILE_TYPES[tensor.dtype], list(tensor.shape), end, tensor.nbytes
        end += tensor.nbytes
    yield _header_bytes(entries, metadata)
    for tensor in ordered.values():
        alive()
        yield _bytes_of(tensor)


_Entries = dict[str, tuple[str, list[int], int, int]]  # type, shape, and where it begins and how long it is


def _header_bytes(entries: _Entries, metadata: Mapping[str, str], num_in_front: int = 0) -> bytes:
    """num_in_front: bytes of numbers, behind which everything else begins."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for name, (kind, shape, start, num_bytes) in entries.items():
        start += num_in_front if shape else 0
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, start + num_bytes]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
