"""Prints a table of facts about the pack's source, and fails where one is worse than scripts/house_limits.json allows.

Source is all Python but tests, benchmarks and scripts; a room is a folder at the top. Goals are below.

    check_house.py            fails where a count is above its limit, or a limit rose without a decision
    check_house.py --lower    lowers every limit to its count. A room that grew takes the lines that others gave up:
                              moving files between rooms needs nothing else as long as `source lines` does not rise
    check_house.py --set NAME raises a limit to its count; NAME is a line of the table, as "lines of tests". The same
                              commit must add or change a page in docs/decisions that says what users gain
    check_house.py --list     shows what was counted
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check_prose
import tomlkit

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
    "source files": 240,
    "private functions with one caller": 450,
    "lines of tests": 58000,
    "lines of documents over 120 characters": 0,
    "mutants whose text does not stand once": 0,
}
ROOM_GOALS = {
    "config": 1400, "system": 950, "families": 4200, "patches": 1400, "quantization": 1650, "checkpoints": 2900,
    "parallel": 6900, "data": 1900, "encoding": 2850, "training": 2150, "planning": 2600, "sampling": 530, "jobs": 3700,
    "runs": 1250, "headless": 300, "cli": 1800, "nodes": 8700, "top files": 820,
}  # fmt: skip
ROOM = "lines in "
DECISIONS = "docs/decisions"
Facts = Mapping[str, tuple[int, list[str]]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file. name: dotted, from the pack's root; a package has the name of its folder."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

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
        found.append(Module(name, is_package, text, ast.parse(text, str(path))))
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


def with_one_caller(modules: Sequence[Module]) -> list[str]:
    """Private functions whose name stands in their file twice: where it is defined and once besides."""
    return [
        place
        for module in modules
        for place, node in module.functions()
        if re.match(r"_[a-z]", node.name) and len(re.findall(rf"\b{node.name}\b", module.text)) == 2
    ]


def room_lines(modules: Sequence[Module]) -> Counter[str]:
    """Lines by folder at the top."""
    lines: Counter[str] = Counter()
    for module in modules:
        is_top = "." not in module.name and not module.is_package
        lines["top files" if is_top or not module.name else module.name.partition(".")[0]] += module.num_lines
    return lines


def _pages(root: Path) -> list[Path]:
    return [*root.glob("README.md"), *sorted((root / "docs").rglob("*.md"))]


def find_long_lines(page: Path) -> list[int]:
    """`check_prose.py --wrap PAGE` mends them."""
    return check_prose.long_lines(page.read_text(encoding="utf-8"))


def find_facts(root: Path) -> Facts:
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
    tests = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "tests").rglob("*.py")}
    most = sorted(tests, key=lambda path: -tests[path])[:10]
    lonely = with_one_caller(modules)
    counts = [*((len(found), found) for found in lists), total, (len(modules), [each.name for each in modules])]
    counts += [(len(lonely), lonely), (sum(tests.values()), [f"{path.name} {tests[path]}" for path in most])]
    long_lines = [f"{page.relative_to(root)}:{line}" for page in _pages(root) for line in find_long_lines(page)]
    lost = lost_mutants(root)
    counts += [(len(long_lines), long_lines), (len(lost), lost)]
    rooms = {f"{ROOM}{room}": (count, []) for room, count in sorted(room_lines(modules).items())}
    return {**dict(zip(GOALS, counts, strict=True)), **rooms}


def lost_mutants(root: Path) -> list[str]:
    """Names of those in tests/mutants.toml that would change nothing, or more than they say."""
    list_of_all = root / "tests" / "mutants.toml"
    mutants = tomlkit.parse(list_of_all.read_text(encoding="utf-8"))["mutant"] if list_of_all.is_file() else []
    texts = {each["file"]: root / each["file"] for each in mutants}
    found = {name: file.read_text(encoding="utf-8") if file.is_file() else "" for name, file in texts.items()}
    return [str(each["name"]) for each in mutants if found[each["file"]].count(each["old"]) != 1]


def table(facts: Facts, limits: Mapping[str, int]) -> list[str]:
    """A line per fact: its name, count, limit and goal."""
    goals = {**GOALS, **{f"{ROOM}{room}": goal for room, goal in ROOM_GOALS.items()}}
    lines = [f"{'fact':44}{'now':>7}{'limit':>7}{'goal':>7}"]
    for name, (count, _) in facts.items():
        verdict = "  WORSE" if count > limits.get(name, 0) else ""
        lines.append(f"{name:44}{count:7}{limits.get(name, 0):7}{goals.get(name, 0):7}{verdict}")
    return [*lines, f"longest modules: {', '.join(facts['source lines'][1])}"]


# ---- limits


def lowered(facts: Facts, limits: Mapping[str, int]) -> dict[str, int]:
    """Each limit at its count where that is less; rooms at their count where all of them together did not grow."""
    counts = {name: count for name, (count, _) in facts.items()}
    may_move = counts["source lines"] <= limits.get("source lines", counts["source lines"])
    return {
        name: count if may_move and name.startswith(ROOM) else min(count, limits.get(name, count))
        for name, count in counts.items()
    }


def risen(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Limits that rose. Rooms take lines from each other."""
    is_moved = after.get("source lines", 0) <= before.get("source lines", 0)
    return [
        name
        for name, limit in after.items()
        if limit > before.get(name, limit) and not (is_moved and name.startswith(ROOM))
    ]


def risen_undecided(root: Path) -> list[str]:
    """Limits that rose in the last commit, or since, without a page of docs/decisions that changed with them."""
    found = []
    for old, new in (("HEAD^", "HEAD"), ("HEAD", "")):
        pages = _git(root, "diff", "--name-only", old, *([new] if new else []), "--", DECISIONS)
        if not new:
            pages += _git(root, "ls-files", "--others", "--exclude-standard", "--", DECISIONS)
        limits = [_limits_at(root, old), _limits_at(root, new) if new else json.loads(LIMITS.read_text("utf-8"))]
        found += [] if pages else risen(*limits)
    return found


def _limits_at(root: Path, commit: str) -> dict[str, int]:
    text = _git(root, "show", f"{commit}:scripts/{LIMITS.name}")
    return json.loads(text) if text else {}


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where there is no such commit, or no git."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def main(arguments: Sequence[str]) -> int:
    facts, limits = find_facts(ROOT), json.loads(LIMITS.read_text(encoding="utf-8"))
    if "--lower" in arguments or "--set" in arguments:
        limits = lowered(facts, limits)
        limits |= {name: facts[name][0] for name in arguments if name in facts}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table(facts, limits)))
    worse = [name for name, (count, _) in facts.items() if count > limits.get(name, 0)]
    for name in facts if "--list" in arguments else worse:
        print(f"\n{name}:", *facts[name][1], sep="\n  ")
    if worse:
        print(f"\n{', '.join(worse)}: more than {LIMITS.name} allows; what was counted is above")
        if all(name.startswith(ROOM) for name in worse):
            print("Where files moved between rooms: python scripts/check_house.py --lower")
    undecided = risen_undecided(ROOT)
    if undecided:
        print(f"\n{', '.join(undecided)}: this limit rose, and no page in {DECISIONS} changed with it")
    return 1 if worse or undecided else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
