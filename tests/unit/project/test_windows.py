"""What Windows lacks is used where a check of the system stands around it; in sources, and in tests that run there."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOT_THERE = ("fcntl", "grp", "pwd", "resource", "termios")
PARTLY_THERE = ("os", "select", "signal", "socket")
_CHECKS = ("'nt'", "'win32'", "'linux'", "_IS_WINDOWS", "hasattr(")  # of the system, or of the name
FILES = [each for top in ROOT.glob("*/__init__.py") for each in top.parent.rglob("*.py")]
FILES += [*ROOT.glob("*.py"), *(ROOT / "tests").glob("*.py"), *(ROOT / "tests" / "unit").rglob("*.py")]


@cache
def _lacking(module: str) -> frozenset[str]:
    """Names that typeshed has for other systems alone."""
    stubs = Path(pytest.importorskip("mypy").__file__).parent / "typeshed" / "stdlib"
    stub = next(each for each in (stubs / f"{module}.pyi", stubs / module / "__init__.pyi") if each.exists())
    found: dict[bool, set[str]] = {True: set(), False: set()}

    def look(body: list[ast.stmt], is_elsewhere: bool) -> None:
        for node in body:
            if isinstance(node, ast.If):
                test = ast.unparse(node.test)
                look(node.body, is_elsewhere or "!= 'win32'" in test or "== 'linux'" in test or "== 'darwin'" in test)
                look(node.orelse, is_elsewhere or "== 'win32'" in test)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[is_elsewhere].add(node.name)
            else:
                names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
                found[is_elsewhere].update((*names, *(each.name for each in getattr(node, "names", ()))))

    look(ast.parse(stub.read_text(encoding="utf-8")).body, False)
    return frozenset(found[True] - found[False])


def _uses(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        module = getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""
        is_lacking = module in PARTLY_THERE and node.attr in _lacking(module)  # type: ignore[attr-defined]
        if is_lacking or any(each in NOT_THERE for each in [*modules, getattr(node, "module", None)]):
            yield node


def _checks(node: ast.AST | None) -> bool:
    return node is not None and any(each in ast.unparse(node) for each in _CHECKS)


def _unchecked(file: Path) -> list[int]:
    """Lines of uses that nothing around them checks."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def is_checked(node: ast.AST) -> bool:
        while (outer := around.get(node)) is not None:
            if isinstance(outer, (ast.If, ast.IfExp)) and node is not outer.test and _checks(outer.test):
                return True
            if isinstance(outer, ast.BoolOp) and node is not outer.values[0] and _checks(outer.values[0]):
                return True
            if isinstance(outer, ast.FunctionDef) and node in outer.body:
                asserted = (each for each in outer.body if isinstance(each, ast.Assert))
                if any(map(_checks, [*outer.decorator_list, *asserted])):
                    return True
            node = outer
        marks = (each for each in tree.body if isinstance(each, ast.Assign) and "pytestmark" in ast.unparse(each))
        return any(map(_checks, marks))

    return [node.lineno for node in _uses(tree) if not is_checked(node)]  # type: ignore[attr-defined]


def test_what_windows_lacks_is_known() -> None:
    assert {"SIGKILL", "SIGHUP", "alarm", "pthread_kill"} <= _lacking("signal")
    assert {"fork", "mkfifo", "geteuid", "sysconf", "sched_getaffinity", "waitid"} <= _lacking("os")
    assert not {"SIGINT", "SIGTERM", "Signals"} & _lacking("signal") and not {"kill", "getpid"} & _lacking("os")


def test_what_windows_lacks_is_used_behind_a_check() -> None:
    found = {str(file.relative_to(ROOT)): lines for file in FILES if (lines := _unchecked(file))}
    assert found == {}
