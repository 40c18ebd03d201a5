"""`devicebridge examine FILE`: where the blocks and tokens of a file's class are, as rows to be written down.

Runs in a process of its own that has ComfyUI in it; see cli/native.py. The file's weights are loaded as ComfyUI loads
them. The same functions derive and prove as in a split (deriving.py), by two ranks on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.sample
import torch
from torch import nn

from ....families.comfy.inputs import COND, POOLED
from ....families.comfy.native import NativeModel
from ....families.comfy.registry import find_native
from ....families.comfy.text_sizes import usual_text
from ....families.comfy.token_plans import NO_TOKENS, TOKEN_PLANS
from ....parallel.local.deriving import written
from ....parallel.local.tokens import RowsError
from ....patches.hooks import HookSet
from ....planning.derived_rows import Blocks, Verdict
from .deriving import Cards, copied, find_rows, rows_of
from .gradients import gradient_fault, trained_blocks
from .model import load_split_model
from .model_copy import alias, copy_structure
from .plan import layout_of
from .shown_inputs import Innermost, ShownInputs

_TEXT, _SIDE, _FRAMES = 9, 16, 3  # tokens, cells
_MASKS = (), (1,) * _TEXT, (*(1,) * (_TEXT - 1), 0)  # of the text: none, and of one without and with padding
_MADE_UP = {COND: 1009, POOLED: 2003}  # widths that no model has, until a layer says which it reads
_MOST_TRIES = 6


class _Width(Exception):  # no error: it ends a forward whose text has another width than a layer reads; both widths
    pass


class _Done(Exception):
    pass


def examine(path: Path) -> str:
    """The rows of the class of this file, in the words of families/comfy; what was proved is kept for splits and jobs.
    Raises: ValueError or RuntimeError for a file that ComfyUI does not know, or whose class cannot be looked at."""
    model = load_split_model(path, "default", None)
    root = model.model.diffusion_model
    layout, name = layout_of(root), type(root).__name__
    if reason := NO_TOKENS.get(layout.class_name):
        return f"{name} cannot be shared out by tokens: {reason}"
    kept = rows_of(root)  # before a forward leaves anything on the model
    found, trained = _verdicts(model, layout)
    if trained:
        kept.trained.write(trained)
    is_written = layout.class_name in TOKEN_PLANS
    for signature, each in found.items():
        if each.row is not None and not is_written:
            kept.keep(signature, each)
    rows = dict.fromkeys(written(each.row) for each in found.values() if each.row is not None)
    without = next((each.refused for each in found.values() if each.row is not None and each.refused), "")
    lines = [
        f"# {name}: {'has a written row' if is_written else 'nobody has described its tokens'}.",
        "# Derived from small pictures, and proved for inputs of these kinds alone: results and keys are one card's.",
        f"# Gradients: {without or 'those of one card'}.",
        *(f'"{name}": {each},' for each in rows),
    ]
    if not rows:
        lines = [f"{name} cannot be shared out by tokens: {next(iter(found.values())).refused}"]
    blocks = min(trained.values(), key=lambda each: bool(each.refused), default=Blocks(layout.block_lists))
    if trained:
        lines += [f"# Training of a LoRA by blocks: {blocks.refused or 'gradients are those of one card, and slopes'}."]
    if find_native(type(root)) is None:
        module, tail = type(root).__module__, blocks.tail
        row = NativeModel(name, module, blocks.lists, tail, "", "stream" if tail else "relay")
        said = ("class_name", "module", "block_lists", "tail", "note", "transport")
        lines += ["# Its blocks, found by their containers, and called as modules.", "NativeModel("]
        lines += [*(f"    {each}={getattr(row, each)!r},".replace("'", '"') for each in said), ")"]
    return "\n".join(lines)


def _verdicts(model: Any, layout: NativeModel) -> tuple[dict[str, Verdict], dict[str, Blocks]]:
    """Of tokens by signature of inputs, and of trainings by kind of inputs, for a class that nobody has described.

    A row whose gradients differ is refused for trainings alone.

    model: a MODEL that is nowhere loaded. Raises: the first forward's error if all failed.
    """
    root: nn.Module = model.model.diffusion_model
    innermost, copy, usual = Innermost(root), copy_structure(root)[0], usual_text(root)
    widths = {each: usual[each].shape[-1] if each in usual else made_up for each, made_up in _MADE_UP.items()}
    found, trained, errors, hooks = dict[str, Verdict](), dict[str, Blocks](), list[Exception](), HookSet()

    def look(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = copied(innermost.arguments(args, kwargs))  # the class writes into its options
        shown = ShownInputs(given)
        own(*args, **kwargs)
        if shown.signature not in found:
            device = next(each.device for each in given.values() if isinstance(each, torch.Tensor))
            _load_as(copy, root)
            forwards, send = (own, getattr(copy, innermost.method)), lambda tensors, rank, arrivals: tensors
            cards = Cards((root, copy), forwards, (device, device), layout.block_lists, send)
            try:
                row = find_rows(cards, given)
                why = gradient_fault(cards, row, given)
                found[shown.signature] = Verdict(row, why, has_gradients=not why)
            except RowsError as error:
                found[shown.signature] = Verdict(None, str(error))
            if layout.is_watched and shown.kind not in trained:
                trained[shown.kind] = trained_blocks(cards, given)
        raise _Done

    hooks.around_method(root, innermost.method, look)
    frames = (_FRAMES, 1) if model.model.latent_format.latent_dimensions == 3 else (1,)
    try:
        for has_pooled, mask, count in itertools.product((True, False), _MASKS, frames):
            try:
                _sample(model, widths, has_pooled=has_pooled, mask=mask, frames=count)
            except (management.InterruptProcessingException, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a class may need a mask, or refuse one
                errors.append(error)
    finally:
        hooks.remove()
    if not found:
        raise errors[0]
    return found, trained


def _load_as(copied: nn.Module, loaded: nn.Module) -> None:
    """Have a copy's weights over the storages that ComfyUI has loaded, on the card or for streaming."""
    for mine, theirs in zip(copied.modules(), loaded.modules(), strict=True):
        mine.__dict__.update({name: each for name, each in vars(theirs).items() if name.startswith("comfy_")})
        mine._buffers.update(theirs._buffers)
        for name, each in theirs._parameters.items():
            mine._parameters[name] = None if each is None else nn.Parameter(alias(each), requires_grad=False)


