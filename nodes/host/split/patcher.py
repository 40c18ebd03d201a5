"""ComfyUI's ModelPatcher for a model on several cards; compat.py lists what is overridden, as ComfyUI 0.33 has it.

SplitMixin is mixed into the given MODEL's patcher class, and ShardMixin into that of each further card's part. While
ComfyUI loads, unloads or measures, the tree shows the main part alone; patches, hooks and injections see the whole.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from comfy.model_management import cuda_device_context
from comfy.patcher_extension import PatcherInjection
from comfy.quant_ops import QuantizedTensor
from comfy.utils import get_attr, set_attr, set_attr_param
from comfy.weight_adapter.bypass import BypassForwardHook
from torch import nn

from ....parallel.local.shards import JoinedSlices
from ..compiler import outside
from .attachments import KEY, is_compiled
from .model_copy import alias, original_of, reachable
from .tree import SplitTree, tree_of

_Patcher: Any = object  # the patcher's class, known only at run time
_SAVING = "saving it, or extracting a LoRA from it,"
_CHANGING = "a LoRA that changes during sampling (a hook)"


class _CardPatcher(_Patcher):
    """A limit on resident weights, and weights that need no copy on their way back to host memory."""

    _tree: SplitTree
    _main: Callable[[], SplitMixin | None]  # the main card's patcher, while there is one
    _own_part: Callable[[], AbstractContextManager[None]]
    companions: tuple[Any, ...] = ()  # of the main card's, the other cards'

    def _unhook(self) -> None:
        """Have the main patcher take out scheduled LoRA, which it wrote into weights that are about to move."""
        if (main := self._main()) is not None:
            main.unpatch_hooks()

    def partially_load(self, device_to: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> Any:
        """ComfyUI's own, with no more bytes than the user allows this card to hold."""
        self._unhook()
        with self._own_part(), cuda_device_context(device_to), outside([device_to]):
            extra_memory = self._without_other_objects(extra_memory)
            limit = self._tree.plan.request.limit_bytes.get(self.load_device)
            if limit is not None:
                extra_memory = min(extra_memory, limit - self.loaded_size())
            loaded = super().partially_load(device_to, extra_memory, force_patch_weights=force_patch_weights)
            # Under DynamicVRAM weights arrive while they are used, into this address range.
            if limit is not None and self.is_dynamic() and (vbar := self._vbar_get()) is not None:
                vbar.set_watermark_limit(limit)
        return loaded

    def patch_weight_to_device(self, key: str, device_to: Any = None, *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's own. Slices of a packed weight are joined on the card: torch would move them as they are."""
        done = super().patch_weight_to_device(key, device_to, *args, **kwargs)
        weight = get_attr(self.model, key) if device_to is not None and key not in self.patches else None
        if isinstance(weight, torch.Tensor) and isinstance(weight.data, JoinedSlices):
            set_attr_param(self.model, key, weight.data.to(device_to))
        return done

    def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
        self._unhook()
        self._tree.executor.release()
        return super().partially_unload(*args, **kwargs)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self._unhook()
        with self._own_part():
            if unpatch_weights:
                self._tree.executor.release()
            if unpatch_weights and device_to is not None:
                self._use_origins()
            super().unpatch_model(device_to, unpatch_weights)

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: Any, key: str, *args: Any, **kw: Any) -> Any:
        if key in combined_patches:
            self._unshare(key)
        return super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kw)

    def patch_cached_hook_weights(self, cached_weights: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        self._unshare(key)
        return super().patch_cached_hook_weights(cached_weights, key, *args, **kwargs)

    def _unshare(self, key: str) -> None:
        """Give a weight in host memory a storage of its own: a scheduled LoRA is written into it in place."""
        tree = self._tree
        tree.executor.check_possible(_CHANGING)
        weight = get_attr(self.model, key)
        if weight.device == self.offload_device and key not in self.hook_backup:
            for owner in (self,) if tree.executor.has_copies else (self, *self.companions):
                if key in owner.pinned:  # else the old storage would stay registered with the driver
                    owner.unpin_weight(key)
            set_attr_param(self.model, key, alias(weight, is_copy=True))

    def _without_other_objects(self, extra_memory: float) -> float:
        """Take the weights off the card if layers are patched in that it was not loaded with: ComfyUI believes that all
        is loaded, and would leave these in host memory. Returns the bytes that may be loaded then."""
        modules = {key: each for key, each in self.object_patches.items() if isinstance(each, nn.Module)}
        layers = {key: id(each) for key, each in modules.items() if [*each.parameters()] and not is_compiled(each)}
        loaded = self._tree.loaded_layers
        if loaded.get(self.load_device, {}) != layers and self.model.model_loaded_weight_memory > 0:
            extra_memory += self.model.model_loaded_weight_memory
            self.unpatch_model(self.offload_device, unpatch_weights=True)
        loaded[self.load_device] = layers
        return extra_memory

    def _use_origins(self) -> None:
        """Point every unpatched weight back to its original in host memory instead of copying it from the card."""
        tree, device = self._tree, self.offload_device
        origin = tree.executor.origin_on(self.load_device, tree.origin)
        if origin is None or self.is_dynamic():
            return
        self.unpin_all_weights()
        for name, parameter in list(self.model.named_parameters()):
            # One of the two types in host memory may be a copy; another is in place there.
            is_copy = parameter.device != device or type(parameter.data) in (torch.Tensor, QuantizedTensor)
            original = original_of(origin, name, parameter, device) if is_copy and name not in self.backup else None
            if original is not None:
                set_attr_param(self.model, name, original)


class ShardMixin(_CardPatcher):
    """Patcher of a further card's part."""

    _main: Callable[[], SplitMixin | None] = staticmethod(lambda: None)

    def follow(self, main: SplitMixin) -> None:
        """Take over what the main patcher does to the weights. Keys of other cards do no harm."""
        self._main = weakref.ref(main)
        # Who unloads a model and its clones means its shards, too.
        for name in ("clone_base_uuid", "patches_uuid", "weight_wrapper_patches", "force_cast_weights"):
            setattr(self, name, getattr(main, name))
        self.patches = self._tree.executor.patches_on(self.load_device, main.patches, main.patches_uuid)
        self.object_patches = main.objects_on(self.load_device)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        n = super().clone(*args, **kwargs)
        n.__class__ = type(self)  # packs exist whose clone() sets the class itself
        n._tree = self._tree
        return n

    @contextlib.contextmanager
    def _own_part(self) -> Iterator[None]:
        """Object patches are set and taken off while the main patcher's injections, which may wrap them, are off."""
        main = self._main() if self.object_patches or self.object_patches_backup else None
        if main is None or not main.is_injected:
            yield
            return
        main.eject_model()
        try:
            yield
        finally:
            main.inject_model()


class SplitMixin(_CardPatcher):
    """Patcher of a split model; acts on the main card and brings the other cards' patchers along."""

    object_patches: dict[str, Any]
    _stand_ins: tuple[Any, ...] = ()  # companions of the classic model that stands in for scheduled LoRA
    _makes_stand_in = False
    _is_own_part = False
    patches: dict[str, Any]

    @property
    def _tree(self) -> SplitTree:  # type: ignore[override]
        tree = tree_of(self.model)
        assert tree is not None, "a split patcher always has a split tree"
        return tree

    @contextlib.contextmanager
    def _own_part(self) -> Iterator[None]:
        tree, patches = self._tree, self.patches
        with tree.main_only():
            if self._is_own_part:
                yield
                return
            try:
                self._is_own_part = True
                self.patches = tree.executor.patches_on(self.load_device, patches, self.patches_uuid)
                yield
            finally:
                self._is_own_part, self.patches = False, patches

    def _main(self) -> SplitMixin:
        return self

    def model_patches_models(self) -> list[Any]:
        for companion in self.companions:
            companion.follow(self)
        return [*super().model_patches_models(), *self.companions]

    def clone(self, disable_dynamic: bool = False, model_override: Any = None, force_deepcopy: bool = False) -> Any:
        if force_deepcopy:
            instead = "'Load Model for Training Across GPUs' and 'Train LoRA', or train the unsplit MODEL"
            raise RuntimeError(f"this MODEL is split, and ComfyUI's own nodes cannot train it; use {instead}")
        self.model_size()  # measured here: a pack's clone() may measure with its own class, which sees the whole
        n = super().clone(disable_dynamic=disable_dynamic, model_override=model_override)
        if n.model is self.model:
            return become_split(n, companions=self.companions)
        tree = tree_of(n.model)
        if tree is None:  # a fresh model from the file: DynamicVRAM's stand-in for scheduled LoRA
            tree = SplitTree(n.model, self._tree.plan)
        # Every sampling asks for the stand-in anew and gets the same model. Its shards' patchers share the originals of
        # weights that they have patched. The first ones stay: no chain of parents grows.
        is_known = any(companion._tree is tree for companion in self._stand_ins)
        become_split(n, companions=self._stand_ins if is_known else None)
        if self._makes_stand_in and not is_known:
            self._stand_ins = n.companions
        return n

    def get_non_dynamic_delegate(self) -> Any:
        self._tree.executor.check_possible(_CHANGING)
        self._makes_stand_in = True
        try:
            return super().get_non_dynamic_delegate()
        finally:
            self._makes_stand_in = False

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """Weights as they were loaded, for merging: of other cards' blocks the shard's patcher has the originals."""
        found = super().get_key_patches(filter_prefix)
        backups = {key: each for companion in self.companions for key, each in companion.backup.items()}
        for key, patches in found.items():
            kept = backups[key].weight if key in backups and key not in self.hook_backup else patches[0][0]
            whole = self._tree.executor.whole_weight(key)
            patches[0] = (kept if whole is None else whole, patches[0][1])
        return found

    def patch_weight_to_device(self, key: str, device_to: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._is_own_part and self._tree.executor.whole_weight(key) is not None:
            self._tree.executor.check_possible(_SAVING)
        return super().patch_weight_to_device(key, device_to, *args, **kwargs)

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        self._tree.executor.check_possible(_SAVING)
        return super().model_state_dict_for_saving(*args, **kwargs)

    def add_object_patch(self, name: str, obj: Any) -> None:
        self._tree.check_object_patch(name)
        super().add_object_patch(name, obj)

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this MODEL is split; use one of 'Split Model Across GPUs' and 'MultiGPU CFG Split'")

    def get_free_memory(self, device: torch.device) -> float:
        """Least free memory of all cards: ComfyUI sizes batches by it, and every card holds activations."""
        free_on = super().get_free_memory
        return min(free_on(place) for place in self._tree.plan.devices)

    # ---- ComfyUI's code that must see the main part alone

    def model_size(self) -> int:
        with self._own_part():
            return super().model_size()

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self._unhook()
        with self._own_part():
            return super().load(*args, **kwargs)

    def partially_load(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: RuntimeError if another node has moved the main part to another device."""
        main = self._tree.plan.main_device
        if self.load_device != main:  # not asked where ComfyUI lists shards: its tracker of outputs does so any time
            found = f"this MODEL is split from {main} on, and a node has moved it to {self.load_device}"
            raise RuntimeError(f"{found}; choose devices in the split node and take that node out")
        for key in self.weight_wrapper_patches:
            self._tree.executor.check_possible(f"wrapping the weight {key}, as another node does,")
        return super().partially_load(*args, **kwargs)

    def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
        with self._own_part():
            return super().partially_unload(*args, **kwargs)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        self.eject_model()
        if unpatch_weights:
            self._unhook()
        tree = self._tree
        with tree.whole():  # ComfyUI could not find whole blocks of other cards in the main view
            for key in [key for key in self.object_patches_backup if tree.is_foreign(key)]:
                set_attr(self.model, key, self.object_patches_backup.pop(key))
        super().unpatch_model(device_to, unpatch_weights)

    # ---- code of hooks, patches and other packs: it must see every block

    def patch_model(self, *args: Any, **kwargs: Any) -> Any:
        """ComfyUI's own, without the object patches inside blocks of other cards: those are the shards' to set."""
        tree, patches = self._tree, self.object_patches
        own = (key for key in patches if tree.is_block(key) or not tree.is_foreign(key))
        self.object_patches = {key: patches[key] for key in own}
        try:
            with tree.whole():
                return super().patch_model(*args, **kwargs)
        finally:
            self.object_patches = patches

    def objects_on(self, device: torch.device) -> dict[str, Any]:
        """The object patches inside blocks of this card, and whole blocks but for compiled ones, whose names differ."""
        tree = self._tree
        on = {key: value for key, value in self.object_patches.items() if tree.device_of(key) == device}
        return {key: value for key, value in on.items() if not (tree.is_block(key) and is_compiled(value))}

    def inject_model(self) -> None:
        with self._tree.whole():
            super().inject_model()
            self._place_bypass_adapters()

    def _place_bypass_adapters(self) -> None:
        """Bring ComfyUI's bypass LoRA, which it moves to its main device, to the card of the layer it is on."""
        tree = self._tree
        for block in filter(tree.is_foreign, tree.plan.blocks):
            for module in tree.diffusion_model.get_submodule(block).modules():
                for hook in reachable(module.__dict__.get("forward")):
                    if isinstance(hook, BypassForwardHook):
                        hook._move_adapter_weights_to_device(tree.device_of(block))

    def eject_model(self) -> None:
        with self._tree.whole():
            super().eject_model()

    def cleanup(self) -> None:
        self._tree.end()  # Cancel inside a block of another card unwinds past torch's hooks
        super().cleanup()

    def apply_hooks(self, *args: Any, **kwargs: Any) -> Any:
        with self._tree.whole():
            return super().apply_hooks(*args, **kwargs)

    def patch_hooks(self, hooks: Any) -> None:
        """ComfyUI's own, also of every copy of the model, whose kept weights are of no other hooks than the main's."""
        for copy in self._copies:
            for group in copy.cached_hook_patches.keys() - self.cached_hook_patches.keys():
                del copy.cached_hook_patches[group]
        super().patch_hooks(hooks)
        for copy in self._copies:
            copy.hook_patches, copy.hook_mode = self.hook_patches, self.hook_mode
            copy.patch_hooks(hooks)

    def unpatch_hooks(self, *args: Any, **kwargs: Any) -> None:
        with self._tree.whole():
            super().unpatch_hooks(*args, **kwargs)
        for copy in self._copies:
            copy.unpatch_hooks(*args, **kwargs)

    @property
    def _copies(self) -> tuple[Any, ...]:
        return self.companions if self._tree.executor.has_copies else ()

    def get_all_callbacks(self, call_type: str) -> list[Callable[..., Any]]:
        callbacks = super().get_all_callbacks(call_type)
        return callbacks if self._tree.is_whole else [self._tree.whole()(callback) for callback in callbacks]


@functools.cache
def _mixed(mixin: type, unsplit: type) -> type:
    return type(mixin.__name__.removesuffix("Mixin") + unsplit.__name__, (mixin, unsplit), {"unsplit_class": unsplit})


def become_split(patcher: Any, companions: Iterable[Any] | None = None) -> Any:
    """Make a patcher of a split tree act as one, in place; companions of the same tree are cloned, else made."""
    tree = tree_of(patcher.model)
    assert tree is not None, "its tree is made first"
    unsplit = getattr(patcher, "unsplit_class", patcher.__class__)
    patcher.__class__ = _mixed(SplitMixin, unsplit)  # of a clone, too: packs exist whose clone() sets the class
    patcher.is_injected = False
    patcher.load_device = tree.plan.main_device
    if patcher.is_dynamic():
        patcher.register_load_device(tree.plan.main_device)
    for key in patcher.object_patches:
        tree.check_object_patch(key)
    if companions is None:
        make = _mixed(ShardMixin, unsplit)
        takes_disk = "fast_disk" in inspect.signature(make).parameters  # of ComfyUI after 0.33
        options = {"fast_disk": patcher.fast_disk} if takes_disk else {}
        made = (make(shard, device, patcher.offload_device, **options) for device, shard in tree.shards.items())
        patcher.companions = tuple(made)
        kept = {name: value for name, value in vars(patcher).items() if hasattr(unsplit, name)}  # by a pack's own class
        for companion in patcher.companions:
            companion.__dict__.update(kept, _tree=tree)
    else:
        patcher.companions = tuple(companion.clone() for companion in companions)
    patcher.size = 0
    injection = PatcherInjection(inject=lambda own: own._tree.attach(own), eject=lambda own: own._tree.detach(own))
    patcher.set_injections(KEY, [injection])
    return patcher
