"""What others changed in a tree of modules since it was looked at, whatever way they took.

A copy of such a tree computes the same only while nobody has changed the tree itself.
"""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, device, dtype, nn

from .hooks import PLAIN, attributes_of, is_made_here, surrounded

_HELD = ("_parameters", "_buffers")
_ABSENT = object()
_LEAVES = frozenset((type, types.ModuleType, types.FunctionType, dtype, device))
_BY_IDENTITY = (nn.Module, *_LEAVES)
_Weight = tuple[Callable[[], Any], int]  # a weight, not held, and its address


@dataclass
class _Seen:
    name: str
    module: nn.Module
    kind: Any
    attributes: dict[str, Any]
    children: dict[str, nn.Module | None]
    weights: dict[str, _Weight] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)  # of attributes that can be written into
    # Names of all attributes when nothing was found; what gets those that count, and these: most modules stay so.
    clean: tuple[Any, Any, Any] = (None, vars, ())


def replaced_methods(value: object) -> list[str]:
    """Names of the class's methods that this one object has another function for."""
    return [name for name, own in vars(value).items() if _replaces(value, name, own) and not is_made_here(own)]


def foreign_methods(kinds: Iterable[type]) -> Iterator[str]:
    """Functions that other code put into classes, for all of their objects, in words for the user. Of torch's own
    classes calls alone count: libraries such as transformers give them further methods."""
    for kind in kinds:
        home = kind.__module__.partition(".")[0] + "."
        for name, value in vars(kind).items():
            if home == "torch." and name not in ("__call__", "forward"):
                continue
            for code in _codes_of(value):
                is_known = f"{code}.".startswith((home, "torch.")) or code.partition(".")[0] in sys.stdlib_module_names
                if not is_known:
                    yield f"the replaced {name} of the class {kind.__name__} by {code}"
                    break


def _codes_of(value: Any) -> Iterator[str]:
    """The modules whose code a callable or descriptor of a class runs: its own, and of what it is made around."""
    layers, seen = [value], set[int]()
    while layers:
        layer = layers.pop()
        if id(layer) in seen or not (callable(layer) or hasattr(type(layer), "__get__")):
            continue
        seen.add(id(layer))
        yield layer.__module__ if isinstance(layer, type) else code_of(layer)
        if not isinstance(layer, type):
            layers += [getattr(layer, each, None) for each in ("__func__", "func", "__wrapped__", "fget", "fset")]


def code_of(value: Any) -> str:
    """The module whose code a function runs, whatever functools.wraps says; for any other object that of its class."""
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        return str(function.__globals__.get("__name__", ""))
    return type(value).__module__


