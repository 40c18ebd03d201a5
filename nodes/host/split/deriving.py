"""The rows of a class that nobody described: derived from small forwards, proved, and kept.

At the first inputs of a kind the main card computes some small forwards of random numbers, as whole ones, and notes
what its blocks are given (parallel/local/watching.py). Candidates (parallel/local/deriving.py) are then computed by all
cards. The first one holds whose results, and the keys of all its attentions, row by row, are those of one card, for
all shares and sizes that are tried. Keys are compared since attention shows no wrong order. Whole steps at the user's
own size are compared beside that, in each third of a run: code may do something else for more rows, or late.

All of this is done again whenever weights were loaded or patched, since a weight of zeros hides what it multiplies.
What was kept is the candidate that is tried first.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import logging
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfyui_version
import torch
from torch import nn

from ....checkpoints.fingerprint import settings_fingerprint
from ....events import first_line
from ....families.comfy.native import NativeModel
from ....families.comfy.token_plans import NO_TOKENS, TOKEN_PLANS, why_no_tokens
from ....families.token_plan import TokenPlan
from ....parallel.block_lists import members
from ....parallel.local.collectives import Send
from ....parallel.local.deriving import derive, written
from ....parallel.local.tokens import HERE, RowsError, TokenParallel
from ....parallel.local.watching import Notes, Watch, apart
from ....parallel.transfer import copy_to
from ....patches.hooks import PLAIN, map_tensors, tensors_reached
from ....planning.derived_rows import DerivedRows, KeptRow, Verdict
from .attachments import OVERRIDE, check_attention
from .leading import home_of, led_by_name
from .model_copy import RUNTIME_STATE
from .shown_inputs import ShownInputs, Size, sizes_of

_log = logging.getLogger(__name__)
OPTIONS = "transformer_options"
UNITS = (2, 4, 8, 16)  # cells that a class may want whole
_NEAR_KEYS = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest value
_NEAR_KEYS_IN_HALF = 0.05
FUNCTIONS = frozenset(("wrappers", "callbacks", "patches", "patches_replace", "model_patcher", OVERRIDE))
_NO_PLAN = TokenPlan({}, passes_options=False)


@dataclass(frozen=True)
class Cards:
    """The copies of a model that compute together.

    Args:
        forwards: the class's own innermost forward of each copy. lists: of blocks.
        devices, send: as of a TokenParallel.
    """

    models: Sequence[nn.Module]
    forwards: Sequence[Callable[..., Any]]
    devices: Sequence[torch.device]
    lists: Sequence[str]
    send: Send

    def whole(self, given: Mapping[str, Any]) -> tuple[Any, Notes]:
        """A forward of the first card alone, and what it showed."""
        watch: Any = Watch(self.models[0])
        watch.plan = _NO_PLAN
        before, HERE.parallel = HERE.parallel, watch
        try:
            watch.begin(self.lists)
            with led_by_name(self.models[0]):
                output = self.forwards[0](**_with_override(copied(given), watch.override))
        finally:
            HERE.parallel = before
            notes = watch.stop()
        return output, notes

    def by_rows(
        self, plan: TokenPlan, given: Mapping[str, Any], shares: Sequence[float]
    ) -> tuple[list[Any], list[list[torch.Tensor]]]:
        """The forward of each card, and the keys that each has in its attentions."""
        rows = _Noted(self.models, self.devices, plan, shares, self.send)

        def attend(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            check_attention(func)
            return rows.attend(func, *args, **kwargs)

        def run(rank: int) -> Any:
            own = map_tensors(copied(given), lambda tensor: copy_to(tensor, self.devices[rank]))
            return self.forwards[rank](**(_with_override(own, attend) if plan.passes_options else own))

        rows.attach()
        try:
            with nullcontext() if plan.passes_options else led_by_name(self.models[0]):
                return rows.run([functools.partial(run, rank) for rank in range(len(self.models))]), rows.seen
        finally:
            rows.remove()


class _Noted(TokenParallel):
    """Keeps the keys of every attention, by rank."""

    def __init__(self, models: Sequence[nn.Module], *args: Any) -> None:
        super().__init__(models, *args)
        self.seen: list[list[torch.Tensor]] = [[] for _ in models]

    def attend(self, func: Callable[..., Any], *tensors: Any, **kwargs: Any) -> Any:
        def noted(q: torch.Tensor, k: torch.Tensor, *args: Any, **named: Any) -> Any:
            here = self.rows
            assert here is not None, "inside a forward of a rank"
            self.seen[here.rank].append(k.detach().clone())
            return func(q, k, *args, **named)

        return super().attend(noted, *tensors, **kwargs)


def _with_override(given: dict[str, Any], override: Callable[..., Any]) -> dict[str, Any]:
    options = {**(given.get(OPTIONS) or {}), OVERRIDE: override}
    return {**given, OPTIONS: options}


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """With containers and tensors of its own: a forward may write into either."""
    own = {name: map_tensors(value, torch.clone, FUNCTIONS) for name, value in given.items()}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in own.items()}


# ---- proving


@dataclass(frozen=True)
class Proof:
    """A small forward of one card, which forwards by rows are compared with."""

    what: str
    given: Mapping[str, Any]
    output: Any
    notes: Notes

    def fault(self, cards: Cards, plan: TokenPlan, shares: Sequence[float]) -> tuple[int, str]:
        """How far a forward came by this plan and these shares, and what differs then; "" if nothing does."""
        try:
            outputs, keys = cards.by_rows(plan, self.given, shares)
        except (management.InterruptProcessingException, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a guess, anything may come
            return 0, f"{self.what}: {first_line(error)}"
        whole = self.notes.keys_seen(by_options=plan.passes_options)
        for rank, (output, found) in enumerate(zip(outputs, keys, strict=True)):
            number, fault = _keys_differ(found, whole)
            if fault:
                return number, f"{self.what}: {fault}, on card {rank + 1}"
            if (far := apart(output, self.output)) > 1:
                differs = f"the result of card {rank + 1} differs {far:.3g} times as much as rounding may"
                return len(whole) + 1, f"{self.what}: {differs}"
        return 0, ""


def _keys_differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[int, str]:
    """The number of the attention, and what differs; "" if nothing does."""
    if len(found) != len(expected):
        return 0, f"{len(found)} attentions where one card has {len(expected)}"
    for number, (keys, whole) in enumerate(zip(found, expected, strict=True), start=1):
        if keys.shape != whole.shape:
            return number, f"attention {number} has {keys.shape[-2]} keys, and on one card {whole.shape[-2]}"
        bound = _NEAR_KEYS.get(whole.dtype, _NEAR_KEYS_IN_HALF)
        off = (keys.to(whole.device).double() - whole.double()).abs().amax(-1)
        limit = bound * float(whole.double().abs().max())
        if not float(off.max()) <= limit:
            row = int((off > limit).reshape(-1, off.shape[-1]).any(0).int().argmax())
            return number, f"the keys of attention {number} are not those of one card in its order, first in row {row}"
    return 0, ""


def find_rows(cards: Cards, given: Mapping[str, Any], kept: TokenPlan | None = None) -> TokenPlan:
    """The first candidate that is proved. The model is left as it was.

    Args:
        given: arguments of a forward, on the main card. kept: what is tried first.
    Raises: RowsError that says what differed.
    """
    with left_as_it_was(cards.models):
        shown, proofs = _small_forwards(cards, given)
        blocks = {name: [block for _, block in members(cards.models[0], name)] for name in cards.lists}
        weights = {
            name: sum(weight.nbytes for block in each for weight in block.parameters()) for name, each in blocks.items()
        }
        candidates = ([] if kept is None else [kept]) + derive(shown, cards.lists, weights)
        if not candidates:
            raise RowsError(_why_none(shown[0], cards.lists))
        faults = []
        for plan in candidates:
            tried = ((number, *each.fault(cards, plan, of)) for number, (each, of) in enumerate(_trials(cards, proofs)))
            if (fault := next((each for each in tried if each[-1]), None)) is None:
                return plan
            faults.append(fault)
    furthest = max(faults, key=lambda each: each[:2])[-1]
    raise RowsError(f"{len(faults)} ways of sharing out its tokens were tried; of the best one {furthest}")


def _why_none(notes: Notes, lists: Sequence[str]) -> str:
    if not notes.calls:
        return f"its blocks in {', '.join(lists)} are never called"
    if not notes.keys:
        return "no attention of its blocks was seen, so nobody can give it the keys of other cards"
    return "nothing that its blocks take and return has tokens that attention was seen to read"


def _trials(cards: Cards, proofs: Sequence[Proof]) -> Iterator[tuple[Proof, Sequence[float]]]:
    """Even and uneven shares, in all sizes."""
    count = len(cards.models)
    uneven = [tuple(3.0 if rank == high else 2.0 for rank in range(count)) for high in (count - 1, 0)]
    for shares in ((1.0,) * count, *uneven):
        yield proofs[0], shares
    for each in proofs[1:]:
        yield each, uneven[0]


def _small_forwards(cards: Cards, given: Mapping[str, Any]) -> tuple[list[Notes], list[Proof]]:
    """What whole forwards of several sizes show, and the same as proofs.

    Raises: RowsError where the class computes none of the sizes, or draws or remembers something.
    """
    inputs, reasons = inputs_of(given), list[str]()
    for unit, has_lists in itertools.product(UNITS, (True, False)):
        base, wider, higher, longer, more = sizes_of(unit, has_lists=has_lists)
        sizes = {"a small picture": base, "a wider one": wider, "a higher one": higher}
        sizes |= {"a longer text": longer} if inputs.has_text else {}
        sizes |= {"more frames": more} if inputs.is_clip else {}
        try:
            return _forwards_of(cards, inputs, sizes)
        except (management.InterruptProcessingException, torch.OutOfMemoryError, RowsError):
            raise
        except Exception as error:
            reasons.append(first_line(error))
    raise RowsError(f"it computes no small picture that could be looked at: {reasons[0]}")


def _forwards_of(cards: Cards, inputs: ShownInputs, sizes: Mapping[str, Size]) -> tuple[list[Notes], list[Proof]]:
    shown, proofs = [], []
    for what, size in sizes.items():
        given = inputs.at(size)
        output, notes = cards.whole(given)
        shown.append(notes)
        proofs.append(Proof(what, given, output, notes))
    for each in proofs:
        keys = [keys.movedim(-2, 0) for keys, *_ in each.notes.keys if keys.shape[-2] > 1]
        if any(bool((of == of[:1]).all()) for of in (*keys, *(one.flatten() for one in tensors_reached(each.output)))):
            raise RowsError("of a small picture of random numbers its result or keys are all alike, which hides faults")
    again, notes = cards.whole(proofs[0].given)
    first, second = ([keys for keys, *_ in each.keys] for each in (shown[0], notes))
    if apart(again, proofs[0].output) > 1 or _keys_differ(second, first)[1]:
        raise RowsError("the same small picture computed twice differs, so it draws random numbers or keeps something")
    return shown, proofs


@contextmanager
def left_as_it_was(models: Sequence[nn.Module]) -> Iterator[None]:
    """What forwards write into modules beside weights is put back: attributes, buffers, and what is in either."""
    modules = [module for model in models for module in model.modules()]
    before = [{name: each for name, each in vars(module).items() if _is_state(name)} for module in modules]
    filled, numbers = list[tuple[Any, Any]](), list[tuple[torch.Tensor, torch.Tensor]]()
    waiting: list[Any] = [each for held in before for each in held.values()]
    while waiting:
        match each := waiting.pop():
            case dict() | list() if type(each) in (dict, list):
                filled.append((each, copy.copy(each)))
                waiting += each.values() if isinstance(each, dict) else each
            case tuple():
                waiting += each
            case torch.Tensor() if not isinstance(each, nn.Parameter) and each.device.type != "meta":
                numbers.append((each, each.clone()))
    try:
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            for name in [each for each in vars(module) if _is_state(each) and each not in held]:
                del module.__dict__[name]
            module.__dict__.update(held)
        for container, contents in filled:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(contents)
        for tensor, own in numbers:
            tensor.copy_(own)


_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}


def _is_state(name: str) -> bool:
    return name not in _OF_TORCH and name not in RUNTIME_STATE


# ---- kept


def rows_of(model: nn.Module) -> DerivedRows:
    """The file of this class as its source is now, and of this structure."""
    home = (home_of(type(model)), "comfy.ldm.")
    kinds = {type(module) for module in model.modules()}
    sources = {name: _source(name) for name in _modules_of(kinds, home)}
    structure = [
        [name, type(module).__name__, _plain_attributes(module, is_own=f"{type(module).__module__}.".startswith(home))]
        for name, module in model.named_modules()
    ]
    shapes = [[name, list(each.shape)] for name, each in model.named_parameters()]
    return DerivedRows(
        {
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "source": settings_fingerprint(sources),
            "structure": settings_fingerprint([structure, shapes]),
            "comfyui": comfyui_version.__version__,
            "torch": torch.__version__,
        }
    )


def with_derived_tokens(row: NativeModel, model: nn.Module) -> NativeModel:
    """The row with what was derived and proved on this machine, gradients among it, where no plan is written."""
    if row.class_name in TOKEN_PLANS or row.class_name in NO_TOKENS:
        return row
    proved = {kind: each for kind, each in rows_of(model).verdicts().items() if each.has_gradients and each.row}
    first = next(iter(proved.values()), None)
    if first is None or first.row is None:
        return row
    alike = tuple(kind for kind, each in proved.items() if each.row == first.row)
    return replace(row, derived_tokens=first.row.plan, derived_inputs=alike)


def _modules_of(kinds: Collection[type], known: tuple[str, ...]) -> list[str]:
    """Modules of source that these classes' code is in, and those of ComfyUI's models and their own that it names."""
    waiting = [kind.__module__ for kind in kinds if f"{kind.__module__}.".startswith(known)]
    found = {"comfy.ldm.modules.attention", "comfy.ldm.common_dit", "comfy.ops"}
    while waiting:
        name = waiting.pop()
        if name in found or name not in sys.modules:
            continue
        found.add(name)
        beside = {str(getattr(each, "__module__", "")) for each in list(vars(sys.modules[name]).values())}
        waiting += [each for each in beside if f"{each}.".startswith(known)]
    return sorted(found)


# Of layers, whatever holds their weights and casts them.
_OF_LAYERS = frozenset(("in_features", "out_features", "normalized_shape", "eps", "num_embeddings", "embedding_dim"))
_OF_LAYERS |= frozenset(("kernel_size", "stride", "padding", "dilation", "groups", "num_groups"))


@functools.cache
def _source(name: str) -> str:
    """A hash of a module's file; of one without a file a name that no other process has."""
    try:
        return hashlib.sha256(Path(str(sys.modules[name].__file__)).read_bytes()).hexdigest()
    except (OSError, AttributeError, KeyError):
        return uuid.uuid4().hex


