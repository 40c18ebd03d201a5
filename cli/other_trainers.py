"""A setting of another trainer becomes ours by its row of other_trainers.toml."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from ..config.job import STOCK_FILES, job_keys
from ..config.ranges import parse_toml
from ..system.files import read_ordinary

MOST_BYTES = 10_000_000
Values = Mapping[str, Any]


def read_values(path: Path) -> tuple[Any, str]:
    """Plain values of a TOML, JSON or YAML file, and its text. JSON with a comma too many is YAML."""
    import yaml

    try:
        text = read_ordinary(path, MOST_BYTES, "a job file of another trainer").decode("utf-8-sig")
        if path.suffix.lower() == ".toml":
            return parse_toml(text.encode()), text
        try:
            return json.loads(text), text
        except json.JSONDecodeError:
            if any(isinstance(each, yaml.AliasEvent) for each in yaml.parse(text, yaml.SafeLoader)):
                raise ValueError("it has aliases (*name), which may stand for endless values; write them out") from None
            return yaml.safe_load(text), text
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a job file of another trainer") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: {error.problem}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


class Made:
    """A job of ours in the making. text: of the file, for the lines of its keys."""

    def __init__(self, path: Path, text: str, trainer: str) -> None:
        self.path, self.text, self.trainer = path, text, trainer
        self.values: dict[str, Any] = {}  # "section.name" -> value
        self.folders: list[dict[str, Any]] = []
        self.left: dict[str, list[str]] = {}  # reason -> settings
        self.origins: dict[str, str] = {}  # our key -> theirs
        self.given: dict[str, Any] = {}  # their settings as they say them
        self.own: dict[str, Any] = {}  # what rows give to this module, by its name without the colon

    def take(self, given: Values, table: str = "", folder: dict[str, Any] | None = None) -> None:
        """Each setting by its row; those of a folder go to it, and others to the job."""
        rows, reasons = rows_of(f"{self.trainer}{table}"), tables()["reasons"]
        for name in sorted(given, key=[*rows, *given].index):
            value = given[name]
            if value is None or value == "" or isinstance(value, str) and value.lower() == "none":
                continue
            self.given[name] = value
            row = rows.get(name) or next((row for key, row in rows.items() if fnmatch.fnmatchcase(name, key)), None)
            kind, *rest = row if isinstance(row, list) else [row or "!not known here"]
            if kind.startswith("!"):
                if value not in (False, 0, [], {}, *rest):
                    self.leave(name, value, reasons.get(kind[1:], kind[1:]))
            elif kind == "=":
                if str(value).removeprefix(".").lower() not in rest:
                    self.leave(name, value, f"it is {' or '.join(rest)} here")
            else:
                self._put(name, value, kind, rest[0] if rest else "", folder)

    def _put(self, name: str, value: Any, key: str, change: str, folder: dict[str, Any] | None) -> None:
        words = tables()["words"].get(change)
        full = key if "." in key or key.startswith(":") else f"data.folders.{key}"
        try:
            if words is not None:
                value = words[str(value).lower()]
            elif change:
                value = _CHANGES[change](value)
            value = None if value is None else _as_kind(value, full)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            now = self.values.get(key) or (job_keys()[full].default if full in job_keys() else "")
            self.leave(name, value, "there is nothing like it here" + (f", so {full} is {now!r}" if now else ""))
            return
        if value is None:
            return
        found = re.search(rf"(?<!\w){re.escape(name.rpartition('.')[2])}[\"']?\s*[:=]", self.text)
        line = f", line {self.text.count(chr(10), 0, found.start()) + 1}" if found else ""
        self.origins.setdefault(full, f"{name}{line}")
        if key.startswith(":"):
            self.own[key[1:]] = [*self.own.get("clip", ()), value] if key == ":clip" else value
        elif folder is not None and "." not in key:
            folder[key] = value
        elif (before := self.values.get(key)) is None:
            self.values[key] = value
        elif before != value:
            self.leave(name, value, f"{key} holds for the whole job, and is {before!r}")

    def leave(self, name: str, value: Any, reason: str) -> None:
        settings = self.left.setdefault(reason, [])
        if (setting := f"{name} = {value!r:.60}") not in settings:
            settings.append(setting)

    def read_beside(self, name: Any) -> Any:
        values, text = read_values(self.beside(name))
        self.text += text
        return values

    def find(self, name: Any) -> Path | None:
        """A file or folder that this file names: from its folder, one of the two above, or where we are."""
        places = [*self.path.resolve().parents[:3], Path.cwd()]
        return next((place / str(name) for place in places if (place / str(name)).exists()), None)

    def beside(self, name: Any) -> Path:
        """A file that this one names. Raises: ValueError if it is not there."""
        if (found := self.find(name)) and found.is_file():
            return found
        place = self.path.resolve().parent
        raise ValueError(f"{self.path} names {name}, which is not there; it was looked for from {place}")

    def anchor(self) -> None:
        """Relative paths to what is there become absolute: a job's start at its own folder."""
        for key in (each for each in job_keys().values() if each.is_path or each.path in STOCK_FILES):
            is_of_folder = key.section == "data.folders"
            name = key.name if is_of_folder else key.path
            for section in self.folders if is_of_folder else [self.values]:
                given = section.get(name)
                if isinstance(given, list):
                    section[name] = [str(self.find(each) or each) for each in given]
                elif given:
                    section[name] = str(self.find(given) or given)

    def take_folders(self, given: Any, general: Values | None = None) -> None:
        for each in given or ():
            folder: dict[str, Any] = {}
            self.take({**(general or {}), **dict(flat(each))}, " folder", folder)
            if "path" in folder:
                self.folders.append(folder)


