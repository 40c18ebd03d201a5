"""Inputs of nodes that are settings of a job: made from the config's fields, and read back into its sections."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from ..config.job import job_keys
from ..config.ranges import problems_of
from ..config.setting import Key
from .host import io

_log = logging.getLogger(__name__)
T = TypeVar("T")
AUTO = "auto"
LATER: dict[str, Any] = {"optional": True, "advanced": True}  # of a socket that workflows of before lack, and few need
_EMPTY_WORDS = {AUTO: "auto", "": "Empty", 0: "0", -1: "-1"}  # what the socket shows for a setting's empty value
_KEY = re.compile(r"\b[a-z]+(?:\.[a-z_]+)+\b")
_Read = Callable[[Any], Any]
_KINDS: dict[type, Any] = {bool: io.Boolean, int: io.Int, float: io.Float}
_KIND_NAMES: dict[Callable[[str], object], str] = {int: "whole number", float: "number"}


class Socket:
    """A node's input for one setting ("section.key").
    note: what only this node has to say; None where all of it is the node's own text. read: makes the setting's value,
    where the rules below do not. example: of a line, where there may be several.
    released: options that differ from what the setting says."""

    def __init__(
        self, id: str, path: str, note: str | None = "", read: _Read | None = None, example: str = "", **released: Any
    ) -> None:
        self.id, self.key = id, job_keys()[path]
        self._note, self._read = note, read
        self._kind, self._options = _options_of(self.key)
        self._options |= {"multiline": True, "placeholder": f"{id}, such as: {example}"} if example else {}
        self._options |= released
        if "options" in released:
            self._kind = io.Combo

    def make_input(self, ids: Mapping[str, str] = {}) -> io.Input:
        """ids: of the node's sockets by their settings' keys, which its texts may name."""
        default = self._options["default"]
        words = str(default) if str(default).startswith("[") else _EMPTY_WORDS.get(default, "")
        text = _KEY.sub(lambda found: ids.get(found[0], found[0]), self.key.text_where(words))
        tooltip = None if self._note is None else f"{text} {self._note}".strip()
        return self._kind.Input(self.id, tooltip=tooltip, **self._options)

    def read(self, given: Mapping[str, Any]) -> Any:
        """The setting's value; a workflow from before the socket has the default. Raises: as read_list."""
        key, shown = self.key, self._options["default"]
        value = given.get(self.id, shown)
        if self._read is not None:
            return self._read(value)
        if get_origin(key.kind) is tuple:
            return read_list(read_auto(value), get_args(key.kind)[0], self.id)
        if key.default is None and value == shown:
            return None
        if not isinstance(value, str):
            return value
        value = read_auto(value) if shown == AUTO and AUTO not in key.choices else value.strip()
        today, line = key.in_todays_words(value)
        if value in key.gone:
            _log.warning("%s", line)
        return next((each for each in key.choices if str(each) == today), today)


def _options_of(key: Key) -> tuple[Any, dict[str, Any]]:
    """Type of the socket and its options, as far as the setting says them."""
    default = AUTO if key.default == "" and key.has_empty else key.default
    if get_origin(key.kind) is Literal:
        return io.Combo, {"options": [str(each) or AUTO for each in key.choices], "default": str(default)}
    kind = get_args(key.kind)[0] if key.default is None else key.kind  # float, of "float | None"
    if kind not in _KINDS:
        return io.String, {"default": default if isinstance(default, str) else ""}
    options = {"default": default}
    if key.limits:
        options |= {"min": 0 if key.limits.or_zero else key.limits.low, "max": key.limits.high}
    return _KINDS[kind], options


SHOWN: dict[str, str] = {}  # "steps of Train LoRA Across GPUs" by the setting's key, for messages


def make_inputs(entries: Iterable[Socket | io.Input], node: str = "") -> list[io.Input]:
    """Inputs of a node; where it is named, messages send users to its sockets."""
    entries = list(entries)
    ids = {each.key.path: each.id for each in entries if isinstance(each, Socket)}
    if node:
        SHOWN.update({each.key.path: f"{each.id} of {node}" for each in entries if isinstance(each, Socket)})
    return [each.make_input(ids) if isinstance(each, Socket) else each for each in entries]


def read_section(kind: type[T], entries: Sequence[Socket | io.Input], given: Mapping[str, Any], **more: Any) -> T:
    """One section of a job config, of a node's sockets and their values; more: settings that the node decides.
    Raises: ValueError with one line per setting that the section refuses."""
    own = [each for each in entries if isinstance(each, Socket) and each.key.owner is kind]
    sockets = {each.key.name: each for each in own if each.key.name not in more}
    try:
        return kind(**{name: socket.read(given) for name, socket in sockets.items()}, **more)
    except ValidationError as error:
        names = {name: socket.id for name, socket in sockets.items()}
        lines = []
        for problem in problems_of(error):
            place = ".".join(names.get(part, str(part)) for part in problem["loc"])
            what = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{place} {problem['input']!r}: {what}" if place else what)
        raise ValueError("\n".join(lines)) from error


def read_sections(
    entries: Sequence[Socket | io.Input], given: Mapping[str, Any], **more: Mapping[str, Any]
) -> dict[str, Any]:
    """Every section that a node has sockets of, by its name; more: by section, settings that the node decides."""
    owners = {each.key.section: each.key.owner for each in entries if isinstance(each, Socket)}
    return {name: read_section(owner, entries, given, **more.get(name, {})) for name, owner in owners.items()}


# ---- what is typed into text fields


def read_auto(text: str) -> str:
    """The text, or "" for "auto" and for an empty field: what the config calls its default."""
    text = text.strip()
    return "" if text.lower() == AUTO else text


def read_list(text: str, kind: Callable[[str], T], what: str) -> tuple[T, ...]:
    """Values between commas or on lines of their own. Raises: ValueError for a part that is none."""
    values = []
    for part in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        try:
            values.append(kind(part))
        except ValueError as error:
            raise ValueError(f"{what}: {part!r} in {text!r} is no {_KIND_NAMES.get(kind, 'value')}") from error
    return tuple(values)


def read_lines(text: str) -> tuple[str, ...]:
    """Every line that is not blank: text with commas in it."""
    return tuple(filter(None, (line.strip() for line in text.splitlines())))


def read_number_or_name(text: str) -> float | str:
    """A number where the text is one, else the text; "" for "auto"."""
    text = read_auto(text)
    try:
        return float(text)
    except ValueError:
        return text
