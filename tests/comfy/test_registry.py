"""What the registry's tools say of the pack, and what its archive holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from devicebridge.tests.comfy.server import ROOT

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that would be committed, in a repository of their own: the tools look at what git tracks."""
    if shutil.which("comfy") is None:
        pytest.skip("needs comfy-cli: pip install comfy-cli")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout of the pack")
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).stdout
    copy = tmp_path_factory.mktemp("registry") / "devicebridge"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "all"]):
        _run(["git", *command], copy)
    return copy


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DO_NOT_TRACK": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment)


def test_the_registrys_check_finds_nothing(repository: Path) -> None:
    done = _run(["comfy", "--skip-prompt", "--no-json", "node", "validate"], repository)
    assert "All validation checks passed" in done.stdout, done.stdout + done.stderr
    assert "arning" not in done.stdout + done.stderr, done.stdout + done.stderr


def test_the_rules_behind_it_hold_without_mercy(repository: Path) -> None:
    """comfy-cli runs these with --exit-zero: it only prints what it finds."""
    ruff = [sys.executable, "-m", "ruff", "check", ".", "-q", "--isolated", "--select", "S102,S307,E702"]
    if subprocess.run([sys.executable, "-m", "ruff", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("needs ruff: pip install ruff")
    done = subprocess.run(ruff, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_archive_holds_the_pack_and_nothing_else(repository: Path) -> None:
    _run(["comfy", "--skip-prompt", "--no-json", "node", "pack"], repository)
    with zipfile.ZipFile(repository / "node.zip") as archive:
        names = set(archive.namelist())
    needed = {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md", "nodes/train.py"}
    needed |= {"web/docs/DeviceBridgeTrainLora.md", "example_workflows/train_a_LoRA_over_two_GPUs.json", "bootstrap.py"}
    assert not needed - names, needed - names
    folders = {name.split("/")[0] for name in names if "/" in name}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "scripts"}
    rooms |= {"web", "example_workflows", "locales", "docs", "examples"}
    assert folders == rooms
    kinds = {Path(name).suffix for name in names if not name.endswith("/")}
    assert kinds <= {".py", ".md", ".json", ".toml", ".txt", ".jpg", ".png", ".svg", ".webp", ".js", ".css", ""}, names
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    missing = {link for link in links if not any(name == link or name.startswith(f"{link}/") for name in names)}
    assert links and not missing, missing
