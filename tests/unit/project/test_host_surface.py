"""The rows of what we touch in ComfyUI are what our code touches, and the table says so."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devicebridge.contract.rows import NODES, ROWS, Row

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "host_surface.py"


@pytest.fixture(scope="module")
def surface() -> SimpleNamespace:
    was = sys.modules.get("host_surface")
    module: Any = SimpleNamespace()
    sys.modules["host_surface"] = module  # dataclasses look their module up
    try:
        module.__dict__.update(runpy.run_path(str(SCRIPT), run_name="host_surface"))
    finally:
        sys.modules.pop("host_surface") if was is None else sys.modules.update(host_surface=was)
    return module


def _touches(surface: SimpleNamespace, source: str, part: str = "split") -> list[Any]:
    reader = surface._Reader("new.py", part)
    reader.visit(ast.parse(source))
    return reader.touches


def test_every_touch_has_a_row_and_the_table_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import comfy.utils\ncomfy.utils.brand_new(1)", "comfy.utils.brand_new(_)"),
        ("from comfy.sd import load_new", "comfy.sd.load_new"),
        ("def run():\n    from comfy import lora_convert\n    lora_convert.apply", "comfy.lora_convert"),
        ("import comfy.utils\ncomfy.utils.get_attr(1, 2, 3)", "comfy.utils.get_attr(_, _, _)"),
        (
            "import comfy.utils\ncomfy.utils.load_torch_file(1, safe_load=True)",
            "comfy.utils.load_torch_file(_, safe_load=)",
        ),
        ("def run(patcher: Any):\n    patcher.brand_new", "*.brand_new"),
        ("def run(patcher: Any):\n    patcher.clone(force=True)", "*.clone(force=)"),
        ("def run(patcher: Any):\n    inner = patcher.model\n    inner.brand_new = 1", "*.brand_new"),
        ("def run(patcher: Any):\n    for each in patcher.patches:\n        each.brand_new", "*.brand_new"),
        ("def run(patcher: Any):\n    return [each.brand_new for each in list(patcher.patches)]", "*.brand_new"),
        ("def run(patcher: Any):\n    return getattr(patcher, 'brand_new', None)", "*.brand_new"),
        ("_ALL = ('model', 'brand_new')\ndef run(p: Any):\n    return [getattr(p, n) for n in _ALL]", "*.brand_new"),
        ("class SplitMixin:\n    def load(self):\n        return super().brand_new()", "*.brand_new()"),
        ("class SplitMixin:\n    def load(self):\n        return self.brand_new", "*.brand_new"),
        ("class SplitMixin:\n    def clone(self, deep):\n        return super().clone()", "override *.clone"),
        ("class Held:\n    def __init__(self, v: Any):\n        self._v = v\n        self._v.brand_new", "*.brand_new"),
        ("from ..host import io\nio.Widget.Input('a')", "comfy_api.v0_0_2.io.Widget.Input(_)"),
    ],
)
def test_a_new_touch_without_a_row_is_found(surface: SimpleNamespace, source: str, told: str) -> None:
    problems = surface.uncovered(_touches(surface, source), ROWS)
    assert any(f"touches {told}: no such row" in text for text in problems), problems


@pytest.mark.parametrize(
    "source",
    [
        "import comfy.utils\ncomfy.utils.get_attr(1, 2)",
        "def run(patcher: Any):\n    patcher.clone(model_override=1).object_patches.items()",
        "import comfy.model_management as management\nmanagement.current_loaded_models.remove(1)",
        "def run(value: dict[str, int]):\n    value.brand_new",
    ],
)
def test_what_has_a_row_or_is_not_comfyuis_is_let_through(surface: SimpleNamespace, source: str) -> None:
    assert surface.uncovered(_touches(surface, source), ROWS) == []


def test_a_row_of_one_part_allows_nothing_in_another(surface: SimpleNamespace) -> None:
    found = _touches(surface, "import comfy.utils\ncomfy.utils.get_attr(1, 2)", "folders")
    assert any("get_attr(_, _): no such row for 'folders'" in text for text in surface.uncovered(found, ROWS))


def test_a_row_that_nothing_touches_is_found(surface: SimpleNamespace) -> None:
    row = Row("call", "comfy.utils.nobody_calls_this", (), "split")
    assert surface.untouched([*ROWS, row]) == ["row call comfy.utils.nobody_calls_this: nothing touches it"]


def test_a_flag_without_a_row_is_found(surface: SimpleNamespace) -> None:
    without = [row for row in ROWS if row.part != "server"]
    problems = "\n".join(surface.missing_words(without))
    assert surface.missing_words(ROWS) == []
    assert "--database-url" in problems and "/system_stats" in problems


# ---- which node relies on what

_HOST = ROOT / "nodes" / "host"
_PART_OF_NAME = {"HostClip": "encoders", "HostVae": "encoders"}


def _folders_names() -> set[str]:
    tree = ast.parse((_HOST / "folders.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def _parts_of(path: Path, node_id: str) -> set[str]:
    """Parts of nodes/host/ that a node uses: in its file, but for other nodes, and in what that imports by name."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    own = [each for each in body if not _is_another_node(each, node_id)]
    imports = [each for each in _walked(own) if isinstance(each, ast.ImportFrom) and each.level == 1 and each.module]
    parts = {"nodes", *_used(own)} | (
        {"split"} if any(each.module.startswith("host.split") for each in imports) else set()
    )
    for each in imports:
        inner = path.with_name(f"{each.module}.py")
        if inner.is_file():
            names = {alias.name for alias in each.names}
            defined = ast.parse(inner.read_text(encoding="utf-8")).body
            parts |= _used([node for node in defined if getattr(node, "name", None) in names])
    return parts


def _walked(statements: list[Any]) -> Iterator[Any]:
    return (node for statement in statements for node in ast.walk(statement))


def _used(statements: list[Any]) -> set[str]:
    """Parts that "host.name" stands for in these statements."""
    places = [each for each in _walked(statements) if isinstance(each, ast.Attribute)]
    names = {each.attr for each in places if isinstance(each.value, ast.Name) and each.value.id == "host"}
    return {_PART_OF_NAME.get(name, "folders" if name in _folders_names() else "host") for name in names}


def _is_another_node(statement: ast.stmt, node_id: str) -> bool:
    text = ast.unparse(statement)
    return isinstance(statement, ast.ClassDef) and "(io.ComfyNode)" in text and f"node_id='{node_id}'" not in text


def test_each_node_names_the_parts_that_its_file_uses() -> None:
    told: dict[str, set[str]] = {}
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for node_id in (each for each in NODES if f'node_id="{each}"' in path.read_text(encoding="utf-8")):
            told[node_id] = _parts_of(path, node_id)
    assert set(told) == set(NODES)
    assert {node: parts - set(NODES[node]) for node, parts in told.items()} == {node: set() for node in NODES}
