"""The inputs of one forward: their signature, and the same kind of inputs at other sizes.

A derived row (deriving.py) knows only inputs that it was shown. So two forwards are of one kind where names, types,
dimensions, those of length 1, and all numbers and texts are the same. Lengths are not: they are the size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ....checkpoints.fingerprint import settings_fingerprint
from ....parallel.local.watching import PASSED_BY
from ....patches.hooks import PLAIN, attributes_of

_OPTIONS = "transformer_options"
# Entries of transformer_options that say when and for whom a forward is, and those that a forward by rows refuses.
_OF_A_STEP = frozenset(
    ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "wrappers", "callbacks", "patches", "patches_replace")
).union(("optimized_attention_override", "model_patcher", "prefetch_dynamic_vbars", "multigpu_thread_device"))
_FRAMES, _MORE_FRAMES = 3, 4
_TEXT, _LONGER_TEXT = 5, 7
_ROWS, _COLUMNS = (3, 4), (5, 7)  # in units: no two products are the same


class Size(NamedTuple):
    """Of small inputs: cells of the latents, and tokens of the text.

    Args:
        unit: of cells, of which a class may want whole ones.
        has_lists: whether what is as long as there are cells or frames has a number for each.
    """

    unit: int
    has_lists: bool
    height: int
    width: int
    frames: int
    text: int


def sizes_of(unit: int, *, has_lists: bool) -> tuple[Size, ...]:
    """A base, a wider picture, a higher one, a longer text, more frames: each differs from the base in one length."""
    (rows, more_rows), (columns, more_columns) = ([unit * each for each in of] for of in (_ROWS, _COLUMNS))
    base = Size(unit, has_lists, rows, columns, _FRAMES, _TEXT)
    shapes = base, base._replace(width=more_columns), base._replace(height=more_rows)
    return *shapes, base._replace(text=_LONGER_TEXT), base._replace(frames=_MORE_FRAMES)


class Innermost:
    """The forward of a class that its wrappers are around, or its only one."""

    def __init__(self, model: nn.Module) -> None:
        self.method = "_forward" if hasattr(type(model), "_forward") else "forward"
        self._signature = inspect.signature(getattr(model, self.method))
        kinds = self._signature.parameters.values()
        self._rest = next((each.name for each in kinds if each.kind is each.VAR_KEYWORD), "")

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By name, in the order of the signature."""
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        return given | given.pop(self._rest, {})


