"""Which parts of ComfyUI the pack's own code touches, compared with contract/rows.py, and the table of them.

The table in docs/internals/upstream_facts.md says beside each part what the newest readable copy of its file has. That
was found by reading; host_surface.toml holds what was read, and where. With --check nothing is written; exit code 1 if
a touch has no row, a row is touched nowhere, or the table is out of date. With --read MODULE the rows of a module of
ComfyUI are noted as read, after its entry in host_surface.toml has been brought up to date by hand.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "upstream_facts.md"
READ = ROOT / "scripts" / "host_surface.toml"
_TABLE = re.compile(
    r"(?<=<!-- what we touch, by scripts/host_surface.py -->\n).*?(?=<!-- end of what we touch -->)", re.DOTALL
)
_HOST = ("comfy", "comfy_api", "comfy_aimdo", "comfy_kitchen", "comfy_extras", "comfy_execution", "comfyui_version")
_HOST += ("folder_paths", "server", "execution", "nodes", "latent_preview", "node_helpers")
_IO = "comfy_api.v0_0_2.io"
_PATCHER_CLASSES = ("_CardPatcher", "ShardMixin", "SplitMixin")
# Attributes of Python's, torch's and aiohttp's own objects, and of ours, where the code says Any.
_PLAIN_NAMES = """
    items values keys get copy update remove pop append startswith removeprefix as_subclass data data_ptr detach device
    dtype shape type numel element_size to named_parameters parameters named_modules modules state_dict get_submodule
    get_parameter get_vocab func args keywords cell_contents __closure__ __globals__ __self__ __func__ __module__
    __qualname__ __dict__ __class__ __name__ __defaults__ __kwdefaults__ _orig_mod forward config companions follow
    unsplit_class id ndim index post scale _params _qdata _layout_cls dequantize lower on_response_prepare
