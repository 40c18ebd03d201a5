"""benchmarks/scaling.py: training by every strategy on four emulated cards, reports that calls go on in, the page."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scaling")


@pytest.fixture
def calculation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scaling_calculation")


@pytest.mark.long
def test_four_emulated_cards_train_by_every_strategy_and_each_has_a_forecast(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    command = [sys.executable, str(BENCHMARKS / "scaling.py"), "--tiny", "--no-calibration", "--out", str(out)]
    command += [
        "--rounds",
        "1",
        "--warm-up",
        "0",
        "--sections",
        "train flux2-512 bf16, 4 cards",
        "ranks*of 2 cards",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert list(report)[0] == "times_faster_than_one_card"
    name = "train flux2-512 bf16, 4 cards"
    rows = report["sections"][name]["ways"]
    assert set(report["times_faster_than_one_card"][name]) == set(rows)
    assert set(rows) == {"one card", "data 8", "pipeline 8", "pipeline 16", "tensor"}
    for way, row in rows.items():
        assert row["s_per_sample"] > 0 and row["forecast"]["s_per_sample"] > 0, way
        assert len(row["forecast"]["peak_gb"]) == (1 if way == "one card" else 4)
    # the same model, samples and noise; how blocks are divided is compared in test_tensor_training.py
    assert rows["tensor"]["losses"] == pytest.approx(rows["one card"]["losses"], rel=2e-5)


def _bench(scaling: Any, out: Path | None, *, cards: int = 4, budget_s: float = 1e9) -> Any:
    options = argparse.Namespace(out=out, tiny=True, budget_s=budget_s, rounds=1, calibrate=False)
    return scaling.Bench(options, [f"card {index}" for index in range(cards)])


def _section(scaling: Any, name: str, found: Any, about_s: float = 10.0, count: int = 2) -> tuple[Any, list[str]]:
    calls: list[str] = []

    def run(bench: Any) -> dict[str, Any]:
        calls.append(name)
        if isinstance(found, Exception):
            raise found
        return dict(found)

    return scaling.Section(name, about_s, count, run), calls


MEASURED = {"ways": {"tensor": {"s_per_sample": 1.0, "times_faster_than_one_card": 1.5}}}


def test_a_later_call_measures_only_what_the_file_lacks_and_tries_again_what_failed(scaling, tmp_path) -> None:
    out = tmp_path / "out.json"
    good, good_calls = _section(scaling, "good", MEASURED)
    bad, bad_calls = _section(scaling, "bad", RuntimeError("no room\nmore"))
    late, late_calls = _section(scaling, "late", MEASURED, about_s=1e6)
    bench = _bench(scaling, out, budget_s=1e5)
    report = scaling.open_report(bench.options, 4)
    scaling.run_sections(bench, report, [bad, good, late])
    assert (good_calls, bad_calls, late_calls) == (["good"], ["bad"], [])
    scaling.write_json(report, out)

    again = scaling.open_report(bench.options, 4)
    assert again["sections"]["bad"]["failed"] == "RuntimeError: no room"
    assert again["times_faster_than_one_card"] == {"good": {"tensor": 1.5}}
    assert "call again" in again["left_out"]["late"]
    bench.options.budget_s = 1e9
    scaling.run_sections(bench, again, [bad, good, late])
    assert (good_calls, bad_calls, late_calls) == (["good"], ["bad", "bad"], ["late"])
    assert "late" not in again["left_out"] and "late" in again["times_faster_than_one_card"]


def test_a_report_of_other_cards_is_refused_and_left_alone(scaling, tmp_path) -> None:
    out = tmp_path / "out.json"
    bench = _bench(scaling, out)
    scaling.write_json(scaling.open_report(bench.options, 4), out)
    before = out.read_bytes()
    with pytest.raises(ValueError, match="another num_cards"):
        scaling.open_report(bench.options, 2)
    assert out.read_bytes() == before


def test_sections_for_more_cards_than_there_are_say_so(scaling) -> None:
    wide, calls = _section(scaling, "wide", MEASURED, count=4)
    report = scaling.open_report(_bench(scaling, None).options, 2)
    scaling.run_sections(_bench(scaling, None, cards=2), report, [wide])
    assert not calls and report["left_out"] == {"wide": "needs 4 cards, found 2"}


def test_processes_are_compared_with_one_card_of_the_section_that_has_it(scaling) -> None:
    report = scaling.open_report(_bench(scaling, None).options, 4)
    ones = {"one card": {"s_per_sample": 3.0}}
    trained, _ = _section(scaling, "train flux2-512 bf16, 4 cards", {"ways": ones})
    other, _ = _section(scaling, "train flux2-512 fp8-compute, 4 cards", {"ways": {"one card": {"s_per_sample": 9.0}}})
    scaling.run_sections(_bench(scaling, None), report, [other, trained])
    (ranks,) = scaling.chosen(scaling.make_sections(), ["ranks flux2-512 bf16, 4 processes"])
    scaling.add(report, ranks, {"ways": {"fsdp": {"s_per_sample": 1.5}}})
    assert report["times_faster_than_one_card"] == {ranks.name: {"fsdp": 2.0}}


def test_what_does_not_fit_side_by_side_takes_its_turns_apart(scaling) -> None:
    from devicebridge.planning.cards import parse_cards

    cards = parse_cards("2x100GB")
    gb = 10**9
    forecasts = {
        "copies": scaling.Forecast(1.0, (60 * gb,) * 2, (50 * gb,) * 2, (0, 0)),
        "split": scaling.Forecast(1.0, (30 * gb,) * 2, (25 * gb,) * 2, (0, 0)),
        "tensor": scaling.Forecast(1.0, (20 * gb,) * 2, (15 * gb,) * 2, (0, 0)),
        "one": scaling.Forecast(1.0, (60 * gb,), (50 * gb,), (0,)),
    }

    def groups(*names: str) -> list[Any]:
        return [(lambda: None, [scaling.Way(name, 1)]) for name in names]

    def named(found: Any) -> list[list[str]]:
        return [[ways[0].name for _, ways in row] for row in found]

    # 50 + 25 held and 10 moving; with 15 more there are 100 of 95
    three = groups("copies", "split", "tensor")
    assert named(scaling.together(three, forecasts, cards)) == [["copies", "split"], ["tensor"]]
    # one card's model takes room of the first card only
    assert named(scaling.together(groups("one", "split"), forecasts, cards)) == [["one", "split"]]
    assert named(scaling.together(groups("one", "copies"), forecasts, cards)) == [["one"], ["copies"]]


# ---- the calculation


@pytest.fixture(scope="module")
def case() -> Any:
    """FLUX.2-dev in bf16 at 512²."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("scaling_calculation").training_cases()[0]


