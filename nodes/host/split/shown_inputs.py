"""The inputs of one forward: their signature, and the same kind of inputs at other sizes.

Of one kind are names, types, dimensions, those of length 1, and all numbers and texts; lengths are the size.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ....checkpoints.fingerprint import settings_fingerprint
from ....parallel.local.deriving import PASSED_BY, leaves
from ....parallel.local.tokens import RowsError
from ....patches.hooks import PLAIN, map_tensors, tensors_reached

OPTIONS = "transformer_options"
OVERRIDE = "optimized_attention_override"  # of transformer_options
FUNCTIONS = frozenset(("wrappers", "callbacks", "patches", "patches_replace", "model_patcher", OVERRIDE))  # no tensors
# Entries of transformer_options that say when and for whom a forward is, and those that a forward by rows refuses.
_OF_A_STEP = FUNCTIONS.union(
    ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas", "prefetch_dynamic_vbars", "multigpu_thread_device")
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_FRAMES, _MORE_FRAMES = 3, 4
_TEXT, _LONGER_TEXT = 5, 7
_ROWS, _COLUMNS = (3, 4), (5, 7)  # in units: no two products are the same


class Size(NamedTuple):
    """Of small inputs: cells of the latents, and tokens of the text. has_lists: whether what is as long as there are
    cells or frames has a number for each. level: of noise: a class may compute something else at a low one."""

    has_lists: bool
    height: int
    width: int
    frames: int = _FRAMES
    text: int = _TEXT
    level: float = 1.0


def innermost_of(cls: type[nn.Module]) -> str:
    """The method of a class that its wrappers are around, or its only one."""
    return "_forward" if hasattr(cls, "_forward") else "forward"


class Innermost:
    """That method of a model, and its arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.method = innermost_of(type(model))
        self._signature = inspect.signature(getattr(model, self.method))
        kinds = self._signature.parameters.values()
        self._rest = next((each.name for each in kinds if each.kind is each.VAR_KEYWORD), "")

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By name, in the order of the signature."""
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        return given | given.pop(self._rest, {})


class ShownInputs:
    """Args: given: arguments of the class's forward by name, the latents first. Raises: RowsError where none are."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        shown, options = self._given, self._given.get(OPTIONS)
        if isinstance(options, Mapping):
            shown = {**shown, OPTIONS: {name: each for name, each in options.items() if name not in _OF_A_STEP}}
        self._leaves = list(leaves(shown))
        latents = tensors_reached(next(iter(given.values())))
        if not latents or latents[0].ndim < 3:
            raise RowsError("the first argument of its forward holds no latents")
        self._cells: tuple[int, ...] = tuple(latents[0].shape[2:])
        found = [each for _, each in self._leaves if isinstance(each, torch.Tensor)]
        states = [given.get("context"), *(each for each in found[1:] if each.ndim == 3 and each.is_floating_point())]
        context = next((each for each in states if isinstance(each, torch.Tensor)), torch.zeros(0))
        self._text = context.shape[1] if context.ndim > 2 else 0
        self._is_clip = len(self._cells) == 3 and self._cells[0] > 1  # frames, more than one

    @property
    def signature(self) -> str:
        """Of the kind of inputs, for tokens."""
        kinds = ([path, *self._kind(path, leaf)] for path, leaf in self._leaves)
        return settings_fingerprint(sorted(kinds, key=str))[:24]

    @property
    def kind(self) -> str:
        """The same for a forward of whole rows: of what is counted, such as tokens of a text, any number."""
        kinds = ([path, *(("n",) if type(leaf) is int else self._kind(path, leaf))] for path, leaf in self._leaves)
        return settings_fingerprint(sorted(kinds, key=str))[:24]

    @property
    def size(self) -> str:
        """Of these very inputs: all lengths and numbers, whose conditionings they are, and how far a run is."""
        numbers = [(path, each) for path, each in self._leaves if isinstance(each, (torch.Tensor, int, float))]
        found = [[path, list(each.shape) if isinstance(each, torch.Tensor) else each] for path, each in numbers]
        options = self._given.get(OPTIONS) or {}
        now, steps, far = options.get("sigmas"), options.get("sample_sigmas"), list[Any]()
        if isinstance(now, torch.Tensor) and isinstance(steps, torch.Tensor) and now.numel() and steps.numel():
            index = int((steps.to(now) > now.flatten()[0]).sum())
            far = [3 * index // steps.numel(), index >= steps.numel() - 2]
        return settings_fingerprint([sorted(found, key=str), far, list(options.get("cond_or_uncond") or ())])[:24]

    def _kind(self, path: str, leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor):
            kind = "float" if leaf.is_floating_point() else str(leaf.dtype)
            return ["tensor", kind, ["1" if length == 1 else "n" for length in leaf.shape]]
        if self._is_length(path, leaf):
            return ["the text's length"]
        if isinstance(leaf, float):
            return ["float", leaf > 0, leaf < 0]  # a class may leave out what has no strength
        if type(leaf) in PLAIN:
            return ["value", leaf]
        return ["object", f"{type(leaf).__module__}.{type(leaf).__name__}", _ADDRESS.sub("", repr(leaf))]

    def _is_length(self, name: str, value: Any) -> bool:
        return name in self._given and type(value) is int and value == self._text > 1

    def small(self, unit: int, *, has_lists: bool) -> dict[str, dict[str, Any]]:
        """Inputs of this kind, of random numbers as large as these: a base, and some that differ in one length each.
        Values are those given where they are no floats. The wider and the higher one are at lower levels of noise."""
        (rows, more_rows), (columns, more_columns) = ([unit * each for each in of] for of in (_ROWS, _COLUMNS))
        base = Size(has_lists, rows, columns)
        sizes = {"a small picture": base, "a wider one": base._replace(width=more_columns, level=0.5)}
        sizes["a higher one"] = base._replace(height=more_rows, level=0.0625)
        sizes |= {"a longer text": base._replace(text=_LONGER_TEXT)} if self._text > 1 else {}
        sizes |= {"more frames": base._replace(frames=_MORE_FRAMES)} if self._is_clip else {}
        found, latents = dict[str, dict[str, Any]](), next(iter(self._given))
        for what, size in sizes.items():
            sized, found[what] = partial(self._tensor, size, torch.Generator().manual_seed(0)), {}
            for name, value in self._given.items():
                made = map_tensors(value, partial(sized, name == latents), FUNCTIONS | PASSED_BY)
                found[what][name] = size.text if self._is_length(name, value) else made
        return found

    def _tensor(self, size: Size, generator: torch.Generator, is_latents: bool, tensor: torch.Tensor) -> torch.Tensor:
        lengths = list(tensor.shape)
        self._resize(lengths, size)
        for dim, length in enumerate(lengths):
            if length != tensor.shape[dim]:  # its first and last stay, as masks and texts end with something else
                along = torch.linspace(0, tensor.shape[dim] - 1, length, device=tensor.device).round().long()
                tensor = tensor.index_select(dim, along)
        if not tensor.is_floating_point() or (not is_latents and tensor.ndim < 3):
            return tensor * size.level if tensor.is_floating_point() and tensor.ndim == 1 else tensor.clone()
        numbers = tensor.float()
        scale = float(numbers.std()) or 1.0
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device) * scale
        return (noise if is_latents else numbers + noise).to(tensor.dtype)

    def _resize(self, lengths: list[int], size: Size) -> None:
        own, count = self._cells, len(self._cells)
        cells = (size.frames if self._is_clip else 1, size.height, size.width)[-count:]
        cells = (size.height * size.width,) if count == 1 else cells
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
            elif self._is_clip and len(lengths) == 2 and lengths[dim] == own[0] and size.has_lists:
                lengths[dim] = cells[0]
            elif lengths[dim] == self._text > 1:
                lengths[dim] = size.text
