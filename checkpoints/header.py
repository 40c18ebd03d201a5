"""The header of a safetensors or GGUF file, checked: names, shapes and types of its tensors, without their weights.

The gguf package has no limits: a file that promises 2^60 settings keeps it waiting.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from ..quantization.stored import PACKINGS, ROWS
from ..system.files import expect, parse_json_object, read_json_object

AGAIN = "download it again"  # what helps against a damaged file that was made elsewhere
FILE_ENDINGS = (".safetensors", ".sft")
# Types a frozen base can be read from. Numbers of the second list have a scale, or come from a plain cast.
FLOAT_TYPES = ("BF16", "F16", "F32", "F64")
EIGHT_BIT_TYPES = ("F8_E4M3", "F8_E5M2", "I8")

_LENGTH_BYTES = 8  # little-endian
LARGEST_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MOST_TENSORS = 50_000  # of a file; the largest models have a tenth of them
FILE_TYPES = {  # as safetensors spells them
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (64, 32, 16)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (64, 32, 16, 8)},
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (64, 32, 16, 8)},
    **{torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.bool: "BOOL", torch.complex64: "C64"},
}
TORCH_TYPES = {**{name: dtype for dtype, name in FILE_TYPES.items()}, **dict.fromkeys(PACKINGS, torch.uint8)}
_GGUF = "a GGUF file, which is read for the model that is trained alone; use a .safetensors file"
_PICKLE = "a pickle; pickles are not read, convert it to safetensors"
_SAVED = "a pickle (saved by torch.save); pickles are not read, convert it to safetensors"
_WEB_PAGE = f"a web page, not the file itself; {AGAIN}"
OTHER_ENDINGS = {".gguf": _GGUF, ".ckpt": _PICKLE, ".pt": _PICKLE, ".pth": _PICKLE, ".bin": _PICKLE}
_FIRST_BYTES = {  # of files that are called safetensors and are not
    b"GGUF": _GGUF,
    b"PK\x03\x04": _SAVED,
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), _SAVED),  # by their protocol
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with git lfs pull",
    b"<!DOCTYPE": _WEB_PAGE,
    b"<html": _WEB_PAGE,
}


class TensorEntry(NamedTuple):
    """One tensor of a file: its type as safetensors spells it, and its bytes, counted from the data's start."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    # How GGUF packs it; "" for numbers. Where rows are whole blocks, dtype is the same; else F32, as which it is read.
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
    file: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    text: bytes  # the header as it is in the file
    data_start: int  # the position of the first tensor's bytes

    def records(self) -> dict[str, TensorRecord]:
        return {key: TensorRecord(self.file, key, entry.shape, entry.dtype) for key, entry in self.tensors.items()}


def read_header(file: Path, *, is_model: bool = False) -> FileHeader:
    """Of a safetensors file; of a model also of a GGUF file. Raises: as read_file_header or read_open_header."""
    refuse_no_file(file)
    with open(file, "rb") as stream:
        return (read_open_header if is_model else read_file_header)(stream)


def refuse_no_file(file: Path) -> None:
    """Raises: ValueError for what is missing, and for a folder or a pipe, which would keep us waiting."""
    if not file.is_file():
        raise ValueError(f"{file} is no file of weights; give a .safetensors file")


def read_file_header(stream: IO[bytes], remedy: str = AGAIN) -> FileHeader:
    """Of an open safetensors file, from its start: 8 bytes of length, JSON, then tensors without a gap between them.
    Raises: ValueError naming the file and what was found, if it is something else, cut short or damaged."""
    file, size = str(stream.name), os.path.getsize(stream.name)
    if (ending := Path(file).suffix) in OTHER_ENDINGS:
        raise ValueError(f"{file} is {OTHER_ENDINGS[ending]}")
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
    end, num_data_bytes = 0, size - _LENGTH_BYTES - length
    for name, entry in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if entry.start != end:
            raise ValueError(f"{file} is damaged: {name!r} begins at byte {entry.start}, not {end}; {remedy}")
        end = entry.end
    if end != num_data_bytes:
        state = "cut short" if end > num_data_bytes else "damaged"
        raise ValueError(
            f"{file} is {state}: its header promises {end} bytes of weights and it has {num_data_bytes}; {remedy}"
        )
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
    known = None if found.dtype in PACKINGS else TORCH_TYPES.get(found.dtype)  # none of 4 and 6 bits
    expected = prod(found.shape) * known.itemsize if known else max(0, num_bytes)
    if num_bytes != expected:
        raise ValueError(
            f"{file} is damaged: {name!r} should be {found.dtype} {list(found.shape)}, and has {num_bytes} bytes; "
            f"{remedy}"
        )
    return found


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of an index that lies beside the files. Raises: ValueError naming it if it is no such
    index, or names a file outside its folder."""
    found = expect(read_json_object(index).get("weight_map"), dict, f"{index}: weight_map")
    for name, file in found.items():
        expect(file, str, f"{index}: the file of {name}")
        if Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}, which is no file beside it; {AGAIN}")
    if not found:
        raise ValueError(f"{index} has an empty weight_map; {AGAIN}")
    return found


# ---- GGUF, all numbers little-endian. "GGUF", version, how many tensors and settings; settings, each a name, type and
# a value; tensors, each a name, its sides (the last one first), a type and where it begins; the weights, each padded to
# a multiple of the alignment. Sides that GGUF has no room for stand in settings of ComfyUI-GGUF's converter.

MAGIC = b"GGUF"
GGUF_ENDING = ".gguf"
_MOST_SETTINGS = 10_000
_LONGEST_TEXT = 2**20
_MOST_SIDES = 4
_ALIGNMENT, _SIDES = "general.alignment", "comfy.gguf.orig_shape."
# Formats of numbers by their type; text and lists have no fixed size.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# GGML's types by number; those that are no packing and have a size are read as safetensors' of that name.
_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
WHAT_IS_READ = f"{', '.join(PACKINGS)}, F16, BF16 and F32 are read"


class _Cursor:
    """Reads an open file, and never past its end or the largest header."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream, self.place = stream, 0
        self._end = min(size, LARGEST_HEADER_BYTES)

    def take(self, count: int) -> bytes:
        self.place += count
        if self.place > self._end:
            raise ValueError("its header goes on past the end, or is larger than any model's")
        return self._stream.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str:
        length = self.number("Q")
        if length > _LONGEST_TEXT:
            raise ValueError(f"a text in its header has {length} bytes")
        return self.take(length).decode("utf-8")

    def setting(self) -> Any:
        """A number or text; of a list its numbers where they are few, else None."""
        kind = self.number("I")
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_NUMBERS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner == _TEXT:
            for _ in range(count):  # a length of 8 bytes each, so that the header's limit ends it
                self.take(self.number("Q"))
            return None
        size = struct.calcsize(f"<{_NUMBERS[inner]}")
        if count > 16:
            self.take(count * size)
            return None
        return [self.number(_NUMBERS[inner]) for _ in range(count)]


