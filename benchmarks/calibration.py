"""Times every kind of FLUX.2-dev's blocks on the cards found, as a job does before it trains, and forecasts steps.

    python benchmarks/calibration.py [--out results.json] [--scheme none fp8-compute int8-compute] [--side 512 1024]
                                     [--compare benchmarks/results/train_step_flux2-512*.json] [--tiny]

Full size, random weights, batch 1, LoRA rank 32 in bfloat16, 512 text tokens: the jobs of train_step.py. Said are the
seconds of every kind of block, of embedders and tail, how long measuring took and what the card held meanwhile; the
speed of the links; then the seconds per sample that the planner forecasts on one card, split over all without and with
a pipeline. Cards that are alike share a measurement; in the first case each is measured, and the first card twice, to
show how far measurements repeat.

--compare sets the forecasts against what train_step.py measured, at its cut and with the blocks it kept; ways with
compiled blocks are left out, as blocks are timed eagerly. --tiny runs the same with toy shapes on emulated cards, where
times mean nothing. Nothing is read from or written to the user's calibrations. No case begins after --budget-s.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

from devicebridge.config.job import JobConfig  # noqa: E402
from devicebridge.parallel.devices import available_devices  # noqa: E402
from devicebridge.planning.block_clock import CardTimes, time_blocks  # noqa: E402
from devicebridge.planning.calibration import CalibrationStore, MeasuredTimes, measured_times, plan_calibrated  # noqa: E402
from devicebridge.planning.cards import Card  # noqa: E402
from devicebridge.planning.question import Question  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings, refusal  # noqa: E402
from eight_bit_training import emulation  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import TINY_CONFIG, VARIANT, find_cards, make_info, make_question, make_random_job  # noqa: E402

SCHEMES = ("none", "fp8", "int8", "fp8-compute", "int8-compute")

# What may be forecast: name -> micro-batches, schedule, whether all cards are used. Names as train_step.py has them.
WAYS: dict[str, tuple[int, str, bool]] = {
    "one GPU": (4, "none", False),
    "split, one in flight": (4, "none", True),
    "pipeline 8": (8, "1f1b", True),
    "pipeline 16": (16, "1f1b", True),
    "pipeline 8, keep": (8, "1f1b", True),
}


class Case:
    """One scheme at one size.

    Args:
        store: holds what was measured so far in this run.
    """

    def __init__(self, options: argparse.Namespace, scheme: str, side: int, store: CalibrationStore) -> None:
        self.options, self.scheme, self.side, self.store = options, scheme, side, store
        config = dict(VARIANT.transformer_config) | (TINY_CONFIG if options.tiny else {})
        self.info = make_info(config, is_tiny=options.tiny)
        assert self.info.variant is not None
        self.variant = self.info.variant

    def question(self, way: str, kept: Sequence[int] = (), cuts: Sequence[int] = ()) -> Question:
        """Of one way; every block is recomputed, but for the kept ones of each card."""
        accumulation, schedule, is_split = WAYS[way]
        cards = self.options.cards if is_split else self.options.cards[:1]
        job = self._job(accumulation, schedule, list(kept) or [0] * len(cards))
        cuts_given = list(cuts) if cuts and is_split else None
        return make_question(job, self.info, cards, self.side, cuts_given)

    def _job(self, accumulation: int, schedule: str, kept: list[int]) -> JobConfig:
        return make_random_job(
            model={"quantize": self.scheme, "dtype": "bfloat16"},
            data={"resolutions": [self.side]},
            lora={"rank": self.options.rank, "alpha": float(self.options.rank), "dtype": "bfloat16"},
            train={"steps": 1, "gradient_accumulation_steps": accumulation},
            parallel={"strategy": schedule},
            split={"blocks_without_checkpointing": kept, "calibrate": "on"},
        )

    def measure(self) -> MeasuredTimes:
        """Every card, each kind of card once."""
        question = self.question("split, one in flight")
        times = measured_times(question, may_measure=True, store=self.store)
        for card in question.cards:
            times.times(card, self.scheme)
        return times

    def measure_again(self) -> dict[str, CardTimes]:
        """Every card anew."""
        work = self.question("one GPU").work(self.scheme)
        cards: Sequence[Card] = self.options.cards
        return {card.name: time_blocks(self.info, self.variant, work, card.device) for card in cards}

    def forecast(self, way: str, kept: Sequence[int] = (), cuts: Sequence[int] = ()) -> dict[str, Any]:
        """Seconds per sample, and the cut."""
        try:
            plan = plan_calibrated(self.question(way, kept, cuts), "always", store=self.store)
        except ValueError as error:
            return {"refused": str(error).splitlines()[0]}
        per_sample = plan.step_s / plan.space.accumulation
        return {"s_per_sample": round(per_sample, 4), "placement": plan.placement.describe()}


def run_case(case: Case, *, is_first: bool) -> dict[str, Any]:
    times = case.measure()
    cards: Sequence[Card] = case.options.cards
    found: dict[str, Any] = {"cards": {card.name: show(times.times(card, case.scheme)) for card in cards}}
    if is_first:
        found["again"] = {name: show(each) for name, each in case.measure_again().items()}
    ways = ("one GPU", "split, one in flight", "pipeline 8") if len(cards) > 1 else ("one GPU",)
    found["forecast"] = {way: case.forecast(way) for way in ways}
    return found


def show(times: CardTimes) -> dict[str, Any]:
    """Milliseconds by kind of block; the rest as measured."""
    kinds = {
        kind.first: {
            "blocks": len(kind.blocks),
            "forward_ms": round(kind.forward_s * 1e3, 3),
            "backward_ms": round(kind.backward_s * 1e3, 3),
        }
        for kind in times.kinds
    }
    rest = {name: value for name, value in asdict(times).items() if name in ("elapsed_s", "peak_gb")}
    ends = {"front_ms": round(times.front_s * 1e3, 3), "tail_ms": round(times.tail_s * 1e3, 3)}
    return {"kinds": kinds, **ends, **{name: value and round(value, 2) for name, value in rest.items()}}


def links(case: Case) -> dict[str, float | None]:
    """Bytes per second of every link."""
    times, cards = case.measure(), case.options.cards
    found = {f"host -> {card.name}": times.speed(None, card) for card in cards}
    pairs = [(one, other) for one in cards for other in cards if one is not other]
    return found | {f"{one.name} -> {other.name}": times.speed(one, other) for one, other in pairs}


def compare(options: argparse.Namespace, store: CalibrationStore) -> dict[str, Any]:
    """Forecast against what train_step.py measured, way by way."""
    report: dict[str, Any] = {}
    for path in options.compare:
        for name, section in json.loads(path.read_text(encoding="utf-8"))["sections"].items():
            subject, scheme = name.split(", ")
            if not subject.startswith("flux2-") or "ways" not in section or elapsed_s() > options.budget_s:
                continue
            case = Case(options, "none" if scheme == "bf16" else scheme, int(subject.split("-")[1]), store)
            report[f"{path.name}: {name}"] = compare_section(case, section)
            say(f"{path.name}: {name}: {report[f'{path.name}: {name}']}")
    return report


def compare_section(case: Case, section: dict[str, Any]) -> dict[str, Any]:
    counts = [int(count) for count in re.findall(r": (\d+) blocks", section["placement"])]
    rows: dict[str, Any] = {}
    for way, row in section["ways"].items():
        measured, is_split = row.get("s_per_sample"), way in WAYS and WAYS[way][2]
        if way not in WAYS or not measured or (is_split and len(counts) != len(case.options.cards)):
            continue
        cuts = [sum(counts[: index + 1]) for index in range(len(counts) - 1)]
        found = case.forecast(way, row.get("kept_blocks") or (), cuts)
        rows[way] = {"measured": measured, **found}
        if "s_per_sample" in found:
            rows[way]["percent_above"] = round(100 * (found["s_per_sample"] / measured - 1), 1)
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["none", "fp8-compute", "int8-compute"])
    parser.add_argument("--side", type=int, nargs="+", default=[512, 1024], help="pixels")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="RESULTS", help="of train_step.py")
    parser.add_argument("--budget-s", type=float, default=50.0, help="no case is begun after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on emulated cards")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.tiny:
        from devicebridge.tests.emulated import CARDS

        options.devices, options.side, options.rank, options.compare = list(CARDS[:2]), [64, 128], 4, []
    else:
        options.devices = available_devices()
    if not options.devices:
        parser.error("this needs a GPU and found none; --tiny runs on the CPU")
    return options


def main() -> None:
    options = parse()
    report: dict[str, Any] = {
        "model": "toy" if options.tiny else "FLUX.2-dev, random weights",
        "batch": 1,
        "rank": options.rank,
        **describe_run("diffusers", "peft", "torchao", "triton"),
        "cases": {},
        "left_out": {},
    }
    with emulation(is_on=options.tiny), tempfile.TemporaryDirectory() as folder:
        options.cards = find_cards(options.devices, is_tiny=options.tiny)
        store = CalibrationStore(Path(folder))
        for scheme in options.scheme:
            reason = "" if scheme == "none" else refusal(QuantizeSettings(scheme), options.devices)
            for side in options.side:
                name, case = f"{scheme}, {side} px", Case(options, scheme, side, store)
                if reason or elapsed_s() > options.budget_s:
                    report["left_out"][name] = reason or "no time was left"
                    continue
                report["cases"][name] = run_case(case, is_first=not report["cases"])
                say(f"{name}: {report['cases'][name]}")
                report.setdefault("links_bytes_per_s", links(case))
                write_json(report, options.out)
        report["compared"] = compare(options, store)
    report["elapsed_s"] = round(elapsed_s(), 1)
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
