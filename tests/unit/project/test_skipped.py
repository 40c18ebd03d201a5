"""What scripts/test.sh says before it starts, for a machine that lacks something."""

from __future__ import annotations

from pathlib import Path

import pytest
from devicebridge.tests import comfy_host

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("has_checkout", [False, True])
def test_a_fresh_machine_is_told_what_brings_what_is_missing(monkeypatch, tmp_path, has_checkout):
    monkeypatch.setattr(comfy_host, "find_comfyui", lambda: tmp_path if has_checkout else None)
    monkeypatch.setattr(comfy_host, "comfy_python", lambda folder: None)
    monkeypatch.setattr(comfy_host.shutil, "which", lambda name: None)
    for name in ("CHROMIUM", "LONG_TESTS", "COMFYUI_GGUF_PATH"):
        monkeypatch.delenv(name, raising=False)
    said = dict(comfy_host.skipped_here())
    assert len(said) == 5
    for command in (
        f"{tmp_path}/requirements.txt" if has_checkout else "comfy-cli && comfy",
        "install ComfyUI-GGUF",
        "install chromium",
        "LONG_TESTS=1",
    ):
        assert any(command in each for each in said.values()), command


def test_the_script_says_so_before_it_checks_anything() -> None:
    lines = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8").splitlines()
    told = [number for number, line in enumerate(lines) if "tell_skipped" in line]
    assert told and told[0] < lines.index("ruff check .")