class ShownInputs:
    """Args: given: arguments of the class's forward by name, the latents first."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        latents = next(iter(self._given.values()))
        first = next((each for _, each in _leaves(latents) if isinstance(each, torch.Tensor)), None)
        if first is None or first.ndim < 3:
            raise ValueError("the first argument of its forward holds no latents")
        self._cells: tuple[int, ...] = tuple(first.shape[2:])
        context = self._given.get("context")
        if not isinstance(context, torch.Tensor):
            others = (each for _, each in list(_leaves(self._given))[1:] if isinstance(each, torch.Tensor))
            context = next((each for each in others if each.ndim == 3 and each.is_floating_point()), None)
        self._text = context.shape[1] if context is not None and context.ndim > 2 else 0

    @property
    def is_clip(self) -> bool:
        """Whether there are frames, more than one."""
        return len(self._cells) == 3 and self._cells[0] > 1

    @property
    def has_text(self) -> bool:
        return self._text > 1

    @property
    def signature(self) -> str:
        """Of the kind of inputs."""
        return settings_fingerprint([[path, *self._kind(leaf)] for path, leaf in _leaves(self._given)])[:24]

    @property
    def size(self) -> str:
        """Of these very inputs: all lengths and numbers, whose conditionings they are, and how far a run is."""
        found: list[Any] = [
            [path, list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf]
            for path, leaf in _leaves(self._given)
            if isinstance(leaf, (torch.Tensor, int, float))
        ]
        options = self._given.get(_OPTIONS) or {}
        now, steps = options.get("sigmas"), options.get("sample_sigmas")
        if isinstance(now, torch.Tensor) and isinstance(steps, torch.Tensor) and now.numel() and steps.numel():
            index = int((steps.to(now) > now.flatten()[0]).sum())
            found.append([3 * index // steps.numel(), index >= steps.numel() - 2])
        return settings_fingerprint([*found, list(options.get("cond_or_uncond") or ())])[:24]

    def _kind(self, leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor):
            kind = "float" if leaf.is_floating_point() else str(leaf.dtype)
            return ["tensor", kind, ["1" if length == 1 else "n" for length in leaf.shape]]
        if type(leaf) is int and leaf == self._text:
            return ["the text's length"]
        if isinstance(leaf, float):
            return ["float"]
        return ["value", leaf] if type(leaf) in PLAIN else ["object", f"{type(leaf).__module__}.{type(leaf).__name__}"]

    # ---- at other sizes

    def at(self, size: Size, seed: int = 0) -> dict[str, Any]:
        """Inputs of this kind, of random numbers as large as these. Values are those given where they are no floats."""
        generator = torch.Generator().manual_seed(seed)
        latents = next(iter(self._given))
        return {name: self._sized(value, size, generator, name == latents) for name, value in self._given.items()}

    def _sized(self, value: Any, size: Size, generator: torch.Generator, is_latents: bool, name: str = "") -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, size, generator, is_latents)
        if type(value) is int and value == self._text:
            return size.text
        if type(value) in (list, tuple):
            return type(value)(self._sized(each, size, generator, is_latents) for each in value)
        if isinstance(value, dict):
            return {
                key: each if name in PASSED_BY else self._sized(each, size, generator, is_latents, str(key))
                for key, each in value.items()
                if key != "control"
            }
        return value

    def _tensor(self, tensor: torch.Tensor, size: Size, generator: torch.Generator, is_latents: bool) -> torch.Tensor:
        lengths = list(tensor.shape)
        self._resize(lengths, size)
        for dim, length in enumerate(lengths):
            if length != tensor.shape[dim]:  # its first and last stay, as masks and texts end with something else
                along = torch.linspace(0, tensor.shape[dim] - 1, length, device=tensor.device).round().long()
                tensor = tensor.index_select(dim, along)
        if not tensor.is_floating_point() or (not is_latents and tensor.ndim < 3):
            return tensor.clone()
        numbers = tensor.float()
        scale = float(numbers.std()) or 1.0
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device) * scale
        return (noise if is_latents else numbers + noise).to(tensor.dtype)

    def _resize(self, lengths: list[int], size: Size) -> None:
        cells = self._small_cells(size)
        own, count = self._cells, len(self._cells)
        if len(lengths) >= 4 and count >= 2:  # latents, and what lies over them, also finer or coarser
            is_alike = lengths[-2] * own[-1] == lengths[-1] * own[-2]
            if is_alike and (lengths[-1] % own[-1] == 0 or own[-1] % lengths[-1] == 0):
                wide = lengths[-1]
                lengths[-2:] = [max(each * wide // own[-1], 1) for each in cells[-2:]]
                if count == 3 and len(lengths) >= 5 and lengths[-3] == own[0]:
                    lengths[-3] = cells[0]
                return
        if len(lengths) == 3 and count == 1 and lengths[-1] == own[-1]:
            lengths[-1] = cells[-1]
            return
        for dim in range(1, len(lengths)):
            if lengths[dim] == math.prod(own) > 1 and size.has_lists:  # a number for each token
                lengths[dim] = math.prod(cells)
            elif self.is_clip and len(lengths) == 2 and lengths[dim] == own[0] and size.has_lists:
                lengths[dim] = cells[0]
            elif lengths[dim] == self._text > 1:
                lengths[dim] = size.text

    def _small_cells(self, size: Size) -> tuple[int, ...]:
        if len(self._cells) == 1:
            return (size.height * size.width,)
        frames = (size.frames if self.is_clip else 1,) if len(self._cells) == 3 else ()
        return (*frames, size.height, size.width)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        is_options = path.endswith(_OPTIONS)
        for name in sorted(value, key=str):
            if not (is_options and name in _OF_A_STEP):
                yield from _leaves(value[name], f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")
    elif not isinstance(value, torch.Tensor) and (names := attributes_of(value)):
        for name in names:
            yield from _leaves(getattr(value, name, None), f"{path}.{name}")
    else:
        yield path.lstrip("."), value
