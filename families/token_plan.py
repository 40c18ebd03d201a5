"""Sequence parallelism as data: every rank has whole weights and runs the class's own forward on its share of the rows
(tokens). Attention gathers the keys and values of all ranks, in one card's order; all else is computed row by row.

An axis is one kind of row: "img", "txt". `txt+img` is an axis of two segments, of which each is shared out, so that a
rank has a part of both. A segment "m?" may be missing.

Plans are written as text: "img=img@1 pe=txt+img@2" says that the argument `img` has the rows of the axis img along
dimension 1, and `pe` those of txt, then img along dimension 2. A path may go on: "x.0", "v_timestep.data".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where rows are: a path (argument, then indices, keys or attributes), an axis, and a dimension."""

    path: tuple[str, ...]
    axis: str
    dim: int


@functools.cache
def places(text: str) -> tuple[Place, ...]:
    """ "x.0=txt+img@2" as (Place(("x", "0"), "txt+img", 2),)."""
    found = []
    for item in text.split():
        path, _, rest = item.partition("=")
        axis, _, dim = rest.partition("@")
        found.append(Place(tuple(filter(None, path.split("."))), axis, int(dim or 0)))
    return tuple(found)


@functools.cache
def segments(axis: str) -> tuple[str, ...]:
    """The segments of an axis, in order."""
    return tuple(axis.replace("?", "").split("+"))


@dataclass(frozen=True)
class BlockRows:
    """One list of blocks."""

    rows: str  # arguments with rows. A length is the axis's (it is cut then), the rank's share, or 1; else refused
    # By submodule of the block the axis of the keys that its attention reads: "attn1=x audio_attn1=a"; "=x" is the
    # block itself. An attention of a module that is not named keeps its keys, as text that is attended to.
    # "=txt+img/img" has an axis for the first attention, and one for all later ones.
    keys: str
    # Arguments that are numbers of rows: a number, or (first, last, ...) tuples. "x=~txt+img" where the forward has
    # counted the first segment after it was cut.
    counts: str = ""
    # What else an argument becomes: (rank's rows, its value) -> the rank's value.
    changes: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # arguments that must be None, such as keys of earlier forwards
    out: str = ""  # as of TokenPlan, where the last block of a build is of this list and returns something else


@dataclass(frozen=True)
class TokenPlan:
    """How a class runs on several ranks by its rows."""

    blocks: Mapping[str, BlockRows]  # by the name of a list of blocks
    out: str = "=x@1"  # of the last block's output: where rows are gathered. "" if tail says where
    tail: str = ""  # modules behind the blocks whose first argument is gathered before they run
    own: tuple[str, ...] = ()  # segments of which it keeps the rank's rows: the forward slices it by a cut tensor
    whole: tuple[str, ...] = ()  # segments of which every rank has all rows
    between: str = ""  # modules that run between blocks and read all rows
    control: str = ""  # the axis of a ControlNet's residuals
    # "e x": shares of x end where a group of its rows ends, each of which has one row of e; "a:16 x" has 16.
    aligned: str = ""
    cuts_masks: bool = False  # whether masks have the columns of the rank's own keys, which are gathered
    # Of attention that makes a mask by the length it sees: (rank's rows, module, mask, axis) -> mask.
    makes_mask: Callable[[Any, Any, Any, str], Any] | None = None
    # Whether blocks hand transformer_options on to attention. Else the names by which the class's modules call
    # attention are led to us while a forward runs.
    passes_options: bool = True
    # An argument of the first block that the class's forward keeps and never reads again. Outside of trainings it gets
    # this rank's rows, so that the memory of all rows is free while that block is computed.
    released: str = ""
    one_frame: TokenPlan | None = None  # the plan of a clip of one frame