def test_calculated_seconds_are_those_of_the_usual_formulas(case) -> None:
    one = case.one.seconds
    assert one == pytest.approx(case.times.recomputed_s, rel=1e-6)
    for cards, batches in ((2, 8), (4, 8), (4, 16)):
        bubble = (batches + cards - 1) / batches
        found = case.pipeline(cards, batches).seconds
        assert one / cards * bubble <= found * 1.001 <= one / cards * bubble * 1.06  # blocks cannot be cut evenly
    assert case.data(4).seconds == pytest.approx(one / 4, rel=0.02)
    weights = 2 * sum(case._weights.blocks) * 3 / 4
    slow = pytest.approx(weights / 1e9 / 4, rel=0.1)
    case.times, known = type(case.times)(case.times.blocks, 0.0, 0.0, 1e9, 1e9), case.times
    try:
        assert case.fsdp(4).seconds == slow  # a link of 1 GB/s hides nothing
    finally:
        case.times = known
    assert case.fsdp(4).seconds == pytest.approx(one / 4, rel=0.03)


def test_a_pipeline_over_two_cards_is_calculated_near_what_was_measured(case) -> None:
    assert case.pipeline(2).seconds == pytest.approx(case.measured_s, rel=0.05)
    assert case.pipeline(2).gb == pytest.approx(40.06, rel=0.02)  # GB, the same result


def test_the_guides_clusters_are_calculated_by_hand_and_from_the_page(calculation) -> None:
    lines = list(calculation.cluster_lines())
    page = (ROOT / "docs" / "guides" / "choosing_a_strategy.md").read_text(encoding="utf-8").splitlines()
    assert all(line in page for line in lines), "write the page again: python benchmarks/scaling.py --calculate"
    found = [float(cell) for cell in lines[-1].strip("| ").split(" | ")]
    reduced, gathered, block = 2 * 0.8 * 15 / 16, 2 * 62.8 * 15 / 16, 62.8 / 56 * 15 / 16  # GB through the slowest link
    assert found[1] == pytest.approx((0.61 + reduced / 300) / 16, abs=6e-4)
    assert found[2] == pytest.approx((0.61 + (reduced + block) / 300) / 16, abs=6e-4)
    assert found[3] == pytest.approx((0.61 + reduced / 3.125 + block / 300) / 16, abs=6e-4)
    assert found[6] == pytest.approx((gathered + reduced + block) / 12.5 / 16, abs=6e-4)
    assert found[7] == pytest.approx((0.61 + reduced / 3.125) / 16, abs=6e-4)


def test_the_page_has_what_the_calculation_says(calculation, case) -> None:
    page = (ROOT / "docs" / "internals" / "scaling.md").read_text(encoding="utf-8").splitlines()
    for line in (*case.lines(), *calculation.sampling_lines()):
        assert line in page, f"write the page again: python benchmarks/scaling.py --calculate\n{line}"