def _plain_attributes(module: nn.Module, *, is_own: bool) -> dict[str, Any]:
    """What says how a module computes, such as a number of heads. is_own: whether the class is of the model's code."""
    return {
        name: repr(value)
        for name, value in sorted(vars(module).items())
        if (is_own or name in _OF_LAYERS) and _is_state(name) and name != "training"
        if type(value) in PLAIN or type(value) in (tuple, list)
    }


class Deriving:
    """The rows of a class by kind of inputs, derived and proved at the first forward with such inputs.

    Args:
        rows: where they are kept. name: of the class. make: a TokenParallel of a plan, of the cards' copies.
    """

    def __init__(self, rows: DerivedRows, name: str, make: Callable[[TokenPlan], TokenParallel]) -> None:
        self._rows, self._name, self._make = rows, name, make
        self._made: dict[str, TokenParallel] = {}
        self._compared: set[tuple[str, str]] = set()  # kinds and sizes of inputs
        self._refused = {kind: each.refused for kind, each in rows.verdicts().items() if each.row is None}

    def forget(self) -> None:
        """Prove all anew: weights are others."""
        self.remove()
        self._made.clear()
        self._compared.clear()

    def choose(self, given: Mapping[str, Any], cards: Cards) -> TokenParallel:
        """The rows for these arguments of a forward, attached, and no others. Raises: RowsError for unproved ones."""
        signature = inputs_of(given).signature
        if signature in self._refused:
            raise RowsError(self.refusal(self._refused[signature]))
        if signature not in self._made:
            self.remove()
            kept = self._rows.verdicts().get(signature)
            _log.info("split: nobody has described %s; its tokens are derived, and compared with one card", self._name)
            try:
                plan = find_rows(cards, given, None if kept is None or kept.row is None else kept.row.plan)
            except RowsError as error:
                raise RowsError(self.refusal(str(error))) from None
            self._rows.keep(signature, Verdict(KeptRow.of(plan)))
            self._made[signature] = self._make(plan)
            _log.info("split: derived and proved: %s", written(plan))
        for name, other in self._made.items():
            if name != signature:
                other.remove()
        self._made[signature].attach()
        return self._made[signature]

    def refusal(self, why: str) -> str:
        """Words for a node."""
        return f"{why_no_tokens(self._name)}, and with these inputs: {why}. Use way 'blocks' in the split node"

    def is_compared(self, given: Mapping[str, Any]) -> bool:
        """Whether a whole step of this size was compared with one card's, with these weights."""
        inputs = inputs_of(given)
        return (inputs.signature, inputs.size) in self._compared

    def compare(self, given: Mapping[str, Any], found: Any, expected: Any, tolerance: float) -> None:
        """Note that a whole step is one card's. Raises: RowsError where it is not; such inputs stay refused."""
        inputs = inputs_of(given)
        if (far := apart(found, expected, tolerance)) > 1:
            why = f"a step of this size differs from one card's {far:.3g} times as much as rounding may"
            why += f" ({self._rows.path} keeps that)"
            self._refused[inputs.signature] = why
            self._rows.keep(inputs.signature, Verdict(None, why))
            raise RowsError(self.refusal(why))
        self._compared.add((inputs.signature, inputs.size))

    def remove(self) -> None:
        """Take the rows off the cards' copies."""
        for rows in self._made.values():
            rows.remove()


def inputs_of(given: Mapping[str, Any]) -> ShownInputs:
    """The inputs of a forward. Raises: RowsError where they have no latents."""
    try:
        return ShownInputs(given)
    except ValueError as error:
        raise RowsError(str(error)) from None
