"""The header of a safetensors file, checked: names, shapes and types of its tensors, read without touching the weights.

A model may be a GGUF file, whose header gguf_header.py reads into the same.

A file is 8 bytes of header length, the header as JSON, then the tensors without a gap between them. What breaks one of
these rules is refused with the file's name, and a file of another kind by what it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..quantization.stored import PACKINGS, ROWS
from ..system.files import expect, parse_json_object, read_json_object

AGAIN = "download it again"  # what helps against a damaged file that was made elsewhere
FILE_ENDINGS = (".safetensors", ".sft")
# Types a frozen base can be read from, as safetensors spells them. Numbers of the second list have a scale, or come
# from a plain cast.
FLOAT_TYPES = ("BF16", "F16", "F32", "F64")
EIGHT_BIT_TYPES = ("F8_E4M3", "F8_E5M2", "I8")

_LENGTH_BYTES = 8  # little-endian
LARGEST_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MOST_TENSORS = 50_000  # of a file; the largest models have a tenth of them
_NUM_BYTES = {  # of one element; of types that are not listed (4 and 6 bits) sizes are not checked
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_GGUF = "a GGUF file, which is read for the model that is trained alone; use a .safetensors file"
_PICKLE = "a pickle; pickles are not read, convert it to safetensors"
_SAVED = "a pickle (saved by torch.save); pickles are not read, convert it to safetensors"
_WEB_PAGE = f"a web page, not the file itself; {AGAIN}"
_ENDINGS = {".gguf": _GGUF, ".ckpt": _PICKLE, ".pt": _PICKLE, ".pth": _PICKLE, ".bin": _PICKLE}
_FIRST_BYTES = {  # of files that are called safetensors and are not
    b"GGUF": _GGUF,
    b"PK\x03\x04": _SAVED,
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), _SAVED),  # by their protocol
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with git lfs pull",
    b"<!DOCTYPE": _WEB_PAGE,
    b"<html": _WEB_PAGE,
}


class TensorEntry(NamedTuple):
    """One tensor of a file: its type as safetensors spells it, and its bytes, counted from the data's start.

    packing: of a GGUF file, how its weights are packed; "" for numbers. Its dtype is the same where rows are whole
        blocks, and read as bytes; else F32, as which it is read.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    packing: str = ""


@dataclass(frozen=True)
class TensorRecord:
    """Where one tensor lies and what it is."""

    file: Path
    key: str  # its name in the file
    shape: tuple[int, ...]  # after rows were cut out
    dtype: str  # as safetensors spells it, e.g. "BF16", or GGUF, e.g. "Q4_K"
    rows: tuple[int, int] | None = None  # start and end of the rows that are taken
    swap_halves: bool = False  # whether the two halves of dim 0 change places
    pieces: tuple[tuple[int, int], ...] = ()  # starts and ends of several runs of rows that are taken, in their order
    # Of an 8-bit tensor: what it is multiplied by, one number or one per row; None for 1.
    scale: TensorRecord | None = None
    rotation: int = 0  # block of the rotation (quantization/eight_bit.py) it was rounded after, 0 for none
    convrot: int = 0  # the same for ComfyUI's rotation, whose matrix is another

    @property
    def is_quantized(self) -> bool:
        return self.dtype in EIGHT_BIT_TYPES or self.dtype in PACKINGS

    @property
    def packing(self) -> str:
        """How GGUF packs its rows; ROWS for a number per weight."""
        return self.dtype if self.dtype in PACKINGS else ROWS

    def cut(self, start: int, end: int) -> TensorRecord:
        """Rows start to end alone, with their scales."""
        scale = self.scale.cut(start, end) if self.scale and prod(self.scale.shape) > 1 else self.scale
        return replace(self, shape=(end - start, *self.shape[1:]), rows=(start, end), scale=scale)

    def swapped(self) -> TensorRecord:
        """The halves of dim 0 exchanged, with their scales."""
        scale = self.scale.swapped() if self.scale and prod(self.scale.shape) > 1 else self.scale
        return replace(self, swap_halves=True, scale=scale)


@dataclass(frozen=True)
class FileHeader:
    """What a safetensors file says of itself."""

    file: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    text: bytes  # the header as it is in the file
    data_start: int  # the position of the first tensor's bytes

    def records(self) -> dict[str, TensorRecord]:
        """Every tensor by its name."""
        return {key: TensorRecord(self.file, key, entry.shape, entry.dtype) for key, entry in self.tensors.items()}


