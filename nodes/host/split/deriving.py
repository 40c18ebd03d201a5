"""The rows of a class that nobody described: derived from small forwards of one card, proved, and kept.

The first candidate holds by which all cards have one card's results and keys. Steps of the user's size are compared,
too, in each third of a run. A weight of zeros hides what it multiplies, so all is done for every set of patches.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import comfy.model_management as management
import comfy.ops
import comfyui_version
import torch
from torch import nn

from ....checkpoints.fingerprint import settings_fingerprint
from ....events import first_line
from ....families.comfy.native import NativeModel
from ....families.token_plan import TokenPlan
from ....parallel.block_lists import members
from ....parallel.local.deriving import Notes, Watch, apart, derive, written
from ....parallel.local.tokens import HERE, RowsError, TokenParallel
from ....parallel.transfer import Send, copy_to
from ....patches.hooks import PLAIN, map_tensors, tensors_reached
from ....planning.derived_rows import DerivedRows, Verdict
from .attachments import OVERRIDE, led_by_name, override_of, package_of
from .model_copy import RUNTIME_STATE
from .shown_inputs import FUNCTIONS, OPTIONS, ShownInputs

_log = logging.getLogger(__name__)
ByRows = Callable[[TokenPlan, Mapping[str, Any]], Any]  # a forward by a plan, of these arguments
_UNITS = (2, 4, 8, 16)  # cells that a class may want whole
_NEAR_KEYS = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest value
_NEAR_KEYS_IN_HALF = 0.05
HALVES = (torch.float16, torch.bfloat16)
_OF_TORCH = frozenset(vars(nn.Module())) - {"_buffers"}  # attributes of any module
# Of layers, whatever holds their weights and casts them.
_OF_LAYERS = frozenset(("in_features", "out_features", "normalized_shape", "eps", "num_embeddings", "embedding_dim"))
_OF_LAYERS |= frozenset(("kernel_size", "stride", "padding", "dilation", "groups", "num_groups"))


@dataclass(frozen=True)
class Cards:
    """Copies of a model that compute together. forwards: the class's innermost ones. send: as of a TokenParallel."""

    models: Sequence[nn.Module]
    forwards: Sequence[Callable[..., Any]]
    devices: Sequence[torch.device]
    lists: Sequence[str]
    send: Send

    def whole(self, given: Mapping[str, Any]) -> tuple[Any, Notes]:
        """A forward of the first card alone, and what it showed."""
        watch: Any = Watch(self.models[0], self.lists)
        before, HERE.parallel = HERE.parallel, watch
        try:
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
        rows = TokenParallel(self.models, self.devices, plan, shares, self.send)
        seen: list[list[torch.Tensor]] = [[] for _ in self.models]
        rows.on_keys = lambda rank, axis, keys: seen[rank].append(keys.detach().clone())

        def run(rank: int) -> Any:
            own = copied(given, self.devices[rank])
            return self.forwards[rank](**(_with_override(own, override_of(rows)) if plan.passes_options else own))

        rows.attach()
        try:
            with led_by_name(self.models[0], plan):
                return rows.run([functools.partial(run, rank) for rank in range(len(self.models))]), seen
        finally:
            rows.remove()


def _with_override(given: dict[str, Any], override: Callable[..., Any]) -> dict[str, Any]:
    return {**given, OPTIONS: {**(given.get(OPTIONS) or {}), OVERRIDE: override}}


def copied(given: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """With containers and tensors of its own: a forward may write into either."""
    change = torch.clone if device is None else lambda tensor: copy_to(tensor.clone(), device)
    own = {name: map_tensors(value, change, FUNCTIONS) for name, value in given.items()}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in own.items()}


