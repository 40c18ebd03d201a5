"""`devicebridge examine FILE`: where the blocks and tokens of a file's class are, as rows to be written down.

Runs in a process of its own that has ComfyUI in it; see cli/examine.py. The file's weights are loaded as ComfyUI loads
them. The same functions derive and prove as in a split (deriving.py), by two ranks on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.sample
import torch
from torch import nn

from ....events import first_line
from ....families.comfy.inputs import COND, POOLED
from ....families.comfy.registry import find_native
from ....families.comfy.text_sizes import usual_text
from ....families.comfy.token_plans import NO_TOKENS, TOKEN_PLANS
from ....families.token_plan import TokenPlan
from ....parallel.local.deriving import written
from ....parallel.local.token_training import TokenModel
from ....parallel.local.tokens import RowsError, TokenParallel
from ....parallel.local.watching import apart
from ....patches.hooks import HookSet, map_tensors, tensors_reached
from ....planning.derived_rows import Verdict
from ..native.model import native_training, plain_attention
from .attachments import OVERRIDE
from .deriving import Cards, copied, find_rows, left_as_it_was, rows_of, small_forwards
from .model import load_split_model
from .model_copy import alias, copy_structure
from .plan import layout_of
from .shown_inputs import FUNCTIONS, OPTIONS, Innermost, ShownInputs

_TEXT, _SIDE, _FRAMES = 9, 16, 3  # tokens, cells
_MADE_UP = {COND: 1009, POOLED: 2003}  # widths that no model has, until a layer says which it reads
_MOST_TRIES = 6


class _Width(Exception):  # no error: it ends a forward whose text has another width than a layer reads
    def __init__(self, found: int, wanted: int) -> None:
        self.found, self.wanted = found, wanted


class _Done(Exception):
    pass


def examine(path: Path) -> str:
    """The rows of the class of this file, in the words of families/comfy; what was proved is kept for splits.
    Raises: ValueError or RuntimeError for a file that ComfyUI does not know, or whose class cannot be looked at."""
    model = load_split_model(path, "default", None)
    root = model.model.diffusion_model
    layout, name = layout_of(root), type(root).__name__
    if reason := NO_TOKENS.get(layout.class_name):
        return f"{name} cannot be shared out by tokens: {reason}"
    kept = rows_of(root)  # before a forward leaves anything on the model
    found = _verdicts(model, layout.block_lists)
    rows = dict.fromkeys(written(each.row) for each in found.values() if each.row is not None)
    if not rows:
        return f"{name} cannot be shared out by tokens: {next(iter(found.values())).refused}"
    is_written = layout.class_name in TOKEN_PLANS
    for signature, each in found.items():
        if each.row is not None and not is_written:
            kept.keep(signature, each)
    without = next((each.refused for each in found.values() if each.row is not None and each.refused), "")
    lines = [
        f"# {name}: {'has a written row' if is_written else 'nobody has described its tokens'}.",
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


def _verdicts(model: Any, lists: tuple[str, ...]) -> dict[str, Verdict]:
    """By signature of inputs. A row whose gradients differ is refused for trainings alone.

    model: a MODEL that is nowhere loaded. lists: of its blocks. Raises: the first forward's error if all failed.
    """
    root: nn.Module = model.model.diffusion_model
    innermost, copy, usual = Innermost(root), copy_structure(root)[0], usual_text(root)
    widths = {each: usual[each].shape[-1] if each in usual else made_up for each, made_up in _MADE_UP.items()}
    found, errors, hooks = dict[str, Verdict](), list[Exception](), HookSet()

    def look(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = copied(innermost.arguments(args, kwargs))  # the class writes into its options
        signature = ShownInputs(given).signature
        own(*args, **kwargs)
        if signature not in found:
            device = next(each.device for each in given.values() if isinstance(each, torch.Tensor))
            _load_as(copy, root)
            forwards = own, getattr(copy, innermost.method)
            cards = Cards((root, copy), forwards, (device, device), lists, lambda tensors, rank, arrivals: tensors)
            try:
                row = find_rows(cards, given)
                why = gradient_fault(cards, row, given)
                found[signature] = Verdict(row, why, has_gradients=not why)
            except RowsError as error:
                found[signature] = Verdict(None, str(error))
        raise _Done

    hooks.around_method(root, innermost.method, look)
    frames = (_FRAMES, 1) if model.model.latent_format.latent_dimensions == 3 else (1,)
    try:
        for has_pooled, has_mask, count in itertools.product((True, False), (False, True), frames):
            try:
                _sample(model, widths, has_pooled=has_pooled, has_mask=has_mask, frames=count)
            except (management.InterruptProcessingException, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a class may need a mask, or refuse one
                errors.append(error)
    finally:
        hooks.remove()
    if not found:
        raise errors[0]
    return found


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
        shape: Any = (module.in_features,) if isinstance(module, nn.Linear) else getattr(module, "normalized_shape", ())
        if shape:
            hooks.just_before(module, partial(check, shape[-1]))
    try:
        yield
    finally:
        hooks.remove()


def _sample(model: Any, widths: dict[str, int], *, has_pooled: bool, has_mask: bool, frames: int) -> None:
    """One step of ComfyUI's sampler, whose forward is looked at; widths become those that layers read."""
    form, root = model.model.latent_format, model.model.diffusion_model
    cells = {1: (_SIDE * _SIDE,), 2: (_SIDE, _SIDE), 3: (frames, _SIDE, _SIDE)}[form.latent_dimensions]
    latent = torch.zeros(1, form.latent_channels, *cells)
    noise = comfy.sample.prepare_noise(latent, 0)
    for _ in range(_MOST_TRIES):
        options = {"attention_mask": torch.ones(1, _TEXT, dtype=torch.long)} if has_mask else {}
        options |= {"pooled_output": torch.randn(1, widths[POOLED])} if has_pooled else {}
        text = [[torch.randn(1, _TEXT, widths[COND]), options]]
        try:
            with torch.no_grad(), _widths_checked(root, widths):
                comfy.sample.sample(
                    model, noise, 1, 1.0, "euler", "simple", text, text, latent, disable_pbar=True, seed=0
                )
        except _Width as wrong:
            widths |= {each: wrong.wanted for each, width in widths.items() if width == wrong.found}
        except _Done:
            return
    raise RuntimeError(f"no text was found that {type(root).__name__} reads")


