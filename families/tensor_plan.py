"""Tensor parallelism as data, after Megatron-LM (https://arxiv.org/abs/1909.08053): attention by heads, the MLP by
hidden features. A column-parallel linear has its output features divided, and the row-parallel one behind it its input
features; every device adds up its partial sums. A packed linear, such as [q | k | v], is divided part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any, Literal

# What the divided dimension of a layer counts: all heads, the heads of keys and values where those are fewer, or
# features that may be cut anywhere.
Unit = Literal["heads", "kv_heads", "features"]
# "gathered": as "column", and the outputs of all devices are joined behind it; for layers whose output is small.
Direction = Literal["column", "row", "gathered"]

_ALIGNMENTS = (128, 64, 32, 16, 8, 1)  # features: cut at the largest multiple that leaves every device some


@dataclass(frozen=True)
class BlockList:
    """One list of transformer blocks. Its patterns are of fnmatch and relative to the block."""

    name: str  # fqn of the ModuleList in the diffusers model
    text_modules: tuple[str, ...] = ()  # of the linears that run over text tokens only
    is_joint: bool = False  # whether the other linears run over text and image tokens together, or image tokens only
    sample_modules: tuple[str, ...] = ()  # of the linears that see one vector per sample, such as modulation
    # Of the linears that a choice sends some of the tokens through -> their share of the tokens.
    routed_modules: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Divided:
    """The linears of a block whose names match a pattern, and how they are divided."""

    linear: str  # pattern of the name inside the block, such as "*_attn.qkv"
    by: Direction
    parts: tuple[Unit, ...]  # what the divided dimension consists of, in order
    # Name of the "row" linear that takes the features of this one; "features" in parts then stands for as many parts as
    # fit, two where a gate and what it gates are packed. "" if each is one part.
    into: str = ""
    # Of "row": name of the module inside the block whose output is summed, where the block may compute the linear
    # without calling it, or where the outputs of several such linears are added up. "" for the linear itself.
    sum_after: str = ""
    repeats: bool = False  # whether builds pack these parts more or less often: as often as they fit


@dataclass(frozen=True)
class TensorPlan:
    """How one kind of block is divided. Names and patterns count from the block."""

    linears: tuple[Divided, ...]  # every other parameter is whole on each device. The first match counts
    num_heads: str = "attn.heads"  # the attribute with the number of heads; others of its name in the block have it too
    width: str = ""  # the attribute with heads times features per head; "" for what the first linear behind heads takes
    # Pattern of any further attribute that holds a number -> what it counts; each device gets its share of the number.
    # A name that is no unit is that of a linear: the number is that of all its features that are of no head.
    attributes: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[str, ...] = ()  # RMS norms over all heads: their weight is divided, their mean square summed
    num_kv_heads: str = ""  # the attribute with the number of heads of keys and values; "" if there are as many
    block: str = "*"  # pattern of the name of the block's class
    # Pattern of a module -> keyword arguments with tensors of all heads, and their dimension; each device gets its own.
    arguments: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Modules that choose by what they compute, as which experts a token goes to. All devices take the first one's
    # choice: theirs could differ by a last bit.
    decided: tuple[str, ...] = ()

    def counted(self, path: str) -> str | None:
        """What the number in an attribute of the block counts; None for what every device has as it is."""
        named = next((what for pattern, what in self.attributes.items() if fnmatchcase(path, pattern)), None)
        *_, leaf = path.split(".")
        is_of_heads, is_of_kv_heads = (leaf == each.split(".")[-1] for each in (self.num_heads, self.num_kv_heads))
        return named or ("heads" if is_of_heads else "kv_heads" if is_of_kv_heads else None)

    def find(self, name: str) -> Divided | None:
        """How the linear of this name is divided; None if it is whole."""
        return next((each for each in self.linears if fnmatchcase(name, each.linear)), None)

    def is_norm(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.norms)

    def is_decided(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.decided)

    def summed_in(self, name: str) -> str:
        """The module whose output is summed: behind a "row" linear, or around any other layer; "" if there is none."""
        own = self.find(name)
        if own is not None and own.by == "row":
            return own.sum_after
        around = (each.sum_after for each in self.linears if each.sum_after)
        return next((each for each in around if name.startswith(f"{each}.")), "")


HEADS: tuple[Unit, ...] = ("heads",)
KV_HEADS: tuple[Unit, ...] = ("kv_heads",)
QKV: tuple[Unit, ...] = ("heads", "heads", "heads")
FEATURES: tuple[Unit, ...] = ("features",)


# How linears are divided whose patterns stand behind one of these words in `plan`.
_WAYS: Mapping[str, tuple[Direction, tuple[Unit, ...]]] = {
    "heads": ("column", HEADS),
    "kv_heads": ("column", KV_HEADS),
    "qkv": ("column", QKV),
    "features": ("column", FEATURES),
    "back": ("row", HEADS),
    "features_back": ("row", FEATURES),
    "gathered": ("gathered", FEATURES),
}


def plan(*first: Divided, mlp: str = "", **said: Any) -> tuple[TensorPlan, ...]:
    """A plan for one kind of block, with its linears as patterns between blanks: "name" or "name/sum_after".

    Args:
        first: linears that are none of _WAYS.
        mlp: "first>second", where the first may pack a gate beside what it gates, or "gate,up>down/sum_after".
        said: patterns by words of _WAYS, and other arguments of TensorPlan.
    """
    found = list(first)
    for way in [each for each in said if each in _WAYS]:
        for linear, _, after in (item.partition("/") for item in said.pop(way).split()):
            found.append(Divided(linear, *_WAYS[way], sum_after=after))
    for item in mlp.split():
        names, _, after = item.partition("/")
        ahead, _, second = names.partition(">")
        found += [Divided(each, "column", FEATURES, into=second) for each in ahead.split(",")]
        found.append(Divided(second, "row", FEATURES, sum_after=after))
    return (TensorPlan(tuple(found), **said),)


Range = tuple[int, int]  # first, behind the last


@dataclass(frozen=True)
class Shares:
    """How many heads, and heads of keys and values, each device computes. width: features of all heads together."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    width: int

    def ranges(self, unit: Unit, size: int) -> list[Range]:
        """The range of each device in a part of this size. Raises: ValueError if the part cannot be cut so."""
        if unit == "features":
            total, least = sum(self.heads), min(self.heads)
            step = next((step for step in _ALIGNMENTS if size % step == 0 and size // step * least >= total), 0)
            if not step:
                raise ValueError(f"{size} features cannot be divided among {len(self.heads)} devices")
            # Halves are rounded up, all of them: to the even number, a device between two halves would get nothing.
            ends = accumulate(self.heads, initial=0)
            return list(pairwise((2 * (size // step) * end + total) // (2 * total) * step for end in ends))
        counts = self.heads if unit == "heads" else self.kv_heads
        if size % sum(counts):
            raise ValueError(f"{size} features are no multiple of {sum(counts)} {unit}")
        each = size // sum(counts)
        return list(pairwise(accumulate((count * each for count in counts), initial=0)))

    def count(self, unit: Unit, number: int, rank: int) -> int:
        """One device's share of a number that counts this."""
        first, last = self.ranges(unit, number)[rank]
        return last - first

    def without_heads(self, parts: Sequence[Unit], size: int) -> int:
        """How much of such a dimension belongs to no head."""
        return sum(length for unit, length in zip(parts, self._lengths(parts, size), strict=True) if unit == "features")

    def repeated(self, parts: tuple[Unit, ...], size: int) -> tuple[Unit, ...]:
        """These parts as often as they fit into a dimension of this size."""
        return parts * (size // sum(self._of_heads(unit) for unit in parts))

    def slices(self, parts: Sequence[Unit], size: int, rank: int) -> list[Range]:
        """One device's ranges in a dimension of these parts. Raises: ValueError if it has no such parts."""
        found: list[Range] = []
        start = 0
        for unit, length in zip(parts, self._lengths(parts, size), strict=True):
            first, last = self.ranges(unit, length)[rank]
            if found and found[-1][1] == start + first:  # neighbours are made one
                found[-1] = (found[-1][0], start + last)
            else:
                found.append((start + first, start + last))
            start += length
        return found

    def _lengths(self, parts: Sequence[Unit], size: int) -> list[int]:
        if len(parts) == 1:  # also of heads of another width, as an audio stream's, or one number per head
            return [size]
        others = parts.count("features")
        rest = size - sum(self._of_heads(unit) for unit in parts if unit != "features")
        if rest < 0 or (rest and not others) or (others and rest % others):
            raise ValueError(f"a dimension of {size} cannot consist of {', '.join(parts)}")
        return [rest // others if unit == "features" else self._of_heads(unit) for unit in parts]

    def _of_heads(self, unit: Unit) -> int:
        """Features of all heads of a kind."""
        return self.width // sum(self.heads) * sum(self.heads if unit == "heads" else self.kv_heads)


def share_heads(num_heads: int, num_kv_heads: int, width: int, num_devices: int) -> Shares:
    """Share heads out evenly, in whole groups of keys and values. Raises: ValueError for more devices than groups."""
    groups = num_kv_heads or num_heads
    if num_heads % groups or groups < num_devices:
        raise ValueError(
            f"{num_heads} heads ({groups} of keys and values) cannot be divided among {num_devices} devices; "
            f"{groups} devices at most"
        )
    each, rest = divmod(groups, num_devices)  # the rest goes to the last devices: the first has all else of the model
    counts = (each,) * (num_devices - rest) + (each + 1,) * rest
    return Shares(tuple(count * (num_heads // groups) for count in counts), counts, width)
