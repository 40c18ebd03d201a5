"""What a setting may be, said where the setting is defined: a range of numbers, a path, a file name.

Each is part of a field's type, as in `rank: Annotated[int, Range(1, 1024)] = 16`, so a config cannot be built without
it. The ends lie far outside of what trains well: they keep out what trains nothing or takes all memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, core_schema

# Schemas are built when a section is first used: nodes read its fields while ComfyUI starts.
STRICT = ConfigDict(extra="forbid", defer_build=True)
MOST_STEPS = 10_000_000
LONGEST_PART = 255  # bytes of a file's or folder's name on Linux, macOS and, in characters, Windows
# What we add to a name: an expert's, the ending, and while it is written a dot before and ".<32 digits>.tmp" behind.
_ROOM_FOR_ENDINGS = len("." + "_high_noise" + ".safetensors" + "." + "0" * 32 + ".tmp")
LONGEST_NAME = LONGEST_PART - _ROOM_FOR_ENDINGS
STATE_FILES = ("adapter.safetensors", "optimizer.safetensors", "random.safetensors")  # of a checkpoint, beside its LoRA
LORA_ENDING = ".safetensors"
BACKSLASHES = (
    "in double quotes a backslash begins an escape; write the path in single quotes, 'C:\\train\\new', or with forward "
    'slashes, "C:/train/new"'
)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # what escapes make; names in no UTF-8 may hold others
_IN_NO_NAME = re.compile(r"^\.|[/\\]")
_IS_WINDOWS = os.name == "nt"
_NOT_ON_WINDOWS = re.compile(r'[<>:"|?*]|^ |[ .]$')
_WINDOWS_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be, ends included; of a whole number's setting, whole ones. or_zero: whether 0 is
    one of them too, meaning "off"."""

    low: float
    high: float
    or_zero: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kind = "whole number" if source is int else "number"

        def check(value: Any, convert: ValidatorFunctionWrapHandler) -> Any:
            number = None
            if isinstance(value, (int, float)) and not isinstance(value, bool):  # True and "3" would become numbers
                with contextlib.suppress(ValidationError):
                    number = convert(value)
            if number is None or not (self.low <= number <= self.high or self.or_zero and number == 0):
                raise ValueError(self.describe(kind))
            return number

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def describe(self, kind: str = "number") -> str:
        low, high = (str(each) if isinstance(each, int) else f"{each:g}" for each in (self.low, self.high))
        return f"is {'0 or ' if self.or_zero else ''}a {kind} from {low} to {high}"


def problems_of(error: ValidationError) -> list[Any]:
    """What is wrong, without a list's complaint that values which are refused themselves are missing from it."""
    problems = error.errors()
    outer = {each["loc"][:length] for each in problems for length in range(len(each["loc"]))}
    return [each for each in problems if each["type"] != "too_short" or each["loc"] not in outer]


def check_plain(text: str) -> str:
    """The text of a path or a name. Raises: ValueError for a control character, as backslashes read as escapes make."""
    if found := CONTROL.search(text):
        fault = f"holds the control character {found[0]!r}, which no name has"
        raise ValueError(f"{fault}; remove it. In a TOML file, {BACKSLASHES}")
    return text


def check_path(text: str) -> str:
    """The text. Raises: ValueError for a control character, or a part that is too long for a file system."""
    check_plain(text)
    for part in Path(text).parts:
        if (size := len(os.fsencode(part))) > LONGEST_PART:
            found = f"has a part of {size} bytes, {part[:20]!r}..."
            raise ValueError(f"{found}, and file systems take {LONGEST_PART}; choose a shorter name")
    return text


def _refuse_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; give a path")
    return text


def check_file_name(text: str) -> str:
    """A file name that stays one with all endings that we add. Raises: ValueError for folders in it, what this system
    refuses as a name, the name of a file of ours, or one that is too long."""
    if not text or _IN_NO_NAME.search(text) or not text.isprintable():
        raise ValueError(f"output.name is a plain file name without folders or a dot at its beginning, not {text!r}")
    if _IS_WINDOWS and (_NOT_ON_WINDOWS.search(text) or _WINDOWS_DEVICES.match(text)):
        helps = "a space at either end, a dot at the end, and the name of a device, such as con"
        raise ValueError(f'output.name {text!r} is no file name on Windows; leave out <>:"|?*, {helps}')
    name = unicodedata.normalize("NFKC", f"{text.removesuffix(LORA_ENDING)}{LORA_ENDING}")
    # The same for all names that may be one on a disk without case.
    if unicodedata.normalize("NFKC", name.casefold()) in STATE_FILES:
        raise ValueError(f"output.name {text!r} is that of a file which every checkpoint has; choose another")
    if (size := len(os.fsencode(text))) > LONGEST_NAME:
        raise ValueError(f"output.name has {size} bytes, and with our endings {LONGEST_NAME} fit; choose a shorter one")
    return text


NameText = Annotated[str, AfterValidator(check_plain)]  # of a file in a folder that somebody else knows, or its path
PathText = Annotated[str, AfterValidator(check_path)]
RequiredPath = Annotated[PathText, AfterValidator(_refuse_empty)]
StepCount = Annotated[int, Range(0, MOST_STEPS)]
Seed = Annotated[int, Range(0, 2**63 - 1)]


# ---- TOML that users write, and TOML that we write for a process of ours


# Names of files may be no UTF-8, which TOML cannot hold; this line begins a file of ours that has such bytes.
_RAW_BYTES = b"# This file is no UTF-8: it has names of files as they are on the disk.\n"
_MOST_PARTS = 20_000  # the parser takes seconds for these


def parse_toml(data: bytes) -> dict[str, Any]:
    """Plain values. Raises: UnicodeDecodeError; ValueError for a text that is too long, or no TOML,
    saying where, and what to do about a backslash there."""
    import tomlkit

    if (parts := data.count(b"\n") + data.count(b",")) > _MOST_PARTS:
        raise ValueError(f"it has {parts} lines and commas, and up to {_MOST_PARTS} are read; remove some")
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
