"""Scripts that no test runs import names that are there."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("tests/comfy/*.py")))


@cache
def _names(module: str) -> frozenset[str]:
    """What a module of ours makes or imports, wherever it does; of a package its modules as well."""
    path = ROOT.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {each.stem for each in path.glob("*")} if path.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8") if file.exists() else "")):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.parent.name}/{script.name}")
def test_what_a_script_imports_of_us_is_there(script: Path) -> None:
    wanted = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "devicebridge" and node.module
        for alias in node.names
    ]
    assert [(module, name) for module, name in wanted if name not in _names(module)] == []
