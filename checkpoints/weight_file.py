"""Weights in a safetensors file, tensor by tensor, also where the file is larger than the machine's memory.

The safetensors library maps a file into memory, which costs nothing and is as fast as the disk. For torch it asks for a
private mapping, and Linux (vm.overcommit_memory 0 or 2) refuses one that is larger than memory and swap together: the
64 GB of FLUX.2 in one file on a computer of 32 GB, of which never more than one tensor is needed at a time. Such a file
is read with plain reads instead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from .file_header import AGAIN, FileHeader, read_file_header

_DTYPES = {
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
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_tensors(file: Path, remedy: str = AGAIN) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the CPU.

    Raises: ValueError naming the file if it is something else, cut short or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_header(file, remedy)
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); {remedy}") from error


def _check_header(file: Path, remedy: str = AGAIN) -> FileHeader:
    if file.exists() and not file.is_file():  # a pipe would keep us waiting
        raise ValueError(f"{file} is no file of weights; give a .safetensors file")
    with open(file, "rb") as stream:
        return read_file_header(stream, remedy)


class WeightReader(Protocol):
    """An open file; what of the safetensors library's reader this pack uses."""

    def keys(self) -> Any: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> Any: ...


@contextmanager
def open_weights(file: Path) -> Iterator[WeightReader]:
    """Open a safetensors file for reading onto the CPU.

    get_slice(name)[a:b] gives rows a to b and reads no others.

    Raises: ValueError naming the file if it is something else, cut short or damaged.
    """
    from safetensors import SafetensorError, safe_open

    header = _check_header(file)
    try:
        mapped = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); {AGAIN}") from error
    except RuntimeError as error:  # torch's, with the error number in its text alone
        if os.strerror(errno.ENOMEM) not in str(error):
            raise
    else:
        with mapped as reader:
            yield reader
        return
    with open(file, "rb", buffering=0) as stream:
        yield _PlainReader(stream, header)


class _PlainReader:
    """Reads what is asked for, when it is asked for."""

    def __init__(self, stream: IO[bytes], header: FileHeader) -> None:
        self._stream, self._start, self._entries = stream, header.data_start, header.tensors

    def keys(self) -> Any:
        return list(self._entries)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._read(name, None)

    def get_slice(self, name: str) -> _Rows:
        return _Rows(self, name)

    def _read(self, name: str, rows: tuple[int, int] | None) -> torch.Tensor:
        entry = self._entries[name]
        dtype, shape, start, end = _DTYPES[entry.dtype], list(entry.shape), entry.start, entry.end
        if rows is not None:
            size = prod(shape[1:]) * dtype.itemsize
            start, end, shape[0] = start + rows[0] * size, start + rows[1] * size, rows[1] - rows[0]
        content = torch.empty(end - start, dtype=torch.uint8)
        self._fill(content.numpy().data, self._start + start, name)
        return content.view(dtype).reshape(shape)

    def _fill(self, target: memoryview, offset: int, name: str) -> None:
        """One call reads 2 GiB at most."""
        self._stream.seek(offset)
        done = 0
        while done < len(target):
            count = self._stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{self._stream.name} ends inside {name}; download it again")
            done += count


class _Rows:
    """Rows of one tensor, by slicing the first dim."""

    def __init__(self, reader: _PlainReader, name: str) -> None:
        self._reader, self._name = reader, name

    def __getitem__(self, rows: slice) -> torch.Tensor:
        start, end, step = rows.indices(self._reader._entries[self._name].shape[0])
        assert step == 1, rows
        return self._reader._read(self._name, (start, max(start, end)))

    def get_shape(self) -> list[int]:
        return list(self._reader._entries[self._name].shape)

    def get_dtype(self) -> str:
        return self._reader._entries[self._name].dtype
