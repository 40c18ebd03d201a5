"""ComfyUI's ModelPatcher for a model on several cards: stock code for every part, told which part it is looking at.

Two classes are mixed into whatever patcher class the incoming MODEL has (classic, dynamic, a pack's own):

- SplitMixin: the patcher a user holds. It is the home card's: while stock code loads, unloads or measures, the tree
  shows the home part alone; patches, hooks, callbacks and injections see the whole. It brings the shards along in
  `model_patches_models()`, which every `load_models_gpu` asks before it makes room, so each card's share is accounted,
  evicted and low-VRAM'd by the host on the card where it is.
- ShardMixin: the patcher of one further card. It shares the home patcher's patches, so a LoRA is applied where the
  weight lives, and puts object patches into its own blocks, so what they bring is loaded and patched there.

Nothing of the host is replaced. With ComfyUI 0.33; what is relied on is listed in docs/internals/upstream_facts.md.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .attachments import KEY, is_compiled
from .model_copy import reachable
from .tree import SplitTree, make_tree, tree_of

# Mixed into the host's ModelPatcher, whose class is known only at run time.
_Patcher: Any = object


class _Limited(_Patcher):
    """What home and shards share: a limit on resident weights, and weights that need no copy on their way back."""

    def _tree(self) -> SplitTree:
        raise NotImplementedError

    def _within_limit(self, extra_memory: float) -> float:
        """Bytes the host grants, cut down to what the user allows this card to hold."""
        limit = self._tree().plan.limit_bytes.get(self.load_device)
        return extra_memory if limit is None else min(extra_memory, limit - self.loaded_size())

    def _limit_dynamic(self) -> None:
        """Under DynamicVRAM weights arrive while they are used; the limit goes to the card's address range."""
        limit = self._tree().plan.limit_bytes.get(self.load_device)
        vbar = self._vbar_get() if limit is not None and self.is_dynamic() else None
        if vbar is not None and limit is not None:
            vbar.set_watermark_limit(limit)

    def _without_other_objects(self, extra_memory: float) -> float:
        """Take the weights off the card if it was loaded with other layers in place of the model's: stock code believes
        that all is loaded, and would leave those there now in host memory. Returns the bytes that may be loaded then.
        """
        layers = {
            key: id(value)
            for key, value in self.object_patches.items()
            if isinstance(value, nn.Module) and any(True for _ in value.parameters()) and not is_compiled(value)
        }
        loaded = self._tree().loaded_layers
        if loaded.get(self.load_device, {}) != layers and self.model.model_loaded_weight_memory > 0:
            extra_memory += self.model.model_loaded_weight_memory
            self.unpatch_model(self.offload_device, unpatch_weights=True)
        loaded[self.load_device] = layers
        return extra_memory

    def _use_origins(self) -> None:
        """Point every unpatched weight back to its original in host memory instead of copying it from the card."""
        import comfy.utils

        tree = self._tree()
        if tree.origin is None or self.is_dynamic():
            return
        self.unpin_all_weights()
        for name, parameter in list(self.model.named_parameters()):
            if name in self.backup or not _may_be_elsewhere(parameter, self.offload_device):
                continue
            original = tree.origin.tensor(name, parameter, self.offload_device)
            if original is not None:
                comfy.utils.set_attr_param(self.model, name, original)


def _may_be_elsewhere(parameter: torch.Tensor, offload_device: torch.device) -> bool:
    """Whether a weight is on a card, or in host memory as an ordinary tensor that may be a copy of its original."""
    return parameter.device != offload_device or type(parameter.data) is torch.Tensor


