"""The module tree of a split model: which part of it each card answers for, and how a forward runs over all of them.

One tree belongs to one split. Its blocks are also members of one small model per further card (a shard), under the
names they have in the whole, so that ComfyUI's stock patcher can load, patch, offload and evict each part by itself.
While stock code works on the home card's part, the other cards' blocks are taken out of their lists (`home_only`);
everything else, LoRA key maps, injections, the forward, sees the whole tree.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ....parallel.block_lists import BlockCalls, hooked_modules, tail_modules
from ....parallel.local.bridge import Bridge
from ....patches.hooks import HookSet
from .attachments import ROOT, replaced_methods, seen_attachments, unseen_attachments
from .model_copy import Origin
from .options import guard_options, wrap_control
from .plan import SplitPlan

_log = logging.getLogger(__name__)
_ATTRIBUTE = "devicebridge_split"


class Shard(nn.Module):
    """Some blocks of a model under the names they have there; stands in for the whole where one card is concerned."""

    def __init__(self, base: nn.Module, block_names: list[str]) -> None:
        super().__init__()
        self.__dict__["_base"] = weakref.ref(base)
        self.device: torch.device | None = None
        for name in block_names:
            self._adopt(f"{ROOT}.{name}", base.get_submodule(f"{ROOT}.{name}"))

    def _adopt(self, fqn: str, block: nn.Module) -> None:
        parent: nn.Module = self
        *path, last = fqn.split(".")
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
        self._base = weakref.ref(base)
        self.plan = plan
        self.origin = origin
        name = f"{type(base).__name__}Shard"  # the host logs it
        make_shard = type(name, (Shard,), {})
        self.shards: dict[torch.device, nn.Module] = {
            device: make_shard(base, plan.blocks_on(device)) for device in plan.foreign_devices
        }
        self._foreign = _children_by_list(plan)
        root = self.diffusion_model
        self._lists = {name: root.get_submodule(name) for name in _lists_of(plan)}
        self._blocks = {name: root.get_submodule(name) for name in plan.placement.blocks}
        self._hidden: dict[str, dict[str, nn.Module | None]] = {}
        self._attached_by: int | None = None
        self._hooks = HookSet()
        self.bridge = self._make_bridge(self._called_modules())
        self._calls: BlockCalls | None = None
        self._patcher: weakref.ref[Any] | None = None  # of who attached
        self._unseen: tuple[str, ...] | None = None
        self._is_plain = False
        self.said: set[str] = set()  # what needs saying once
        self.is_to_verify = False  # the next step
        self.loaded_layers: dict[torch.device, dict[str, int]] = {}  # of object patches, by name: what each card holds
        self._is_proven = plan.is_described and not plan.layout.is_derived

    @property
    def base(self) -> Any:
        return self._base()

    @property
    def diffusion_model(self) -> nn.Module:
        return self.base.diffusion_model

    # ---- views

    @contextmanager
    def home_only(self) -> Iterator[None]:
        """Blocks of other cards are out of their lists; the remaining ones keep their numbers."""
        if self._hidden:
            yield
            return
        self._hide()
        try:
            yield
        finally:
            self._show()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every block is in its list, also inside home_only."""
        if not self._hidden:
            yield
            return
        self._show()
        try:
            yield
        finally:
            self._hide()

    def check_object_patch(self, key: str) -> None:
        """Refuse an object patch that would put something else in the place of whole lists of blocks.

        Raises: ValueError that says what can be patched.
        """
        if key in {ROOT, *(f"{ROOT}.{name}" for name in _lists_of(self.plan))}:
            raise ValueError(
                f"a node replaces {key} as a whole, which cannot span several cards; patch single blocks (such as "
                f"{ROOT}.{self.plan.placement.blocks[0]}), or use the MODEL without the split"
            )

    @property
    def is_whole(self) -> bool:
        return not self._hidden

    def _hide(self) -> None:
        for name, foreign in self._foreign.items():
            container = self.diffusion_model.get_submodule(name)
            self._hidden[name] = container._modules
            container._modules = {key: child for key, child in container._modules.items() if key not in foreign}

    def _show(self) -> None:
        for name, children in self._hidden.items():
            container = self.diffusion_model.get_submodule(name)
            children.update(container._modules)  # stock code may have patched or restored a home block meanwhile
            container._modules = children
        self._hidden.clear()

    def device_of(self, key: str) -> torch.device:
        """The card of what has this name inside the BaseModel."""
        return self.plan.placement.device_of(key.removeprefix(f"{ROOT}."))

    def is_foreign(self, key: str) -> bool:
        """Whether a name inside the BaseModel lies in a block of another card."""
        return self.device_of(key) != self.plan.home

    def is_block(self, key: str) -> bool:
        """Whether this is the name of a whole block."""
        return key.removeprefix(f"{ROOT}.") in self._blocks

    # ---- the forward

    def attach(self, owner: object) -> None:
        """Hook the tree for this patcher; the hooks of another are replaced, since one patcher is loaded at a time."""
        self._remove_hooks()
        self._attached_by = id(owner)
        self._patcher, self._unseen = weakref.ref(owner), None
        self.bridge.attach()
        self._hooks.before(self.diffusion_model, self._start)
        self._hooks.after(self.diffusion_model, self._finish, also_on_error=True)

    def detach(self, owner: object) -> None:
        """Take off the hooks this patcher attached; those of another stay (a clone dies while its original runs)."""
        if self._attached_by == id(owner):
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        self._attached_by = None
        self.bridge.remove()
        self._hooks.remove()

    @property
    def unseen(self) -> tuple[str, ...]:
        """What other nodes attached inside the model, where it runs unseen; looked up once per loading."""
        if self._unseen is None:
            patcher = self._patcher() if self._patcher is not None else None
            own = self.bridge.hook_ids | self._hooks.ids
            self._unseen = () if patcher is None else unseen_attachments(patcher, self.diffusion_model, own)
        return self._unseen

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Forwards inside go home after every block and remember no copies: slower, and right whatever is attached."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            _log.info(text)

    def _make_bridge(self, called: Mapping[nn.Module, torch.device]) -> Bridge:
        return Bridge(
            called,
            self.plan.home,
            tail=tail_modules(self.diffusion_model, self.plan.layout),
            transport=self.plan.transport,
            passed_by=self.plan.layout.passed_by,
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
        if container and not self._is_in_place(container):
            return self._blocks[name]
        parent = self._lists[container] if container else self.diffusion_model
        block = parent._modules.get(child)
        return self._blocks[name] if block is None else block

    def _is_in_place(self, name: str) -> bool:
        """Whether a list of blocks is the one that was split."""
        found: object = self.diffusion_model
        for part in name.split("."):
            found = getattr(found, part, None)
        return found is self._lists[name]

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._follow_compiled_blocks()
        self._decide(kwargs.get("transformer_options") or {})
        if not self._is_proven:
            self._watch_first_forward()
        self.bridge.end()  # torch calls no hook of ours when KeyboardInterrupt ends a forward
        self.bridge.begin()
        kwargs = dict(kwargs)
        if isinstance(kwargs.get("control"), dict):
            kwargs["control"] = wrap_control(kwargs["control"], self.bridge)
        if isinstance(kwargs.get("transformer_options"), dict):
            kwargs["transformer_options"] = guard_options(kwargs["transformer_options"], self.bridge, self.plan)
        return self.bridge.move((args, kwargs), self.plan.home)

    def _finish(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        try:
            if output is not None and self._calls is not None:
                self._calls.check()
                self._calls, self._is_proven = None, True
            return self.bridge.move(output, self.plan.home) if output is not None else None
        finally:
            self.bridge.end()

    def _decide(self, options: Mapping[str, Any]) -> None:
        """How this forward travels, and whose code it may meet on its way."""
        between = [f"another node replaced {name} of the model" for name in replaced_methods(self.diffusion_model)]
        between += [f"another node exchanged {name}" for name in self._lists if not self._is_in_place(name)]
        is_known = self.plan.is_described and not self.plan.layout.is_derived
        if between and self.plan.transport == "stream":
            self.say_once(f"split: relay instead of stream: {between[0]}, which may do anything between two blocks")
        self.bridge.transport = "relay" if between or self._is_plain else self.plan.transport
        if between or self._is_plain or self.unseen or not is_known:
            self.bridge.trust = "nobody"
        else:
            self.bridge.trust = "callers" if seen_attachments(options) else "model"

    def _follow_compiled_blocks(self) -> None:
        """Hook the compiled wrapper of a block where a compile node has put one, so that the hooks stay out of it."""
        called = self._called_modules()
        if called.keys() == self.bridge.blocks.keys():
            return
        self.bridge.remove()
        self.bridge = self._make_bridge(called)
        self.bridge.attach()

    def _watch_first_forward(self) -> None:
        if self._calls is not None:
            self._calls.stop()
        self._calls = BlockCalls(self.diffusion_model, self.plan.placement.blocks)


def _lists_of(plan: SplitPlan) -> list[str]:
    """fqns of the lists that hold the blocks."""
    return list(dict.fromkeys(filter(None, (name.rpartition(".")[0] for name in plan.placement.blocks))))


def _children_by_list(plan: SplitPlan) -> dict[str, set[str]]:
    foreign: dict[str, set[str]] = defaultdict(set)
    for device in plan.foreign_devices:
        for name in plan.blocks_on(device):
            container, _, child = name.rpartition(".")
            foreign[container].add(child)
    return dict(foreign)


def tree_of(base: nn.Module) -> SplitTree | None:
    """The split a BaseModel belongs to; None for an ordinary one."""
    return base.__dict__.get(_ATTRIBUTE)


def make_tree(base: nn.Module, plan: SplitPlan, origin: Origin | None = None) -> SplitTree:
    """Make a BaseModel that nobody else uses the tree of a split."""
    tree = SplitTree(base, plan, origin)
    base.__dict__[_ATTRIBUTE] = tree
    return tree
