"""The module tree of a split model: which part of it each card answers for, and how a forward runs over all of them.

One tree belongs to one split. Its blocks are also members of one small model per further card (a shard), under the
names they have in the whole, so that ComfyUI's own patcher can load, patch, offload and evict each part by itself.
While ComfyUI works on the home card's part, the other cards' blocks are taken out of their lists (`home_only`).
Everything else, LoRA key maps, injections, the forward, sees the whole tree.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import comfy.model_management as management
import torch
from torch import nn

from ....parallel.block_lists import BlockCalls, hooked_modules, tail_modules
from ....parallel.local.bridge import Bridge
from ....parallel.local.tensor_parallel import TensorParallel
from ....patches.hooks import HookSet
from ..compiler import Hold, hold, outside, settle
from .attachments import ROOT, replaced_methods, seen_attachments, unseen_attachments
from .division import DividedBlocks, addresses_on, check_runnable, find_bypass
from .model_copy import Origin
from .options import guard_options, wrap_control
from .plan import SplitPlan

_log = logging.getLogger(__name__)
_ATTRIBUTE = "devicebridge_split"


class Shard(nn.Module):
    """Some blocks of a model under the names they have there; stands in for the whole where one card is concerned."""

    def __init__(self, base: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.__dict__["_base"] = weakref.ref(base)
        self.device: torch.device | None = None
        for name, block in blocks.items():
            parent: nn.Module = self
            *path, last = f"{ROOT}.{name}".split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, block)

    @property
    def manual_cast_dtype(self) -> torch.dtype | None:
        return self.__dict__["_base"]().manual_cast_dtype

    def get_dtype(self) -> torch.dtype:
        return self.__dict__["_base"]().get_dtype()


class SplitTree:
    """The split state of one BaseModel: its shards, its two views, its hooks."""

    def __init__(self, base: nn.Module, plan: SplitPlan, origin: Origin | None) -> None:
        self._base: Callable[[], Any] = weakref.ref(base)
        self.plan = plan
        self._origin = origin
        make_shard = type(f"{type(base).__name__}Shard", (Shard,), {})  # ComfyUI logs the name
        root, blocks = self.diffusion_model, plan.placement.blocks
        self.divided = DividedBlocks(root, plan.division) if plan.division is not None else None
        self.shards: dict[torch.device, nn.Module] = {
            device: make_shard(base, self.blocks_on(device)) for device in plan.foreign_devices
        }
        self._blocks = {name: root.get_submodule(name) for name in blocks}
        self._lists = {name: root.get_submodule(name) for name in _containers_of(blocks) if name}
        self._hidden: dict[str, dict[str, nn.Module | None]] = {}
        self._hooks = HookSet()
        self.bridge = self._make_bridge(self._called_modules())
        self._calls: BlockCalls | None = None
        self._patcher: Callable[[], Any] = lambda: None  # who attached
        self._attached_by: int | None = None  # its id: weak references are dead when the collector has a patcher detach
        self._weights: object = None  # ComfyUI's number for the patches with which the cards were compared
        self._layers = tuple(layer for block in self.bridge.blocks for layer in block.modules()) if self.divided else ()
        self._unseen: tuple[str, ...] | None = None
        self._inside: tuple[str, ...] = ()  # of that, what is in blocks
        self._num_attached = 0  # to layers, when that was looked up
        self._is_plain = False
        self._is_step = False
        self._forwards = _Forwards()
        self._said: set[str] = set()  # what needs saying once
        self.is_to_verify = False  # the next step
        self.advise: Callable[[SplitTree, int], None] | None = None  # at the next step, told how many conds it computes
        self.loaded_layers: dict[torch.device, dict[str, int]] = {}  # of object patches, by name: what each card holds
        self._is_proven = not plan.layout.is_watched
        self.is_verified = plan.layout.evidence != "read"  # or need not be

    @property
    def diffusion_model(self) -> nn.Module:
        return self._base().diffusion_model

    def blocks_on(self, device: torch.device) -> dict[str, nn.Module]:
        """A card's blocks by name, or its parts of all blocks."""
        if self.divided is not None:
            return {name: shard.block for name, shard in self.divided.shards[device].items()}
        return {name: self.diffusion_model.get_submodule(name) for name in self.plan.blocks_on(device)}

    def part_bytes(self) -> dict[torch.device, int]:
        """Bytes of weights that each card has of a divided model."""
        others = {device: int(management.module_size(shard)) for device, shard in self.shards.items()}
        return {self.plan.home: int(management.module_size(self._base())), **others}

    def origin_on(self, device: torch.device) -> Origin | None:
        """Where the unpatched weights of a card's part lie in host memory; None if nobody knows."""
        return self._origin if self.divided is None else self.divided.origin(device, self._origin)

    def patches_on(self, device: torch.device, patches: dict[str, Any], uuid: Any) -> dict[str, Any]:
        """The patches of the whole model as they apply to a card's part. uuid: ComfyUI's number for them."""
        return patches if self.divided is None else self.divided.patches_on(device, patches, uuid)

    # ---- views

    @contextmanager
    def _view(self, *, is_whole: bool) -> Iterator[None]:
        if self.is_whole == is_whole:
            yield
            return
        enter, leave = (self._show, self._hide) if is_whole else (self._hide, self._show)
        enter()
        try:
            yield
        finally:
            leave()

    home_only = partialmethod(_view, is_whole=False)  # blocks of other cards are out; the others keep their numbers
    whole = partialmethod(_view, is_whole=True)  # every block is in its list, also inside home_only

    @property
    def is_whole(self) -> bool:
        return not self._hidden

    def _hide(self) -> None:
        for name in _containers_of([block for device in self.shards for block in self.plan.blocks_on(device)]):
            container = self.diffusion_model.get_submodule(name)
            children = self._hidden[name] = container._modules
            container._modules = {
                key: child for key, child in children.items() if not self.is_foreign(f"{name}.{key}".lstrip("."))
            }

    def _show(self) -> None:
        for name, children in self._hidden.items():
            container = self.diffusion_model.get_submodule(name)
            children.update(container._modules)  # ComfyUI may have patched or restored a home block meanwhile
            container._modules = children
        self._hidden.clear()

    # ---- names

    def check_object_patch(self, key: str) -> None:
        """Refuse an object patch that would put something else in the place of whole lists of blocks.

        Raises: ValueError that says what can be patched.
        """
        if key in {ROOT, *(f"{ROOT}.{name}" for name in self._lists)}:
            raise ValueError(
                f"a node replaces {key} as a whole, which cannot span several cards; patch single blocks (such as "
                f"{ROOT}.{self.plan.placement.blocks[0]}), or use the MODEL without the split"
            )

    def device_of(self, key: str) -> torch.device:
        """The card of what has this name inside the BaseModel or the diffusion model."""
        return self.plan.placement.device_of(key.removeprefix(f"{ROOT}."))

    def is_foreign(self, key: str) -> bool:
        """Whether what has this name lies in a block of another card."""
        return self.device_of(key) != self.plan.home

    def is_block(self, key: str) -> bool:
        """Whether this is the name of a whole block."""
        return key.removeprefix(f"{ROOT}.") in self._blocks

    # ---- the forward

    def attach(self, owner: Any) -> None:
        """Hook the tree for this patcher; the hooks of another are replaced, since one patcher is loaded at a time."""
        self._remove_hooks()
        if isinstance(self.bridge, TensorParallel) and owner.patches_uuid != self._weights:
            self.bridge.check_again()
            self._weights = owner.patches_uuid
        self._attached_by, self._patcher, self._unseen = id(owner), weakref.ref(owner), None
        self._inside = ()
        self.bridge.attach()
        self._hooks.before(self.diffusion_model, self._start)
        self._hooks.after(self.diffusion_model, self._finish, also_on_error=True)

    def detach(self, owner: object) -> None:
        """Take off the hooks this patcher attached; those of another stay (a clone dies while its original runs)."""
        if self._attached_by == id(owner):
            self._remove_hooks()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Forwards inside, in whatever threads, stand outside ComfyUI's compiler and leave nothing behind."""
        with outside(self.plan.used_devices):
            self._is_step = True
            try:
                yield
            finally:
                self._is_step = False
                self.end()

    def end(self) -> None:
        """End what a forward of this thread left behind: torch calls no hook of ours when an interrupt unwinds one."""
        self.bridge.end()
        if self._forwards.held is not None:
            self._forwards.held.end()
            self._forwards.held = None
        settle()

    def release(self) -> None:
        """Give back the memory that is kept between forwards for speed alone: a card needs room."""
        if isinstance(self.bridge, TensorParallel):
            self.bridge.release()

    def _remove_hooks(self) -> None:
        self._attached_by = None
        self.bridge.remove()
        self._hooks.remove()
        settle()

    @property
    def unseen(self) -> tuple[str, ...]:
        """What other nodes attached inside the model, where it runs unseen; looked up once per loading."""
        self._look()
        return self._unseen or ()

    def _look(self) -> None:
        patcher = self._patcher()
        if self._unseen is None and patcher is not None:
            own = self.bridge.hook_ids | self._hooks.ids
            self._unseen = tuple(unseen_attachments(patcher, self.diffusion_model, own))
            if self._unseen:
                blocks = self.plan.placement.blocks
                self._inside = tuple(unseen_attachments(patcher, self.diffusion_model, own, blocks))

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Forwards inside go home after every block, or their cards are given anew all that it is called with. They
        remember no copies: slower, and right whatever is attached."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.info(text)

    def _make_bridge(self, called: Mapping[nn.Module, torch.device]) -> Bridge:
        if self.divided is not None:
            bridge = TensorParallel(
                self.divided.division.devices,
                self.divided.by_block(),
                passed_by=self.plan.layout.passed_by,
                per_device=self.plan.layout.per_device,
            )
            bridge.replay(addresses_on)
            return bridge
        return Bridge(
            called,
            self.plan.home,
            tail=tail_modules(self.diffusion_model, self.plan.layout),
            transport=self.plan.transport,
            passed_by=self.plan.layout.passed_by,
            per_device=self.plan.layout.per_device,
        )

    def _called_modules(self) -> dict[nn.Module, torch.device]:
        """The modules to hook, and their devices: blocks as they are now, those of an exchanged list as they were."""
        placement, layout = self.plan.placement, self.plan.layout
        return {
            module: device
            for name, device in zip(placement.blocks, placement.devices, strict=True)
            for module in hooked_modules(self._block(name), layout)
        }

    def _block(self, name: str) -> nn.Module:
        container, _, child = name.rpartition(".")
        parent = self._lists[container] if container else self.diffusion_model
        block = parent._modules.get(child) if not container or self._is_in_place(container) else None
        return self._blocks[name] if block is None else block

    def _is_in_place(self, name: str) -> bool:
        """Whether a list of blocks is the one that was split."""
        found: object = self.diffusion_model
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is self._lists[name]

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.divided is not None:
            options = kwargs.get("transformer_options") or {}
            compiled = [] if self._called_modules().keys() == self.bridge.blocks.keys() else ["a compiled block"]
            number = _count_attached(self._layers)
            if number != self._num_attached:  # since that was looked up
                self._unseen, self._inside, self._num_attached = None, (), number
            self._look()
            bypass = find_bypass(self._layers)  # before every forward: it can come at any time
            check_runnable((*compiled, *bypass, *self._inside), options, self.plan.layout.patches_inside)
        else:
            self._follow_compiled_blocks()
        self.end()
        self.bridge.begin()  # ahead of what is decided for this forward: another thread's may be running
        self._decide(kwargs.get("transformer_options") or {})
        if not self._is_proven:
            if self._calls is not None:
                self._calls.stop()
            self._calls = BlockCalls(self.diffusion_model, self.plan.placement.blocks)
        if not self._is_step:  # run by somebody else than ComfyUI's sampler
            self._forwards.held = hold(self.plan.used_devices, sys._getframe(1))
        kwargs = dict(kwargs)
        if isinstance(kwargs.get("control"), dict):
            kwargs["control"] = wrap_control(kwargs["control"], self.bridge)
        if isinstance(kwargs.get("transformer_options"), dict):
            kwargs["transformer_options"] = guard_options(kwargs["transformer_options"], self.bridge, self.plan)
        args, kwargs = self.bridge.move((args, kwargs), self.plan.home)
        return args, _Arguments(kwargs)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        try:
            if output is not None and self._calls is not None:
                self._calls.check()
                self._calls, self._is_proven = None, True
            return self.bridge.move(output, self.plan.home) if output is not None else None
        finally:
            self.end()

    def _decide(self, options: Mapping[str, Any]) -> None:
        """How this forward travels, and whose code it may meet on its way."""
        between = [f"another node replaced {name} of the model" for name in replaced_methods(self.diffusion_model)]
        between += [f"another node exchanged {name}" for name in self._lists if not self._is_in_place(name)]
        if between and self.plan.transport == "stream":
            self.say_once(f"split: relay instead of stream: {between[0]}, which may do anything between two blocks")
        goes_home = bool(between) or (self._is_plain and self.divided is None)
        if isinstance(self.bridge, TensorParallel):
            self.bridge.remembers = not self._is_plain
        self.bridge.transport = "relay" if goes_home else self.plan.transport
        is_watched = goes_home or self.unseen or self.plan.layout.is_watched
        self.bridge.runs_alone = not is_watched and not seen_attachments(options)

    def _follow_compiled_blocks(self) -> None:
        """Hook the compiled wrapper of a block where a compile node has put one, so that the hooks stay out of it."""
        called = self._called_modules()
        if called.keys() == self.bridge.blocks.keys():
            return
        self.bridge.remove()
        self.bridge = self._make_bridge(called)
        self.bridge.attach()


class _Forwards(threading.local):
    """Of each thread: what keeps its forward outside the compiler."""

    held: Hold | None = None


class _Arguments(dict[str, Any]):
    """Keyword arguments that torch holds while the forward runs; when they go, a hold whose forward is over ends."""

    def __del__(self) -> None:
        settle()


def _count_attached(layers: Sequence[nn.Module]) -> int:
    """How many hooks and forwards of their own layers have."""
    return sum(
        len(layer._forward_hooks) + len(layer._forward_pre_hooks) + ("forward" in layer.__dict__) for layer in layers
    )


def _containers_of(blocks: Sequence[str]) -> list[str]:
    """fqns of the modules that hold these blocks, such as their lists; "" for the diffusion model itself."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in blocks))


def tree_of(base: nn.Module) -> SplitTree | None:
    """The split a BaseModel belongs to; None for an ordinary one."""
    return base.__dict__.get(_ATTRIBUTE)


def make_tree(base: nn.Module, plan: SplitPlan, origin: Origin | None = None) -> SplitTree:
    """Make a BaseModel that nobody else uses the tree of a split."""
    tree = base.__dict__[_ATTRIBUTE] = SplitTree(base, plan, origin)
    return tree
