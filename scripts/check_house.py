"""Prints a table of facts about the pack's source, and fails where one is worse than scripts/house_limits.json allows.

Source is all Python but tests, benchmarks and scripts. The limits of that file are a ratchet: a change that makes a
fact better lowers them (`--lower`), one that makes it worse fails. `--list` shows what was counted. Goals are below.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "scripts" / "house_limits.json"
LEFT_OUT = {"tests", "benchmarks", "scripts", "docs", "examples", "build", "dist"}
DATA_TABLES = ("families.comfy.image", "families.comfy.video", "families.comfy.audio")  # rows and no code
ARGUMENT_PARSERS = ("_make_parser",)
MOST_MODULE_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 500, 60, 8
GOALS = {
    "import circles": 0,
    f"modules over {MOST_MODULE_LINES} lines": 0,
    f"functions over {MOST_FUNCTION_LINES} lines": 0,
    f"functions with more than {MOST_PARAMETERS} parameters": 0,
    "files in training/": 10,
    'functions that compare with "auto"': 1,
    "functions that call find_devices": 1,
    "source lines": 42000,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. name: dotted, from the pack's root; a package has the name of its folder."""

    name: str
    is_package: bool
    num_lines: int
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function with its place, those inside classes and functions too."""
        yield from _functions(self.tree, self.name)


def _functions(parent: ast.AST, place: str) -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(parent):
        is_function = isinstance(node, Function)
        inside = f"{place}.{node.name}" if is_function or isinstance(node, ast.ClassDef) else place
        if is_function:
            yield inside, node
        yield from _functions(node, inside)


def read_modules(root: Path) -> list[Module]:
    """All source modules below a folder, by name."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part in LEFT_OUT or part.startswith(".") or part.endswith(".egg-info") for part in parts[:-1]):
            continue
        text, is_package = path.read_text(encoding="utf-8"), parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, is_package, len(text.splitlines()), ast.parse(text, str(path))))
    return found


# ---- circles


def import_circles(modules: Sequence[Module], pack: str = "devicebridge") -> list[list[str]]:
    """Groups of modules that reach each other by imports, wherever these stand: in a function, under TYPE_CHECKING."""
    names = {module.name for module in modules}
    reached = {module.name: set(_imported(module, names, pack)) - {module.name} for module in modules}
    for middle in names:  # Warshall's transitive closure
        for each in reached.values():
            if middle in each:
                each |= reached[middle]
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in names}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _imported(module: Module, names: set[str], pack: str) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.removeprefix(f"{pack}.") for alias in node.names if alias.name.startswith(f"{pack}.")]
        elif isinstance(node, ast.ImportFrom):
            targets = list(_imported_from(module, node, names, pack))
        else:
            continue
        yield from (target for target in targets if target in names)


def _imported_from(module: Module, node: ast.ImportFrom, names: set[str], pack: str) -> Iterator[str]:
    """The submodules that are named; for names that are none, the module itself."""
    if node.level:
        parts = module.name.split(".") if module.name else []
        up = node.level - module.is_package
        base = parts[: len(parts) - up] + (node.module.split(".") if node.module else [])
    elif node.module and node.module.split(".")[0] == pack:
        base = node.module.split(".")[1:]
    else:
        return
    for alias in node.names:
        submodule = ".".join([*base, alias.name])
        yield submodule if submodule in names else ".".join(base)


# ---- other counts


def long_modules(modules: Sequence[Module]) -> list[str]:
    over = [module for module in modules if module.num_lines > MOST_MODULE_LINES and module.name not in DATA_TABLES]
    return [f"{module.name} {module.num_lines}" for module in sorted(over, key=lambda each: -each.num_lines)]


def long_functions(modules: Sequence[Module]) -> list[str]:
    found = []
    for module in modules:
        for place, node in module.functions():
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MOST_FUNCTION_LINES and node.name not in ARGUMENT_PARSERS:
                found.append(f"{place} {num_lines}")
    return found


def many_parameters(modules: Sequence[Module]) -> list[str]:
    """self and cls count as none. Left out are Triton's kernels, which cannot be handed an object."""
    found = []
    for module in modules:
        for place, node in module.functions():
            if any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                continue
            of = node.args
            names = [each.arg for each in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg) if each]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MOST_PARAMETERS:
                found.append(f"{place} {count}")
    return found


def comparing_with_auto(modules: Sequence[Module]) -> list[str]:
    """Functions that compare a value with "auto": each is a place where "auto" is decided, or asked for."""
    return [place for module in modules for place, node in module.functions() if any(map(_is_auto, _own(node)))]


def _own(function: Function) -> Iterator[ast.AST]:
    """What stands in a function, without the functions inside it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Function):
            yield node
            waiting += ast.iter_child_nodes(node)


def _is_auto(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    constants = (each for side in (node.left, *node.comparators) for each in ast.walk(side))
    return any(isinstance(each, ast.Constant) and each.value == "auto" for each in constants)


def calling(modules: Sequence[Module], name: str) -> list[str]:
    """Functions that call a function of this name."""
    return [
        place
        for module in modules
        for place, node in module.functions()
        if any(isinstance(each, ast.Call) and _called(each) == name for each in _own(node))
    ]


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def find_facts(root: Path) -> dict[str, tuple[int, list[str]]]:
    """Each fact's count, and what was counted."""
    modules = read_modules(root)
    longest = sorted(modules, key=lambda each: -each.num_lines)[:10]
    lists = [
        [" -> ".join(circle) for circle in import_circles(modules)],
        long_modules(modules),
        long_functions(modules),
        many_parameters(modules),
        [each.name for each in modules if each.name.startswith("training.")],
        comparing_with_auto(modules),
        calling(modules, "find_devices"),
    ]
    total = sum(module.num_lines for module in modules), [f"{each.name} {each.num_lines}" for each in longest]
    return dict(zip(GOALS, [*((len(found), found) for found in lists), total], strict=True))


def table(facts: Mapping[str, tuple[int, list[str]]], limits: Mapping[str, int]) -> list[str]:
    """A line per fact: its name, count, limit and goal."""
    lines = [f"{'fact':44}{'now':>7}{'limit':>7}{'goal':>7}"]
    for name, (count, _) in facts.items():
        verdict = "  WORSE" if count > limits[name] else ""
        lines.append(f"{name:44}{count:7}{limits[name]:7}{GOALS[name]:7}{verdict}")
    return [*lines, f"longest modules: {', '.join(facts['source lines'][1])}"]


def main(arguments: Sequence[str]) -> int:
    facts, limits = find_facts(ROOT), json.loads(LIMITS.read_text(encoding="utf-8"))
    if "--lower" in arguments:
        limits = {name: min(count, limits.get(name, count)) for name, (count, _) in facts.items()}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(facts, limits)))
    worse = [name for name, (count, _) in facts.items() if count > limits[name]]
    for name in facts if "--list" in arguments else worse:
        print(f"\n{name}:", *facts[name][1], sep="\n  ")
    if worse:
        print(f"\n{', '.join(worse)}: more than {LIMITS.name} allows; what was counted is above")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
