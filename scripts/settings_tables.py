"""Writes what is said of settings elsewhere, from the config's fields: the tables of the job file's reference, between
markers, and the lines "#: ..." of the examples. With --check it writes nothing; exit code 1 if anything is out of date.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "flux2.toml"  # every key that stands in it is explained; in the other examples only those commented out
_TABLE = re.compile(
    r"(?<=<!-- settings, by scripts/settings_tables.py -->\n).*?(?=<!-- end of settings -->)", re.DOTALL
)
_SECTION = re.compile(r"^(?:# )?\[\[?([\w.]+)\]\]?")
_KEY = re.compile(r"^(# )?(\w+) = ")


def pages() -> dict[Path, str]:
    """Every file with such a part, as it should be."""
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    job = importlib.import_module("devicebridge.config.job")
    reference = ROOT / "docs" / "reference" / "job_file.md"
    texts = {reference: _with_table(reference, list(_keys_tables(job)))}
    for path in sorted((ROOT / "examples").glob("*.toml")):
        texts[path] = _with_comments(path, job.job_keys())
    return texts


def _with_table(path: Path, lines: list[str]) -> str:
    text = path.read_text(encoding="utf-8")
    if not _TABLE.search(text):
        raise ValueError(
            f"{path.name} has no place for the table: <!-- settings, by ... --> and <!-- end of settings -->"
        )
    return _TABLE.sub(lambda _: "\n".join(["", *lines, "", ""]), text)


def _keys_tables(job: ModuleType) -> Iterator[str]:
    keys, section = job.job_keys().values(), ""
    for key in keys:
        if key.section != section:
            section = key.section
            heading = f"[[{section}]]" if "." in section else f"[{section}]"
            yield from ("", f"## `{heading}`", "", key.owner.__doc__.splitlines()[0], "")
            yield from ("| key | meaning | default | takes |", "|---|---|---|---|")
        default = "required" if key.default is dataclasses.MISSING else f"`{_toml(key.default)}`"
        was = f" Older name: `{'`, `'.join(key.was)}`." if key.was else ""
        free = " *" if key.is_free else ""
        yield f"| `{key.name}`{free} | {key.text}{was} | {default} | {_takes(key)} |"


def _takes(key: Any) -> str:
    if key.kind is bool:
        return "`true`, `false`"
    parts = [_listed([each for each in key.choices if each != ""])] if key.choices else []
    if key.limits:
        low, high = _plain(key.limits.low), _plain(key.limits.high)
        parts.append(f"{'0 or ' if key.limits.or_zero else ''}{low} to {high}")
    if key.path == "data.folders":
        return "sections"
    kind = "list, each " if str(key.kind).startswith("tuple") else ""
    return kind + (", ".join(parts) or ("path" if key.is_path else "text"))


def _listed(choices: Any) -> str:
    return ", ".join(f"`{_plain(each)}`" for each in choices)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if value < 1e15 else str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: Any) -> str:
    return "" if value is None else json.dumps(value)


def _with_comments(path: Path, keys: dict[str, Any]) -> str:
    """The example with the first sentence of each key's text above the key."""
    section, lines = "", []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#: "):
            continue
        if found := _SECTION.match(line):
            section = found[1]
        elif (found := _KEY.match(line)) and (found[1] or path.name == REFERENCE):
            text = keys[f"{section}.{found[2]}"].text
            lines += textwrap.wrap(_first(text), 118, initial_indent="#: ", subsequent_indent="#: ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _first(text: str) -> str:
    """The first sentence, and what is taken where the key is left out."""
    sentences = re.split(r"(?<=\.) ", text)
    return " ".join([sentences[0], *(each for each in sentences[1:] if each.startswith("Left out:"))])


def main(arguments: list[str]) -> int:
    stale = {path: text for path, text in pages().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is out of date; run python scripts/settings_tables.py")
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