def read_header(file: Path) -> FileHeader:
    """The header of a safetensors file. Raises: ValueError if it is something else, cut short or damaged; it says what
    was found."""
    refuse_no_file(file)
    with open(file, "rb") as stream:
        return read_file_header(stream)


def refuse_no_file(file: Path) -> None:
    """Raises: ValueError for what is missing, and for a folder or a pipe, which would keep us waiting."""
    if not file.is_file():
        raise ValueError(f"{file} is no file of weights; give a .safetensors file")


def read_file_header(stream: IO[bytes], remedy: str = AGAIN) -> FileHeader:
    """The header of an open safetensors file, from its start. Raises: ValueError naming the file if it is something
    else, cut short or damaged; it says what was found."""
    file, size = str(stream.name), os.path.getsize(stream.name)
    if (ending := Path(file).suffix) in _ENDINGS:
        raise ValueError(f"{file} is {_ENDINGS[ending]}")
    start = stream.read(64)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    for first_bytes, what in _FIRST_BYTES.items():  # a header of 640 bytes begins like a pickle
        if start.startswith(first_bytes) and _LENGTH_BYTES + length > size:
            raise ValueError(f"{file} is {what}")
    stream.seek(_LENGTH_BYTES)
    if size < _LENGTH_BYTES or length > LARGEST_HEADER_BYTES:
        raise ValueError(f"{file} ({size} bytes) is not a safetensors file; {remedy}")
    text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"{file} is cut short inside its header: {size} bytes; {remedy}")
    if (count := text.count(b'"data_offsets"')) > MOST_TENSORS:
        raise ValueError(f"{file} has {count} tensors, and files of models have up to {MOST_TENSORS}; {remedy}")
    header = parse_json_object(text, f"{file} is not a safetensors file: its header", remedy)
    metadata = header.pop("__metadata__", None)
    metadata = expect({} if metadata is None else metadata, dict, f"{file}: its __metadata__", remedy)
    for name, value in metadata.items():
        expect(value, str, f"{file}: {name} of its __metadata__", remedy)
    tensors = {name: _entry(file, name, entry, remedy) for name, entry in header.items()}
    end, num_data_bytes = max((entry.end for entry in tensors.values()), default=0), size - _LENGTH_BYTES - length
    if end != num_data_bytes:
        state = "cut short" if end > num_data_bytes else "damaged"
        raise ValueError(
            f"{file} is {state}: its header promises {end} bytes of weights and it has {num_data_bytes}; {remedy}"
        )
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if entry.start != position:
            raise ValueError(f"{file} is damaged: {name!r} begins at byte {entry.start}, not {position}; {remedy}")
        position = entry.end
    return FileHeader(Path(file), tensors, metadata, text, _LENGTH_BYTES + length)


def _entry(file: str, name: str, entry: Any, remedy: str) -> TensorEntry:
    try:
        start, end = entry["data_offsets"]
        found = TensorEntry(entry["dtype"], tuple(entry["shape"]), start, end)
        numbers = [*found.shape, found.start, found.end]
        is_sound = isinstance(found.dtype, str) and all(type(each) is int and 0 <= each < 2**63 for each in numbers)
        is_sound = is_sound and prod(side for side in found.shape if side) < 2**63  # as tensors count, also empty ones
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{file} is not a safetensors file: its entry {name!r} is malformed; {remedy}")
    num_bytes = found.end - found.start
    expected = prod(found.shape) * _NUM_BYTES[found.dtype] if found.dtype in _NUM_BYTES else max(0, num_bytes)
    if num_bytes != expected:
        raise ValueError(
            f"{file} is damaged: {name!r} should be {found.dtype} {list(found.shape)}, and has {num_bytes} bytes; "
            f"{remedy}"
        )
    return found


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of an index that lies beside the files. Raises: ValueError naming the index if it is no
    such index, or names a file outside its folder."""
    found = expect(read_json_object(index).get("weight_map"), dict, f"{index}: weight_map")
    for name, file in found.items():
        expect(file, str, f"{index}: the file of {name}")
        if Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}, which is no file beside it; {AGAIN}")
    if not found:
        raise ValueError(f"{index} has an empty weight_map; {AGAIN}")
    return found
