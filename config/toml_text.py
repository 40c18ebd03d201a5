"""TOML that users write, and TOML that we write for a process of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ranges import BACKSLASHES

# Names of files may be no UTF-8, which TOML cannot hold; this line begins a file of ours that has such bytes.
_RAW_BYTES = b"# This file is no UTF-8: it has names of files as they are on the disk.\n"
_MOST_PARTS = 20_000  # the parser takes seconds for these


def parse_toml(data: bytes) -> dict[str, Any]:
    """Plain values.

    Raises: UnicodeDecodeError for what is no UTF-8; ValueError saying where a text is no TOML, and what to do about a
        backslash there, and for a text that is too long.
    """
    import tomlkit

    if (parts := data.count(b"\n") + data.count(b",")) > _MOST_PARTS:
        raise ValueError(f"it has {parts} lines and commas, and a job file has up to {_MOST_PARTS}; remove some")
    text = data.decode("utf-8-sig", "surrogateescape" if data.startswith(_RAW_BYTES) else "strict")
    try:
        return tomlkit.parse(text).unwrap()
    except tomlkit.exceptions.ParseError as error:
        line = "".join(text.splitlines()[error.line - 1 : error.line])  # the parser also counts a lone \r
        raise ValueError(f"{error}; {BACKSLASHES}" if "\\" in line else str(error)) from error
    except tomlkit.exceptions.TOMLKitError as error:
        raise ValueError(str(error)) from error


def toml_bytes(values: Mapping[str, Any]) -> bytes:
    """TOML that parse_toml reads back."""
    import tomlkit

    text = tomlkit.dumps(values)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _RAW_BYTES + text.encode("utf-8", "surrogateescape")
