"""`devicebridge examine FILE`: where the blocks and tokens of a file's class are, as rows to be written down.

deriving.py proves as in a split, by two ranks on one device. Gradients are proved with a LoRA on every linear: blocks
that are computed again, and cards that share out the tokens, have those of one card, which are slopes of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.sample
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ....events import first_line
from ....families.comfy.inputs import COND, POOLED
from ....families.comfy.native import PASSED_BY, NativeModel
from ....families.comfy.registry import find_native, path_of
from ....families.comfy.text_sizes import usual_text
from ....families.token_plan import TokenPlan
from ....parallel.block_lists import members
from ....parallel.local.deriving import apart, written
from ....parallel.local.token_training import TokenModel
from ....parallel.local.tokens import RowsError, TokenParallel
from ....parallel.offload.recompute import BlockCall, InPlaceGuard, checkpoint_calls, recompute
from ....patches.changes import code_of
from ....patches.hooks import HookSet, map_tensors, tensors_reached
from ....planning.derived_rows import Blocks, Verdict
from ..native.model import native_training, plain_attention
from .attachments import OVERRIDE
from .deriving import HALVES, Cards, Proof, copied, find_rows, left_as_it_was, rows_of, small_forwards
from .model import load_split_model
from .model_copy import alias, copy_structure
from .plan import layout_of
from .shown_inputs import FUNCTIONS, OPTIONS, Innermost, ShownInputs

_TEXT, _SIDE, _FRAMES = 9, 16, 3  # tokens, cells
_MASKS = (), (1,) * _TEXT, (*(1,) * (_TEXT - 1), 0)  # of the text: none, and of one without and with padding
_MADE_UP = {COND: 1009, POOLED: 2003}  # widths that no model has, until a layer says which it reads
_MOST_TRIES = 6
_RANK = 2
_NEAR = 3e-5  # of the length of a gradient; shares of rows are added up in another order
_LEAST = 1e-2  # of the longest gradient: so much cancels in shorter ones that their last bits are noise
_STEPS, _NEAR_SLOPE = (1e-2, 3e-3, 1e-3), 5e-3  # in float32 a step is too long, or drowned by rounding
Gradients = dict[str, torch.Tensor]


class _Seen(Exception):
    """Ends a forward that was looked at, or whose text has another width than a layer reads: both widths."""


def examine(path: Path) -> str:
    """The rows of the class of this file, in the words of families/comfy; what was proved is kept for splits and jobs.
    Raises: ValueError or RuntimeError."""
    model = load_split_model(path, "default", None)
    root = model.model.diffusion_model
    layout, name = layout_of(root), type(root).__name__
    if layout.no_tokens:
        return layout.why_no_tokens
    kept = rows_of(root)  # before a forward leaves anything on the model
    found, trained = _verdicts(model, layout)
    if trained:
        kept.trained.write(trained)
    is_written = bool(layout.tokens.blocks)
    for signature, each in found.items():
        if each.row is not None and not is_written:
            kept.keep(signature, each)
    proved = [(written(each.row), each.refused) for each in found.values() if each.row is not None]
    lines = [f"{name} cannot be shared out by tokens: {next(iter(found.values())).refused}"]
    if proved:
        lines = [
            f"# {name}: {'has a written row' if is_written else 'nobody has described its tokens'}.",
            "# Derived from small pictures, proved for inputs of these kinds alone: results and keys are one card's.",
            f"# Gradients: {next((refused for _, refused in proved if refused), 'those of one card')}.",
            *(f"tokens={row}," for row in dict.fromkeys(row for row, _ in proved)),
        ]
    blocks = min(trained.values(), key=lambda each: bool(each.refused), default=Blocks(layout.block_lists))
    if trained:
        lines += [f"# Training of a LoRA by blocks: {blocks.refused or 'gradients are those of one card, and slopes'}."]
    if find_native(type(root)) is None:
        said = {"path": path_of(type(root)), "block_lists": blocks.lists, "tail": blocks.tail}
        said |= {"note": "", "transport": "stream" if blocks.tail else "relay"}
        lines += ["# Its blocks, found by their containers, and called as modules.", "NativeModel("]
        lines += [*(f"    {each}={value!r},".replace("'", '"') for each, value in said.items()), ")"]
    return "\n".join(lines)


def _verdicts(model: Any, layout: NativeModel) -> tuple[dict[str, Verdict], dict[str, Blocks]]:
    """Of tokens by signature of inputs, and of trainings by kind. Raises: the first forward's error if all failed."""
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
                why = gradient_fault(cards, row, given)  # which refuses it for trainings alone
                found[shown.signature] = Verdict(row, why, has_gradients=not why)
            except RowsError as error:
                found[shown.signature] = Verdict(None, str(error))
            if layout.is_derived and shown.kind not in trained:
                trained[shown.kind] = trained_blocks(cards, given)
        raise _Seen

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
        try:
            raise errors[0]
        finally:
            errors.clear()  # their tracebacks hold this frame
    return found, trained