class ShardMixin(_Limited):
    """Patcher of the blocks on one further card."""

    _home: Callable[[], SplitPatcher | None] | None = None
    _tree_of_home: SplitTree

    def _tree(self) -> SplitTree:
        return self._tree_of_home

    def follow(self, home: SplitPatcher) -> None:
        """Take over what the home patcher wants done to the weights. Keys of other cards do no harm."""
        self._home = weakref.ref(home)
        self.clone_base_uuid = home.clone_base_uuid  # who unloads a model and its clones means its shards too
        self.patches = home.patches
        self.patches_uuid = home.patches_uuid
        self.weight_wrapper_patches = home.weight_wrapper_patches
        self.force_cast_weights = home.force_cast_weights
        self.object_patches = home.objects_on(self.load_device)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        n = super().clone(*args, **kwargs)
        n.__class__ = type(self)  # packs exist whose clone() sets the class itself
        n._tree_of_home = self._tree_of_home
        return n

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> Any:
        from comfy.model_management import cuda_device_context

        self._unhook()
        with cuda_device_context(device_to), self._below_injections():
            extra_memory = self._within_limit(self._without_other_objects(extra_memory))
            loaded = super().partially_load(device_to, extra_memory, force_patch_weights=force_patch_weights)
            self._limit_dynamic()
        return loaded

    def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
        self._unhook()
        return super().partially_unload(*args, **kwargs)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self._unhook()
            if device_to is not None:
                self._use_origins()
        with self._below_injections():
            super().unpatch_model(device_to, unpatch_weights)

    @contextlib.contextmanager
    def _below_injections(self) -> Iterator[None]:
        """Object patches are set and taken off while the home patcher's injections, which may wrap them, are off."""
        home = self._home() if self._home is not None else None
        has_objects = bool(self.object_patches or self.object_patches_backup)
        if home is None or not home.is_injected or not has_objects:
            yield
            return
        home.eject_model()
        try:
            yield
        finally:
            home.inject_model()

    def _unhook(self) -> None:
        """Scheduled LoRA is written into the weights by the home patcher: it must take it out before they move."""
        home = self._home() if self._home is not None else None
        if home is not None:
            home.unpatch_hooks()


