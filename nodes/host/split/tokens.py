"""Way tokens: every card has a copy of the model over the same storages, and computes its rows (tokens) of one forward.

The cards share the class's innermost forward. Wrappers, step caches and ControlNets around it run on the main card.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management as management
import torch
from torch import nn

from ....events import first_line
from ....families.comfy.native import NativeModel
from ....families.comfy.video import VIDEO_MODELS
from ....families.token_plan import TokenPlan
from ....parallel.block_lists import execution_order
from ....parallel.devices import device_title
from ....parallel.local.borrow import RowResiduals
from ....parallel.local.bridge import Bridge
from ....parallel.local.graph_recorder import can_record, graphs_on
from ....parallel.local.heads import groups_for
from ....parallel.local.interleave import Wholes
from ....parallel.local.shards import plain_parts
from ....parallel.local.token_graphs import Replays
from ....parallel.local.tokens import OneDeviceError, RowsError, TokenParallel
from ....parallel.staged_copies import copies_between
from ....parallel.transfer import copy_to, current_device, is_everywhere, module_with_streams
from ....patches.changes import Unchanged, code_of, foreign_methods
from ....patches.hooks import HookSet, is_made_here, map_tensors
from ....planning.cards import machine_speed
from ....planning.derived_rows import DerivedRows
from ....planning.times import CLIP_TOKENS, LEAST_SHARE, PICTURE_TOKENS, ForwardWork, forward_work
from .attachments import NO_PREFETCH, OVERRIDE, ROOT, attention_of, check_runnable, led_by_name, override_of, package_of
from .deriving import Cards, Deriving, rows_of
from .model_copy import RUNTIME_STATE, Origin, alias, copy_structure
from .plan import SplitPlan, SplitRequest, find_streamed, layout_of
from .shown_inputs import FUNCTIONS, OPTIONS, Innermost
from .tensor import addresses_on
from .tree import Executor, SplitTree

_log = logging.getLogger(__name__)
# Modules of other code that are known: layers, whatever holds their weights.
_KNOWN_LAYERS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.modules.conv._ConvNd)
_KNOWN_MODULES = ("comfy.", "torch.", "einops.")
_ON_WEIGHTS = ("weight_function", "bias_function")
# What ComfyUI's loading and its classes' forwards write into modules.
_MAY_CHANGE = RUNTIME_STATE.union(
    ("comfy_cast_weights", "comfy_force_cast_weights", "seed_key", "training", *_ON_WEIGHTS),
    ("weight_comfy_model_dtype", "bias_comfy_model_dtype", "max_seq_len_cached", "cos_cached", "sin_cached"),
)


def plan_tokens(diffusion_model: nn.Module, request: SplitRequest) -> TokensPlan:
    """Decide who computes how many tokens; reads sizes only. Raises: ValueError for a class without rows, for modules
    of other code, or with offload off, if a card cannot hold it."""
    layout = layout_of(diffusion_model)
    if layout.no_tokens:
        raise ValueError(f"{layout.why_no_tokens}. Use way 'blocks' or 'tensor'")
    tokens, derived = layout.tokens, None
    if not tokens.blocks:
        derived = rows_of(diffusion_model)
        verdicts = list(derived.verdicts().values())
        tokens = next((each.row for each in verdicts if each.row is not None), tokens)
        if verdicts and not tokens.blocks:
            why = f"{layout.why_no_tokens}, and tried inputs are refused: {verdicts[0].refused}"
            _log.warning("split: %s", why)
    known = (*_KNOWN_MODULES, package_of(type(diffusion_model))) if derived else _KNOWN_MODULES
    for name, module in diffusion_model.named_modules():
        code = type(module).__module__
        if not f"{code}.".startswith(known) and not isinstance(module, _KNOWN_LAYERS):
            found = f"{name} of this MODEL is a {type(module).__name__} of {code}, which may read across tokens"
            raise ValueError(f"{found}. Use way 'blocks', or take out the node that put it there")
    size = int(management.module_size(diffusion_model))
    find_streamed(request, dict.fromkeys(request.devices, size), "Use way 'blocks' or 'tensor'")
    blocks, devices = execution_order(diffusion_model, layout), request.devices
    is_one_kind = len({device_title(device) for device in devices}) == 1
    measured = (1.0,) * len(devices) if is_one_kind or request.shares else machine_speed(devices).flops_per_s
    work = forward_work(diffusion_model, layout, dict.fromkeys(blocks), usual_tokens(layout))
    shares, (groups, replayed) = request.shares or tuple(measured), _num_groups(request, work)
    of_tokens: dict[str, Any] = {"tokens": tokens, "shares": shares, "groups": groups, "derived": derived}
    of_tokens["replayed_groups"] = groups if derived else replayed
    return TokensPlan(blocks, devices, layout, request, "relay", request.overlap, **of_tokens)


def usual_tokens(layout: NativeModel) -> int:
    """Of a picture or clip; a split is planned before its size is known."""
    return CLIP_TOKENS if layout in VIDEO_MODELS else PICTURE_TOKENS


def _num_groups(request: SplitRequest, work: ForwardWork) -> tuple[int, int]:
    """Of heads, in which keys and values travel: where blocks are launched, and where they are replayed."""
    if module_with_streams(*request.devices[:2]) is None:
        return 1, 1  # they cannot copy beside what they compute
    try:
        speed = machine_speed(request.devices)
    except RuntimeError as error:
        _log.info("split: the link is not measured: %s", first_line(error))
        return 1, 1
    assert speed.bytes_per_s is not None, "there are several cards"
    rates = min(speed.flops_per_s), speed.bytes_per_s, request.exchange
    launched = groups_for(*rates, work.block_s(speed))
    return launched, groups_for(*rates) if can_record(request.devices) else launched


class TokensExecutor(Executor):
    plain, plainer, has_copies = "on one card", "way to blocks", True

    def __init__(self, tree: SplitTree, plan: TokensPlan) -> None:
        # Kernels are chosen by the number of rows.
        self._plan, self.tolerance = plan, 0.1 if plan.request.exchange == "8-bit" else 0.02
        root = tree.diffusion_model
        self.parts = {plan.main_device: {name: tree.block(name) for name in plan.blocks}}
        self.parts |= {device: {"": copy_structure(root)[0]} for device in plan.devices[1:]}
        self.bridge = Bridge(dict.fromkeys(tree.called_modules(), plan.main_device), plan.main_device)
        self._models = [root, *(self.parts[device][""] for device in plan.devices[1:])]
        self._unpatched = {f"{ROOT}.{name}": alias(each) for name, each in root.named_parameters()}
        self._innermost = Innermost(root)
        self._method = self._innermost.method
        copies = copies_between(plan.devices)
        self._send = copies.to_ranks(plan.devices)
        if plan.derived is None and (plan.layout.keeps_nothing or plan.layout.forgets_if_patched):
            self.graphs = graphs_on(plan.devices, copies, addresses_on)
        self._attention = [*attention_of(root, is_wide=True)]
        self._override = functools.lru_cache(maxsize=4)(override_of)  # the same function while blocks are replayed
        self._rows: dict[int, TokenParallel] = {}  # by the id of their plan, which they hold
        tolerance = self.tolerance if plan.request.exchange == "8-bit" else 0.0
        rows = plan.derived
        self._deriving = None if rows is None else Deriving(rows, plan.layout, tolerance)
        self._proved_for: object = None  # ComfyUI's number of the patches
        self._hooks = HookSet()
        self._may_change = _MAY_CHANGE.union(plan.layout.remembers)
        self._unchanged = Unchanged(root, self._may_change)
        self._pairs = [tuple(each) for each in zip(*(model.modules() for model in self._models), strict=True)]
        self._tree: Callable[[], SplitTree | None] = lambda: None
        self._wholes = Wholes(plan.devices)
        self._running = threading.Lock()  # one forward by tokens at a time, or one whole forward on each card
        self._is_compared = False  # whether the cards have the same weights since ComfyUI moved any

    def attach(self, patches_uuid: object) -> None:
        self._unchanged.note_weights()  # ComfyUI attaches whenever it has moved or patched weights
        self._is_compared, self.looks_first = False, True
        if self._deriving is not None and patches_uuid != self._proved_for:
            self._proved_for = patches_uuid
            self._deriving.forget()
            self._rows.clear()
        self._take_method()

    def _take_method(self) -> bool:
        """Compute in the place of the class's method, unless other code is there; returns whether it is so."""
        root, held = self._models[0], vars(self._models[0])
        if (found := held.get(self._method)) is not None:
            if getattr(found, "__func__", None) is not getattr(type(root), self._method) and not is_made_here(found):
                return False
            del held[self._method]  # ours, or the class's own, put back by whoever replaced it
        self._hooks.remove()
        self._hooks.around_method(root, self._method, self._compute)
        return True

    def guard(self, tree: SplitTree, options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, **NO_PREFETCH}  # each card calls its own patches

    def remove(self) -> None:
        self._hooks.remove()
        for rows in self._rows.values():
            rows.remove()

    def origin_on(self, device: torch.device, given: Origin | None) -> Origin:
        return self._unpatched.get  # for all cards, whose weights would come back to memory of each

    def prepare(self, tree: SplitTree, options: Mapping[str, Any]) -> None:
        if self._wholes.rank is not None:
            return  # reason_against_parts has looked
        self._tree = weakref.ref(tree)
        if not self._take_method():
            if not self._plan.may_run_alone:  # which it does where that code is
                self._check_unchanged(tree)
            self._go_alone(tree, self._refused(f"the replaced {self._method} of the model"))

    @staticmethod
    def _refused(found: str) -> RowsError:
        found = f"each card of this split has a copy of the model, and {found} is of another node and in one of them"
        return RowsError(f"{found}. Use way 'blocks' in the split node, or take that node out")

    def _check_unchanged(self, tree: SplitTree) -> None:
        """Raises: RowsError that names what other code did to the main card's modules, which no copy has."""
        patches = (key for key in tree.patcher().object_patches if f"{key}.".startswith(f"{ROOT}."))
        changes = self._unchanged.changes(tree.own_hooks), self._added_to_weights()
        found = next(itertools.chain(*changes, (f"the object patch of {key}" for key in patches)), "")
        if not (found or self._is_compared):
            found = next(self._other_numbers(tree.patcher()), "")
            self._is_compared = not found
        if found:
            raise self._refused(found)

    def _added_to_weights(self) -> Iterator[str]:
        """Other code's functions on the main card's weights, unless all have them; ComfyUI adds LoRAs so."""
        for name, (own, *others) in itertools.product(_ON_WEIGHTS, self._pairs):
            for each in vars(own).get(name) or ():
                has_it = all(each in vars(other).get(name, ()) for other in others)
                if not has_it and not (code := code_of(each)).startswith("comfy."):
                    yield f"a function of {code} on a weight"

    def _other_numbers(self, patcher: Any) -> Iterator[str]:
        """Weights and buffers whose numbers before any LoRA are not another card's, by a hundred of their bytes."""
        of_each = []
        for model, owner in zip(self._models, (patcher, *patcher.companions), strict=True):
            backup = {key: weight for key, (weight, _) in owner.hook_backup.items()}
            backup |= {key: kept.weight for key, kept in owner.backup.items()}
            named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
            found = {name: each for name, each in named if name.rpartition(".")[2] not in self._may_change}
            of_each.append({name: backup.get(f"{ROOT}.{name}", each) for name, each in found.items()})
        own, *others = of_each
        for other in others:
            yield from (f"the weight {name}, of one card alone," for name in sorted(own.keys() ^ other.keys()))
            for name in filter(other.__contains__, own):
                parts = list(plain_parts(own[name])), list(plain_parts(other[name]))
                if len(parts[0]) != len(parts[1]) or not all(map(_is_alike, *parts)):
                    yield f"a change of the numbers in {name}"

    def _check_runnable(self, options: Mapping[str, Any], control: Any) -> None:
        found = [*foreign_methods(self._unchanged.kinds)]
        found += ["a ControlNet"] if control and not self._plan.tokens.control else []
        check_runnable(self._plan.layout.class_name, options, found)

    def reason_against_parts(self, tree: SplitTree, num_parts: int, has_room: Callable[[], bool]) -> str:
        shares, layout, size = self._plan.shares, self._plan.layout, len(self._models)
        if num_parts < size:
            return f"{num_parts} conditionings or pictures are fewer than the {size} cards, so that all compute each"
        if min(shares) * size < LEAST_SHARE * sum(shares):
            return "one card is much slower than the others, or was given less, so that all compute each picture"
        if not layout.keeps_nothing or self._deriving is not None:
            return f"{layout.class_name} may keep something from one conditioning for the next"
        if not has_room():
            return "a card may lack the memory for a whole conditioning, so that all compute each"
        with self._running:  # nobody else's code runs in this step from here on
            try:
                self.prepare(tree, {})
                self._check_unchanged(tree)
                self._check_runnable({}, None)
            except RowsError as error:
                self._go_alone(tree, error)
                return "the first card computes alone"
        return ""

    def run_parts(self, tree: SplitTree, jobs: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Each card computes a whole one; what is left is shared out by tokens."""
        size, outputs = len(self._models), list[torch.Tensor]()

        def on_a_card(job: Callable[[], torch.Tensor]) -> torch.Tensor:
            try:
                return job()
            finally:
                tree.end()  # whatever it left in its thread

        whole = f"{size} conditionings or pictures at once, each on a card of its own, with all of its activations"
        tree.say_once(f"split: {whole}; overlap off computes each on all cards")
        while len(jobs) >= size:
            try:
                with self._running:
                    self._attach(self._plan.tokens)
                    outputs += self._wholes.run([functools.partial(on_a_card, job) for job in jobs[:size]])
            except RowsError as error:  # of what a wrapper put there just now
                self._go_alone(tree, error)
                break
            jobs = jobs[size:]
        return outputs + [job() for job in jobs]

    def _compute(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The innermost forward: of every card, or of one while the others compute others."""
        tree = self._tree()
        if tree is None or tree.is_plain:
            return own(*args, **kwargs)
        given = self._innermost.arguments(args, kwargs)
        if (rank := self._wholes.rank) is not None:
            self._check_runnable(given.get(OPTIONS) or {}, given.get("control"))
            moved = self._given(rank, given)
            self._wholes.barrier()
            with current_device(self._plan.devices[rank]):
                output = self._forwards(own)[rank](**moved)
            return map_tensors(output, lambda tensor: copy_to(tensor, self._plan.main_device))
        with self._running:
            try:
                return self._watched(tree, functools.partial(self._by_rows, own, given))
            except OneDeviceError as error:
                tree.say_once(f"split: one card computes such a forward: {error}")
            except RowsError as error:
                self._go_alone(tree, error)
            return own(**self._forgetting(given)) if self._plan.layout.forgets_if_patched else own(*args, **kwargs)

    def _watched(self, tree: SplitTree, compute: Callable[[], Any]) -> Any:
        """What compute() gives where other code changed nothing. Looking takes the host as long as a few blocks take a
        card (14 ms for Qwen-Image), so behind a run's first forward it looks while cards compute what was launched."""
        is_first, self.looks_first = self.looks_first or self._deriving is not None, True  # verdicts on rows are kept
        if is_first:
            self._check_unchanged(tree)
        try:
            output = compute()
            if not is_first:
                self._check_unchanged(tree)
        except BaseException as error:
            if not is_first:
                self.release()  # blocks may have been recorded with what nobody has looked at
                if isinstance(error, Exception):  # not an interrupt
                    self._check_unchanged(tree)  # it may tell why
            raise
        self.looks_first = False
        return output

    def _by_rows(self, own: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        self._check_runnable(given.get(OPTIONS) or {}, given.get("control"))
        if self._deriving is not None:
            cards, by_rows = functools.partial(self._cards, own), functools.partial(self._compute_by, own)
            return self._deriving.compute(given, own, cards, by_rows)
        latents, tokens = next(iter(given.values())), self._plan.tokens
        is_one = isinstance(latents, torch.Tensor) and latents.ndim == 5 and latents.shape[2] == 1
        return self._compute_by(own, (is_one and tokens.one_frame) or tokens, given)

    def _forgetting(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments with which a class neither reads nor leaves keys: those of an earlier prompt are of its LoRAs."""
        if not self._plan.layout.forgets_if_patched:
            return given
        options = given.get(OPTIONS) or {}
        patches = options.get("patches_replace") or {}
        patches = {**patches, "dit": {**patches.get("dit", {}), "of no block": None}}
        return {**given, OPTIONS: {**options, "patches_replace": patches}}

    def _compute_by(self, own: Callable[..., Any], plan: TokenPlan, given: Mapping[str, Any]) -> Any:
        rows, replays, options = self._attach(plan), None, given.get(OPTIONS) or {}
        is_patched = any(any(options.get(name, {}).values()) for name in ("patches", "patches_replace"))
        if self.graphs is not None and self.graphs.may_replay and not is_patched:
            functions = tuple(getattr(module, name, None) for module, name in self._attention)
            groups = self._plan.replayed_groups if self._plan.replayed_groups != rows.groups else 0
            replays = Replays(self.graphs, (rows, rows.groups, rows.exchange, functions), groups)
        attend = self._override(rows, options.get(OVERRIDE)) if plan.passes_options else None
        of_ranks = ((each, self._given(rank, given)) for rank, each in enumerate(self._forwards(own)))
        calls = [functools.partial(self._run, rows, attend, *each) for each in of_ranks]
        with led_by_name(self._models[0], plan):
            return rows.run(calls, replays)[0]

    def _cards(self, own: Callable[..., Any]) -> Cards:
        """For forwards by other rows than those of this split."""
        for rows in self._rows.values():
            rows.remove()
        return Cards(self._models, self._forwards(own), self._plan.devices, self._plan.layout.block_lists, self._send)

    def _forwards(self, own: Callable[..., Any]) -> list[Callable[..., Any]]:
        """By rank. own: the main card's."""
        return [own, *(getattr(model, self._method) for model in self._models[1:])]

    def _go_alone(self, tree: SplitTree, refusal: RowsError) -> None:
        """Raises: the refusal, where a user named this way."""
        if not self._plan.may_run_alone:
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame: the MODEL would wait for the garbage collector
        tree.say_once(f"split: way auto took tokens, and now the first card computes alone: {refusal}")

    def _attach(self, plan: TokenPlan) -> TokenParallel:
        """The rows of this plan, and no others."""
        if (rows := self._rows.get(id(plan))) is None:
            how = plan, self._plan.shares, self._send, self._plan.groups, self._plan.request.exchange
            rows = self._rows[id(plan)] = TokenParallel(self._models, self._plan.devices, *how)
        for other in self._rows.values():
            if other is not rows:
                other.remove()
        rows.attach()
        return rows

    def _given(self, rank: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the forward on a rank's device; dicts are its own."""
        device = self._plan.devices[rank]

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if rank == 0 or is_everywhere(tensor) else copy_to(tensor, device)

        moved = {name: map_tensors(value, move, FUNCTIONS) for name, value in given.items()}
        if isinstance(moved.get(OPTIONS), dict):
            moved[OPTIONS] = dict(moved[OPTIONS])
        if isinstance(control := given.get("control"), dict):
            residuals = {name: [each if each is None else move(each) for each in of] for name, of in control.items()}
            moved["control"] = residuals
        return moved

    def _run(self, rows: TokenParallel, attend: Any, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """One rank's forward, in its thread. attend: the attention override, where the class hands it on."""
        here = rows.rows
        assert here is not None
        if isinstance(control := given.get("control"), dict):
            given["control"] = {name: RowResiduals(each, here, rows.plan.control) for name, each in control.items()}
        if attend is not None:
            given = self._forgetting(given)
            given.setdefault(OPTIONS, {})[OVERRIDE] = attend
        return forward(**given)


@dataclass(frozen=True, kw_only=True)
class TokensPlan(SplitPlan):
    """Every device computes a share of the rows of each forward."""

    executor, part = TokensExecutor, "a share of the tokens each"
    tokens: TokenPlan  # of a class that nobody described a derived one, or an empty one
    shares: tuple[float, ...]  # of the rows, by device
    groups: int = 1  # of heads, in which keys and values travel
    replayed_groups: int = 1  # where blocks are replayed
    may_run_alone: bool = False  # whether the main card computes what is refused by tokens, as no user named them
    derived: DerivedRows | None = None  # where derived plans are kept; None for a class with a written one

    def share_of(self, device: torch.device) -> str:
        share = self.shares[self.devices.index(device)] / sum(self.shares)
        return f"the whole model and {share:.0%} of the tokens"


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a sample of two tensors has the same bytes, or one is the other cast; no numbers are zeros."""
    if (a.device, a.data_ptr()) == (b.device, b.data_ptr()) and (a.dtype, a.shape) == (b.dtype, b.shape):
        return True
    flat = [part.reshape(-1) if a.dtype != b.dtype else part.reshape(-1).view(torch.uint8) for part in (a, b)]
    some = [part[:: len(part) // 100 | 1] for part in flat]
    one, two = (torch.zeros_like(each, device="cpu") if each.is_meta else each.cpu() for each in some)
    return a.shape == b.shape and (torch.equal(one.to(two.dtype), two) or torch.equal(two.to(one.dtype), one))
