"""The page's JavaScript stays small, has one entry, and asks for nothing again and again."""

import re
from pathlib import Path

WEB = Path(__file__).resolve().parents[3] / "web"
FILES = sorted(WEB.rglob("*.js"))


def test_our_javascript_has_at_most_60_kb_and_one_entry() -> None:
    assert FILES and sum(file.stat().st_size for file in FILES) <= 60_000
    entries = [file.name for file in FILES if "registerExtension" in file.read_text(encoding="utf-8")]
    assert entries == ["devicebridge.js"]


def test_nothing_is_polled_and_no_text_becomes_markup_or_code() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"setInterval|innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", text), file
