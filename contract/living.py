"""The ComfyUI that this process runs in, asked by its own objects, which is fast.

Other packs may have put functions of their own in the place of ComfyUI's. How those are called is not judged: it says
nothing about ComfyUI, and they pass on what they are given.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from typing import Any


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
        return not missing or (isinstance(owner, type) and len(missing) == 1 and missing[0] in self._mentions(owner))

    def signature(self, path: str) -> inspect.Signature | None:
        found, missing = self._find(path)
        try:
            signature = None if missing or _is_replaced(found, path) else inspect.signature(found)
        except (TypeError, ValueError):
            return None
        if signature is not None and self._is_unbound(path):
            return signature.replace(parameters=list(signature.parameters.values())[1:])
        return signature

    def strings(self, path: str) -> frozenset[str] | None:
        found, missing = self._find(path)
        code = getattr(_plain_function(found), "__code__", None)
        return None if missing or code is None or _is_replaced(found, path) else frozenset(_strings(code))

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
            members = (each for cls in owner.__mro__ if not _is_foreign(cls) for each in vars(cls).values())
            functions = (getattr(each, "fget", None) or getattr(each, "__func__", each) for each in members)
            codes = [each.__code__ for each in functions if isinstance(each, types.FunctionType)]
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
    return inspect.unwrap(getattr(found, "__func__", found))


def _is_replaced(found: Any, path: str) -> bool:
    """Whether this is somebody else's function in the place of ComfyUI's."""
    home = getattr(_plain_function(found), "__globals__", {}).get("__name__", "")
    return bool(home) and home.partition(".")[0] != path.partition(".")[0]


def _is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("builtins", "torch", "abc", "typing")


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