@dataclass(frozen=True)
class Proof:
    """A small forward of one card, which forwards by rows are compared with."""

    what: str
    given: Mapping[str, Any]
    output: Any
    notes: Notes

    def fault(self, cards: Cards, plan: TokenPlan, shares: Sequence[float]) -> tuple[float, str]:
        """How far a forward came by this plan and these shares, and what differs then; "" if nothing does."""
        try:
            outputs, keys = cards.by_rows(plan, self.given, shares)
        except (management.InterruptProcessingException, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a guess, anything may come
            return 0, f"{self.what}: {first_line(error)}"
        whole = self.notes.keys_seen(by_options=plan.passes_options)
        for rank, (output, found) in enumerate(zip(outputs, keys, strict=True), start=1):
            number, fault = _keys_differ(found, whole)
            if fault:
                return number, f"{self.what}: {fault}, on card {rank}"
            if (far := apart(output, self.output)) > 1:
                why = f"the result differs {far:.3g} times as much as rounding may, on card {rank}"
                return len(whole) + 1 / far, f"{self.what}: {why}"
        return 0, ""


def _in_float32(given: Mapping[str, Any], models: Sequence[nn.Module]) -> dict[str, Any]:
    """Inputs in float32, and ComfyUI's layers of these models with weights that they cast to what they are given."""
    for module in (each for model in models for each in model.modules() if hasattr(each, "comfy_cast_weights")):
        module.__dict__["comfy_cast_weights"] = True
        if getattr(module, "layout_type", None):  # else it rounds what it is given to 8 bits, too
            module.__dict__["weight_function"] = [lambda weight: weight, *cast(Any, module.weight_function)]
    widened = (lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor), FUNCTIONS
    return {name: map_tensors(value, *widened) for name, value in given.items()}


def _keys_differ(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> tuple[int, str]:
    """The number of the attention, and what differs; "" if nothing does."""
    if len(found) != len(expected):
        return 0, f"{len(found)} attentions where one card has {len(expected)}"
    for number, (keys, whole) in enumerate(zip(found, expected, strict=True), start=1):
        if keys.shape != whole.shape:
            return number, f"attention {number} has {keys.shape[-2]} keys, and on one card {whole.shape[-2]}"
        limit = _NEAR_KEYS.get(whole.dtype, _NEAR_KEYS_IN_HALF) * float(whole.double().abs().max())
        if not float((keys.to(whole.device).double() - whole.double()).abs().max()) <= limit:
            return number, f"the keys of attention {number} are not those of one card in its order"
    return 0, ""


def find_rows(cards: Cards, given: Mapping[str, Any], kept: TokenPlan | None = None) -> TokenPlan:
    """The first candidate that is proved. The model is left as it was. given: arguments of a forward, on the main card.
    kept: what is tried first. Raises: RowsError that says what differed."""
    with left_as_it_was(cards.models):
        proofs, count = small_forwards(cards, given), len(cards.models)
        notes, size_of = proofs[0].notes, management.module_size
        sizes = {name: sum(size_of(each) for _, each in members(cards.models[0], name)) for name in cards.lists}
        candidates = ([] if kept is None else [kept]) + derive([each.notes for each in proofs], cards.lists, sizes)
        if not candidates:
            why = "nothing that its blocks take and return has tokens that attention was seen to read"
            why = why if notes.keys else "no attention of its blocks was seen, so nobody can give it other cards' keys"
            raise RowsError(why if notes.calls else f"its blocks in {', '.join(cards.lists)} are never called")
        uneven = [tuple(3.0 if rank == high else 2.0 for rank in range(count)) for high in (count - 1, 0)]
        trials = [(proofs[0], shares) for shares in ((1.0,) * count, *uneven)]
        trials += [(each, uneven[0]) for each in proofs[1:]]
        faults: list[tuple[float, float, str]] = []
        for plan in candidates:
            tried = ((number, *each.fault(cards, plan, shares)) for number, (each, shares) in enumerate(trials))
            if (fault := next((each for each in tried if each[-1]), None)) is None:
                return plan
            faults.append(fault)
    furthest = max(faults, key=lambda each: each[:2])[-1]
    raise RowsError(f"{len(faults)} ways of sharing out its tokens were tried; of the best one {furthest}")


def small_forwards(cards: Cards, given: Mapping[str, Any]) -> list[Proof]:
    """Whole forwards of several sizes, and what they show; in float32 if the class can, as halves hide faults. Layers
    cast their weights from then on. Raises: RowsError where it computes no size, or draws or remembers something."""
    inputs, reasons = ShownInputs(given), list[str]()
    has_8_bits = any(getattr(each, "layout_type", None) for each in cards.models[0].modules())
    is_rounded = has_8_bits or any(each.dtype in HALVES for each in tensors_reached(dict(given)))
    for is_wide, unit, has_lists in itertools.product((True, False) if is_rounded else (False,), _UNITS, (True, False)):
        try:
            small = inputs.small(unit, has_lists=has_lists)
            if is_wide:
                small = {what: _in_float32(each, cards.models) for what, each in small.items()}
            proofs = [Proof(what, each, *cards.whole(each)) for what, each in small.items()]
            again, notes = cards.whole(proofs[0].given)
        except (management.InterruptProcessingException, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a class may want whole units, or no lists
            reasons.append(first_line(error))
            continue
        keys = [keys for each in proofs for keys, *_ in each.notes.keys]
        outputs = [found for each in proofs for found in tensors_reached(each.output)]
        if is_wide and any(each.dtype in HALVES for each in (*keys, *outputs)):
            continue  # it computes in halves whatever it is given
        along = [each.movedim(-2, 0) for each in keys if each.shape[-2] > 1]
        if any(bool((of == of[:1]).all()) for of in (*along, *map(torch.flatten, outputs))):
            raise RowsError("the result or keys of a small picture are all alike, which hides faults")
        first, second = ([keys for keys, *_ in each.keys] for each in (proofs[0].notes, notes))
        if apart(again, proofs[0].output) > 1 or _keys_differ(second, first)[1]:
            raise RowsError("a small picture computed twice differs, so it draws random numbers or keeps something")
        return proofs
    raise RowsError(f"it computes no small picture that could be looked at: {reasons[0]}")


@contextmanager
def left_as_it_was(models: Sequence[nn.Module]) -> Iterator[None]:
    """What forwards write into modules beside weights is put back: attributes, buffers, and what is in either."""
    before = [(module, _state_of(module)) for model in models for module in model.modules()]
    held, waiting = list[tuple[Any, Any]](), [each for _, state in before for each in state.values()]
    while waiting:
        each = waiting.pop()
        if type(each) in (dict, list, tuple):
            held.append((each, copy.copy(each)))
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, torch.Tensor) and not isinstance(each, nn.Parameter) and each.device.type != "meta":
            held.append((each, each.clone()))
    try:
        yield
    finally:
        for module, state in before:
            for name in _state_of(module).keys() - state.keys():
                del module.__dict__[name]
            module.__dict__.update(state)
        for each, own in held:
            if isinstance(each, torch.Tensor):
                each.copy_(own)
            elif not isinstance(each, tuple):
                each.clear()
                (each.update if isinstance(each, dict) else each.extend)(own)


def _state_of(module: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in vars(module).items() if name not in _OF_TORCH and name not in RUNTIME_STATE}


def rows_of(model: nn.Module) -> DerivedRows:
    """The file of this class as its source is now, and of this structure."""
    structure, packages, modules, kind = [], (package_of(type(model)), "comfy.ldm."), set[str](), type(model)
    for name, module in model.named_modules():
        code = type(module).__module__
        is_own = f"{code}.".startswith(packages)
        modules |= {code} if is_own else set()
        plain = {
            key: repr(value)
            for key, value in sorted(_state_of(module).items())
            if (is_own or key in _OF_LAYERS) and key != "training"
            if type(value) in PLAIN or type(value) in (tuple, list)
        }
        structure.append([name, type(module).__name__, plain])
    shapes = sorted([name, list(each.shape)] for name, each in model.named_parameters())  # not so of layers in 8 bits
    key = {"class": f"{kind.__module__}.{kind.__qualname__}", "source": _source(frozenset(modules))}
    versions = {"comfyui": comfyui_version.__version__, "torch": torch.__version__}
    return DerivedRows({**key, "structure": settings_fingerprint([structure, shapes]), **versions})


@functools.cache
def _source(modules: Collection[str]) -> str:
    """A hash of the source beside these modules, and of ComfyUI's models. No other process has that of lost files."""
    ops = Path(comfy.ops.__file__).resolve()
    try:
        folders = {Path(str(sys.modules[name].__file__)).resolve(strict=True).parent for name in modules}
        files = {ops, *ops.parent.joinpath("ldm").rglob("*.py"), *(each for of in folders for each in of.glob("*.py"))}
        return settings_fingerprint(sorted(hashlib.sha256(each.read_bytes()).hexdigest() for each in files))
    except (OSError, AttributeError, KeyError):
        return uuid.uuid4().hex


def with_derived_rows(row: NativeModel, model: nn.Module) -> NativeModel:
    """The row with the blocks and tokens that were derived and proved on this machine, gradients among it."""
    rows = rows_of(model)
    if row.is_derived and (trained := rows.trained.read()):
        proved = {kind: each for kind, each in trained.items() if not each.refused}
        untrained = row.untrained or ("" if proved else next(iter(trained.values())).refused)
        row = replace(row, takes_one=True, trained_inputs=tuple(proved), untrained=untrained)
        blocks = set(proved.values())
        if len(blocks) == 1 and (of_all := blocks.pop()).tail:  # what a pipeline needs
            row = replace(row, block_lists=of_all.lists, tail=of_all.tail, transport="stream")
    if row.tokens.blocks or row.no_tokens:
        return row
    kept = rows.verdicts().items()
    return replace(row, derived_rows={kind: each.row for kind, each in kept if each.has_gradients and each.row})


class Deriving:
    """The rows of a class by kind of inputs, derived and proved at the first forward with such inputs, and kept.
    tolerance: of later forwards, of a standard deviation; 0 takes what the type allows."""

    def __init__(self, rows: DerivedRows, layout: NativeModel, tolerance: float) -> None:
        self._rows, self._layout, self._tolerance = rows, layout, tolerance
        self._proved: dict[str, TokenPlan] = {}
        self._compared: set[tuple[str, str]] = set()  # kinds and sizes of inputs
        self._refused = {kind: each.refused for kind, each in rows.verdicts().items() if each.row is None}

    def forget(self) -> None:
        """Prove all anew: patches are others."""
        self._proved.clear()
        self._compared.clear()

    def compute(self, given: Mapping[str, Any], own: Callable[..., Any], cards: Callable[[], Cards], by: ByRows) -> Any:
        """A forward by derived rows; the first one of its size in each third of a run is one card's, which is compared.
        own: the main card's. by: what it has of a forward by a plan. cards: that derive rows; none of this split are
        attached then. Raises: RowsError."""
        inputs = ShownInputs(given)
        kind, size = inputs.signature, (inputs.signature, inputs.size)
        if kind in self._refused:
            raise self._refusal(self._refused[kind])
        if kind not in self._proved:
            name = self._layout.class_name
            _log.info("split: nobody has described %s; its tokens are derived, and compared with one card", name)
            kept = self._rows.verdicts().get(kind)
            try:
                self._proved[kind] = plan = find_rows(cards(), given, None if kept is None else kept.row)
            except RowsError as error:
                raise self._refusal(str(error)) from None
            self._rows.keep(kind, Verdict(plan))
            _log.info("split: derived and proved: %s", written(plan))
        if size in self._compared:
            return by(self._proved[kind], given)
        try:
            found = by(self._proved[kind], copied(given))
        except (management.InterruptProcessingException, torch.OutOfMemoryError, RowsError):
            raise
        except Exception as error:  # of rows that nobody wrote, anything may come
            raise self._refusal(first_line(error)) from error
        expected = own(**copied(given))
        if (far := apart(found, expected, self._tolerance)) > 1:
            why = f"a step of this size differs from one card's {far:.3g} times as much as rounding may"
            self._refused[kind] = why = f"{why} ({self._rows.path} keeps that)"
            self._rows.keep(kind, Verdict(None, why))
            raise self._refusal(why)
        self._compared.add(size)
        return expected

    def _refusal(self, why: str) -> RowsError:
        said = f"{self._layout.why_no_tokens}, and with these inputs: {why}"
        return RowsError(f"{said}. Use way 'blocks' in the split node")