# ---- gradients of the inputs, which went through every block, and through the keys of all cards


def gradient_fault(cards: Cards, plan: TokenPlan, given: Mapping[str, Any]) -> str:
    """What differs between gradients of all cards, added up, and those of one; "" if nothing does."""
    with left_as_it_was(cards.models):
        small = small_forwards(cards, given)[0].given
        try:
            with native_training():
                expected, found = (gradients_of(cards, each, small) for each in (None, plan))
        except (management.InterruptProcessingException, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a class may compute what has no backward
            return first_line(error)
    if not any(float(each.abs().max()) for each in expected):
        return "nothing that it is given has a gradient"
    far = apart(found, expected)
    return "" if far <= 1 else f"gradients differ {far:.3g} times as much as rounding may"


def gradients_of(cards: Cards, plan: TokenPlan | None, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Of every tensor of floats that the forward is given; by the plan the sum of what the cards have.

    Not of a number for each sample, such as its timestep: all rows add up to it, and nearly cancel each other.
    """
    found: dict[int, list[torch.Tensor]] = {}

    def of_card(index: int) -> torch.Tensor:
        leaves = found.setdefault(index, [])

        def own(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().to(cards.devices[index]).clone()
            if not made.is_floating_point() or made.ndim < 2:
                return made
            leaves.append(made.requires_grad_())
            return made * 1  # a forward may write into it, as it may not into what gradients are asked of

        made = {name: map_tensors(value, own, FUNCTIONS) for name, value in given.items()}
        made[OPTIONS] = {**(made.get(OPTIONS) or {}), OVERRIDE: plain_attention}
        # What a forward writes into a tensor that it has kept would be lost for its backward.
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            outputs = tensors_reached(cards.forwards[index](**made))
        # Every number counts otherwise.
        counts = [torch.linspace(-1, 1, each.numel(), device=each.device).reshape(each.shape) for each in outputs]
        return torch.stack([(each * count).sum() for each, count in zip(outputs, counts, strict=True)]).sum()

    if plan is None:
        of_card(0).backward()
    else:
        rows = TokenParallel(cards.models, cards.devices, plan, (1.0,) * len(cards.models))
        rows.attach()
        whole, indices = TokenModel(cards.models, cards.devices, rows), list(map(id, cards.models))
        try:
            whole.together(lambda: whole.through(lambda model, device: of_card(indices.index(id(model)))).backward())
        finally:
            rows.remove()
    device, of_cards = cards.devices[0], [leaves for _, leaves in sorted(found.items())]
    gradients = [[torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in each] for each in of_cards]
    return [torch.stack([part.to(device) for part in each]).sum(0) for each in zip(*gradients, strict=True)]
