"""What the oldest and the newest environment of scripts/test_matrix.sh are made of, and the table of how they ended."""

import runpy
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
