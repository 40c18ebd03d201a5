"""What the oldest and the newest environment of scripts/test_matrix.sh are made of, and the table of how they ended."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from devicebridge.system.versions import TESTED

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "test_versions.py"


@pytest.fixture(scope="module")
def versions() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_oldest_are_the_floors_that_users_get(versions: dict[str, Any]) -> None:
    asked = versions["requirements"]("oldest")
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").split():
        assert line.replace(">=", "==") in asked
    assert f"torch=={TESTED['torch'].first}" in asked
    assert versions["interpreter"]("oldest") == f"python{TESTED['python'].first}"


def test_the_newest_have_no_version_and_no_package_is_left_out(versions: dict[str, Any]) -> None:
    asked = versions["requirements"]("newest")
    assert not any("=" in line for line in asked)
    assert set(TESTED) - {"python"} <= set(asked)


def test_no_floor_is_above_the_newest_that_was_tested(versions: dict[str, Any]) -> None:
    for name, floor in versions["floors"]().items():
        if name in TESTED:
            first = [int(part) for part in floor.split(".")][:2]
            assert first <= [int(part) for part in (*TESTED[name].last.split("."), "99")][:2], name


def test_the_table_shows_versions_and_how_the_tests_ended(versions: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "oldest-installed.txt").write_text("torch==2.11.0\nPackaging==23.0\n")
    passing, failing = tmp_path / "test_a.py", tmp_path / "test_b.py"
    passing.write_text("import pytest\ndef test_a(): pass\ndef test_skipped(): pytest.skip('why')\n")
    failing.write_text("def test_b(): assert 0\n")
    command = [sys.executable, "-m", "pytest", "-q", "--junit-xml", str(tmp_path / "oldest.xml"), "."]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120).returncode == 1
    rows = versions["table"](tmp_path).splitlines()
    assert "| torch | 2.11.0 | missing |" in rows and "| packaging | 23.0 | missing |" in rows
    assert rows[-1] == "| tests | 1 passed, 1 failed, 1 skipped | did not run |"
