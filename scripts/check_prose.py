"""Print sentences of more than 40 words in README.md and docs/. Exit code 1 if there are any.

Tables and code blocks are left out. A heading or a list item starts a new sentence. `Inline code` is one word, and of a
link its text counts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_WORDS = 40
ROOT = Path(__file__).resolve().parents[1]

_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
_STARTS_NEW = re.compile(r"\s*([-*] |\d+\. |#|\||>|<|!\[)")
_NOT_READ = re.compile(r"\s*(\||<|!\[)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_INLINE_CODE = re.compile(r"`[^`]*`")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\.\.)(?<!e\.g\.)[)*\"]*\s+")


def long_sentences(text: str) -> list[str]:
    """Sentences of a Markdown page that have more than MAX_WORDS words."""
    return [sentence for block in _blocks(text) for sentence in _sentences(block) if _num_words(sentence) > MAX_WORDS]


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, headings and list items, each on one line."""
    block: list[str] = []
    for line in [*_CODE_BLOCK.sub("", text).splitlines(), ""]:
        if (not line.strip() or _STARTS_NEW.match(line)) and block:
            yield " ".join(block)
            block = []
        if line.strip() and not _NOT_READ.match(line):
            block.append(line.strip())


def _sentences(block: str) -> list[str]:
    return _SENTENCE_END.split(_LINK.sub(r"\1", _INLINE_CODE.sub("`code`", block)))


def _num_words(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def main() -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [(page, sentence) for page in pages for sentence in long_sentences(page.read_text(encoding="utf-8"))]
    for page, sentence in found:
        print(f"{page.relative_to(ROOT)}: {_num_words(sentence)} words: {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
