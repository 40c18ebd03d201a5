"""benchmarks/ranks.py --cards: two processes beside one, on CPUs and toy shapes, where times mean nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from devicebridge.tests.ranks.launching import ENVIRONMENT

# What the first rank tells of two modes on one card and three on two.
ROW = {"first_gradient": 0.5, "peak_gb": [30.0]}
ONE = {"alone": {**ROW, "s_per_step": 1.2}, "alone_fp8": {**ROW, "s_per_step": 0.8, "first_gradient": 0.4}}
TWO = {
    "links": {"all_gather_gb_per_s": 1.0},
    "data": {**ROW, "s_per_step": 0.6, "peak_gb": [30.0, 31.0]},
    "plain_fsdp": {**ROW, "s_per_step": 0.8},
    "fsdp_fp8": {**ROW, "s_per_step": 0.5},
    "fsdp_compile": {**ROW, "s_per_step": 0.5},
    "data_int8": {"error": "said"},
}
SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ranks.py"


def test_each_mode_is_set_beside_one_card_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    ranks = importlib.import_module("ranks")
    report = {key: {} for key in ranks.IN_FRONT} | {"parts": [{"modes": ONE}, {"modes": TWO}]}
    ranks._set_beside_one_card(report)
    assert report["times_faster_than_one_card"] == {"data": 2.0, "plain_fsdp": 1.5, "fsdp_fp8": 1.6}
    assert report["gradient_over_one_cards"] == {"data": 1.0, "fsdp_fp8": 1.25}
    assert report["peak_gb"]["data"] == 31.0 and set(report["s_per_step"]) == {*ONE, *TWO} - {"links", "data_int8"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs gloo over a loopback device")
def test_two_processes_are_set_beside_one_and_a_mode_that_fails_costs_no_other(tmp_path: Path) -> None:
    out, modes = tmp_path / "out.json", "alone,alone_fp8,data,no_such_mode,fsdp,fsdp_fp8"
    command = [sys.executable, SCRIPT, "--cards", "2", "--tiny", "--steps", "1", "--modes", modes, "--out", out]
    done = subprocess.run(list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text(encoding="utf-8"))
    assert next(iter(report)) == "times_faster_than_one_card"
    shared = {"data", "fsdp", "fsdp_fp8"}
    assert set(report["times_faster_than_one_card"]) == set(report["gradient_over_one_cards"]) == shared
    assert report["gradient_over_one_cards"] == {mode: pytest.approx(1, rel=1e-5) for mode in shared}
    one, two = (part["modes"] for part in report["parts"])
    assert two["data"]["first_loss"] == pytest.approx(one["alone"]["first_loss"], rel=1e-6)
    assert two["fsdp_fp8"]["first_loss"] == pytest.approx(one["alone_fp8"]["first_loss"], rel=1e-6)
    assert two["no_such_mode"]["error"] == "KeyError: 'no_such_mode'"
    assert report["s_per_step"]["alone"] == one["alone"]["s_per_step"] > 0
