"""A setting of the job file beside its type: the names it had in older versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints


def setting(default: Any, *, was: tuple[str, ...] = (), old_values: Mapping[str, str] | None = None) -> Any:
    """A field of a section.

    Args:
        was: "section.key" in older versions, which still load.
        old_values: words of older versions -> today's.
    """
    return dataclasses.field(default=default, metadata={"was": was, "old_values": old_values or {}})


def settings_of(job: type) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Section, key and metadata of every setting."""
    for section, kind in get_type_hints(job).items():
        for each in dataclasses.fields(kind):
            yield section, each.name, each.metadata


def with_todays_names(job: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same job under today's keys and words, and a line about each that is of an older version.

    Raises: ValueError for a setting that is given under its old and its new key.
    """
    today = {name: dict(each) if isinstance(each, dict) else each for name, each in values.items()}
    lines = []
    for section, key, about in settings_of(job):
        path = f"{section}.{key}"
        for old in about.get("was", ()):
            lines += _move(today, old, path)
            if not today.get(gone := old.split(".")[0], True) and gone not in get_type_hints(job):
                del today[gone]
        found = today.get(section)
        if isinstance(found, dict) and (word := _word(about, found.get(key))) is not None:
            lines.append(f'{path} = "{found[key]}" is an older word for "{word}"; both mean the same')
            found[key] = word
    return today, lines


def _word(about: Mapping[str, Any], value: Any) -> str | None:
    return about.get("old_values", {}).get(value) if isinstance(value, str) else None


def _move(values: dict[str, Any], old: str, new: str) -> list[str]:
    (old_section, old_key), (section, key) = old.split("."), new.split(".")
    source = values.get(old_section)
    if not isinstance(source, dict) or old_key not in source:
        return []
    target = values.setdefault(section, {})
    if not isinstance(target, dict):
        return []  # which is refused as what it is
    if key in target:
        raise ValueError(f"{old} is an older name of {new}, and the job has both; remove {old}")
    target[key] = source.pop(old_key)
    return [f"{old} is an older name of {new}; both mean the same"]
