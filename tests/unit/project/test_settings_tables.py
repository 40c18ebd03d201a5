"""Help pages, the reference of keys and the examples say what the config says; of models, what the suite has seen."""

import subprocess
import sys
from pathlib import Path

import pytest
from devicebridge.config.job import job_keys, load_job

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("script", ["settings_tables.py", "families_table.py"])
def test_tables_and_comments_are_up_to_date(script: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_says_what_it_is() -> None:
    for path, key in job_keys().items():
        assert len(key.text) > 10 and key.text.endswith("."), path
        assert "Left out" not in key.text_where("auto") and "  " not in key.text_where(""), path


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_an_example_with_every_key_uncommented_names_only_known_keys(path: Path, tmp_path: Path) -> None:
    """A key of an example that is gone, or spelt otherwise, would be found by its readers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    shown = [line.removeprefix("# ") if " = " in line or line.startswith("# [") else line for line in lines]
    keys = [line.split(" = ")[0] for line in shown if " = " in line and not line.startswith("#")]
    known = {key.name for key in job_keys().values()}
    assert keys and not [key for key in keys if key.isidentifier() and key not in known]
    load_job(path)
