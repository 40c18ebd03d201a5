"""Links of README, changelog, docs and help pages lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HOME = "https://github.com/devicebridge/ComfyUI-DeviceBridge/blob/main/"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("web/docs/**/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them of the words."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (line.lstrip("#").strip().lower() for line in text.splitlines() if line.startswith("#"))
    return {"".join(each for each in heading if _is_kept(each)).replace(" ", "-") for heading in headings}


def _is_kept(letter: str) -> bool:
    """Letters and digits, but not a raised 2."""
    return letter.isalpha() or letter.isdecimal() or letter in "-_ "


def dead_links(page: Path) -> list[str]:
    """Links of a page to a file or heading of this repository that does not exist."""
    dead = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.removeprefix(HOME).partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (ROOT if link.startswith(HOME) else page.parent) / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert dead_links(page) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#none) [c](gone.md) [d](https://example.com/x)", encoding="utf-8")
    assert dead_links(page) == ["#none", "gone.md"]
