"""Whether a ComfyUI has what the rows say: asked of the one this process runs in, or of one that lies on the disk.

A changed part is refused by name, for a call that still works may mean something else now. Newer parameters that we
leave out are no change, unless ComfyUI passes them to a method of ours.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .rows import COMMAND, NODES, ROWS, TESTED_VERSION, Row

_log = logging.getLogger(__name__)

_SHOWN = 3
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Host(Protocol):
    """A ComfyUI to ask; paths are dotted names. A running one is in living.py, one on the disk in written.py."""

    version: str
    is_written: bool

    def is_pending(self, path: str) -> bool:
        """Whether its module is there and has not been imported yet."""

    def has(self, path: str) -> bool:
        """Whether the name is there, or a method of its class mentions it as an attribute."""

    def signature(self, path: str) -> inspect.Signature | None:
        """How the function or class is called, without self; None where that cannot be told."""

    def strings(self, path: str) -> frozenset[str] | None:
        """The strings and names in the code of a function or module; None where that cannot be told."""

    def value(self, path: str) -> Any:
        """A constant; None where that cannot be told."""


@dataclass(frozen=True)
class Fault:
    """A row that a host does not keep, and what it does instead."""

    row: Row
    text: str


def find_faults(host: Host, rows: Iterable[Row] = ROWS) -> list[Fault]:
    """What has changed in a host, in the order of the rows; left out is what it cannot be asked, or not yet."""
    asked = (row for row in rows if host.is_written or not row.is_written)
    judged = ((row, _judge_safely(host, row)) for row in asked)
    return [Fault(row, text) for row, text in judged if text]


def check_parts(host: Host, parts: Collection[str]) -> None:
    """Raises: RuntimeError if something has changed that these parts of the pack rely on."""
    faults = find_faults(host, [row for row in ROWS if row.part in parts])
    if faults:
        raise RuntimeError(_refusal(host.version, list(dict.fromkeys(fault.text for fault in faults))))


def pending_nodes(host: Host) -> set[str]:
    """Ids of nodes that cannot be judged yet."""
    parts = {row.part for row in ROWS if _is_pending(host, row)}
    return {node for node, needed in NODES.items() if not parts.isdisjoint(needed)}


def refusals(version: str, faults: Iterable[Fault]) -> dict[str, str]:
    """Why each node does not run on this host, by node id; a node that runs is left out."""
    found = list(faults)
    told = {}
    for node, parts in {**NODES, COMMAND: ("server",)}.items():
        texts = list(dict.fromkeys(fault.text for fault in found if fault.row.part in parts))
        if texts:
            told[node] = _refusal(version, texts)
    return told


def _refusal(version: str, texts: list[str]) -> str:
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return (
        f"ComfyUI {version} changed what DeviceBridge relies on here: {'; '.join(texts[:_SHOWN])}{more}. Update "
        f"DeviceBridge, or use ComfyUI {TESTED_VERSION}, with which this version of it was tested"
    )


# ---- one row


def _judge_safely(host: Host, row: Row) -> str:
    try:
        return "" if host.is_pending(row.path) else _judge(host, row)
    except Exception as error:  # other packs put things there that fail when they are looked at
        _log.debug("%s cannot be asked about (%s: %s)", row.path, type(error).__name__, error)
        return ""


def _is_pending(host: Host, row: Row) -> bool:
    try:
        return host.is_pending(row.path)
    except Exception:  # another pack's finder of modules; the node asks again when it is run
        return True


def _judge(host: Host, row: Row) -> str:
    if not host.has(row.path):
        return "" if row.is_optional else f"{row.path} is gone"
    if row.use == "says":
        strings = host.strings(row.path)
        lost = [] if strings is None else [word for word in row.form if word not in strings]
        return f"{row.path} no longer knows {', '.join(map(repr, lost))}" if lost else ""
    if row.use == "is":
        value = host.value(row.path)
        return "" if value is None or value == row.form[0] else f"{row.path} is {value!r}, no longer {row.form[0]!r}"
    signature = None if row.use == "has" else host.signature(row.path)
    if signature is None:
        return ""
    return next({"call": _call_faults, "override": _override_faults, "wrap": _wrap_faults}[row.use](row, signature), "")


def _call_faults(row: Row, signature: inspect.Signature) -> Iterator[str]:
    """What keeps our call from meaning what it did."""
    parameters = list(signature.parameters.values())
    by_place = [each.name for each in parameters if each.kind in _POSITIONAL]
    ours = [name for name in row.form if not name.endswith("=") and name != "..."]
    named = [name.rstrip("=") for name in row.form if name.endswith("=")]
    yield from _misplaced(row, by_place, ours, any(each.kind is _MANY[0] for each in parameters))
    if not any(each.kind is _MANY[1] for each in parameters):
        yield from (f"{row.path} no longer takes {name!r}" for name in named if name not in signature.parameters)
    given = {*ours, *named}
    for each in parameters:
        if each.default is each.empty and each.kind not in _MANY and each.name not in given and "..." not in row.form:
            yield f"{row.path} now needs {each.name!r}"


def _override_faults(row: Row, signature: inspect.Signature) -> Iterator[str]:
    """What ComfyUI may pass that our method does not take."""
    by_place = [each.name for each in signature.parameters.values() if each.kind not in _MANY]
    ours = [name for name in row.form if name != "..."]
    takes_more = "..." in row.form
    for place, name in enumerate(by_place):
        if place >= len(ours) and not takes_more:
            yield f"{row.path} now also takes {name!r}"
        elif place < len(ours) and ours[place] != name:
            yield f"{row.path} takes {name!r} where {ours[place]!r} was"


def _wrap_faults(row: Row, signature: inspect.Signature) -> Iterator[str]:
    """What the function that ours stands around is handed now."""
    by_place = [each.name for each in signature.parameters.values() if each.kind not in _MANY]
    yield from _misplaced(row, by_place, [name for name in row.form if name != "..."], False)
    yield from _override_faults(row, signature)


def _misplaced(row: Row, by_place: list[str], ours: list[str], takes_any: bool) -> Iterator[str]:
    for place, name in enumerate(ours):
        if place >= len(by_place):
            if not takes_any:
                yield f"{row.path} no longer takes {name!r}"
        elif by_place[place] != name:
            yield f"{row.path} takes {by_place[place]!r} where {name!r} was"
