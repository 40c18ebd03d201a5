"""scripts/check_prose.py finds sentences that are too long."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
LONG = " ".join(["word"] * 41) + "."
SHORT = " ".join(["word"] * 40) + "."


@pytest.fixture(scope="module")
def check_prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prose", ROOT / "scripts" / "check_prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sentence_of_41_words_is_found_and_one_of_40_is_not(check_prose: ModuleType) -> None:
    assert check_prose.long_sentences(f"{SHORT} {LONG}\n\n- {LONG}\n- {SHORT}\n") == [LONG, f"- {LONG}"]


def test_a_sentence_goes_on_over_lines_and_ends_with_its_list_item(check_prose: ModuleType) -> None:
    assert len(check_prose.long_sentences(LONG.replace(" ", "\n"))) == 1
    assert check_prose.long_sentences(f"- {SHORT[:-1]}\n- {SHORT[:-1]}\n") == []


def test_tables_and_code_blocks_are_left_out(check_prose: ModuleType) -> None:
    assert check_prose.long_sentences(f"```\n{LONG}\n```\n\n| {LONG} |\n") == []


def test_inline_code_is_one_word_and_of_a_link_its_text_counts(check_prose: ModuleType) -> None:
    assert check_prose.long_sentences(f"`{LONG}` [see]({'x' * 50}) it.") == []
    assert len(check_prose.long_sentences(f"[{LONG[:-1]}](page.md) it.")) == 1


def test_this_repositorys_readme_and_docs_pass(check_prose: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_prose.main() == 0, capsys.readouterr().out
