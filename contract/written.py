"""A ComfyUI that lies on the disk, read without running any of it: no device is touched, nothing has to be installed.

As a program it prints, as JSON, what the folder it is given has changed. The doctor runs it with that ComfyUI's own
Python, which knows the syntax and the packages of its code.
"""

from __future__ import annotations

import ast
import inspect
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Found(NamedTuple):
    """A piece of source, the module whose names it knows, and whether it stands in a class."""

    node: ast.AST
    module: str
    is_member: bool = False


class Written:
    """Reads modules of the folder, and of the Python packages beside it."""

    is_written = True

    def __init__(self, folder: Path, packages: Sequence[str] = ()) -> None:
        self._roots = [folder, *map(Path, packages)]
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.AST]] = {}
        self.version = str(self.value("comfyui_version.__version__") or "of unknown version")

    def is_pending(self, path: str) -> bool:
        return False

    def has(self, path: str) -> bool:
        if self._find(path) is not None:
            return True
        above, _, last = path.rpartition(".")
        owner = self._find(above) if above else None
        return owner is not None and any(_mentions(each.node, last) for each in self._lineage(owner))

    def signature(self, path: str) -> inspect.Signature | None:
        found = self._find(path)
        if found is None:
            return None
        if isinstance(found.node, ast.ClassDef):
            return self._constructor(found)
        return _signature(found) if isinstance(found.node, _Function) else None

    def strings(self, path: str) -> frozenset[str] | None:
        found = self._find(path)
        return None if found is None else frozenset(_strings(found.node))

    def value(self, path: str) -> Any:
        found = self._find(path)
        node = getattr(found.node, "value", None) if found is not None else None
        return node.value if isinstance(node, ast.Constant) else None

    # ---- modules

    def _file(self, name: str) -> Path | None:
        inner = Path(*name.split("."))
        places = (root / each for root in self._roots for each in (inner.with_suffix(".py"), inner / "__init__.py"))
        return next((place for place in places if place.is_file()), None)

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            file = self._file(name)
            try:
                self._modules[name] = ast.parse(file.read_bytes()) if file else None
            except (SyntaxError, ValueError):
                self._modules[name] = None
        return self._modules[name]

    def _namespace(self, name: str) -> dict[str, ast.AST]:
        """What defines each name of a module; the last definition counts."""
        module = self._module(name)
        if name not in self._names and module is not None:
            self._names[name] = {key: node for node in _statements(module.body) for key in _defined(node)}
        return self._names.get(name, {})

    # ---- names

    def _find(self, path: str) -> _Found | None:
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            if self._module(name) is not None:
                return self._inside(name, parts[length:])
        return None

    def _inside(self, module: str, names: list[str]) -> _Found | None:
        """What these names mean in a module, imports followed."""
        if not names:
            return _Found(self._module(module) or ast.Module([], []), module)
        node = self._namespace(module).get(names[0])
        if node is None:
            return self._starred(module, names)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._imported(node, module, names)
        found: _Found | None = _Found(node, module)
        for name in names[1:]:
            found = self._member(found, name) if found is not None else None
        return found

    def _imported(self, node: ast.Import | ast.ImportFrom, module: str, names: list[str]) -> _Found | None:
        source = self._source(node, module) if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if isinstance(node, ast.ImportFrom) and (alias.asname or alias.name) == names[0]:
                return self._find(".".join(filter(None, (source, alias.name, *names[1:]))))
            if isinstance(node, ast.Import) and alias.asname == names[0]:
                return self._find(".".join((alias.name, *names[1:])))
        return None

    def _starred(self, module: str, names: list[str]) -> _Found | None:
        for node in _statements(self._module(module).body if self._module(module) else []):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found = self._inside(self._source(node, module), names)
                if found is not None:
                    return found
        return None

    def _source(self, node: ast.ImportFrom, module: str) -> str:
        """The module that an import names, dots resolved."""
        if not node.level:
            return node.module or ""
        file = self._file(module)
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (file is not None and file.name == "__init__.py")]
        return ".".join([*parts, *filter(None, [node.module])])

    # ---- classes

    def _lineage(self, found: _Found) -> Iterator[_Found]:
        """A class and its bases, as far as they are written here."""
        if not isinstance(found.node, ast.ClassDef):
            return
        yield found
        for base in found.node.bases:
            inner = self._inside(found.module, ast.unparse(base).split("."))
            if inner is not None and inner.node is not found.node:
                yield from self._lineage(inner)

    def _member(self, found: _Found, name: str) -> _Found | None:
        for cls in self._lineage(found):
            for node in _statements(cls.node.body):  # type: ignore[attr-defined]
                if name in _defined(node):
                    return _Found(node, cls.module, True)
        return None

    def _constructor(self, found: _Found) -> inspect.Signature | None:
        written = self._member(found, "__init__")
        if written is not None and isinstance(written.node, _Function):
            return _signature(written)
        decorators = [ast.unparse(each) for each in found.node.decorator_list]  # type: ignore[attr-defined]
        if not any("dataclass" in each for each in decorators):
            return None
        fields = [each for each in found.node.body if isinstance(each, ast.AnnAssign)]  # type: ignore[attr-defined]
        return inspect.Signature([_parameter(ast.unparse(each.target), each.value is None) for each in fields])


# ---- source


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Those of a body, and of what is conditional in it; what stands in after an error comes before what it is for."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            inner = [each for field in ("body", "orelse", "finalbody") for each in getattr(node, field, ())]
            yield from _statements([each for handler in getattr(node, "handlers", ()) for each in handler.body])
            yield from _statements(inner)


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, (*_Function, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [inner.id for each in targets if each is not None for inner in ast.walk(each) if isinstance(inner, ast.Name)]


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == name for each in ast.walk(node))


def _strings(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        yield from (text for text in (getattr(each, key, None) for key in ("id", "attr", "arg")) if text)


def _signature(found: _Found) -> inspect.Signature:
    arguments: ast.arguments = found.node.args  # type: ignore[attr-defined]
    kinds = inspect.Parameter
    by_place = [*arguments.posonlyargs, *arguments.args]
    first_default = len(by_place) - len(arguments.defaults)
    parameters = [_parameter(each.arg, place < first_default) for place, each in enumerate(by_place)]
    decorators = [ast.unparse(each) for each in found.node.decorator_list]  # type: ignore[attr-defined]
    if found.is_member and "staticmethod" not in decorators:
        parameters = parameters[1:]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(each.arg, default is None, kinds.KEYWORD_ONLY))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _parameter(name: str, is_required: bool, kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=inspect.Parameter.empty if is_required else None)


def main(arguments: Sequence[str]) -> None:
    host = Written(Path(arguments[0]), tuple(sys.path))
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "bootstrap.py"))["load_pack"]()
    from devicebridge.contract.check import find_faults, refusals

    faults = find_faults(host)
    told = refusals(host.version, faults)
    answer = {"version": host.version, "faults": [fault.text for fault in faults], "refused": told}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
