"""Two processes fill one cache and are killed: see benchmarks/killed_caches.py, which asserts what must hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "killed_caches.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_killed_fillers_damage_nothing_and_nothing_finished_is_computed_again():
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--samples", "14", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 4 and found["encoded"] >= found["entries_per_folder"] // 2
    assert found["training"] == "finished"
