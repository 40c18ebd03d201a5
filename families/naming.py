"""The mechanics of a family's rename table (Rename), between the names of the original checkpoint and diffusers': names
and ranges of rows. Loading cuts and stacks the tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .spec import Rename


@dataclass(frozen=True)
class Stack:
    """One original name and what it stands for."""

    original: str
    members: tuple[str, ...]  # diffusers names whose tensors lie below each other in it, in this order; mostly one
    proportions: tuple[int, ...]  # relative heights of the members
    swap_halves: bool  # dim 0 is [a | b] in one layout and [b | a] in the other

    def rows(self, num_rows: int) -> dict[str, tuple[int, int]]:
        """Start and end row of every member in so many rows. Raises: ValueError if these cannot be cut so."""
        unit, rest = divmod(num_rows, sum(self.proportions))
        if rest:
            raise ValueError(
                f"{self.original} has {num_rows} rows, which cannot be cut {':'.join(map(str, self.proportions))}"
            )
        ends = [unit * height for height in accumulate(self.proportions)]
        return dict(zip(self.members, zip([0, *ends], ends, strict=False), strict=True))


def find_by_diffusers(name: str, renames: Sequence[Rename]) -> Stack | None:
    """The stack a diffusers module or tensor belongs to; None if no row names it."""
    return _find(name, ((row, row.diffusers) for row in renames))


def find_by_original(name: str, renames: Sequence[Rename]) -> Stack | None:
    """The stack an original module or tensor is, under its main spelling; None if no row names it."""
    return _find(name, ((row, (row.original, *row.aliases)) for row in renames))


def any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """Matches what one of these patterns of a rename table names; for many names, of which most are unknown."""
    return re.compile("|".join(_matcher(pattern).pattern for pattern in patterns))


def originals_of(names: Iterable[str], renames: Sequence[Rename]) -> dict[str, Stack]:
    """The stacks that hold these diffusers tensors or modules, by original name, in order of first appearance. A family
    without a table has one set of names. Raises: ValueError naming those no row names."""
    if not renames:
        return {name: Stack(name, (name,), (1,), swap_halves=False) for name in names}
    stacks: dict[str, Stack] = {}
    unknown: list[str] = []
    for name in names:
        stack = find_by_diffusers(name, renames)
        if stack is None:
            unknown.append(name)
        else:
            stacks.setdefault(stack.original, stack)
    if unknown:
        raise ValueError(f"no row of the rename table names {', '.join(unknown[:3])} ({len(unknown)} names in all)")
    return stacks


def _find(name: str, rows: Iterable[tuple[Rename, Sequence[str]]]) -> Stack | None:
    """By the first row one of whose patterns names it."""
    for row, patterns in rows:
        if match := next(filter(None, (_matcher(pattern).match(name) for pattern in patterns)), None):
            *numbers, below = match.groups()
            members = tuple(pattern.format(*numbers) + below for pattern in row.diffusers)
            original = row.original.format(*numbers) + below
            return Stack(original, members, row.proportions or (1,) * len(members), row.swap_halves)
    return None


@functools.cache
def _matcher(pattern: str) -> re.Pattern[str]:
    """Matches the name itself and everything below it: numbers as groups, then what follows ("" or ".weight")."""
    return re.compile(re.escape(pattern).replace(r"\{\}", r"(\d+)") + r"(|\..+)\Z")