@functools.cache
def tables() -> dict[str, Any]:
    return parse_toml(Path(__file__).with_name("other_trainers.toml").read_bytes())


@functools.cache
def rows_of(table: str) -> dict[str, Any]:
    return {name: row for names, row in tables()[table].items() for name in names.split()}


def _as_kind(value: Any, path: str) -> Any:
    """As the type of our key has it: 1e-4 of YAML is a text, 16.0 a count, ON a truth, one number a list.
    Raises: KeyError for a word that is none of the key's."""
    if (key := job_keys().get(path)) is None:
        return value
    if get_origin(key.kind) is tuple:
        values = value if isinstance(value, list) else str(value).split(",")
        return [_number(each, get_args(key.kind)[0]) for each in values]
    if key.choices and value not in key.choices:
        raise KeyError(value)
    if key.kind is bool and isinstance(value, str):
        return value.lower() not in ("off", "false", "0")
    return str(value) if key.kind is str else _number(value, key.kind)


def _number(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, float, int)) or kind in (str, bool):
        return value
    try:
        number = float(value)
    except ValueError:
        return value  # which the check of the whole job refuses by name
    return int(number) if number.is_integer() and not (kind is float and isinstance(value, float)) else number


def _side(value: Any) -> list[int]:
    """Of "1024,768", "960x544" or [960, 544] the side of a square of that area in pixels; of a number itself."""
    parts = value if isinstance(value, list) else str(value).lower().replace("x", ",").split(",")
    return [round(math.prod(map(float, parts)) ** (1 / len(parts)))]


_CHANGES: Mapping[str, Callable[[Any], Any]] = {
    "side": _side,
    "sides": lambda value: [  # several of them: numbers, or pairs of width and height
        one for each in (value if isinstance(value, list) else str(value).split(",")) for one in _side(each)
    ],
    "prefix": lambda value: f"{value}{{caption}}",
    "prefix_apart": lambda value: f"{value} {{caption}}",
    "prompts": lambda value: [each if isinstance(each, str) else each["prompt"] for each in value] or None,
    "paths": lambda value: [each["path"] for each in value],
    "negated": lambda value: not value,
    "not_negative": lambda value: max(int(value), 0),
    "positive": lambda value: value or None,  # kohya_ss and SimpleTuner write 0 where epochs count
    "whole": lambda value: int(value) if float(value) >= 1 and float(value).is_integer() else int("part"),
    "one_more": lambda value: float(value) + 1,  # SimpleTuner counts the repeats after the first
    "or_one": lambda value: value or 1,  # 0 is no shift
    "stages": lambda value: "pipeline" if int(value) > 1 else None,
    "uniform": lambda value: "sigmoid" if str(value).lower() in ("false", "0") else "uniform",
    "debiased": lambda value: "debiased" if value else None,
    "thousandths": lambda value: float(value) / 1000,
}


def flat(values: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
