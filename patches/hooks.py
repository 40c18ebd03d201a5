"""Hooks on someone else's module: attached as a set, removed as a set, leaving no trace.

Every change this pack makes to how a module is called goes through a HookSet, so one `remove()` undoes a strategy.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

# (module, args, kwargs) -> (args, kwargs)
BeforeHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
# (module, args, kwargs, output) -> output, or None to leave it
AfterHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
# (the module's own call, args, kwargs) -> output
AroundHook = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# The types of most of what holds no tensor; told apart quickly, since hooks run per block.
PLAIN = frozenset({bool, int, float, str, type(None)})


class HookSet:
    """Hooks that live and die together."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._surrounded: list[nn.Module] = []
        self._methods: list[tuple[nn.Module, str, Callable[..., Any]]] = []

    def __len__(self) -> int:
        return len(self._handles) + len(self._surrounded) + len(self._methods)

    @property
    def ids(self) -> set[int]:
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

    def around(self, module: nn.Module, hook: AroundHook) -> None:
        """Call hook in the place of the module, whose own call has all other hooks; one hook per module. The module is
        of a subclass meanwhile, as Python looks `__call__` up in the class. It costs a tenth of what torch takes to run
        a hook before and one behind the module."""
        assert _AROUND not in module.__dict__, "one at a time"
        module.__dict__[_AROUND] = hook
        module.__class__ = surrounded(type(module))  # type: ignore[arg-type]
        self._surrounded.append(module)

    def around_method(self, module: nn.Module, name: str, hook: AroundHook) -> None:
        """Call hook in the place of this one module's method; one hook per method."""
        assert name not in module.__dict__, "one at a time"
        own = getattr(module, name)
        made = lambda *args, **kwargs: hook(own, args, kwargs)  # noqa: E731
        module.__dict__[name] = _made[id(made)] = made
        self._methods.append((module, name, made))

    def remove(self) -> None:
        """Take every hook off again; a second call is a no-op."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._surrounded:
            module.__class__ = type(module).__mro__[1]
            del module.__dict__[_AROUND]
        self._surrounded.clear()
        for module, name, made in self._methods:
            if module.__dict__.get(name) is made:  # others may have replaced or deleted it
                del module.__dict__[name]
        self._methods.clear()


_AROUND = "_devicebridge_around"
_made: weakref.WeakValueDictionary[int, Callable[..., Any]] = weakref.WeakValueDictionary()  # by id, in around_method


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules are made with parameters that take no memory; their buffers are real."""

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]  # of torch's stub
    try:
        yield
    finally:
        handle.remove()


def is_made_here(value: Any) -> bool:
    """Whether around_method made this very function; what functools.wraps made of one was made by others."""
    return _made.get(id(value)) is value


@functools.cache
def surrounded(cls: type[nn.Module], key: str = _AROUND) -> type[nn.Module]:
    """The class, called through what its object holds under the key."""

    class Surrounded(cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__[key](super().__call__, args, kwargs)

    Surrounded.__name__, Surrounded.__qualname__ = cls.__name__, cls.__qualname__
    Surrounded.__module__ = cls.__module__
    return Surrounded


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], passed_by: Collection[Any] = frozenset()) -> Any:
    """Apply change to every tensor inside value and return the result; nothing is modified in place.

    Descends into tuples, lists, dicts, dataclasses and objects whose only state is `__slots__`. A container none of
    whose tensors changed is returned as the same object, since a model may mutate it on purpose. Other objects are
    passed through, and so is what a dict holds under the keys in passed_by. A function that holds tensors is made anew
    around the changed ones (native models hand blocks an attention function that holds masks and earlier keys).
    """
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in PLAIN:
        return value
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change, passed_by) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        filled = copy.copy(value)
        filled[:] = items
        return filled
    if isinstance(value, types.FunctionType):
        return _map_closure(value, change, passed_by)
    is_dict = isinstance(value, dict)
    parts = value if is_dict else {name: getattr(value, name, None) for name in attributes_of(value)}
    changed = {
        key: new
        for key, old in parts.items()
        if not (is_dict and key in passed_by) and (new := map_tensors(old, change, passed_by)) is not old
    }
    if not changed:
        return value
    fresh = copy.copy(value)
    for key, new in changed.items():
        if is_dict:
            fresh[key] = new  # diffusers' and transformers' outputs are dicts that refuse update()
        else:
            object.__setattr__(fresh, key, new)  # frozen dataclasses too: the copy is ours
    return fresh


def tensors_reached(value: Any, passed_by: Collection[Any] = frozenset()) -> list[Tensor]:
    """Every tensor that map_tensors would change, in its order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note, passed_by)
    return found


def _map_closure(
    function: types.FunctionType, change: Callable[[Tensor], Tensor], passed_by: Collection[Any]
) -> types.FunctionType:
    """The function around changed tensors; itself if it holds none. What it holds in dicts and functions stays. One
    that sets a variable of its maker (`nonlocal`) is left alone: around cells of its own nobody else would see it."""
    if _sets_free_variables(function.__code__):
        return function
    cells, is_new = list(function.__closure__ or ()), False
    for index, (name, cell) in enumerate(zip(function.__code__.co_freevars, cells, strict=True)):
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that its maker has not set yet
            continue
        if name in passed_by or not isinstance(content, (Tensor, tuple, list)):
            continue
        if any(isinstance(leaf, types.FunctionType) for leaf in tree_leaves(content)):  # it may hold this one
            continue
        new = map_tensors(content, change, passed_by)
        if new is not content:
            cells[index], is_new = types.CellType(new), True
    if not is_new:
        return function
    fresh = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    fresh.__kwdefaults__ = function.__kwdefaults__
    fresh.__qualname__, fresh.__module__ = function.__qualname__, function.__module__
    fresh.__dict__.update(function.__dict__)
    return fresh


@functools.lru_cache(maxsize=256)
def _sets_free_variables(code: types.CodeType, names: frozenset[str] | None = None) -> bool:
    """Whether code, or a function made in it, stores into one of these variables of a maker; None means any."""
    free = frozenset(code.co_freevars) if names is None else names.intersection(code.co_freevars)
    if not free:
        return False
    stored = (each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF"))
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(name in free for name in stored) or any(_sets_free_variables(each, free) for each in inner)


def attributes_of(value: Any) -> Sequence[str]:
    """Names of a dataclass's fields, or of an object's slots if it has no instance dictionary; none for others."""
    cls: Any = type(value)
    if names := _field_names(cls):
        return names
    if isinstance(value, (str, bytes, int, float, complex, type, type(None), Mapping)) or hasattr(value, "__dict__"):
        return ()
    slots = [getattr(each, "__slots__", ()) for each in cls.__mro__]
    names = tuple(name for each in slots for name in ((each,) if isinstance(each, str) else each))
    return [name for name in names if not name.startswith("__")]


@functools.lru_cache(maxsize=256)
def _field_names(cls: type) -> tuple[str, ...]:
    """Attribute names of a dataclass, () for any other class; asked for every argument of every block, hence kept."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def change_at(value: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    """The value with what lies at a path of indices, keys and attributes changed; containers are copied."""
    if not path:
        return change(value)
    if value is None:
        return None
    first, rest = path[0], path[1:]
    if isinstance(value, (tuple, list)):
        items = list(value)
        if int(first) < len(items):
            items[int(first)] = change_at(items[int(first)], rest, change)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        return {**value, first: change_at(value[first], rest, change)} if first in value else value
    made = copy.copy(value)
    object.__setattr__(made, first, change_at(getattr(value, first), rest, change))
    return made