def _load_as(copied: nn.Module, loaded: nn.Module) -> None:
    """Have a copy's weights over the storages that ComfyUI has loaded, on the card or for streaming."""
    for mine, theirs in zip(copied.modules(), loaded.modules(), strict=True):
        mine.__dict__.update({name: each for name, each in vars(theirs).items() if name.startswith("comfy_")})
        mine._buffers.update(theirs._buffers)
        for name, each in theirs._parameters.items():
            mine._parameters[name] = None if each is None else nn.Parameter(alias(each), requires_grad=False)


def _sample(model: Any, widths: dict[str, int], *, has_pooled: bool, mask: Sequence[int], frames: int) -> None:
    """One step of ComfyUI's sampler. A layer that is given a made-up width says which it reads; widths become those."""
    form, root, hooks = model.model.latent_format, model.model.diffusion_model, HookSet()
    cells = {1: (_SIDE * _SIDE,), 2: (_SIDE, _SIDE), 3: (frames, _SIDE, _SIDE)}[form.latent_dimensions]
    latent = torch.zeros(1, form.latent_channels, *cells)
    how = comfy.sample.prepare_noise(latent, 0), 1, 1.0, "euler", "simple"

    def check(wanted: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        width = args[0].shape[-1] if args and isinstance(args[0], torch.Tensor) and args[0].ndim else None
        if width != wanted and width in widths.values() and width in _MADE_UP.values():
            raise _Seen(width, wanted)

    for module in root.modules():
        is_linear = hasattr(module, "in_features")  # ComfyUI's of 8-bit weights is none of torch's
        if shape := (module.in_features,) if is_linear else getattr(module, "normalized_shape", ()):
            hooks.just_before(module, partial(check, shape[-1]))
    try:
        for _ in range(_MOST_TRIES):
            options = {"attention_mask": torch.tensor([mask])} if mask else {}
            options |= {"pooled_output": torch.randn(1, widths[POOLED])} if has_pooled else {}
            text = [[torch.randn(1, _TEXT, widths[COND]), options]]
            try:
                with torch.no_grad():
                    comfy.sample.sample(model, *how, text, text, latent, disable_pbar=True, seed=0)
            except _Seen as seen:
                if not seen.args:
                    return
                found, wanted = seen.args
                widths |= {each: wanted for each, width in widths.items() if width == found}
    finally:
        hooks.remove()
    raise RuntimeError(f"no text was found that {type(root).__name__} reads")


class _Lora:
    """A LoRA on every linear of some copies of a model, each with leaves of its own, of the same numbers."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.hooks, self.leaves = HookSet(), list[dict[str, torch.Tensor]]()
        for model in models:
            generator, leaves = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
            for name, module in _linears_of(model):
                sides = (_RANK, module.in_features), (module.out_features, _RANK)
                for kind, shape, scale in zip(("down", "up"), sides, (module.in_features**-0.5, 0.1), strict=True):
                    drawn = torch.randn(shape, generator=generator) * scale
                    leaves[f"{name} {kind}"] = drawn.to(module.weight.device).requires_grad_()
                self.hooks.after(module, partial(self._add, leaves, name))
            self.leaves.append(leaves)

    @staticmethod
    def _add(leaves: Mapping[str, torch.Tensor], name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        down, up = (leaves[f"{name} {kind}"].to(out.device) for kind in ("down", "up"))
        return out + F.linear(F.linear(args[0].to(down.dtype), down), up).to(out.dtype)

    @torch.no_grad()
    def move(self, direction: Gradients, length: float) -> None:
        for name, part in direction.items():
            self.leaves[0][name].add_(part.to(self.leaves[0][name].device), alpha=length)


def _linears_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Of any class of layers that has a matrix, such as ComfyUI's of 8-bit weights."""
    named = ((name, each, each._parameters.get("weight")) for name, each in model.named_modules())
    return [(n, m) for n, m, weight in named if hasattr(m, "out_features") and weight is not None and weight.ndim == 2]


def gradient_fault(cards: Cards, plan: TokenPlan, given: Mapping[str, Any]) -> str:
    """What differs between gradients of all cards, added up, and those of one; "" if nothing does."""

    def compared(proof: Proof) -> str:
        found = gradients_of(cards, plan, proof.given)
        return _gradients_differ(found, gradients_of(cards, None, proof.given), "")

    return _fault_of(cards, given, compared)


def _gradients_differ(found: Gradients, expected: Gradients, where: str) -> str:
    far, name = worst(found, expected)
    return "" if far <= _NEAR else f"the gradient of {name} differs by {far:.2g} of its length{where}"


def trained_blocks(cards: Cards, given: Mapping[str, Any]) -> Blocks:
    """What a training of LoRA by blocks may rely on, or why it is refused; in float32, with the weights as they are."""
    stages = _Stages(cards.models[0], cards.lists)

    def compared(proof: Proof) -> str:
        model, small, forward = cards.models[0], proof.given, cards.forwards[0]
        for name, linear in ((f"{n}.{m}", of) for n, block in stages.blocks.items() for m, of in _linears_of(block)):
            if not (code := code_of(type(linear).forward)).startswith(("comfy.ops", "torch.")):
                return f"{name} computes by {code} more than its weight does, to which ComfyUI's loader adds a LoRA"
        if any(each.dtype in HALVES for each in tensors_reached(proof.output)):
            return "it computes in halves, whatever it is given, which hides faults of gradients"
        with torch.no_grad():  # in its own type and size, too, where a class may do otherwise
            whole, left_out = forward(**copied(given)), "it takes weights out of its layers, where a LoRA is left out"
        try:
            with _weights_in_their_layers(model), torch.no_grad():
                own = forward(**copied(given))
                with stages:
                    output = forward(**copied(small))
        except (RuntimeError, NotImplementedError) as error:
            return f"{left_out}: {first_line(error)}"
        if any(apart(*pair) > 1 for pair in ((output, proof.output), (own, whole))):
            return left_out
        if left := stages.blocks.keys() - set(stages.calls):
            return f"it does not call {min(left)} as a module"
        expected = gradients_of(cards, None, small)
        with _as_trained(model, cards.lists):
            found = gradients_of(cards, None, small)
        where = " where blocks are computed again, with their own tensors"
        return _gradients_differ(found, expected, where) or _slope_fault(cards, small, expected)

    refused = _fault_of(cards, given, compared)
    return Blocks(stages.lists, stages.tail, refused)


def _fault_of(cards: Cards, given: Mapping[str, Any], compared: Callable[[Proof], str]) -> str:
    try:
        with left_as_it_was(cards.models):
            proof = small_forwards(cards, given)[0]
            with native_training():
                return compared(proof)
    except (management.InterruptProcessingException, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a class may compute what has no backward
        return first_line(error)


def worst(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest difference of a gradient as a share of its length, and whose it is."""
    least = max(float(each.norm()) for each in expected.values()) * _LEAST
    if not least:
        raise ValueError("nothing has a gradient")
    lengths = {name: each.norm().clamp_min(least) for name, each in expected.items()}
    of_each = ((float((found[name] - each).norm() / lengths[name]), name) for name, each in expected.items())
    return max(of_each, key=lambda each: (each[0] != each[0], each))


def gradients_of(cards: Cards, plan: TokenPlan | None, given: Mapping[str, Any]) -> Gradients:
    """Of every tensor of floats that the forward is given, and of a LoRA; by the plan the sum of what the cards have.
    Not of a number for each sample, such as its timestep: all rows add up to it, and nearly cancel each other."""
    lora = _Lora(cards.models if plan is not None else cards.models[:1])

    def of_card(index: int) -> torch.Tensor:
        leaves, count = lora.leaves[index], itertools.count()

        def own(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().to(cards.devices[index]).clone()
            if not made.is_floating_point() or made.ndim < 2:
                return made
            leaves[f"input {next(count)}"] = made.requires_grad_()
            return made * 1  # a forward may write into it, as it may not into what gradients are asked of

        made = {name: map_tensors(value, own, FUNCTIONS) for name, value in given.items()}
        made[OPTIONS] = {**(made.get(OPTIONS) or {}), OVERRIDE: plain_attention}
        # What a forward writes into a tensor that it has kept would be lost for its backward. A card may lack the room.
        kept = (lambda each: (each.device, each.to("cpu", copy=True))), (lambda kept: kept[1].to(kept[0]))
        with saved_tensors_hooks(*kept):
            return _number_of(cards.forwards[index](**made))

    try:
        if plan is None:
            of_card(0).backward()
        else:
            rows = TokenParallel(cards.models, cards.devices, plan, (1.0,) * len(cards.models))
            rows.attach()
            whole, indices = TokenModel(rows), list(map(id, cards.models))

            def work() -> None:
                # Else one thread of torch's computes the backwards of all ranks of a GPU, which wait for each other.
                with torch.autograd.set_multithreading_enabled(False):
                    whole.through(lambda model, _: of_card(indices.index(id(model)))).backward()

            try:
                whole.on_all(work)
            finally:
                rows.remove()
    finally:
        lora.hooks.remove()

    def of(leaf: torch.Tensor) -> torch.Tensor:
        return (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).to(cards.devices[0])

    return {name: torch.stack([of(each[name]) for each in lora.leaves]).sum(0) for name in lora.leaves[0]}


def _number_of(output: Any) -> torch.Tensor:
    """One number of a result, to which each of its numbers counts otherwise."""
    outputs = tensors_reached(output)
    counts = [torch.linspace(-1, 1, each.numel(), device=each.device).reshape(each.shape) for each in outputs]
    return torch.stack([(each * count).sum() for each, count in zip(outputs, counts, strict=True)]).sum()


class _Stages(TorchFunctionMode):
    """Watches whether a forward needs its main device between its blocks or behind them. A module behind the blocks
    goes where their rows are; what is computed of rows and others, outside of any module, can be nowhere."""

    def __init__(self, model: nn.Module, lists: Sequence[str]) -> None:
        super().__init__()
        self._list_of = {fqn: name for name in lists for fqn, _ in members(model, name)}
        self.blocks = {fqn: model.get_submodule(fqn) for fqn in self._list_of}
        self.calls = dict[str, None]()  # of blocks, in order
        self._has_fault, self._since, self._depth = False, dict[str, None](), 0
        self._rows: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()
        self._hooks, self._model = HookSet(), model

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._list_of[each] for each in (self.calls or self.blocks)))

    @property
    def tail(self) -> tuple[str, ...]:
        """Modules behind the last block; () where one device has to compute beside the blocks."""
        in_order = [fqn for name in self.lists for fqn, _ in members(self._model, name)]
        return () if self._has_fault or in_order != list(self.calls) else tuple(self._since)

    def __enter__(self) -> Any:
        holders = {fqn[:end] for fqn in self.blocks for end in range(len(fqn)) if fqn[end] == "."} | {""}
        for name, module in self._model.named_modules():
            if name in self.blocks or (name not in holders and name.rpartition(".")[0] in holders):
                self._hooks.just_before(module, partial(self._enter, name))
                self._hooks.after(module, self._leave)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.remove()
        super().__exit__(*error)

    def _enter(self, name: str, *call: Any) -> None:
        if name in self.blocks:
            self._has_fault |= bool(self._since) or name in self.calls
            self._since.clear()
            self.calls[name] = None
        elif self.calls and not self._depth:
            self._since[name] = None
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self.calls and not self._depth:
            self._rows.update((each, True) for each in tensors_reached(output))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.calls and not self._depth:
            are_rows = [each in self._rows for each in tensors_reached((args, kwargs or {})) if each.ndim]
            if any(are_rows):
                self._has_fault |= not all(are_rows)
                self._rows.update((each, True) for each in tensors_reached(output))
        return output


@contextmanager
def _weights_in_their_layers(model: nn.Module) -> Iterator[None]:
    """Inside, a linear has its weight while it is called alone; else what stands there has no numbers."""
    hooks, held = HookSet(), list[tuple[nn.Module, Any]]()

    def put(weight: Any, module: nn.Module, *call: Any) -> None:
        module._parameters["weight"] = weight

    for _, module in _linears_of(model):
        weight = module._parameters["weight"]
        empty = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
        held.append((module, weight))
        hooks.just_before(module, partial(put, weight))
        hooks.after(module, partial(put, empty), also_on_error=True)
        put(empty, module)
    try:
        yield
    finally:
        hooks.remove()
        for module, weight in held:
            put(weight, module)


@contextmanager
def _as_trained(model: nn.Module, lists: Sequence[str]) -> Iterator[None]:
    """Inside, blocks are computed again for their backward, with tensors of their own, as cards have them."""
    blocks = [block for name in lists for _, block in members(model, name)]

    def on_another_card(call: BlockCall, *values: Any) -> Any:
        device = next(each.device for each in tensors_reached(values))
        output = recompute(call, map_tensors(values, torch.clone, PASSED_BY), device)
        return map_tensors(output, torch.clone)

    for block in blocks:
        block.forward = InPlaceGuard(block, PASSED_BY)
    checkpoint_calls(blocks, on_another_card, PASSED_BY)
    try:
        yield
    finally:
        for block in blocks:
            block.__class__ = type(block).__mro__[1]
            del block.__dict__["_checkpoint"], block.__dict__["forward"]


def _slope_fault(cards: Cards, small: Mapping[str, Any], gradients: Gradients) -> str:
    """What differs between gradients and slopes of ComfyUI's own forward along them; "" if nothing does."""
    lora = _Lora(cards.models[:1])
    own = {name: each for name, each in gradients.items() if name in lora.leaves[0]}
    norms = {name: float(each.norm()) for name, each in own.items()}
    alive, whole = [name for name, norm in norms.items() if norm], sum(norm**2 for norm in norms.values()) ** 0.5
    along = {name: own[name] / whole for name in alive}
    alike = {name: own[name] / norms[name] / len(alive) ** 0.5 for name in alive}
    still = {name: torch.ones_like(each) for name, each in own.items() if not norms[name]}

    @torch.no_grad()
    def at(direction: Gradients, length: float) -> torch.Tensor:
        lora.move(direction, length)
        found = _number_of(map_tensors(cards.forwards[0](**copied(small)), torch.Tensor.double))
        lora.move(direction, -length)
        return found

    def error(direction: Gradients, slope: float) -> float:
        differences = (float(at(direction, step) - at(direction, -step)) / (2 * step * slope) for step in _STEPS)
        return min(abs(each - 1) for each in differences)

    try:
        if still and not torch.equal(at(still, 0.1), at(still, -0.1)):
            return f"the result depends on {next(iter(still)).rpartition(' ')[0]}, which has no gradient"
        slope = sum(norms[name] for name in alive) / len(alive) ** 0.5
        far = max(error(along, whole), error(alike, slope))
    finally:
        lora.hooks.remove()
    return "" if far <= _NEAR_SLOPE else f"gradients differ from the slopes of the result by {far:.2g}"
