"""scripts/check_prose.py finds sentences and lines that are too long, and words without a noun."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LONG, SHORT = (" ".join(["word"] * count) + "." for count in (41, 40))


@pytest.fixture(scope="module")
def prose() -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "check_prose.py")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{SHORT} {LONG}\n\n- {LONG}\n- {SHORT}\n", [LONG, f"- {LONG}"]), (LONG.replace(" ", "\n"), [LONG]),
        (f"- {SHORT[:-1]}\n- {SHORT[:-1]}\n", []), (f"```\n{LONG}\n```\n\n| {LONG} |\n", []),
        (f"`{LONG}` [see]({'x' * 50}) it.", []), (f"[{LONG[:-1]}](page.md) it.", [f"{LONG[:-1]} it."]),
    ],
    ids=["41 words", "over lines", "list items", "code and tables", "inline code", "link"],
)  # fmt: skip
def test_a_sentence_of_41_words_is_found(text: str, found: list[str], prose: Any) -> None:
    assert prose.long_sentences(text) == found


def test_a_line_of_121_characters_and_a_word_without_a_noun_are_found(prose: Any) -> None:
    page = f"{'x ' * 60}\n{'y ' * 60}yy\n\n| {'z' * 130} |\n\n```\n{'z' * 130}\n```\n[{'z' * 130}](a.md)\n"
    assert prose.long_lines(page) == [2]
    assert prose.bare_words("Cards have a half each.\nEach has a half of those.\n") == ["of those"]


def test_this_repositorys_readme_and_docs_pass(prose: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main() == 0, capsys.readouterr().out


def test_pages_above_their_size_and_a_guide_that_begins_with_words_are_found(prose: Any, tmp_path: Path) -> None:
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    sizes = {"README.md": "line\n" * 91, "docs/guides/long.md": "# Long\n\n" + "word " * 12_000}
    sizes["docs/guides/glossary.md"] = "# Words\n\n| word | meaning |\n|---|---|\n" + "| a | b |\n" * 26
    for name, text in sizes.items():
        (tmp_path / name).write_text(text)
    found = [fault.split()[1:3] for fault in prose.too_large(tmp_path)]
    assert found == [["91", "lines,"], ["12140", "words,"], ["26", "rows,"], ["begins", "with"]]
