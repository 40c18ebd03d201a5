"""What is known of a setting: its type, its text, whether a resumed run may change it, and its older names.

Node sockets, help pages, comments of the examples and the reference of keys are made of this. A setting's text stands
in the docstring of its section: first what it is, in one sentence, then what to choose and when it matters. There
"Left out: ..." says what its empty value ("", (), None or 0) takes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator

from .ranges import Range, check_path

_UNSET = re.compile(r" ?Left out: (.+?)\.(?= |$)")


def setting(default: Any, **of_key: Any) -> Any:
    """A dataclass field with fields of its Key: is_free, was, old_words, gone."""
    return dataclasses.field(default=default, metadata=of_key)


@dataclass(frozen=True)
class Key:
    """A key of the job file.

    Args:
        owner: class of its section.
        kind: its type; parts: all that the type is made of, ranges too.
        default: MISSING if it must be given.
        is_free: whether a resumed run may change it: it decides neither what is trained nor in which order.
        was: keys of older versions, "section.key", which still load.
        old_words: values of older versions -> today's.
        gone: values of older versions that nothing does any more -> what there is no more; the default is taken.
    """

    owner: type
    section: str
    name: str
    text: str
    kind: Any
    parts: tuple[Any, ...]
    default: Any
    is_free: bool = False
    was: tuple[str, ...] = ()
    old_words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gone: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def limits(self) -> Range | None:
        return next((each for each in self.parts if isinstance(each, Range)), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        return next((get_args(each) for each in self.parts if get_origin(each) is Literal), ())

    @property
    def is_path(self) -> bool:
        return AfterValidator(check_path) in self.parts

    @property
    def has_empty(self) -> bool:
        """Whether an empty value stands for something else."""
        return bool(_UNSET.search(self.text))

    def in_todays_words(self, value: Any) -> tuple[Any, str]:
        """A value as this version has it, and a line about one of an older version, else ""."""
        if isinstance(value, str) and (word := self.old_words.get(value)):
            return word, f'{self.path} = "{value}" is an older word for "{word}"; both mean the same'
        if isinstance(value, str) and (what := self.gone.get(value)):
            return self.default, f'{self.path} = "{value}" was asked for, but {what} is gone; "{self.default}" is taken'
        return value, ""

    def text_where(self, empty: str) -> str:
        """Its text for a place where the empty value is called so: "auto", "0"; "" where there is none."""
        return _UNSET.sub(lambda found: f" {empty} takes {found[1]}." if empty else "", self.text).strip()


def keys_of(kind: type, section: str) -> Iterator[Key]:
    """All keys of a section, and of the sections inside it."""
    plain, full = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    named = re.split(r"^    (\w+): ", listed, flags=re.MULTILINE)[1:]
    texts = {name: " ".join(text.split()) for name, text in zip(named[::2], named[1::2], strict=True)}
    for each in dataclasses.fields(kind):
        parts = tuple(_parts(full[each.name]))
        default = each.default if each.default_factory is MISSING else each.default_factory()
        yield Key(kind, section, each.name, texts.get(each.name, ""), plain[each.name], parts, default, **each.metadata)
    for name, each in full.items():
        for inner in get_args(each):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from keys_of(inner, f"{section}.{name}")


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for each in get_args(kind):
        yield from _parts(each)


def with_todays_names(keys: Mapping[str, Key], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A job's values under today's keys and words, and a line about each that is of an older version.
    Raises: ValueError for a setting that is given under its old and its new key."""
    today = {name: dict(each) if isinstance(each, dict) else each for name, each in values.items()}
    lines = [line for key in keys.values() for old in key.was for line in _move(today, old, key)]
    for key in keys.values():
        section = today.get(key.section)
        if isinstance(section, dict) and key.name in section:
            section[key.name], line = key.in_todays_words(section[key.name])
            lines += [line] * bool(line)
    gone = {old.split(".")[0] for key in keys.values() for old in key.was} - {key.section for key in keys.values()}
    return {name: each for name, each in today.items() if each != {} or name not in gone}, lines


def _move(values: dict[str, Any], old: str, new: Key) -> Iterator[str]:
    section, name = old.split(".")
    source, target = values.get(section), values.get(new.section, {})
    if not isinstance(source, dict) or name not in source or not isinstance(target, dict):
        return  # nothing to move, or refused as what it is
    if new.name in target:
        raise ValueError(f"{old} is an older name of {new.path}, and the job has both; remove {old}")
    values[new.section] = target | {new.name: source.pop(name)}
    yield f"{old} is an older name of {new.path}; both mean the same"


# ---- where "auto" of a job file or a socket ends: behind this a setting has a value, or is None and open


T = TypeVar("T", bound=str)


def requested(setting: T) -> T | None:
    """What the user asked for; None where it is left open."""
    return None if setting == "auto" else setting
