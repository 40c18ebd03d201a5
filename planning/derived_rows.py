"""Rows of tokens that were derived and proved on this machine, kept beside the speeds of its cards: a file per class,
as its source and ComfyUI's version have it, and structure; an entry per signature of inputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from ..families.token_plan import TokenPlan
from .cards import Kept

_VERSION = 3  # of the proof; raise it when more has to be proved
_NAMES = re.compile(r'[\w.=@+?/~:" {}\[\],-]{0,40000}')  # and paths of arguments, as JSON
Row = TypeVar("Row", TokenPlan, tuple[str, ...])
_STRICT = pydantic.ConfigDict(extra="forbid")


def _of_names(row: Row) -> Row:
    if not _NAMES.fullmatch(json.dumps(asdict(row) if isinstance(row, TokenPlan) else row)):
        raise ValueError("a row holds something else than names")
    return row


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class Verdict:
    """What became of one signature of inputs: a row, or why not. has_gradients: whether these were compared, too."""

    row: Annotated[TokenPlan, pydantic.AfterValidator(_of_names)] | None
    refused: Annotated[str, pydantic.Field(max_length=4000)] = ""
    has_gradients: bool = False


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class Blocks:
    """What became of a training with one kind of inputs. lists: of blocks, in the order in which a forward calls them.
    tail: modules that are called behind the last block. refused: why its gradients are not trusted; "" if proved."""

    lists: Annotated[tuple[str, ...], pydantic.AfterValidator(_of_names)]
    tail: Annotated[tuple[str, ...], pydantic.AfterValidator(_of_names)] = ()
    refused: Annotated[str, pydantic.Field(max_length=4000)] = ""


class DerivedRows:
    """The files of one class. key: everything that its rows depend on but the inputs. trained: by kind of inputs."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        self._kept = Kept("rows-", {**key, "version": _VERSION}, dict[str, Verdict])
        self.trained = Kept("trained-", {**key, "version": _VERSION}, dict[str, Blocks])

    @property
    def path(self) -> Path:
        return self._kept.path

    def verdicts(self) -> dict[str, Verdict]:
        """By signature of inputs; {} where nothing is kept, or nothing that can be used."""
        return self._kept.read() or {}

    def keep(self, signature: str, verdict: Verdict) -> None:
        """Beside what is there for other inputs. What was refused stays so, and so do compared gradients of a row."""
        there = self.verdicts()
        if (before := there.get(signature)) is not None:
            has_gradients = verdict.has_gradients or (before.row == verdict.row and before.has_gradients)
            verdict = before if before.row is None else replace(verdict, has_gradients=has_gradients)
        if verdict != before:
            self._kept.write({**there, signature: verdict})
