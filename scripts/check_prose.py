"""Print sentences of more than 40 words in README.md and docs/, and words that stand for a noun nobody can name.

Exit code 1 if there are any, if pages together are larger than MOST says, or if a guide does not begin with a picture
or a table. Tables and code blocks are left out. A heading or a list item starts a new sentence. `Inline code` is one
word, and of a link its text counts. `--wrap PAGES` wraps paragraphs of these pages (of all, where none is named) at 120
characters; how many lines are longer is a fact of check_house.py.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_WORDS = 40
MAX_COLUMNS = 120
GUIDES = "docs/guides/*.md"
MOST = (("README.md", "lines", 90), (GUIDES, "words", 12_000), ("docs/guides/glossary.md", "rows", 25))
ROOT = Path(__file__).resolve().parents[1]

_CODE_BLOCK = re.compile(r"^( *)```.*?^\1```[^\n]*$", re.MULTILINE | re.DOTALL)
_STARTS_NEW = re.compile(r"\s*([-*] |\d+\. |#|\||>|<|!\[)")
_NOT_READ = re.compile(r"\s*(\||<|!\[)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_INLINE_CODE = re.compile(r"`[^`]*`")
# "pairs of those.", "what the cards have": say which things.
_BARE = re.compile(r"\b(?:of those(?=[.,;:)]|$)|what (?:the|a|an|its) [a-z]+ (?:has|have)(?=[.,;:)]))", re.IGNORECASE)
_BEGINS_WELL = re.compile(r"(?:#+ .+\n\n)+(?:\||!\[)")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\.\.)(?<!e\.g\.)[)*\"]*\s+")


def long_sentences(text: str) -> list[str]:
    """Sentences of a Markdown page that have more than MAX_WORDS words."""
    return [sentence for block in _blocks(text) for sentence in _sentences(block) if _num_words(sentence) > MAX_WORDS]


def bare_words(text: str) -> list[str]:
    """Where a Markdown page says "of those" and the like in place of a noun."""
    return [found for block in _blocks(text) for found in _BARE.findall(_INLINE_CODE.sub("`code`", block))]


def long_lines(text: str) -> list[int]:
    """Numbers of lines of more than MAX_COLUMNS characters that could be wrapped."""
    text = _CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    lines = enumerate(text.splitlines(), start=1)
    return [
        number
        for number, line in lines
        if len(line) > MAX_COLUMNS and not _NOT_READ.match(line) and " " in _LINK.sub("link", line.strip("- "))
    ]


def wrapped(text: str) -> str:
    """The page with its paragraphs and list items wrapped at MAX_COLUMNS."""
    lines: list[str] = []
    paragraph: list[str] = []
    in_code = False
    for line in [*text.splitlines(), ""]:
        is_fence = line.lstrip().startswith("```")
        if paragraph and (in_code or is_fence or not line.strip() or _STARTS_NEW.match(line)):
            lines += _wrapped_paragraph(paragraph)
            paragraph = []
        if in_code or is_fence or not line.strip() or _NOT_READ.match(line) or line.startswith("#"):
            lines.append(line)
        else:
            paragraph.append(line)
        in_code ^= is_fence
    return "\n".join(lines[:-1]) + "\n"


def _wrapped_paragraph(paragraph: list[str]) -> list[str]:
    """As it is where it has breaks of its own, or where a line would begin like a list."""
    marker = re.match(r"\s*(?:[-*] |\d+\. )?", paragraph[0])
    assert marker is not None
    if all(len(line) <= MAX_COLUMNS for line in paragraph) or any(line.endswith("  ") for line in paragraph):
        return paragraph
    lines = textwrap.wrap(
        " ".join(line.strip() for line in [paragraph[0][marker.end() :], *paragraph[1:]]),
        MAX_COLUMNS,
        initial_indent=marker[0],
        subsequent_indent=" " * marker.end(),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return paragraph if any(_STARTS_NEW.match(line) for line in lines[1:]) else lines


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


def too_large(root: Path) -> list[str]:
    """Pages of MOST that have more than it says, and guides that begin with neither a picture nor a table."""
    faults = []
    for pattern, unit, most in MOST:
        count = sum(_count(page.read_text(encoding="utf-8"), unit) for page in root.glob(pattern))
        faults += [f"{pattern}: {count} {unit}, more than {most}"] if count > most else []
    bare = [page for page in root.glob(GUIDES) if not _BEGINS_WELL.match(page.read_text(encoding="utf-8"))]
    return faults + [f"{page.relative_to(root)}: begins with neither a picture nor a table" for page in sorted(bare)]


def _count(text: str, unit: str) -> int:
    if unit == "rows":  # of tables, without their headings
        return len(re.findall(r"^\| ", text, re.MULTILINE)) - len(re.findall(r"^\|-", text, re.MULTILINE))
    return len(text.split() if unit == "words" else text.splitlines())


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: Sequence[str] = ()) -> int:
    if "--wrap" in arguments:
        for page in list(map(Path, arguments[1:])) or pages():
            page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    faults = too_large(ROOT)
    for page in pages():
        text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
        faults += [f"{name}: {_num_words(sentence)} words: {sentence}" for sentence in long_sentences(text)]
        faults += [f'{name}: "{words}" stands for a noun: name it' for words in bare_words(text)]
    print(*faults, sep="\n", end="\n" * bool(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