"""
_NOT_THE_HOSTS = frozenset(_PLAIN_NAMES.split())
_LOOKED_UP = ("getattr", "hasattr")


def part_of(path: Path) -> str:
    """The part of the pack that a file belongs to, in the words of contract/rows.py."""
    inner = path.relative_to(ROOT / "nodes").parts
    if inner[0] != "host":
        return "nodes"
    if inner[1:] == ("native", "conditions.py"):
        return "conditions"
    parts = {
        "native": "native",
        "__init__.py": "host",
        "folders.py": "folders",
        "comfy_encoders.py": "encoders",
        "page.py": "page",
    }
    return parts.get(inner[1], "split")


@dataclass(frozen=True)
class Touch:
    """One place where our code touches ComfyUI's.

    Args:
        name: dotted from a module, or "*.name" for an attribute of one of its objects.
        places, names: of a call, how many arguments it passes by place, and which by name.
    """

    file: str
    line: int
    name: str
    part: str
    is_call: bool = False
    places: int = 0
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        called = f"({', '.join([*['_'] * self.places, *(f'{name}=' for name in self.names)])})" if self.is_call else ""
        return f"{self.file}:{self.line} touches {self.name}{called}"


def find_touches() -> list[Touch]:
    """Every touch of the nodes and of nodes/host/."""
    found = []
    for path in sorted((ROOT / "nodes").rglob("*.py")):
        reader = _Reader(str(path.relative_to(ROOT)), part_of(path))
        reader.visit(ast.parse(path.read_text(encoding="utf-8")))
        found += reader.touches
    return found


def missing_words(rows: Iterable[Any]) -> list[str]:
    """Flags and routes in headless/server.py that no row of the part "server" names."""
    known = {word for row in rows if row.part == "server" for word in row.form}
    tree = ast.parse((ROOT / "headless" / "server.py").read_text(encoding="utf-8"))
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = {each for each in strings if re.fullmatch(r"--[a-z-]+|/[a-z_]+", each)}
    return [f"headless/server.py uses {word}: no such row for 'server'" for word in sorted(found - known)]


# ---- our code


@dataclass
class _Reader(ast.NodeVisitor):
    """Follows what a file imports from ComfyUI, and values that are annotated as Any, through its functions."""

    file: str
    part: str
    touches: list[Touch] = field(default_factory=list)
    scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])  # name -> dotted name, "*" for an object, or ""
    words: dict[str, list[str]] = field(default_factory=dict)  # name of a tuple -> the strings in it
    own: set[str] = field(default_factory=set)  # members of our patcher classes
    held: set[str] = field(default_factory=set)  # attributes of ours that hold an object of ComfyUI's
    in_patcher: bool = False

    # names

    def visit_Module(self, node: ast.Module) -> None:
        classes = [each for each in node.body if isinstance(each, ast.ClassDef) and each.name in _PATCHER_CLASSES]
        self.own = {name for cls in classes for inner in cls.body for name in _names_of(inner)}
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.scopes[-1][alias.asname or top] = (alias.name if alias.asname else top) if top in _HOST else ""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            is_host = not node.level and module.partition(".")[0] in _HOST
            origin = f"{module}.{alias.name}" if is_host else ""
            if node.level and module.split(".")[-1] == "host" and alias.name == "io":
                origin = _IO
            self.scopes[-1][alias.asname or alias.name] = origin
            if is_host:
                self._add(node, origin)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        was, self.in_patcher = self.in_patcher, node.name in _PATCHER_CLASSES
        self.generic_visit(node)
        self.in_patcher = was

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        scope = {each.arg: _meaning_of(each.annotation) for each in arguments}
        scope |= {each.arg: "" for each in (node.args.vararg, node.args.kwarg) if each}
        if self.in_patcher and "self" in scope:
            scope["self"] = "self"
            self._note_override(node)
        self.scopes.append(scope)
        for each in node.body:
            self.visit(each)
        self.scopes.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.scopes.append({each.arg: "" for each in node.args.args})
        self.visit(node.body)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for left, right in pairs:
                self._bind(left, right)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, node.iter, is_each=True)
        for each in (*node.body, *node.orelse):
            self.visit(each)

    def _visit_comprehension(self, node: Any) -> None:
        self.scopes.append({})
        for part in node.generators:
            self.visit(part.iter)
            self._bind(part.target, part.iter, is_each=True)
            for condition in part.ifs:
                self.visit(condition)
        for name in ("key", "value", "elt"):
            if hasattr(node, name):
                self.visit(getattr(node, name))
        self.scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _bind(self, target: ast.AST, value: ast.AST, *, is_each: bool = False) -> None:
        constants = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
        strings = [each for each in constants if isinstance(each, str)]
        if _is_of_self(target) and self._is_object(value):
            self.held.add(target.attr)  # type: ignore[attr-defined]
        if not isinstance(target, (ast.Name, ast.Tuple, ast.List)):
            return
        for name in (each.id for each in ast.walk(target) if isinstance(each, ast.Name)):
            self.scopes[-1][name] = "*" if self._is_object(value) else ""
            if isinstance(value, (ast.Tuple, ast.List)):
                self.words[name] = strings
            elif is_each and isinstance(value, ast.Name):
                self.words[name] = self.words.get(value.id, [])

    def _meaning(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), "")

    def _is_object(self, node: ast.AST) -> bool:
        """Whether a value comes from ComfyUI."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(map(self._is_object, node.elts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not self._meaning(node.func.id):
            return node.func.id in ("list", "tuple", "getattr", "next", "iter") and any(map(self._is_object, node.args))
        if any(_is_of_self(each) and each.attr in self.held for each in _owners(node)):
            return True
        root = _root(node)
        return root is not None and bool(self._meaning(root)) and self._meaning(root) != "self"

    # touches

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name_of(node.func)
        if name and not self._is_ours(name):
            places = [each for each in node.args if not isinstance(each, ast.Starred)]
            names = tuple(each.arg for each in node.keywords if each.arg)
            self._add(node, name, is_call=True, places=len(places), names=names)
            for each in (*node.args, *(keyword.value for keyword in node.keywords)):
                self.visit(each)
            if isinstance(node.func, ast.Attribute):
                self.visit(node.func.value)
            return
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called in _LOOKED_UP and self._may_be_the_hosts(node.args[0]):
            self._look_up(node)
        if called == "isinstance" and isinstance(node.args[0], ast.Name) and self._name_of(node.args[1]):
            self.scopes[-1][node.args[0].id] = "*"
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name_of(node)
        if name and not self._is_ours(name):
            self._add(node, name)
        if name is None or name.startswith("*"):
            self.visit(node.value)

    def _name_of(self, node: ast.AST) -> str | None:
        """The dotted name of ComfyUI's that an expression means, "*.name" for a member of an object; None for ours."""
        if isinstance(node, ast.Name):
            return self._meaning(node.id) if self._meaning(node.id) not in ("", "*", "self") else None
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Call) and _root(node.value) == "super":
            return f"*.{node.attr}" if self.in_patcher else None
        if isinstance(node.value, ast.Name) and self._meaning(node.value.id) == "self":
            return None if node.attr in self.own else f"*.{node.attr}"
        inner = self._name_of(node.value)
        if inner and not inner.startswith("*") and not inner.endswith(".instance"):
            return f"{inner}.{node.attr}"
        return f"*.{node.attr}" if self._is_object(node.value) else None

    def _is_ours(self, name: str) -> bool:
        return name.startswith("*") and (name[2:] in _NOT_THE_HOSTS or name[2:] in self.own)

    def _may_be_the_hosts(self, node: ast.AST) -> bool:
        root = _root(node)
        return root is not None and (self._is_object(node) or self._meaning(root) == "self" or root == "module")

    def _look_up(self, node: ast.Call) -> None:
        """getattr with a name that is written here, itself or in the tuple it comes from."""
        asked = node.args[1]
        names = [asked.value] if isinstance(asked, ast.Constant) else self.words.get(getattr(asked, "id", ""), [])
        for name in names:
            if name not in _NOT_THE_HOSTS:
                self._add(node, f"*.{name}")

    def _note_override(self, node: ast.FunctionDef) -> None:
        """A method that calls the one it stands in for."""
        called = {each.func.attr for each in ast.walk(node) if isinstance(each, ast.Call) and _is_super(each.func)}
        if node.name in called:
            given = tuple(each.arg for each in node.args.args[1:])
            more = ("...",) if node.args.vararg or node.args.kwarg else ()
            self._add(node, f"override *.{node.name}", names=given + more)

    def _add(self, node: Any, name: str, **call: Any) -> None:
        self.touches.append(Touch(self.file, node.lineno, name, self.part, **call))