class SplitMixin(_Limited):
    """Patcher of a split model; acts on the home card and brings the other cards' patchers along."""

    object_patches: dict[str, Any]
    companions: tuple[Any, ...] = ()
    _stand_ins: tuple[Any, ...] = ()  # companions of the classic model that stands in for scheduled LoRA
    _makes_stand_in = False

    def _tree(self) -> SplitTree:
        tree = tree_of(self.model)
        assert tree is not None, "a split patcher always has a split tree"
        return tree

    # ---- companions

    def model_patches_models(self) -> list[Any]:
        for companion in self.companions:
            companion.follow(self)
        return [*super().model_patches_models(), *self.companions]

    def clone(self, disable_dynamic: bool = False, model_override: Any = None, force_deepcopy: bool = False) -> Any:
        if force_deepcopy:
            raise RuntimeError(
                "this MODEL is split across GPUs for sampling and cannot be trained by ComfyUI's own nodes; use "
                "'Load Model for Training Across GPUs' and 'Train LoRA', or train the unsplit MODEL"
            )
        self.model_size()  # measured here: a pack's clone() may measure with the stock class, which sees the whole
        n = super().clone(disable_dynamic=disable_dynamic, model_override=model_override)
        if n.model is self.model:
            return become_split(n, companions=self.companions)
        if tree_of(n.model) is None:  # a fresh model from the file: DynamicVRAM's stand-in for scheduled LoRA
            make_tree(n.model, self._tree().plan)
        # The stand-in is asked for anew at every sampling, with the same model: its shards' patchers must share what
        # they hold of the originals of weights they have patched. The first ones stay: no chain of parents grows.
        is_known = self._are_of(n.model)
        become_split(n, companions=self._stand_ins if is_known else None)
        if self._makes_stand_in and not is_known:
            self._stand_ins = n.companions
        return n

    def get_non_dynamic_delegate(self) -> Any:
        self._makes_stand_in = True
        try:
            return super().get_non_dynamic_delegate()
        finally:
            self._makes_stand_in = False

    def _are_of(self, model: nn.Module) -> bool:
        shards = set(map(id, tree_of(model).shards.values()))  # type: ignore[union-attr]
        return bool(self._stand_ins) and all(id(companion.model) in shards for companion in self._stand_ins)

    def _check_device(self) -> None:
        """Raises: RuntimeError if another node has moved the home part to another device."""
        home = self._tree().plan.home
        if self.load_device != home:
            raise RuntimeError(
                f"this MODEL is split with {home} as its first device, and a node behind the split has moved it to "
                f"{self.load_device}; choose the devices in the split node and take that node out"
            )

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """Weights as they were loaded, for merging: of other cards' blocks the shard's patcher has the originals."""
        found = super().get_key_patches(filter_prefix)
        for companion in self.companions:
            for key, backup in companion.backup.items():
                if key in found and key not in self.hook_backup:
                    found[key][0] = (backup.weight, found[key][0][1])
        return found

    def add_object_patch(self, name: str, obj: Any) -> None:
        self._tree().check_object_patch(name)
        super().add_object_patch(name, obj)

    def deepclone_multigpu(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "this MODEL is already split across GPUs; it cannot be replicated per GPU as well. Use either 'Split Model "
            "Across GPUs' (a model too large for one card) or 'MultiGPU CFG Split' (it fits each card)"
        )

    def get_free_memory(self, device: torch.device) -> float:
        """Least free memory of all cards: the host sizes batches by it, and every card holds activations."""
        free_on = super().get_free_memory
        return min(free_on(place) for place in self._tree().plan.placement.used_devices)

    # ---- stock code that must see the home part alone

    def model_size(self) -> int:
        with self._tree().home_only():
            return super().model_size()

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self.unpatch_hooks()
        with self._tree().home_only():
            return super().load(*args, **kwargs)

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False
    ) -> Any:
        from comfy.model_management import cuda_device_context

        self._check_device()  # not where the host asks for shards: its tracker of outputs does that outside any node
        self.unpatch_hooks()
        extra_memory = self._without_other_objects(extra_memory)
        with cuda_device_context(device_to), self._tree().home_only():
            loaded = super().partially_load(
                device_to, self._within_limit(extra_memory), force_patch_weights=force_patch_weights
            )
            self._limit_dynamic()
        return loaded

    def partially_unload(self, *args: Any, **kwargs: Any) -> Any:
        self.unpatch_hooks()
        with self._tree().home_only():
            return super().partially_unload(*args, **kwargs)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        self.eject_model()
        if unpatch_weights:
            self.unpatch_hooks()
        self._restore_foreign_objects()
        with self._tree().home_only():
            if unpatch_weights and device_to is not None:
                self._use_origins()
            super().unpatch_model(device_to, unpatch_weights)

    def _restore_foreign_objects(self) -> None:
        """Object patches of whole blocks of other cards, which stock code could not find in the home view."""
        import comfy.utils

        tree = self._tree()
        with tree.whole():
            for key in [key for key in self.object_patches_backup if tree.is_foreign(key)]:
                comfy.utils.set_attr(self.model, key, self.object_patches_backup.pop(key))

    # ---- code of hooks, patches and other packs: it must see every block

    def patch_model(self, *args: Any, **kwargs: Any) -> Any:
        """Stock code, without the object patches inside blocks of other cards: those are the shards' to set."""
        tree, patches = self._tree(), self.object_patches
        self.object_patches = {
            key: value for key, value in patches.items() if tree.is_block(key) or not tree.is_foreign(key)
        }
        try:
            with tree.whole():
                return super().patch_model(*args, **kwargs)
        finally:
            self.object_patches = patches

    def objects_on(self, device: torch.device) -> dict[str, Any]:
        """The object patches inside blocks of this card, and whole blocks but for compiled ones, whose names differ."""
        tree = self._tree()
        return {
            key: value
            for key, value in self.object_patches.items()
            if tree.device_of(key) == device and not (tree.is_block(key) and is_compiled(value))
        }

    def inject_model(self) -> None:
        with self._tree().whole():
            super().inject_model()
            self._place_bypass_adapters()

    def _place_bypass_adapters(self) -> None:
        """Bring the host's bypass LoRA, which it moves to its main device, to the card of the layer it is on."""
        from comfy.weight_adapter.bypass import BypassForwardHook

        tree = self._tree()
        for device in tree.plan.foreign_devices:
            for block in tree.plan.blocks_on(device):
                for module in tree.diffusion_model.get_submodule(block).modules():
                    for hook in reachable(module.__dict__.get("forward")):
                        if isinstance(hook, BypassForwardHook):
                            hook._move_adapter_weights_to_device(device)

    def eject_model(self) -> None:
        with self._tree().whole():
            super().eject_model()

    def cleanup(self) -> None:
        self._tree().bridge.end()  # Cancel inside a block of another card unwinds past torch's hooks
        super().cleanup()

    def apply_hooks(self, *args: Any, **kwargs: Any) -> Any:
        with self._tree().whole():
            return super().apply_hooks(*args, **kwargs)

    def unpatch_hooks(self, *args: Any, **kwargs: Any) -> None:
        with self._tree().whole():
            super().unpatch_hooks(*args, **kwargs)

    def patch_hook_weight_to_device(self, hooks: Any, combined_patches: Any, key: str, *args: Any, **kw: Any) -> Any:
        if key in combined_patches:
            self._unshare(key)
        return super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kw)

    def patch_cached_hook_weights(self, cached_weights: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        self._unshare(key)
        return super().patch_cached_hook_weights(cached_weights, key, *args, **kwargs)

    def _unshare(self, key: str) -> None:
        """Give a weight in host memory a storage of its own: a scheduled LoRA is written into it in place."""
        import comfy.utils

        weight = comfy.utils.get_attr(self.model, key)
        if self._tree().origin is not None and weight.device == self.offload_device and key not in self.hook_backup:
            comfy.utils.set_attr_param(self.model, key, weight.detach().clone())

    def get_all_callbacks(self, call_type: str) -> list[Callable[..., Any]]:
        callbacks = super().get_all_callbacks(call_type)
        return callbacks if self._tree().is_whole else [self._seeing_the_whole(callback) for callback in callbacks]

    def _seeing_the_whole(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(callback)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._tree().whole():
                return callback(*args, **kwargs)

        return run


class SplitPatcher(SplitMixin):
    """For annotations: a patcher made by become_split."""


@functools.cache
def _mixed(mixin: type, stock: type) -> type:
    return type(mixin.__name__.removesuffix("Mixin") + stock.__name__, (mixin, stock), {"stock_class": stock})


def become_split(patcher: Any, companions: Iterable[Any] | None = None) -> Any:
    """Make a patcher of a split tree act as one, in place; companions of the same tree are cloned, else made.

    The class is put on again also on a clone: packs exist whose clone() sets the class itself.
    """
    tree = tree_of(patcher.model)
    assert tree is not None, "make_tree comes before become_split"
    stock = getattr(patcher, "stock_class", patcher.__class__)
    patcher.__class__ = _mixed(SplitMixin, stock)
    patcher.is_injected = False
    patcher.load_device = tree.plan.home
    if patcher.is_dynamic():
        patcher.register_load_device(tree.plan.home)
    for key in patcher.object_patches:
        tree.check_object_patch(key)
    if companions is None:
        patcher.companions = tuple(
            _make_shard_patcher(stock, shard, device, patcher, tree) for device, shard in tree.shards.items()
        )
    else:
        patcher.companions = tuple(companion.clone() for companion in companions)
    patcher.size = 0
    patcher.set_injections(KEY, [_injection()])
    return patcher


def _make_shard_patcher(stock: type, shard: nn.Module, device: torch.device, home: Any, tree: SplitTree) -> Any:
    patcher = _mixed(ShardMixin, stock)(shard, device, home.offload_device)
    patcher._tree_of_home = tree
    return patcher


def _injection() -> Any:
    from comfy.patcher_extension import PatcherInjection

    return PatcherInjection(
        inject=lambda patcher: patcher._tree().attach(patcher), eject=lambda patcher: patcher._tree().detach(patcher)
    )
