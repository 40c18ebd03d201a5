"""The guide to troubleshooting quotes messages that the code still prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
MESSAGES = re.findall(r"^```text\n(.*?)\n```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
_NOT_OURS = {"tests", "benchmarks", "scripts", "docs"}
_LEAST_LETTERS = 24  # of fixed text, below which a message would match by chance


def printed_texts() -> Iterator[re.Pattern[str]]:
    """Every longer text in the source, with anything for what is filled in."""
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0]
        if room in _NOT_OURS or room.startswith("."):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = _parts(node)
            if sum(map(len, parts)) >= _LEAST_LETTERS:
                yield re.compile(".+?".join(map(re.escape, parts)), re.DOTALL)


def _parts(node: ast.AST) -> list[str]:
    """The fixed text of a string before, between and behind what is filled in (%s or braces)."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"%[sd]", node.value)
    if isinstance(node, ast.JoinedStr):
        holes = (value.value if isinstance(value, ast.Constant) else "\0" for value in node.values)
        return "".join(map(str, holes)).split("\0")
    return []


@pytest.fixture(scope="module")
def patterns() -> list[re.Pattern[str]]:
    return list(printed_texts())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_the_code_prints_this_message(message: str, patterns: list[re.Pattern[str]]) -> None:
    assert any(pattern.search(message) for pattern in patterns)


def test_a_message_that_nobody_prints_is_found(patterns: list[re.Pattern[str]]) -> None:
    assert not any(pattern.search("the flux capacitor of /runs/cat is out of charge") for pattern in patterns)
    assert len(MESSAGES) >= 10
