"""`devicebridge examine FILE`: where the blocks and tokens of a file's class are, as rows to be written down.

Runs in a process of its own that has ComfyUI in it; see cli/examine.py. The file's weights are loaded as ComfyUI loads
them. The same functions derive and prove as in a split (deriving.py), by two ranks on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import comfy.model_management as management
import comfy.sample
import torch
from torch import nn

from ....families.comfy.inputs import COND, POOLED
from ....families.comfy.registry import find_native
from ....families.comfy.text_sizes import usual_text
from ....families.comfy.token_plans import NO_TOKENS, TOKEN_PLANS
from ....families.token_plan import TokenPlan
from ....parallel.local.deriving import written
from ....parallel.local.tokens import RowsError
from ....patches.hooks import HookSet
from ....planning.derived_rows import KeptRow, Verdict
from .derived_gradients import gradient_fault
from .deriving import Cards, copied, find_rows, inputs_of, rows_of
from .model import load_split_model
from .model_copy import alias, copy_structure
from .plan import layout_of
from .shown_inputs import Innermost

_TEXT, _SIDE, _FRAMES = 9, 16, 3  # tokens, cells
_STATES, _POOLED = 1009, 2003  # widths that no model has, until a layer says which it reads
_MOST_TRIES = 6


class _Width(Exception):  # no error: it ends a forward whose text has another width than a layer reads
    def __init__(self, found: int, wanted: int) -> None:
        self.found, self.wanted = found, wanted


class _Done(Exception):
    pass


class _Kind(NamedTuple):
    """Of inputs: whether the text has states that are pooled, or a mask; frames of latents that have any."""

    has_pooled: bool
    has_mask: bool
    frames: int


@dataclass(frozen=True)
class _Found:
    """Args: row: None where none was proved; why says so, and where there is one why gradients were not."""

    row: TokenPlan | None
    why: str


def examine(path: Path) -> str:
    """The rows of the class of this file, in the words of families/comfy; what was proved is kept for splits.

    Raises: ValueError or RuntimeError for a file that ComfyUI does not know, or whose class cannot be looked at.
    """
    model = load_split_model(path, "default", None)
    root = model.model.diffusion_model
    layout, name = layout_of(root), type(root).__name__
    if reason := NO_TOKENS.get(layout.class_name):
        return f"{name} cannot be shared out by tokens: {reason}"
    kept = rows_of(root)  # before a forward leaves anything on the model
    found = _Examination(model, layout.block_lists).run()
    rows = dict.fromkeys(written(each.row) for each in found.values() if each.row is not None)
    if not rows:
        return f"{name} cannot be shared out by tokens: {next(iter(found.values())).why}"
    for signature, each in found.items() if layout.class_name not in TOKEN_PLANS else ():
        if each.row is not None:
            kept.keep(signature, Verdict(KeptRow.of(each.row), has_gradients=not each.why))
    without = next((each.why for each in found.values() if each.row is not None and each.why), "")
    lines = [
        f"# {name}: {'has a written row' if layout.class_name in TOKEN_PLANS else 'nobody has described its tokens'}.",
        "# Derived from small pictures, and proved for inputs of these kinds alone: results and keys are one card's.",
        f"# Gradients: {without or 'those of one card'}.",
        *(f'"{name}": {each},' for each in rows),
    ]
    if find_native(type(root)) is None:
        lists = ", ".join(f'"{each}"' for each in layout.block_lists)
        lines += ["# Its blocks, found by their containers, and called as modules.", "NativeModel("]
        lines += [f'    class_name="{name}",', f'    module="{type(root).__module__}",', f"    block_lists=({lists},),"]
        lines += ["    tail=(),", '    transport="relay",', '    note="",', ")"]
    return "\n".join(lines)


class _Examination:
    """Args: model: a MODEL that is nowhere loaded. lists: of its blocks."""

    def __init__(self, model: Any, lists: tuple[str, ...]) -> None:
        self._model, self._lists = model, lists
        self._root: nn.Module = model.model.diffusion_model
        self._innermost, self._copied = Innermost(self._root), copy_structure(self._root)[0]
        usual = usual_text(self._root)
        made_up = {COND: _STATES, POOLED: _POOLED}
        self._widths = {each: usual[each].shape[-1] if each in usual else made_up[each] for each in made_up}
        self._found: dict[str, _Found] = {}

    def run(self) -> dict[str, _Found]:
        """By signature of inputs. Raises: what the first forward raises where none of them could be computed."""
        hooks, errors = HookSet(), list[Exception]()
        hooks.around_method(self._root, self._innermost.method, self._look)
        has_frames = self._model.model.latent_format.latent_dimensions == 3
        try:
            for kind in itertools.starmap(
                _Kind, itertools.product((True, False), (False, True), (_FRAMES, 1) if has_frames else (1,))
            ):
                try:
                    self._try(kind)
                except (management.InterruptProcessingException, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # a class may need a mask, or refuse one
                    errors.append(error)
        finally:
            hooks.remove()
        if not self._found:
            raise errors[0]
        return self._found

    def _try(self, kind: _Kind) -> None:
        for _ in range(_MOST_TRIES):
            try:
                with torch.no_grad(), _widths_checked(self._root, self._widths):
                    _sample(self._model, self._widths, kind)
            except _Width as wrong:
                sizes = self._widths.items()
                self._widths = {each: wrong.wanted if width == wrong.found else width for each, width in sizes}
            except _Done:
                return
        raise RuntimeError(f"no text was found that {type(self._root).__name__} reads")

    def _look(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = copied(self._innermost.arguments(args, kwargs))  # the class writes into its options
        signature = inputs_of(given).signature
        own(*args, **kwargs)
        if signature not in self._found:
            device = next(each.device for each in given.values() if isinstance(each, torch.Tensor))
            _load_as(self._copied, self._root)
            forwards = own, getattr(self._copied, self._innermost.method)
            send = lambda tensors, rank, arrivals: tensors  # noqa: E731
            cards = Cards((self._root, self._copied), forwards, (device, device), self._lists, send)
            try:
                row = find_rows(cards, given)
                self._found[signature] = _Found(row, gradient_fault(cards, row, given))
            except RowsError as error:
                self._found[signature] = _Found(None, str(error))
        raise _Done


def _load_as(copied: nn.Module, loaded: nn.Module) -> None:
    """Have a copy's weights over the storages that ComfyUI has loaded, on the card or for streaming: they are there
    once."""
    for mine, theirs in zip(copied.modules(), loaded.modules(), strict=True):
        mine.__dict__.update({name: each for name, each in vars(theirs).items() if name.startswith("comfy_")})
        mine._buffers.update(theirs._buffers)
        for name, each in theirs._parameters.items():
            mine._parameters[name] = None if each is None else nn.Parameter(alias(each), requires_grad=False)


@contextmanager
def _widths_checked(root: nn.Module, widths: Mapping[str, int]) -> Iterator[None]:
    """Inside, a layer that is given a made-up width says which one it reads."""
    hooks, made_up = HookSet(), {_STATES, _POOLED}.intersection(widths.values())

    def check(wanted: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] in made_up and x.shape[-1] != wanted:
            raise _Width(x.shape[-1], wanted)

    for module in root.modules():
        shape: Any = getattr(module, "normalized_shape", ())
        if isinstance(module, nn.Linear) or shape:
            hooks.just_before(
                module, partial(check, module.in_features if isinstance(module, nn.Linear) else shape[-1])
            )
    try:
        yield
    finally:
        hooks.remove()


def _sample(model: Any, widths: Mapping[str, int], kind: _Kind) -> None:
    """One step of ComfyUI's sampler, whose forward is looked at."""
    form = model.model.latent_format
    cells = {1: (_SIDE * _SIDE,), 2: (_SIDE, _SIDE), 3: (kind.frames, _SIDE, _SIDE)}[form.latent_dimensions]
    latent = torch.zeros(1, form.latent_channels, *cells)
    options = {"attention_mask": torch.ones(1, _TEXT, dtype=torch.long)} if kind.has_mask else {}
    options |= {"pooled_output": torch.randn(1, widths[POOLED])} if kind.has_pooled else {}
    text = [[torch.randn(1, _TEXT, widths[COND]), options]]
    noise = comfy.sample.prepare_noise(latent, 0)
    comfy.sample.sample(model, noise, 1, 1.0, "euler", "simple", text, text, latent, disable_pbar=True, seed=0)
