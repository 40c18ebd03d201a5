"""The ComfyUI that this process runs in, asked by its own objects, which is fast.

Other packs may have put functions, classes and objects of their own in the place of ComfyUI's. Those are not judged:
they say nothing about ComfyUI, and they pass on what they are given. Judged are modules, and plain functions and
classes that were written in the package that the path begins with.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

_STANDARD = frozenset({*sys.stdlib_module_names, "torch"})


class Living:
    """Looks at the modules that ComfyUI has imported.

    Args:
        may_import: also import those that it has not, which may take long and set up devices.
    """

    is_written = False

    def __init__(self, *, may_import: bool = False) -> None:
        self._may_import = may_import
        self._pending: set[str] = set()
        self._modules: dict[str, types.ModuleType | None] = {}
        self._mentioned: dict[type, frozenset[str]] = {}
        self._found: dict[str, tuple[Any, list[str]]] = {}
        self.version = str(getattr(self._module("comfyui_version"), "__version__", "of unknown version"))

    def is_pending(self, path: str) -> bool:
        self._find(path)
        return any(f"{path}.".startswith(f"{name}.") for name in self._pending)

    def has(self, path: str) -> bool:
        owner, missing = self._find(path)
        if not missing:
            return True
        if not _is_own(owner, path):
            return owner is not None and type(owner) is not types.ModuleType
        is_attribute = isinstance(owner, type) and len(missing) == 1
        return is_attribute and (missing[0] in self._mentions(owner) or _is_patched(owner))

    def signature(self, path: str) -> inspect.Signature | None:
        found, missing = self._find(path)
        try:
            signature = inspect.signature(found) if not missing and _is_own(found, path) else None
        except (TypeError, ValueError):
            return None
        if signature is not None and self._is_unbound(path):
            return signature.replace(parameters=list(signature.parameters.values())[1:])
        return signature

    def strings(self, path: str) -> frozenset[str] | None:
        found, missing = self._find(path)
        is_ours = not missing and not isinstance(found, type) and _is_own(found, path)
        return frozenset(_strings(_plain_function(found).__code__)) if is_ours else None

    def value(self, path: str) -> Any:
        found, missing = self._find(path)
        return None if missing else found

    def _is_unbound(self, path: str) -> bool:
        owner, missing = self._find(path.rpartition(".")[0])
        member = inspect.getattr_static(owner, path.rpartition(".")[2], None)
        return not missing and isinstance(owner, type) and isinstance(member, types.FunctionType)

    def _find(self, path: str) -> tuple[Any, list[str]]:
        """The object, or the last of its owners that is there and the names that are not."""
        if path not in self._found:
            self._found[path] = self._look_up(path)
        return self._found[path]

    def _look_up(self, path: str) -> tuple[Any, list[str]]:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            found: Any = self._module(".".join(parts[:length]))
            if found is not None:
                return _descend(found, parts[length:])
        return None, parts

    def _module(self, name: str) -> types.ModuleType | None:
        if name not in self._modules:
            self._modules[name] = self._import(name)
        return self._modules[name]

    def _import(self, name: str) -> types.ModuleType | None:
        if name in sys.modules:
            return sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent and (self._module(parent) is None or hasattr(self._module(parent), last)):
            return None  # a class, or what lies in one
        try:
            if self._may_import:
                return importlib.import_module(name)
            if importlib.util.find_spec(name) is not None:
                self._pending.add(name)
        except (ImportError, ValueError):  # of something that is no module
            pass
        return None

    def _mentions(self, owner: type) -> frozenset[str]:
        """Names of attributes in the methods of a class and of its bases."""
        if owner not in self._mentioned:
            codes = [each.__code__ for each in _members(owner) if isinstance(each, types.FunctionType)]
            self._mentioned[owner] = frozenset(name for code in codes for name in code.co_names)
        return self._mentioned[owner]


def _descend(found: Any, names: list[str]) -> tuple[Any, list[str]]:
    for place, name in enumerate(names):
        inner = inspect.getattr_static(found, name, names)  # runs nobody's __getattr__ or property
        if inner is names:
            return found, names[place:]
        found = getattr(found, name) if isinstance(found, (type, types.ModuleType)) else inner
    return found, []


def _plain_function(found: Any) -> Any:
    """What is behind a bound method, a property, a method of the class and functools.wraps."""
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, (types.MethodType, classmethod, staticmethod)):
        found = found.__func__
    return inspect.unwrap(found)


def _is_own(found: Any, path: str) -> bool:
    """Whether this is a plain function or class that was written in the package that the path begins with."""
    root = _root(path)
    if isinstance(found, type):
        made = [_plain_function(inspect.getattr_static(found, name)) for name in ("__init__", "__new__")]
        return _root(found.__module__) == root and not any(_is_foreign(each, root) for each in made)
    inner = found.__func__ if isinstance(found, types.MethodType) else found
    return isinstance(inner, types.FunctionType) and _home(_plain_function(inner)) == root


def _is_patched(owner: type) -> bool:
    """Whether another pack has put something into a class or its bases, which may set any attribute."""
    root = _root(owner.__module__)
    is_based = any(_root(cls.__module__) not in (root, *_STANDARD) for cls in owner.__mro__)
    return is_based or any(_is_foreign(each, root) for each in _members(owner))


def _members(owner: type) -> Iterator[Any]:
    """What a class and its bases hold, down to plain functions; Python's and torch's bases are left out."""
    classes = [cls for cls in owner.__mro__ if _root(cls.__module__) not in _STANDARD]
    return (_plain_function(each) for cls in classes for each in vars(cls).values())


def _is_foreign(member: Any, root: str) -> bool:
    """Whether a member of a class of this package is another's; an object that wraps a function may be."""
    if isinstance(member, types.FunctionType):
        return _home(member) not in (root, *_STANDARD)
    wraps = isinstance(member, (functools.partial, functools.partialmethod))
    return wraps or (callable(member) and _root(type(member).__module__) not in (root, *_STANDARD))


def _home(function: Any) -> str:
    return _root(getattr(function, "__globals__", {}).get("__name__"))


def _root(name: Any) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


@functools.cache
def _strings(code: types.CodeType) -> tuple[str, ...]:
    found = list(code.co_names) + list(code.co_varnames)
    waiting: list[Any] = list(code.co_consts)
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, (tuple, frozenset)):
            waiting += each
        elif isinstance(each, types.CodeType):
            found += _strings(each)
    return tuple(found)
