"""Weights in a safetensors file, tensor by tensor, also where the file is larger than the machine's memory.

The safetensors library maps a file into memory, which costs nothing and is as fast as the disk. For torch it asks for a
private mapping, and Linux (vm.overcommit_memory 0 or 2) refuses one that is larger than memory and swap together: the
64 GB of FLUX.2 in one file on a computer of 32 GB, of which never more than one tensor is needed at a time. Such a file
is read with plain reads instead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError

from .header import AGAIN, FileHeader, TensorRecord, read_file_header

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightReader(Protocol):
    """An open file; what of the safetensors library's reader this pack uses."""

    def keys(self) -> Any: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> Any: ...


def load_tensors(file: Path, remedy: str = AGAIN) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises: ValueError naming the file if it is something else, cut short or damaged.
    """
    with open_weights(file, remedy) as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  (the library's is no mapping)


def read_tensors(file: Path, remedy: str = AGAIN) -> dict[str, torch.Tensor]:
    """As load_tensors, each read into memory of its own, so that the file may be written anew meanwhile.

    The library has a way for that, too; it copies everything twice, and keeps Python's lock.

    Raises: as load_tensors.
    """
    with open(file, "rb") as stream:
        reader = _PlainReader(stream, read_file_header(stream, remedy))
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118


def by_file(records: Mapping[str, TensorRecord]) -> dict[Path, dict[str, TensorRecord]]:
    """The same records, file by file."""
    files: dict[Path, dict[str, TensorRecord]] = {}
    for name, record in records.items():
        files.setdefault(record.file, {})[name] = record
    return files


def read_records(records: Mapping[str, TensorRecord]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as the files have them, rows in the model's order; file by file, one at a time."""
    for file, of_file in by_file(records).items():
        with open_weights(file) as reader:
            for name, record in of_file.items():
                yield name, _read(reader, record)  # and hold nothing of it here


def _read(reader: WeightReader, record: TensorRecord) -> torch.Tensor:
    rows = record.rows
    if record.pieces:
        whole = reader.get_slice(record.key)
        return torch.cat([whole[start:end] for start, end in record.pieces])
    tensor = reader.get_slice(record.key)[slice(*rows)] if rows else reader.get_tensor(record.key)
    return torch.cat(tensor.chunk(2)[::-1]) if record.swap_halves else tensor


def read_rows(reader: WeightReader, record: TensorRecord, start: int, end: int) -> torch.Tensor:
    """Rows start to end of a tensor, in the model's order; no others are read, but all pieces. [end - start, ...]"""
    if record.pieces:
        return _read(reader, record)[start:end]
    rows = reader.get_slice(record.key)
    first, half = record.rows[0] if record.rows else 0, record.shape[0] // 2
    if not record.swap_halves:
        return rows[first + start : first + end]  # type: ignore[no-any-return]
    front = rows[first + start + half : first + min(end, half) + half] if start < half else None
    back = rows[first + max(start, half) - half : first + end - half] if end > half else None
    return torch.cat([part for part in (front, back) if part is not None])


@contextmanager
def open_weights(file: Path, remedy: str = AGAIN) -> Iterator[WeightReader]:
    """Open a safetensors file for reading onto the CPU.

    get_slice(name)[a:b] gives rows a to b and reads no others.

    Raises: ValueError naming the file if it is something else, cut short or damaged; OSError if it cannot be opened.
    """
    if file.exists() and not file.is_file():  # a pipe would keep us waiting
        raise ValueError(f"{file} is no file of weights; give a .safetensors file")
    with open(file, "rb") as stream:
        header = read_file_header(stream, remedy)
    mapped = _map(file, remedy)
    if mapped is not None:
        with mapped as reader:
            yield reader
    else:
        with open(file, "rb", buffering=0) as stream:
            yield _PlainReader(stream, header)


def _map(file: Path, remedy: str) -> Any:
    """The library's reader; None where the system maps no file as large, or the library takes no such name."""
    from safetensors import safe_open

    try:
        str(file).encode()
        return safe_open(file, framework="pt")
    except UnicodeEncodeError:  # bytes of a name that is no UTF-8
        return None
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); {remedy}") from error
    except RuntimeError as error:  # torch's, with the error number in its text alone
        if os.strerror(errno.ENOMEM) not in str(error):
            raise
    return None


@dataclass(frozen=True)
class _PlainReader:
    """Reads what is asked for, when it is asked for."""

    stream: IO[bytes]
    header: FileHeader

    def keys(self) -> Any:
        return list(self.header.tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]

    def get_slice(self, name: str) -> _Rows:
        return _Rows(self, name)

    def fill(self, target: memoryview, offset: int, name: str) -> None:
        """One call reads 2 GiB at most."""
        self.stream.seek(self.header.data_start + offset)
        done = 0
        while done < len(target):
            count = self.stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{self.stream.name} ends inside {name}; download it again")
            done += count


class _Rows:
    """One tensor, of which slicing the first dim reads some rows. [:] reads all, of a tensor without dims too."""

    def __init__(self, reader: _PlainReader, name: str) -> None:
        self._reader, self._name, self._entry = reader, name, reader.header.tensors[name]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        dtype, shape, start, end = self._type(), self.get_shape(), self._entry.start, self._entry.end
        if rows != slice(None):
            first, last, step = rows.indices(shape[0])
            assert step == 1, rows
            size = prod(shape[1:]) * dtype.itemsize
            shape[0] = max(0, last - first)
            start, end = start + first * size, start + (first + shape[0]) * size
        content = torch.empty(end - start, dtype=torch.uint8)
        self._reader.fill(content.numpy().data, start, self._name)
        return content.view(dtype).reshape(shape)

    def _type(self) -> torch.dtype:
        if self._entry.dtype not in TORCH_TYPES:
            raise ValueError(
                f"{self._name} of {self._reader.stream.name} has type {self._entry.dtype}, not one of "
                f"{', '.join(TORCH_TYPES)}"
            )
        return TORCH_TYPES[self._entry.dtype]

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._entry.dtype


# ---- weights that are nothing but zeros, as a download into a prepared file leaves them where it broke off


def find_zero_weights(records: Mapping[str, TensorRecord]) -> list[str]:
    """Names of the matrices that hold zeros only. Of all others three rows are read at most.

    Raises: ValueError naming a file whose weights cannot be read.
    """
    found = []
    for file, inside in by_file(records).items():
        try:
            with open_weights(file) as reader:
                found += [name for name, record in inside.items() if len(record.shape) > 1 and _is_zero(reader, record)]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read ({error}); download it again") from error
    return found


def refuse_zeros(path: Path, records: Mapping[str, TensorRecord]) -> None:
    """Raises: ValueError naming the path if its weights are zeros and nothing else; ends at the first that is not."""
    matrices = {name: record for name, record in records.items() if len(record.shape) > 1}
    if matrices and all(find_zero_weights({name: record}) for name, record in matrices.items()):
        raise ValueError(f"{path} holds nothing but zeros; download it again")


def _is_zero(reader: WeightReader, record: TensorRecord) -> bool:
    tensor = reader.get_slice(record.key)
    first, end = record.rows or (0, tensor.get_shape()[0])
    if any(_has_number(tensor[row : row + 1]) for row in {first, (first + end) // 2, end - 1}):
        return False
    return not any(_has_number(tensor[row : row + 1]) for row in range(first, end))


def _has_number(rows: torch.Tensor) -> bool:
    """By its bytes, which types without arithmetic have too."""
    return bool(rows.contiguous().view(torch.uint8).any())