def read_open_header(stream: IO[bytes]) -> FileHeader:
    """Of an open file of a model, from its start; texts among a GGUF file's settings are its metadata. Raises: as
    read_file_header; of a GGUF file also where it is one of several, or has a type that is not read."""
    file, size = Path(stream.name), os.path.getsize(stream.name)
    is_gguf = stream.read(len(MAGIC)) == MAGIC or file.suffix == GGUF_ENDING
    stream.seek(0)
    if not is_gguf:
        return read_file_header(stream)
    cursor = _Cursor(stream, size)
    try:
        settings, tensors = _read_gguf(cursor)
        others = {name: each.dtype for name, each in tensors.items() if each.dtype not in TORCH_TYPES}
        alignment = settings.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r}")
        start = _aligned(cursor.place, alignment)
        if not others:  # whose sizes nobody knows
            place, end = 0, 0
            for name, each in sorted(tensors.items(), key=lambda item: item[1].start):
                if each.start != place:
                    raise ValueError(f"{name[:200]} begins at byte {each.start} of the weights, not {place}")
                place, end = _aligned(each.end, alignment), each.end
            if not tensors or not end <= size - start <= place:
                raise ValueError(f"its header promises {end} bytes of weights, and it has {max(0, size - start)}")
    except (ValueError, KeyError, struct.error, OverflowError, TypeError) as error:
        said = f"it has a setting of type {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{file} ({size} bytes) is no whole GGUF file: {said}; {AGAIN}") from error
    if (count := settings.get("split.count", 1)) not in (0, 1):
        raise ValueError(f"{file} is one of {count} files of a model, which are not read; join them with gguf-split")
    for name, kind in others.items():
        raise ValueError(
            f"{file} holds {len(others)} tensors of types that are not read, such as {name} in {kind}; of GGUF "
            f"{WHAT_IS_READ}, so take a file in Q4_K or more"
        )
    texts = {name: each for name, each in settings.items() if isinstance(each, str)}
    stream.seek(0)
    return FileHeader(file, tensors, texts, stream.read(start), start)


def _read_gguf(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Settings, and tensors whose ends are those of types that are read, else their starts."""
    if cursor.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in (2, 3):
        raise ValueError(f"it is of version {version}, and 2 and 3 are read")
    num_tensors, num_settings = cursor.number("Q"), cursor.number("Q")
    if num_tensors > MOST_TENSORS or num_settings > _MOST_SETTINGS:
        raise ValueError(f"it promises {num_tensors} tensors and {num_settings} settings")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        name = cursor.text()
        if name in settings:
            raise ValueError(f"it has {name[:200]} twice")
        settings[name] = cursor.setting()
    tensors: dict[str, TensorEntry] = {}
    for _ in range(num_tensors):
        name, num_sides = cursor.text(), cursor.number("I")
        if name in tensors or num_sides > _MOST_SIDES:
            raise ValueError(f"it has {name[:200]} twice, or with {num_sides} sides")
        stored = tuple(cursor.number("Q") for _ in range(num_sides))[::-1]
        tensors[name] = _tensor(cursor, name, stored, settings.get(f"{_SIDES}{name}"))
    return settings, tensors


def _tensor(cursor: _Cursor, name: str, stored: tuple[int, ...], given: Any) -> TensorEntry:
    """given: the sides that the model has for it, where a setting says other ones than are stored."""
    number, start = cursor.number("I"), cursor.number("Q")
    kind = _TYPES.get(number, f"type {number}")
    shape = stored if given is None else tuple(given)
    if not all(type(side) is int and 0 < side < 2**48 for side in (*shape, *stored)) or prod(stored) >= 2**48:
        raise ValueError(f"{name[:200]} is {list(shape)}")
    if prod(shape) != prod(stored):
        raise ValueError(f"{name[:200]} is stored as {list(stored)}, and said to be {list(shape)}")
    count, packed = prod(stored), PACKINGS.get(kind)
    if packed is not None:
        if not stored or stored[-1] % packed.values:
            raise ValueError(f"{name[:200]} is {list(stored)} in blocks of {packed.values}")
        is_whole = len(shape) > 1 and prod(shape[1:]) % packed.values == 0
        dtype = kind if is_whole else "F32"
        return TensorEntry(dtype, shape, start, start + packed.row_bytes(count), packing=kind)
    return TensorEntry(kind, shape, start, start + count * (TORCH_TYPES[kind].itemsize if kind in TORCH_TYPES else 0))


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
