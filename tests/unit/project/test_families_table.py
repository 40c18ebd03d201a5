"""The page of what each model can do is what the test suite has seen."""

import json
import subprocess
import sys
from pathlib import Path

from devicebridge.families.comfy.registry import NATIVE_MODELS

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_up_to_date() -> None:
    script = ROOT / "scripts" / "families_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_class_is_on_it() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert not [row.class_name for row in NATIVE_MODELS if f"`{row.class_name}`" not in page]
    seen = json.loads((ROOT / "tests" / "assets" / "native_training.json").read_text(encoding="utf-8"))
    assert not [name for name in seen if f"| {name} |" not in page]
