"""The header of a GGUF file, checked: names, shapes and types of its tensors, read without touching the weights.

Numbers are little-endian. "GGUF", version, how many tensors and settings; the settings, each a name, a type and a
value; the tensors, each a name, its sides (the last one first), a type and where it begins; then the weights, each
padded to a multiple of the alignment. Sides that GGUF has no room for stand in settings of ComfyUI-GGUF's converter.

The gguf package reads the same with NumPy and no limits; a file that promises 2^60 settings keeps it waiting. Here
counts, lengths and the whole header have limits, and a type that is not read is refused by its name.
"""

from __future__ import annotations

import os
import struct
from math import prod
from pathlib import Path
from typing import IO, Any

from ..quantization.stored import PACKINGS
from .header import (
    AGAIN,
    LARGEST_HEADER_BYTES,
    MOST_TENSORS,
    FileHeader,
    TensorEntry,
    read_file_header,
    refuse_no_file,
)

MAGIC = b"GGUF"
GGUF_ENDING = ".gguf"
_VERSIONS = (2, 3)
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
_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
WHAT_IS_READ = f"{', '.join(PACKINGS)}, F16, BF16 and F32 are read"


class _Cursor:
    """Reads an open file from here on, and never past its end or the largest header."""

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


def read_model_header(file: Path) -> FileHeader:
    """As read_header, and of a GGUF file by its first bytes. Raises: as read_open_header."""
    refuse_no_file(file)
    with open(file, "rb") as stream:
        return read_open_header(stream)


def read_open_header(stream: IO[bytes]) -> FileHeader:
    """The header of an open file of a model, from its start; texts among a GGUF file's settings are its metadata.
    Raises: as read_file_header; of a GGUF file also where it is one of several, or has a type that is not read."""
    file, size = Path(stream.name), os.path.getsize(stream.name)
    is_gguf = stream.read(len(MAGIC)) == MAGIC or file.suffix == GGUF_ENDING
    stream.seek(0)
    if not is_gguf:
        return read_file_header(stream)
    cursor = _Cursor(stream, size)
    try:
        settings, tensors = _read(cursor)
        others = {name: each.dtype for name, each in tensors.items() if each.dtype not in (*PACKINGS, *_PLAIN_BYTES)}
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


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Settings, and tensors whose ends are those of types that are read, else their starts."""
    if cursor.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in _VERSIONS:
        raise ValueError(f"it is of version {version}, and {' and '.join(map(str, _VERSIONS))} are read")
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
    return TensorEntry(kind, shape, start, start + count * _PLAIN_BYTES.get(kind, 0))


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment
