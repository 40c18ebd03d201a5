"""The oldest and the newest versions that scripts/test_matrix.sh tests, and the table of how that ended.

The oldest are the floors of requirements.txt, and for what is not listed there (Python, torch, transformers: the user's
own) the first tested ones of system/versions.py. Needs nothing installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
Which = Literal["oldest", "newest"]
_TOOLS = ("pytest", "pytest-xdist", "ruff", "mypy", "tensorboard")  # what tests call; the newest of each


def tested() -> dict[str, Any]:
    """TESTED of system/versions.py, read without the pack."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "system" / "versions.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["versions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TESTED


def floors() -> dict[str, str]:
    """Package -> oldest version claimed, without Python."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    listed = dict(line.split(">=") for line in lines)
    return {name: found.first for name, found in tested().items() if name != "python"} | listed


def requirements(which: Which) -> list[str]:
    """What pip is asked for."""
    packages = [f"{name}=={floor}" if which == "oldest" else name for name, floor in floors().items()]
    return [*packages, *_TOOLS]


def interpreter(which: Which) -> str:
    found = tested()["python"]
    return f"python{found.first if which == 'oldest' else found.last}"


def table(folder: Path) -> str:
    """One row per package: the version in each environment; the last row is how the tests ended."""
    sides: tuple[Which, Which] = ("oldest", "newest")
    installed = {side: _installed(folder / f"{side}-installed.txt") for side in sides}
    rows = [("", *sides), ("---", "---", "---")]
    rows += [(name, *(installed[side].get(name, "missing") for side in sides)) for name in floors()]
    rows.append(("tests", *(_ending(folder / f"{side}.xml") for side in sides)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _installed(path: Path) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else []
    return {name.lower().replace("_", "-"): version for name, version in lines}


def _ending(report: Path) -> str:
    """Such as "812 passed, 3 failed, 20 skipped", from pytest's own report."""
    if not report.exists():
        return "did not run"
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {
        kind: sum(int(suite.get(kind, 0)) for suite in suites) for kind in ("tests", "failures", "errors", "skipped")
    }
    failed = count["failures"] + count["errors"]
    return f"{count['tests'] - failed - count['skipped']} passed, {failed} failed, {count['skipped']} skipped"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="?", choices=("oldest", "newest"))
    parser.add_argument("--python", choices=("oldest", "newest"), help="name that interpreter")
    parser.add_argument("--table", type=Path, help="folder of scripts/test_matrix.sh")
    asked = parser.parse_args()
    if asked.table:
        print(table(asked.table))
    elif asked.python:
        print(interpreter(asked.python))
    else:
        print("\n".join(requirements(asked.which or "newest")))


if __name__ == "__main__":
    main()