def _names_of(node: ast.AST) -> list[str]:
    """What a statement in one of our patcher classes makes a member of ours; a bare annotation is ComfyUI's."""
    if isinstance(node, ast.FunctionDef):
        is_new = not any(isinstance(each, ast.Call) and _is_super(each.func) for each in ast.walk(node))
        return [node.name] if is_new else []
    target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
    if not isinstance(target, ast.Name):
        return []
    return [target.id] if getattr(node, "value", None) is not None or target.id.startswith("_") else []


def _meaning_of(annotation: ast.AST | None) -> str:
    """What a parameter is: "*" for an object of ComfyUI's, "self" for one of our patchers."""
    text = ast.unparse(annotation) if annotation is not None else ""
    return "*" if text in ("Any", "list[Any]", "Any | None") else "self" if text in _PATCHER_CLASSES else ""


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _owners(node: ast.AST) -> Iterator[Any]:
    """An expression and all that it is a part of, outermost first."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript, ast.Starred)):
        yield node
        node = node.func if isinstance(node, ast.Call) else node.value


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and _root(node.value) == "super"


def _root(node: ast.AST) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript, ast.Starred)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


# ---- the rows


def load_rows() -> Any:
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    from devicebridge.contract import rows

    return rows


def uncovered(touches: Iterable[Touch], rows: Iterable[Any]) -> list[str]:
    """Touches that no row of their part allows, in words."""
    known = list(rows)
    lost = [touch for touch in touches if not any(_allows(row, touch) for row in known)]
    return [f"{touch}: no such row for {touch.part!r}" for touch in lost]


def untouched(rows: Iterable[Any]) -> list[str]:
    """Rows whose last word is nowhere in the files of their part."""
    words: dict[str, set[str]] = {}
    for path in (ROOT / "nodes").rglob("*.py"):
        words.setdefault(part_of(path), set()).update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    asked = [row for row in rows if row.use in ("has", "call", "override")]
    asked = [row for row in asked if not row.is_written and not row.is_optional]
    lost = [row for row in asked if row.path.rpartition(".")[2] not in words[row.part]]
    return [f"row {row.use} {row.path}: nothing touches it" for row in lost]


def _allows(row: Any, touch: Touch) -> bool:
    if row.part not in (touch.part, "nodes"):
        return False
    if touch.name.startswith("override "):
        is_it = row.use == "override" and row.path.endswith(touch.name.removeprefix("override *"))
        return is_it and touch.names in (row.form, ("...",))
    if row.use == "says":
        return touch.name[2:] in row.form
    is_named = row.path.rpartition(".")[2] == touch.name[2:] if touch.name.startswith("*.") else row.path == touch.name
    if not is_named:  # the module or class of what is touched, or a plain container of the host's
        owner, _, last = touch.name.rpartition(".")
        is_container = row.use == "has" and row.path == owner and last in _NOT_THE_HOSTS
        return is_container or (not touch.is_call and row.path.startswith(f"{touch.name}."))
    if not touch.is_call or row.use == "has":
        return not touch.is_call or row.path.rpartition(".")[2][:1].isupper()  # a class that is only named
    if row.use != "call":
        return False
    by_place = [name for name in row.form if not name.endswith("=")]
    by_name = {name.rstrip("=") for name in row.form}
    return "..." in row.form or (touch.places <= len(by_place) and by_name.issuperset(touch.names))


# ---- the table


def table(rows: Any) -> Iterator[str]:
    read = tomlkit.parse(READ.read_text(encoding="utf-8")).unwrap()
    grouped: dict[str, list[Any]] = {}
    for row in rows.ROWS:
        grouped.setdefault(_module_of(row, read), []).append(row)
    yield from ("", "| module | what we touch | newest copy read | what has changed there |", "|---|---|---|---|")
    for module in sorted(grouped):
        entry = read["file"].get(module, {})
        where = f"{entry['repository']} `{entry['commit'][:9]}`" if entry else "none"
        unseen = sorted({_told(row, module) for row in grouped[module]} - set(entry.get("seen", ())))
        changed = list(entry.get("changed", ()))
        changed += [f"not read: {', '.join(f'`{each}`' for each in unseen)}"] if entry and unseen else []
        told = ", ".join(f"`{each}`" for each in dict.fromkeys(_told(row, module) for row in grouped[module]))
        yield f"| `{module}` | {told} | {where} | {'; '.join(changed) or ('nothing' if entry else 'not readable')} |"
    yield ""


def _module_of(row: Any, read: dict[str, Any]) -> str:
    modules = [name for name in read["modules"] if f"{row.path}.".startswith(f"{name}.")]
    if not modules:
        raise SystemExit(f"{row.path} is in no module that {READ.name} names")
    return max(modules, key=len)


def _told(row: Any, module: str) -> str:
    """A row as the table shows it."""
    name = row.path.removeprefix(module).lstrip(".")
    name = f"{'where it is: ' if row.is_optional else ''}{name or module}"
    if row.use == "has":
        return name
    word = {"call": "", "override": "override ", "wrap": "around ", "says": "strings of ", "is": "value of "}[row.use]
    return f"{word}{name}({', '.join(row.form)})"


def note_as_read(module: str, rows: Any) -> None:
    """Write down that these rows were compared with the copy that host_surface.toml names."""
    document = tomlkit.parse(READ.read_text(encoding="utf-8"))
    told = [_told(row, module) for row in rows.ROWS if _module_of(row, document.unwrap()) == module]
    seen = tomlkit.array().multiline(True)
    seen.extend(dict.fromkeys(told))
    document["file"][module]["seen"] = seen  # type: ignore[index]
    READ.write_text(tomlkit.dumps(document), encoding="utf-8")


def main(arguments: list[str]) -> int:
    rows = load_rows()
    if arguments[:1] == ["--read"]:
        for module in arguments[1:]:
            note_as_read(module, rows)
    touches = find_touches()
    problems = uncovered(touches, rows.ROWS) + untouched(rows.ROWS) + missing_words(rows.ROWS)
    text = PAGE.read_text(encoding="utf-8")
    if not _TABLE.search(text):
        raise SystemExit(f"{PAGE.name} has no place for the table")
    updated = _TABLE.sub(lambda _: "\n".join(table(rows)) + "\n", text)
    if "--check" not in arguments:
        PAGE.write_text(updated, encoding="utf-8")
    elif updated != text:
        problems.append(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/host_surface.py")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
