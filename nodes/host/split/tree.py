"""The module tree of a split model: each further card's part is a small model (a shard) to ComfyUI's patcher.

While that works on the main card's part, the other cards' blocks are taken out of their lists (`main_only`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod
from itertools import groupby
from typing import Any, cast

import comfy.model_management as management
import torch
from torch import nn

from ....parallel import block_lists
from ....parallel.local.bridge import Bridge
from ....parallel.local.graphs import Graphs
from ....parallel.local.interleave import Interleave
from ....parallel.placement import Placement, block_flops, check_budgets, plan_manual, plan_placement
from ....patches.changes import replaced_methods
from ....patches.hooks import HookSet
from ....planning.times import NUM_TEXT_TOKENS, PICTURE_TOKENS
from ..compiler import outside
from .attachments import ROOT, guard_options, seen_attachments, unseen_attachments, wrap_control
from .model_copy import Origin
from .plan import SplitPlan, SplitRequest, layout_of
from .shown_inputs import OPTIONS

_log = logging.getLogger(__name__)
_ATTRIBUTE = "devicebridge_split"


class Shard(nn.Module):
    """Some blocks of a model under the names they have there: the model of one further card."""

    def __init__(self, base: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.__dict__["_base"] = weakref.ref(base)
        self.device: torch.device | None = None
        for name, block in blocks.items():
            parent: nn.Module = self
            *path, last = f"{ROOT}.{name}".removesuffix(".").split(".")
            for part in path:
                parent = cast(nn.Module, parent._modules.setdefault(part, nn.Module()))
            parent.add_module(last, block)

    @property
    def manual_cast_dtype(self) -> torch.dtype | None:
        return self.__dict__["_base"]().manual_cast_dtype

    def get_dtype(self) -> torch.dtype:
        return self.__dict__["_base"]().get_dtype()


class Executor:
    """Runs the forwards of one tree over its cards."""

    bridge: Bridge  # hooks the blocks and moves what they are called with
    parts: Mapping[torch.device, Mapping[str, nn.Module]]  # by device and name, the blocks or its part of each
    tolerance = 0.0  # of a standard deviation, between a step and its verification
    plain = ""  # how a step is computed a second time to verify it
    plainer = ""  # what a user can set where that gives something else
    has_copies = False  # whether every card has the whole model
    graphs: Graphs | None = None  # of blocks, where they are replayed
    looks_first = True  # at what other nodes did, before a run's first forward

    def attach(self, patches_uuid: object) -> None:
        """Hook the blocks. patches_uuid: ComfyUI's number for the patches of their weights."""
        self.bridge.attach()

    def remove(self) -> None:
        self.bridge.remove()

    def prepare(self, tree: SplitTree, options: Mapping[str, Any]) -> None:
        """Look at what other nodes did to the blocks. Raises: RuntimeError for what cannot run."""
        raise NotImplementedError

    def guard(self, tree: SplitTree, options: Mapping[str, Any]) -> dict[str, Any]:
        """transformer_options for every card; with a check of forwards that wrappers run, if one is needed."""
        return guard_options(options, self.bridge, tree.plan)

    def reason_against_parts(self, tree: SplitTree, num_parts: int, has_room: Callable[[], bool]) -> str:
        """Why a step's micro-batches are not to be computed apart; "" if they are. has_room: for the largest one."""
        return ""

    def run_parts(self, tree: SplitTree, jobs: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        return Interleave(self.bridge).run(jobs)

    def release(self) -> None:
        """Give back the memory that is kept between forwards for speed alone."""
        if self.graphs is not None:
            self.graphs.release()

    def origin_on(self, device: torch.device, given: Origin | None) -> Origin | None:
        return given

    def patches_on(self, device: torch.device, patches: dict[str, Any], uuid: object) -> dict[str, Any]:
        """The patches of the whole model as they apply to a card's part. uuid: ComfyUI's number for them."""
        return patches

    def whole_weight(self, key: str) -> torch.Tensor | None:
        """The whole of a divided weight, by its name in the BaseModel; None if it is not divided."""
        return None

    def check_possible(self, action: str) -> None:
        """Raises: RuntimeError where no card has a whole weight, which this action needs."""


class SplitTree:
    """The split state of one BaseModel, which nobody else uses: its shards, its two views, its hooks.
    Raises: ValueError for weights that cannot be divided."""

    def __init__(self, base: nn.Module, plan: SplitPlan, origin: Origin | None = None) -> None:
        self._base: Callable[[], Any] = weakref.ref(base)
        self.plan, self.origin = plan, origin
        root = self.diffusion_model
        self._blocks = {name: root.get_submodule(name) for name in plan.blocks}
        self._lists = {name: root.get_submodule(name) for name in _containers_of(plan.blocks) if name}
        self.executor: Executor = plan.executor(self, plan)
        make_shard = type(f"{type(base).__name__}Shard", (Shard,), {})  # ComfyUI logs the name
        others = plan.devices[1:]
        self.shards: dict[torch.device, nn.Module] = {at: make_shard(base, self.executor.parts[at]) for at in others}
        self._hidden: dict[str, dict[str, nn.Module | None]] = {}
        self._hooks, self._said = HookSet(), set[str]()  # what was said once
        self.patcher: Callable[[], Any] = lambda: None  # who attached; it has one for each other card as companions
        self._attached_by: int | None = None  # its id: weak references are dead when the collector has a patcher detach
        self._unseen: list[tuple[str, str]] | None = None  # None: to be looked for
        self.is_plain = False  # whether forwards return to the main card after every block and remember no copies
        self._is_step, self.is_to_verify = False, False  # the latter is of the next step
        self._held = threading.local()  # what keeps a thread's forward outside the compiler; its end leaves, too
        self.loaded_layers: dict[torch.device, dict[str, int]] = {}  # of object patches, by name: what each card holds
        self._is_proven = not plan.layout.is_derived  # or need not be
        base.__dict__[_ATTRIBUTE] = self

    @property
    def diffusion_model(self) -> nn.Module:
        return self._base().diffusion_model

    @property
    def bridge(self) -> Bridge:
        return self.executor.bridge

    def weight_bytes(self) -> dict[torch.device, int]:
        sizes = {device: int(management.module_size(shard)) for device, shard in self.shards.items()}
        with self.main_only():
            return {self.plan.main_device: int(management.module_size(self._base()))} | sizes

    @contextmanager
    def _view(self, *, is_whole: bool) -> Iterator[None]:
        if is_other := self.is_whole != is_whole:
            self._turn()
        try:
            yield
        finally:
            if is_other:
                self._turn()

    main_only = partialmethod(_view, is_whole=False)  # blocks of other cards are out; the others keep their numbers
    whole = partialmethod(_view, is_whole=True)  # every block is in its list, also inside main_only

    @property
    def is_whole(self) -> bool:
        return not self._hidden

    def _turn(self) -> None:
        """Take the blocks of other cards out of their lists, or put them back."""
        for name, children in self._hidden.items():
            container = self.diffusion_model.get_submodule(name)
            children.update(container._modules)  # ComfyUI may have patched or restored a main card's block meanwhile
            container._modules = children
        if self._hidden:
            return self._hidden.clear()
        for name in _containers_of(list(filter(self.is_foreign, self.plan.blocks))):
            container = self.diffusion_model.get_submodule(name)
            children = self._hidden[name] = container._modules
            own = (key for key in children if not self.is_foreign(f"{name}.{key}".lstrip(".")))
            container._modules = {key: children[key] for key in own}

    def check_object_patch(self, key: str) -> None:
        """Raises: ValueError for an object patch that replaces whole lists of blocks."""
        if key in {ROOT, *(f"{ROOT}.{name}" for name in self._lists)}:
            single = f"{ROOT}.{self.plan.blocks[0]}"
            raise ValueError(f"a node replaces {key}; have it patch single blocks, such as {single}")

    def device_of(self, key: str) -> torch.device:
        """The card of what has this name inside the BaseModel or the diffusion model."""
        return self.plan.device_of(key.removeprefix(f"{ROOT}."))

    def is_foreign(self, key: str) -> bool:
        return self.device_of(key) != self.plan.main_device

    def is_block(self, key: str) -> bool:
        return key.removeprefix(f"{ROOT}.") in self._blocks

    def block(self, name: str) -> nn.Module:
        """The block as it is now, or as it was where its list was exchanged."""
        container, _, child = name.rpartition(".")
        parent = self._lists[container] if container else self.diffusion_model
        block = parent._modules.get(child) if not container or self._is_in_place(container) else None
        return self._blocks[name] if block is None else block

    def called_modules(self) -> dict[nn.Module, torch.device]:
        hooked = ((name, block_lists.hooked_modules(self.block(name), self.plan.layout)) for name in self.plan.blocks)
        return {module: self.plan.device_of(name) for name, modules in hooked for module in modules}

    def _is_in_place(self, name: str) -> bool:
        """Whether a list of blocks is the one that was split."""
        return block_lists.find_module(self.diffusion_model, name) is self._lists[name]

    def attach(self, owner: Any) -> None:
        """Hook the tree for this patcher, in the place of another's: one is loaded at a time."""
        self._remove_hooks()
        self._attached_by, self.patcher = id(owner), weakref.ref(owner)
        self.look_again()
        self.executor.attach(owner.patches_uuid)
        self._hooks.before(self.diffusion_model, self._start)
        self._hooks.after(self.diffusion_model, self._finish, also_on_error=True)

    def detach(self, owner: object) -> None:
        """Take off the hooks this patcher attached; those of another stay (a clone dies while its original runs)."""
        if self._attached_by == id(owner):
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._attached_by = None
        self.executor.remove()
        self._hooks.remove()
        self._held = threading.local()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Forwards inside, in whatever threads, stand outside ComfyUI's compiler and leave nothing behind."""
        with outside(self.plan.devices):
            try:
                self._is_step = True
                yield
            finally:
                self._is_step = False
                self.end()

    def end(self) -> None:
        """End what a forward of this thread left behind: an interrupt that unwinds one calls no hook."""
        self.bridge.end()
        if held := self._held.__dict__.pop("stay", None):
            held.__exit__(None, None, None)

    def unseen(self, *, in_blocks: bool = False) -> tuple[str, ...]:
        """What other nodes attached inside the model, where it runs unseen; or the part that is or may be in blocks."""
        if self._unseen is None and (patcher := self.patcher()) is not None:
            self._unseen = list(unseen_attachments(patcher, self.diffusion_model, self.own_hooks))
        places = tuple(f"{name}." for name in self.plan.blocks) if in_blocks else ("",)
        return tuple(text for name, text in self._unseen or () if not name or f"{name}.".startswith(places))

    def look_again(self) -> None:
        self._unseen = None

    @property
    def own_hooks(self) -> set[int]:
        return self.bridge.hook_ids | self._hooks.ids

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.info(text)

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Decide how this forward travels, and whose code it may meet on its way."""
        options = kwargs.get("transformer_options") or {}
        self.executor.prepare(self, options)
        self.end()
        self.bridge.begin()  # before anything is set for this forward: another thread's may be running
        between = [f"another node replaced {name} of the model" for name in replaced_methods(self.diffusion_model)]
        between += [f"another node exchanged {name}" for name in self._lists if not self._is_in_place(name)]
        if between and self.plan.transport == "stream":
            self.say_once(f"split: relay instead of stream: {between[0]}, which may do anything between two blocks")
        is_plain = bool(between) or self.is_plain
        self.bridge.transport = "relay" if is_plain else self.plan.transport
        is_watched = is_plain or self.unseen() or self.plan.layout.is_derived
        self.bridge.runs_alone = not is_watched and not seen_attachments(options)
        if not self._is_step:  # run by somebody else than ComfyUI's sampler
            stay = outside(self.plan.devices)
            stay.__enter__()
            self._held.stay = stay
        changes = {"control": partial(wrap_control, self.bridge), OPTIONS: partial(self.executor.guard, self)}
        changed = {name: make(kwargs[name]) for name, make in changes.items() if isinstance(kwargs.get(name), dict)}
        return self.bridge.move((args, {**kwargs, **changed}), self.plan.main_device)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        layout = self.plan.layout
        try:
            if output is None:
                return None
            if not (self._is_proven or self.executor.has_copies):
                # Single blocks may be left out on purpose (skip-layer guidance), a whole list hardly.
                hooked = {name: block_lists.hooked_modules(self.block(name), layout) for name in self.plan.blocks}
                called = [name for name, modules in hooked.items() if not self.bridge.entered.isdisjoint(modules)]
                if unused := set(_containers_of(self.plan.blocks)).difference(_containers_of(called)):
                    found = f"{type(module).__name__} did not call a single block of {', '.join(unused)} as a module"
                    raise RuntimeError(f"{found}, so these get no inputs in a split; load the model without a split")
                self._is_proven = True
            return self.bridge.move(output, self.plan.main_device)
        finally:
            self.end()


def _containers_of(blocks: Sequence[str]) -> list[str]:
    """fqns of the modules that hold these blocks, such as their lists; "" for the diffusion model itself."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in blocks))


def tree_of(base: nn.Module) -> SplitTree | None:
    """The split of a BaseModel; None for an ordinary one."""
    return base.__dict__.get(_ATTRIBUTE)


class BlockExecutor(Executor):
    plain = "without overlap and by relay"
    plainer = "transport to relay and overlap off"

    def __init__(self, tree: SplitTree, plan: BlockPlan) -> None:
        self._plan, parts = plan, {device: dict[str, nn.Module]() for device in plan.devices}
        for name, device in plan.placement.items():
            parts[device][name] = tree.block(name)
        self.parts = parts
        self.bridge = self._make_bridge(tree, tree.called_modules())

    def prepare(self, tree: SplitTree, options: Mapping[str, Any]) -> None:
        """Hook the compiled wrapper of a block where a compile node has put one, so that the hooks stay out of it."""
        called = tree.called_modules()
        if called.keys() != self.bridge.blocks.keys():
            self.bridge.remove()
            self.bridge = self._make_bridge(tree, called)
            self.bridge.attach()

    def _make_bridge(self, tree: SplitTree, called: Mapping[nn.Module, torch.device]) -> Bridge:
        tail = block_lists.tail_modules(tree.diffusion_model, self._plan.layout)
        return Bridge(called, self._plan.main_device, tail=tail, transport=self._plan.transport, **self._plan.of_class)


@dataclass(frozen=True, kw_only=True)
class BlockPlan(SplitPlan):
    """Every card holds some of the blocks, and activations travel from card to card."""

    executor = BlockExecutor
    placement: Placement

    def device_of(self, name: str) -> torch.device:
        return self.placement.device_of(name)

    def share_of(self, device: torch.device) -> str:
        return f"{self.placement.num_blocks_on(device)} blocks"

    def num_blocks(self) -> list[tuple[str, int]]:
        return self.placement.runs()

    def describe(self) -> str:
        runs = groupby(enumerate(self.placement.devices), key=lambda each: each[1])
        numbers = [(device, [index for index, _ in run]) for device, run in runs]
        where = ", ".join(f"{indices[0]}-{indices[-1]} on {device}" for device, indices in numbers)
        no_use = self.describe_exchange("of no use to way blocks, which sends each activation once and as it is")
        return f"{where}; {self.transport}; overlap {'on' if self.overlap else 'off'}{no_use}"


def plan_blocks(diffusion_model: nn.Module, request: SplitRequest) -> BlockPlan:
    """Decide where every block goes and how activations travel; reads sizes only. Raises: ValueError if the class has
    no blocks that can be found, the cuts are wrong or the limits are too small."""
    layout = layout_of(diffusion_model)
    of = diffusion_model, layout
    leaders, order = block_lists.followers(*of), block_lists.execution_order(*of)
    blocks, natural = block_lists.placed_blocks(*of), block_lists.transport_for(*of)
    if request.transport == "stream" and natural != "stream":
        raise ValueError(f"transport stream is wrong for {layout.class_name} ({layout.note}); use auto or relay")
    model_bytes = int(management.module_size(diffusion_model))
    request, wanted = request.allotted(model_bytes)
    size_of = dict.fromkeys(blocks, 0)
    for name in order:  # a block that follows another is where that one is
        size_of[leaders.get(name, name)] += int(management.module_size(diffusion_model.get_submodule(name)))
    sizes = list(size_of.values())
    other_bytes = model_bytes - sum(sizes)  # on the main device
    budgets, is_time = request.card_budgets(), request.balance == "time"
    by_hand = plan_manual(blocks, request.devices, request.split_at) if request.balance == "manual" else None
    costs: list[float] = list(sizes)
    if is_time:  # a block's share changes little with the size of what is sampled
        of_blocks, side = map(diffusion_model.get_submodule, blocks), layout.linears
        costs = [block_flops(block, side, PICTURE_TOKENS, NUM_TEXT_TOKENS) for block in of_blocks]

    def place(budget: Mapping[torch.device, int]) -> Placement:
        if by_hand is not None:
            check_budgets(by_hand, sizes, other_bytes, budget)
            return by_hand
        others: dict[str, Any] = {"block_cost": costs, "main_cost": 0.0 if is_time else other_bytes}
        others |= {"block_bytes": sizes, "main_bytes": other_bytes, "budget_bytes": budget}
        others["capacity"] = () if is_time else wanted or list(budgets.values())
        return plan_placement(blocks, request.devices, **others)

    try:
        placed = place(budgets)
    except ValueError as error:
        if not request.offload:
            raise ValueError(f"{error}, or turn offload on") from error
        _log.warning("split: %s; what does not fit stays in host memory and is streamed at every step", error)
        placed = place({})
    transport = request.transport or natural
    overlap = request.overlap and transport == "stream" and layout.can_overlap
    devices = tuple(placed.device_of(leaders.get(name, name)) for name in order)
    placement = Placement(order, devices, request.devices[0])
    return BlockPlan(order, placement.used_devices, layout, request, transport, overlap, placement=placement)