@contextmanager
def _widths_checked(root: nn.Module, widths: Mapping[str, int]) -> Iterator[None]:
    """Inside, a layer that is given a made-up width says which one it reads."""
    hooks, made_up = HookSet(), set(_MADE_UP.values()).intersection(widths.values())

    def check(wanted: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else None
        if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] in made_up and x.shape[-1] != wanted:
            raise _Width(x.shape[-1], wanted)

    for module in root.modules():
        is_linear = hasattr(module, "in_features")  # ComfyUI's of 8-bit weights is none of torch's
        shape: Any = (module.in_features,) if is_linear else getattr(module, "normalized_shape", ())
        if shape:
            hooks.just_before(module, partial(check, shape[-1]))
    try:
        yield
    finally:
        hooks.remove()


def _sample(model: Any, widths: dict[str, int], *, has_pooled: bool, mask: Sequence[int], frames: int) -> None:
    """One step of ComfyUI's sampler, whose forward is looked at; widths become those that layers read."""
    form, root = model.model.latent_format, model.model.diffusion_model
    cells = {1: (_SIDE * _SIDE,), 2: (_SIDE, _SIDE), 3: (frames, _SIDE, _SIDE)}[form.latent_dimensions]
    latent = torch.zeros(1, form.latent_channels, *cells)
    noise = comfy.sample.prepare_noise(latent, 0)
    for _ in range(_MOST_TRIES):
        options = {"attention_mask": torch.tensor([mask])} if mask else {}
        options |= {"pooled_output": torch.randn(1, widths[POOLED])} if has_pooled else {}
        text = [[torch.randn(1, _TEXT, widths[COND]), options]]
        try:
            with torch.no_grad(), _widths_checked(root, widths):
                comfy.sample.sample(
                    model, noise, 1, 1.0, "euler", "simple", text, text, latent, disable_pbar=True, seed=0
                )
        except _Width as wrong:
            found, wanted = wrong.args
            widths |= {each: wanted for each, width in widths.items() if width == found}
        except _Done:
            return
    raise RuntimeError(f"no text was found that {type(root).__name__} reads")
