"""Hooks on someone else's module: attached as a set, removed as a set, leaving no trace.

Every change this pack makes to how a module is called goes through a HookSet, so one `remove()` undoes a strategy.
`map_tensors` is what such hooks use to reach the tensors inside a block's arguments, however they are wrapped.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

# (module, args, kwargs) -> (args, kwargs)
BeforeHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
# (module, args, kwargs, output) -> output, or None to leave it
AfterHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]

_PLAIN = frozenset({bool, int, float, str})  # most of what is no tensor; told apart quickly, since hooks run per block


class HookSet:
    """Hooks that live and die together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def ids(self) -> set[int]:
        """The numbers by which torch knows these hooks."""
        return {handle.id for handle in self._handles}

    def before(self, module: nn.Module, hook: BeforeHook) -> None:
        """Call hook ahead of every other pre-hook of the module, with its keyword arguments."""
        self._handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def just_before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call hook behind every other pre-hook of the module, with what these made of its arguments; for looking."""
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def after(self, module: nn.Module, hook: AfterHook, *, also_on_error: bool = False) -> None:
        """Call hook behind every other hook of the module; with also_on_error also when its forward raised."""
        handle = module.register_forward_hook(hook, with_kwargs=True, always_call=also_on_error)
        self._handles.append(handle)

    def remove(self) -> None:
        """Take every hook off again; a second call is a no-op."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def map_tensors(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], passed_by: Collection[Any] = frozenset()
) -> Any:
    """Apply change to every tensor inside value and return the result; nothing is modified in place.

    Descends into tuples, named tuples, lists, dicts, dataclasses and objects whose only state is `__slots__` (native
    models pass modulation and compressed timesteps that way). A container none of whose tensors changed is returned as
    the same object, so one that a model mutates on purpose (a key-value cache) keeps its identity while it can. Other
    objects are passed through, and so is what a dict holds under the keys in passed_by.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, tuple):
        return _map_tuple(value, change, passed_by)
    if isinstance(value, list):
        items = [map_tensors(item, change, passed_by) for item in value]
        return _refill(value, items) if _any_changed(value, items) else value
    if isinstance(value, dict):
        return _map_dict(value, change, passed_by)
    cls: Any = type(value)
    names = _field_names(cls) or _slots(value)
    return _map_attributes(value, names, change, passed_by) if names else value


@functools.lru_cache(maxsize=256)
def _field_names(cls: type) -> tuple[str, ...]:
    """Attribute names of a dataclass, () for any other class; asked for every argument of every block, hence kept."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def _any_changed(old: Any, new: list[Any]) -> bool:
    return any(a is not b for a, b in zip(old, new, strict=True))


def _refill(value: list[Any], items: list[Any]) -> list[Any]:
    fresh = copy.copy(value)
    fresh[:] = items
    return fresh


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Every tensor in tuples, lists and dicts, in order; other objects are not looked into."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _map_tuple(
    value: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor], passed_by: Collection[Any]
) -> tuple[Any, ...]:
    items = [map_tensors(item, change, passed_by) for item in value]
    if not _any_changed(value, items):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _map_dict(
    value: dict[Any, Any], change: Callable[[torch.Tensor], torch.Tensor], passed_by: Collection[Any]
) -> dict[Any, Any]:
    items = {key: map_tensors(item, change, passed_by) for key, item in value.items() if key not in passed_by}
    if not any(value[key] is not item for key, item in items.items()):
        return value
    fresh = copy.copy(value)
    for key, item in items.items():  # diffusers' and transformers' outputs are dicts that refuse update()
        fresh[key] = item
    return fresh


def _slots(value: Any) -> list[str]:
    """Attribute names of an object that has slots and no instance dictionary; [] for anything else."""
    if isinstance(value, (str, bytes, int, float, complex, type, type(None), Mapping)) or hasattr(value, "__dict__"):
        return []
    names = [name for cls in type(value).__mro__ for name in _as_tuple(getattr(cls, "__slots__", ()))]
    return [name for name in names if not name.startswith("__")]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _map_attributes(
    value: Any, names: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor], passed_by: Collection[Any]
) -> Any:
    changed: dict[str, Any] = {}
    for name in names:
        old = getattr(value, name, None)
        new = map_tensors(old, change, passed_by)
        if new is not old:
            changed[name] = new
    if not changed:
        return value
    fresh = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(fresh, name, item)  # frozen dataclasses too: the copy is ours
    return fresh
