"""Containers of video and sound: which one a file is, by its content, and whether all of it is there.
MPEG and FLV do not say how long they are: one that was cut short is a shorter clip, unless its last frame is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_MOV_SUFFIXES = (".mp4", ".m4v", ".mov", ".3gp")
_MPEG_SUFFIXES = (".ts", ".mts", ".m2ts", ".mpg", ".mpeg")
CONTAINER_SUFFIXES = (*_MOV_SUFFIXES, ".mkv", ".webm", ".avi", ".flv", *_MPEG_SUFFIXES)
SOUND_SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus")
_NO_OTHER_FILES = {"protocol_whitelist": "none", "enable_drefs": "0"}  # "none" is no protocol's name
_UNKNOWN_LENGTH = 0xFFFFFFFF  # of a WAV that was written as it came


@contextmanager
def open_container(path: Path) -> Iterator[Any]:
    """PyAV's container of a file. FFmpeg is given the format and an open file, so that no playlist in disguise and no
    track of MOV opens another. Raises: ValueError for a damaged file, RuntimeError without PyAV."""
    try:
        import av
    except ImportError as error:
        raise RuntimeError(f"reading {path} needs PyAV, which ComfyUI brings along; pip install av") from error

    with open(path, "rb") as file:
        kind = find_kind(file)
        file.seek(0)
        try:
            with av.open(file, format=kind, container_options=_NO_OTHER_FILES) as container:
                yield container
        except av.error.FFmpegError as error:  # some are neither ValueError nor OSError
            raise ValueError(error.strerror or str(error)) from error


def find_kind(file: BinaryIO) -> str:
    """FFmpeg's name of the container. Raises: ValueError for another content, or a file shorter than it says."""
    start = file.read(2 * 192)
    if not start:
        raise ValueError("the file is empty")
    size, end = file.seek(0, 2), 0
    if start[:4] == b"\x1aE\xdf\xa3":
        end, kind = _matroska_end(file), "matroska"
    elif start[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"):
        end, kind = _mov_end(file, size), "mov"
    elif start[:4] == b"RIFF" and start[8:12] == b"AVI ":
        end, kind = _avi_end(file, size), "avi"
    elif start[:4] == b"RIFF" and start[8:12] == b"WAVE":
        length = int.from_bytes(start[4:8], "little")
        end, kind = 0 if length == _UNKNOWN_LENGTH else length + 8, "wav"
    elif start[:4] in (b"fLaC", b"OggS"):
        kind = "flac" if start[:1] == b"f" else "ogg"
    elif start[:3] == b"FLV":
        kind = "flv"
    elif start[:4] == b"\0\0\1\xba":
        kind = "mpeg"
    elif any(start[first::length][:2] == b"GG" for first, length in ((0, 188), (4, 192))):
        # packets follow each other; those of a camera have a time of four bytes in front
        kind = "mpegts"
    elif start[:3] == b"ID3" or start[0] == 0xFF and start[1:2] and start[1] & 0xE6 == 0xE2:  # layer III
        kind = "mp3"
    else:
        raise ValueError("it is neither MP4, MOV, MKV, WebM, AVI, FLV, MPEG, WAV, FLAC, Ogg nor MP3")
    if end > size:
        raise ValueError(f"it is cut off: {size} of {end} bytes are there")
    return kind


def _mov_end(file: BinaryIO, size: int) -> int:
    """Where the boxes that hold frames or their index should end; other boxes and what follows them do not matter."""
    position = end = 0
    while position + 8 <= size:
        file.seek(position)
        header = file.read(16)
        length = int.from_bytes(header[:4], "big")
        if length == 1:
            length = int.from_bytes(header[8:16], "big")
        if length < 8:  # to the end of the file, or no box
            break
        position += length
        if header[4:8] in (b"moov", b"mdat", b"moof"):
            end = position
    return end


def _avi_end(file: BinaryIO, size: int) -> int:
    """Where the last of its parts should end; a large file has several."""
    position = 0
    while position + 8 <= size:
        file.seek(position)
        header = file.read(8)
        if header[:4] != b"RIFF":
            break
        position += 8 + int.from_bytes(header[4:], "little")
    return position


def _matroska_end(file: BinaryIO) -> int:
    """Where the segment should end; 0 if the file does not say, as of a live recording."""
    file.seek(4)
    length = _read_vint(file)
    if length is None:
        return 0
    file.seek(length, 1)
    if file.read(4) != b"\x18S\x80g":
        return 0
    length = _read_vint(file)
    return 0 if length is None else file.tell() + length


def _read_vint(file: BinaryIO) -> int | None:
    """EBML's number of variable length; None for "unknown"."""
    first = file.read(1)
    if not first or first == b"\0":
        return None
    num_bytes = 9 - first[0].bit_length()
    value = int.from_bytes(bytes([first[0] & (0xFF >> num_bytes)]) + file.read(num_bytes - 1), "big")
    return None if value == (1 << (7 * num_bytes)) - 1 else value
