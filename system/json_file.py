"""JSON objects from files of others; whatever is wrong with one is said with the file's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import read_ordinary

_MOST_BYTES = 100_000_000
_MOST = 1e100  # the product of two is still a finite float
_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def read_json_object(file: Path, remedy: str = "download it again", most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
        remedy: what would help, for the message.
    Raises: ValueError naming the file if it is no JSON or no object; FileNotFoundError.
    """
    try:
        text = read_ordinary(file, most_bytes, "a JSON file")
    except ValueError as error:
        raise ValueError(f"{file} {error}; {remedy}") from error
    return parse_json_object(text, str(file), remedy)


def parse_json_object(text: bytes | str, what: str, remedy: str = "download it again") -> dict[str, Any]:
    """The same for a text that was read already.

    Args:
        what: whose text this is, for the message.
    Raises: ValueError for a text that is no JSON, no object, or says one name twice.
    """
    try:
        found = json.loads(text, object_pairs_hook=_refuse_twice)
    except (ValueError, RecursionError) as error:  # the latter for brackets inside brackets inside brackets
        raise ValueError(f"{what} is no JSON ({error}); {remedy}") from error
    return expect(found, dict, what, remedy)


def is_number(value: Any) -> bool:
    """Whether this is a number to count with: neither true nor false, nor infinite, nor one that no float holds."""
    return type(value) in (int, float) and -_MOST < value < _MOST


def expect(value: Any, kind: type | tuple[type, ...], what: str, remedy: str = "download it again") -> Any:
    """The value, if it is of this kind; true and false are no numbers, nor is what is_number refuses.

    Raises: ValueError saying what it is.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) in (int, float) and not is_number(value):
        raise ValueError(f"{what} is a number that is not finite, or too large; {remedy}")
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return value
    wanted = " or ".join(dict.fromkeys(_NAMES[each] for each in kinds))
    found = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    raise ValueError(f"{what} is {found} in JSON, not {wanted}; {remedy}")


def _refuse_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it says {name!r} twice")
        found[name] = value
    return found