class Unchanged:
    """A tree of modules as it is now, to be compared with what it is later.

    Numbers that somebody writes into a weight are not seen.

    Args:
        root: the tree. Functions that are in the place of a class's own count as changed from the beginning.
        ignored: names of attributes that may change.
    """

    def __init__(self, root: nn.Module, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self._seen, known = [], dict[int, Any]()
        for name, module in root.named_modules():
            own = {key: value for key, value in vars(module).items() if not _replaces(module, key, value)}
            seen = _Seen(name or "the model", module, type(module), own, dict(module._modules))
            seen.contents = {
                key: _content(value, known)
                for key, value in own.items()
                if not (key in _OF_TORCH or key in self._ignored or _is_fixed(value))
            }
            self._seen.append(seen)
        # The classes of the modules, and what they are derived from.
        self.kinds = {base for seen in self._seen for base in seen.kind.__mro__ if base is not object}
        self.note_weights()

    def note_weights(self) -> None:
        """The weights are the right ones now; their owner has put them there."""
        for seen in self._seen:
            held = vars(seen.module)
            seen.weights = {key: _weight(value) for kind in _HELD for key, value in held[kind].items()}

    def changes(self, own_hooks: Set[int] = frozenset()) -> Iterator[str]:
        """What is not as it was, in words for the user; own_hooks: ids of hooks that may be there."""
        known: dict[int, Any] = {}
        for seen in self._seen:
            name, module, now = seen.name, seen.module, vars(seen.module)
            if type(module) is not seen.kind and type(module) is not surrounded(seen.kind):
                yield f"the exchanged class of {name}"
            if now["_modules"] != seen.children:
                yield f"an exchanged module in {name}"
            for hooks in (now["_forward_hooks"], now["_forward_pre_hooks"]):
                if hooks and not hooks.keys() <= own_hooks:
                    yield f"a hook on {name}"
            names, values_of, values = seen.clean
            if tuple(now) != names or not all(map(operator.is_, values_of(now), values)):
                found = [*self._attributes(seen)]
                yield from found
                counted = [key for key in now if key not in self._ignored]
                values_of = operator.itemgetter(*counted)
                seen.clean = (None, vars, ()) if found else (tuple(now), values_of, values_of(now))
            for key in seen.weights:
                if not (key in now["_parameters"] or key in now["_buffers"] or key in self._ignored):
                    yield f"the deleted {key} of {name}"
            for key, content in seen.contents.items():
                if now.get(key) is seen.attributes[key] and _content(now[key], known) != content:
                    yield f"a change inside {key} of {name}"
            for kind in _HELD:
                for key, value in now[kind].items():
                    weight, address = seen.weights.get(key, _NEW)
                    if value is weight() and address == _address(value) or key in self._ignored:
                        continue
                    # ComfyUI puts zeros in the place of a weight without numbers.
                    is_plain = type(value) is nn.Parameter and not value.is_meta
                    if address == _META and is_plain and not bool(value.any()):
                        seen.weights[key] = _weight(value)
                    else:
                        yield f"the replaced {key} of {name}"

    def _attributes(self, seen: _Seen) -> Iterator[str]:
        attributes, now = seen.attributes, vars(seen.module)
        for key, value in now.items():
            is_same = attributes.get(key, _ABSENT) is value or key in self._ignored
            if not is_same and _is_other(seen, key, value):
                yield f"the replaced {key} of {seen.name}{f' by {code_of(value)}' if callable(value) else ''}"
        for key in attributes.keys() - now.keys() - self._ignored:
            if not (callable(attributes[key]) and callable(getattr(type(seen.module), key, None))):
                yield f"the deleted {key} of {seen.name}"


def _is_fixed(value: Any) -> bool:
    """Whether this is looked at by identity alone, or holds such things alone for good."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return type(value) in PLAIN or isinstance(value, _BY_IDENTITY) or callable(value) and not isinstance(value, Tensor)


def _content(value: Any, known: dict[int, Any]) -> Any:
    """What can be compared later of what a value holds; modules, types and functions by identity. Args: known: what was
    looked at before, in the same look, by id."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind in _LEAVES:
        return id(value)
    if (key := id(value)) in known:
        return known[key]
    known[key] = key  # also inside itself
    if isinstance(value, Tensor):
        found: Any = key, _address(value), -1 if value.is_inference() else value._version
    elif isinstance(value, dict):
        found = kind, tuple(value), tuple(_content(each, known) for each in value.values())
    elif isinstance(value, (list, tuple)):
        found = kind, tuple(_content(each, known) for each in value)
    elif isinstance(value, (set, frozenset)):
        found = kind, frozenset(_content(each, known) for each in value)
    elif isinstance(value, types.MethodType):
        found = id(value.__self__), id(value.__func__)
    elif _is_fixed(value):
        found = key
    else:
        held = dict(getattr(value, "__dict__", {}))
        held |= {name: getattr(value, name, None) for name in attributes_of(value)}
        found = key, tuple((name, _content(each, known)) for name, each in held.items())
    known[key] = found
    return found


def _is_other(seen: _Seen, key: str, value: Any) -> bool:
    if key.startswith("_devicebridge") or is_made_here(value):
        return False
    cls, before = type(seen.module), seen.attributes.get(key, _ABSENT)
    if callable(value) and callable(getattr(cls, key, None)):
        return _replaces(seen.module, key, value)
    if before is _ABSENT:
        before = getattr(cls, key, _ABSENT)
        if before is _ABSENT:  # new, so the class's code does not know it, unless it hides what it knows
            return any(key in vars(seen.module)[kind] for kind in ("_modules", *_HELD))
    return not (type(value) in PLAIN and type(before) in PLAIN and value == before)


def _replaces(owner: object, key: str, value: Any) -> bool:
    """Whether this is another function than the one its owner's class has under this name."""
    if not callable(value) or isinstance(value, nn.Module) or not callable(own := getattr(type(owner), key, None)):
        return False
    return getattr(value, "__func__", value) is not own


def _address(value: Any) -> int:
    if isinstance(value, Tensor) and value.is_meta:
        return _META
    return value.data_ptr() if type(value) is nn.Parameter or type(value) is Tensor else 0


def _weight(value: Tensor | None) -> _Weight:
    return (lambda: None) if value is None else weakref.ref(value), _address(value)


# Torch's own attributes of any module, which are watched by kind or do not compute.
_OF_TORCH = frozenset(vars(nn.Module()))
_META = -1  # in the place of an address
_NEW: _Weight = (lambda: _ABSENT, 0)
