"""FLUX.2-dev and Wan 14B on 1, 2 and 4 cards: LoRA training and sampling by every strategy, beside the forecasts.

    python benchmarks/scaling.py --out scaling.json                     # as far as --budget-s goes; then once more
    python benchmarks/scaling.py --out scaling.json --sections "train*"  # by pattern; --list says what there is
    python benchmarks/scaling.py --calculate                            # no GPU: tables of docs/internals/scaling.md

The report begins with the ratios. A call goes on where the file named by --out ends: sections that are in it are left
out, and no section is begun for which --budget-s has no room. It is written after each section. Cards are the first
min(4, visible); sections for more cards than that are left out.

- "train": full-size models with random weights. One card and the strategies on so many cards take turns, step by step,
  as far as they fit beside each other; each way is built for the first of its turns. Every block is recomputed and
  nothing is compiled. "data" holds a copy of the model on each card, and one card is the first of them. Steps are
  train_step.py's, and so are seconds per sample and the bytes that a way needs of each card. Forecast are the planner's
  seconds, of blocks timed on these cards before, and bytes.
- "sample": native_split.py in a process of its own, for it starts ComfyUI. One card, blocks and tensor take turns.
- "ranks": data parallel and FSDP of several processes, one card each, beside torch's own FSDP2. Started by torchrun
  from ranks.py, if this version has that, on the file that --checkpoint names; where there is none it is written with
  random weights (64 GB). The ratio is to one card of a "train" section.

--tiny runs all sections with toy shapes on four emulated cards, where times mean nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.events import first_line  # noqa: E402
from devicebridge.parallel.placement import Placement  # noqa: E402
from devicebridge.planning.calibration import CalibrationStore, measured_times  # noqa: E402
from devicebridge.planning.cards import Card  # noqa: E402
from devicebridge.planning.question import ModelCosts  # noqa: E402
from devicebridge.tests.comfy_host import comfy_python, find_comfyui  # noqa: E402
from eight_bit_training import emulation  # noqa: E402
from provenance import commit, describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_checkpoint import write_single_file  # noqa: E402
from random_job import FAMILY, VARIANT, find_cards, make_info, take_devices  # noqa: E402
from scaling_forecast import Forecast, Forecaster  # noqa: E402
from train_step import (  # noqa: E402
    SUBJECTS,
    Contestant,
    Subject,
    Way,
    cut_by_time,
    in_size,
    make_contestant,
    make_divided,
    make_replicas,
    measure,
    release,
)

BENCHMARKS = Path(__file__).resolve().parent
MOST_CARDS = 4
COUNTS = (2, 4)
SCHEMES = {"bf16": "none", "fp8-compute": "fp8-compute"}  # as train_step.py and as a job file has them
RANKS_SCRIPT = "ranks.py"
PROCESS_MODES = {"bf16": ("data", "fsdp", "plain_fsdp"), "fp8-compute": ("data_fp8", "fsdp_fp8")}
ROOM = 0.95  # of a card's free memory, for what stands side by side

ONE_CARD = Way("one card", 2)
# Strategy in the planner's words, micro-batches of a step, and from how many cards on.
WAYS: dict[str, tuple[Way, str, int]] = {
    "pipeline 8": (Way("pipeline 8", 8, "1f1b"), "pipeline", 2),
    "pipeline 16": (Way("pipeline 16", 16, "1f1b"), "pipeline", 3),
    "tensor": (Way("tensor", 2, "tensor"), "tensor", 2),
    "data 8": (Way("data 8", 8, "replicas"), "data", 2),
}


@dataclass(frozen=True)
class Section:
    """Args: about_s: what it takes on H200s, set-up included, estimated. count: cards. beside: how the names of
    sections begin that have the same work on one card, where this one has not."""

    name: str
    about_s: float
    count: int
    run: Callable[[Bench], dict[str, Any]]
    beside: str = ""


@dataclass
class Bench:
    """What all sections of a call share."""

    options: argparse.Namespace
    devices: list[torch.device]
    cards: list[Card] = field(default_factory=list)
    store: CalibrationStore | None = None
    costs: dict[str, ModelCosts] = field(default_factory=dict)  # by subject

    @property
    def left_s(self) -> float:
        return float(self.options.budget_s) - elapsed_s()


# ---- training


class TrainSection:
    """One subject and scheme on so many cards."""

    def __init__(self, bench: Bench, subject: str, scheme: str, count: int) -> None:
        self.bench, self.scheme, self.count = bench, scheme, count
        self.devices = bench.devices[:count]
        self.options = argparse.Namespace(**{**vars(bench.options), "devices": self.devices})
        self.subject, self.config = in_size(SUBJECTS[subject], is_tiny=bench.options.tiny)
        self.placement = cut_by_time(self.config, self.subject, self.devices)
        self.forecaster = self._make_forecaster(subject)
        self.ways = [way for way, _, fewest in WAYS.values() if fewest <= count]

    def _make_forecaster(self, name: str) -> Forecaster:
        bench, info = self.bench, make_info(self.config, is_tiny=self.bench.options.tiny)
        assert info.variant is not None
        costs = bench.costs.setdefault(self.subject.variant, ModelCosts(info, info.variant))
        rank = 4 if bench.options.tiny else 32
        dtype = "float32" if bench.options.tiny else "bfloat16"
        found = Forecaster(info, costs, SCHEMES[self.scheme], _side(self.subject), rank, dtype)
        if bench.options.calibrate:
            found.times = measured_times(found.question(bench.cards), may_measure=True, store=bench.store)
        return found

    def run(self) -> dict[str, Any]:
        """Every way -> seconds, memory and forecast."""
        forecasts, rows = self._forecasts()
        say(f"forecasts are made: {sorted(forecasts)}")
        for group in together(self._groups(forecasts), forecasts, self.bench.cards[: self.count]):
            entries = [(each, way) for make, ways in group for each in [make()] for way in ways]
            rows |= measure(self.options, entries)
            del entries
            release()
        for name, row in rows.items():
            if "s_per_sample" in row:
                _set_beside(row, forecasts[name], 1 if name == ONE_CARD.name else self.count)
        one = rows.get(ONE_CARD.name, {}).get("s_per_sample")
        for row in rows.values():
            if one and "s_per_sample" in row:
                row["times_faster_than_one_card"] = round(one / row["s_per_sample"], 3)
        return {"placement": self.placement.describe(), "ways": rows}

    def _forecasts(self) -> tuple[dict[str, Forecast], dict[str, Any]]:
        """Of every way that fits; and rows for those that do not."""
        found: dict[str, Forecast] = {}
        refused: dict[str, Any] = {}
        cards, cuts = self.bench.cards[: self.count], _cuts(self.placement)
        for way, strategy in [(ONE_CARD, "none"), *((way, WAYS[way.name][1]) for way in self.ways)]:
            is_cut, own = strategy == "pipeline", cards if way is not ONE_CARD else cards[:1]
            try:
                found[way.name] = self.forecaster.of(own, strategy, way.num_batches, cuts if is_cut else None)
            except ValueError as error:
                refused[way.name] = {"left_out": first_line(error)}
        return found, refused

    def _groups(self, forecasts: Mapping[str, Forecast]) -> list[Group]:
        """What is built together, with its ways."""
        of_kind = {kind: [way for way in self.ways if way.kind == kind and way.name in forecasts] for kind in _KINDS}
        ones = [ONE_CARD] if ONE_CARD.name in forecasts else []
        groups: list[Group] = []
        if of_kind["replicas"]:
            groups.append((self._copies, [*ones, *of_kind["replicas"]]))
        elif ones:
            groups.append((self._alone, ones))
        if of_kind["1f1b"]:
            groups.append((self._split, of_kind["1f1b"]))
        if of_kind["tensor"]:
            groups.append((self._divided, of_kind["tensor"]))
        return groups

    def _copies(self) -> Contestant:
        return make_replicas(self.options, self.subject, self.config, self.placement, self.scheme)

    def _alone(self) -> Contestant:
        placement = self.placement.on(self.devices[0])
        return make_contestant(self.options, self.subject, self.config, placement, self.scheme, usual=False)

    def _split(self) -> Contestant:
        return make_contestant(self.options, self.subject, self.config, self.placement, self.scheme, usual=False)

    def _divided(self) -> Contestant:
        return make_divided(self.options, self.subject, self.config, self.scheme)


Group = tuple[Callable[[], Contestant], list[Way]]
_KINDS = ("replicas", "1f1b", "tensor")


def together(groups: Sequence[Group], forecasts: Mapping[str, Forecast], cards: Sequence[Card]) -> list[list[Group]]:
    """The groups in lists that fit the cards side by side, in order; the peaks of ways do not coincide."""
    rows: list[list[Group]] = []
    for group in groups:
        if rows and _fits([*rows[-1], group], forecasts, cards):
            rows[-1].append(group)
        else:
            rows.append([group])
    return rows


def _fits(groups: Sequence[Group], forecasts: Mapping[str, Forecast], cards: Sequence[Card]) -> bool:
    held = [0] * len(cards)
    moving = max(forecasts[way.name].moving for _, ways in groups for way in ways)
    for _, ways in groups:
        widest = max((forecasts[way.name] for way in ways), key=lambda each: len(each.weights))
        held = [sum(pair) for pair in zip(held, widest.weights, strict=True)] if len(widest.weights) > 1 else held
        if len(widest.weights) == 1:
            held[0] += widest.weights[0]
    return all(each + moving <= ROOM * card.usable_bytes for each, card in zip(held, cards, strict=True))


def _set_beside(row: dict[str, Any], forecast: Forecast, count: int) -> None:
    """The forecast into a way's row, and the ratio of forecast to measured."""
    peaks = [round(each / 1e9, 2) for each in forecast.peak]
    row["forecast"] = {"s_per_sample": float(f"{forecast.s_per_sample:.4g}"), "peak_gb": peaks}
    row["peak_gb"] = row.get("peak_gb", [])[:count]
    memory = [round(ours / real, 3) for ours, real in zip(peaks, row["peak_gb"], strict=False) if real]
    row["forecast_over_measured"] = {
        "seconds": float(f"{forecast.s_per_sample / row['s_per_sample']:.3g}"),
        "memory": memory,
    }


def _side(subject: Subject) -> int:
    """Pixels of a side: a latent of FLUX.2 has a sixteenth of them."""
    return 16 * subject.latent[-1]


def _cuts(placement: Placement) -> list[int]:
    counts = [count for _, count in placement.runs()]
    return [sum(counts[: index + 1]) for index in range(len(counts) - 1)]


# ---- sections in processes of their own


def sample(bench: Bench, case: str, count: int) -> dict[str, Any]:
    """A case of native_split.py."""
    options = bench.options
    comfyui = options.comfyui or find_comfyui()
    python = None if comfyui is None else options.comfyui_python or comfy_python(comfyui)
    if comfyui is None or python is None:
        return {"left_out": "no ComfyUI was found, or no Python for it; name them by --comfyui and --comfyui-python"}
    rounds = ["--steps", "3" if options.tiny else "4", "--rounds", str(options.rounds)]
    command = [str(python), str(BENCHMARKS / "native_split.py"), "--comfyui", str(comfyui), "--case", case, *rounds]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        _run_apart(bench, [*command, "--cards", str(count), "--out", str(out)])
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["cases"][case]
    for row in result.get("ways", {}).values():
        if "forecast" in row:
            given = row["forecast"]
            pairs = zip(given["weights_gb"], row["weights_gb"], strict=False)
            row["forecast_over_measured"] = {
                "seconds": float(f"{given['s_per_step'] / row['s_per_step']:.3g}"),
                "weights": [round(ours / real, 3) for ours, real in pairs if real],
            }
    return result


def train_in_processes(bench: Bench, subject: str, scheme: str, processes: int, cards_of_each: int) -> dict[str, Any]:
    """What ranks.py prints, a line per mode."""
    script, checkpoint = BENCHMARKS / RANKS_SCRIPT, bench.options.checkpoint
    if not script.is_file():
        return {"left_out": f"not in this version: benchmarks/{RANKS_SCRIPT} is missing"}
    if cards_of_each > 1:
        return {"left_out": f"not in this version: benchmarks/{RANKS_SCRIPT} gives each process one card"}
    if checkpoint is None and not bench.options.tiny:
        return {"left_out": "it reads a file; name one by --checkpoint, which is written if it is not there"}
    if checkpoint is not None and not checkpoint.exists():
        say(f"writing {checkpoint}")
        write_single_file(checkpoint, FAMILY, VARIANT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    what = [*([str(checkpoint)] if checkpoint else []), "--modes", ",".join(PROCESS_MODES[scheme])]
    size = ["--size", str(_side(SUBJECTS[subject])), "--steps", str(bench.options.rounds + 1)]
    said = _run_apart(bench, [*torchrun, str(script), *what, *size])
    rows = [json.loads(line) for line in said.splitlines() if line.startswith('{"mode"')]
    return {"ways": {row.pop("mode"): row for row in rows}}


def _run_apart(bench: Bench, command: Sequence[str]) -> str:
    """What a command prints; it is ended when the budget is spent.

    Raises: RuntimeError with the end of what it said on its standard error.
    """
    release()
    told = [*command, *["--tiny"] * bench.options.tiny]
    try:
        done = subprocess.run(told, check=False, capture_output=True, text=True, timeout=max(30.0, bench.left_s))
    except subprocess.TimeoutExpired as error:
        raise RuntimeError("it took longer than was left of --budget-s") from error
    if done.returncode:
        say(done.stderr[-3000:])
        raise RuntimeError(
            f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing was said'])[-1]}"
        )
    return done.stdout


# ---- all sections


def make_sections() -> list[Section]:
    """In the order in which they are run: what nobody has measured comes first."""
    trained = [(subject, scheme) for subject in ("flux2-512", "flux2-1024") for scheme in SCHEMES]
    found: list[Section] = []
    for count in reversed(COUNTS):
        found += [_train(*what, count) for what in trained]
        found += [_sample(case, count) for case in ("flux2", "wan", "flux2_batch4", "wan_cfg")]
        found += [_processes(*what, count) for what in trained]
    return found + [_processes(*what, 2, 2) for what in trained]


def _train(subject: str, scheme: str, count: int) -> Section:
    about = {"flux2-512": 75.0, "flux2-1024": 130.0}[subject]
    return Section(
        f"train {subject} {scheme}, {count} cards",
        about,
        count,
        lambda bench: TrainSection(bench, subject, scheme, count).run(),
    )


def _sample(case: str, count: int) -> Section:
    about = {"flux2": 70.0, "wan": 75.0, "flux2_batch4": 100.0, "wan_cfg": 110.0}[case]
    return Section(f"sample {case}, {count} cards", about, count, lambda bench: sample(bench, f"scaling_{case}", count))


def _processes(subject: str, scheme: str, count: int, cards_of_each: int = 1) -> Section:
    inside = f" of {cards_of_each} cards" if cards_of_each > 1 else ""
    return Section(
        f"ranks {subject} {scheme}, {count} processes{inside}",
        120.0,
        count * cards_of_each,
        lambda bench: train_in_processes(bench, subject, scheme, count, cards_of_each),
        f"train {subject} {scheme},",
    )


def chosen(sections: Sequence[Section], patterns: Sequence[str]) -> list[Section]:
    return [each for each in sections if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in patterns)]


# ---- the report


def open_report(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """What an earlier call has written, else an empty one.

    Raises: ValueError for a report of other cards or other versions: its ratios are not to be mixed with these.
    """
    setup = {"weights": "random", "rank": 4 if options.tiny else 32, "num_cards": count, "tiny": options.tiny}
    setup |= describe_run("diffusers", "peft", "torchao", "triton")
    del setup["commit"], setup["date"]  # each section has its own
    empty = {"times_faster_than_one_card": {}, "forecast_over_measured": {}, "sections": {}, "left_out": {}}
    if options.out is None or not options.out.exists():
        return empty | {"setup": setup, "calls": []}
    report: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8"))
    differing = [name for name, value in setup.items() if report["setup"].get(name) != value]
    if differing:
        raise ValueError(f"{options.out} is of another {', '.join(differing)}; name another file by --out")
    return report


def is_done(report: Mapping[str, Any], section: Section) -> bool:
    """Whether an earlier call has measured it; what has failed is tried again."""
    return bool(report["sections"].get(section.name, {}).get("ways"))


def add(report: dict[str, Any], section: Section, found: dict[str, Any]) -> None:
    """A section's result, and its ratios to the front."""
    report["left_out"].pop(section.name, None)
    report["sections"][section.name] = found
    ways = found.get("ways", {})
    one = _one_card_s(report, section.beside) if section.beside else None
    for row in ways.values():
        if one and "s_per_sample" in row:
            row["times_faster_than_one_card"] = round(one / row["s_per_sample"], 3)
    for key in ("times_faster_than_one_card", "forecast_over_measured"):
        ratios = {name: row[key] for name, row in ways.items() if key in row}
        if ratios:
            report[key][section.name] = ratios


def _one_card_s(report: Mapping[str, Any], beside: str) -> float | None:
    """Seconds per sample of one card in a section of this beginning; None if none has been measured."""
    rows = [each.get("ways", {}) for name, each in report["sections"].items() if name.startswith(beside)]
    return next(
        (row[ONE_CARD.name]["s_per_sample"] for row in rows if "s_per_sample" in row.get(ONE_CARD.name, {})), None
    )


def run_sections(bench: Bench, report: dict[str, Any], sections: Sequence[Section]) -> None:
    """One after the other, as far as cards and seconds go."""
    out = bench.options.out
    for section in sorted(sections, key=lambda each: each.name in report["sections"]):  # what has failed comes last
        if is_done(report, section):
            continue
        reason = ""
        if section.count > len(bench.devices):
            reason = f"needs {section.count} cards, found {len(bench.devices)}"
        elif section.about_s > bench.left_s:
            reason = f"takes about {section.about_s:.0f} s, {max(0.0, bench.left_s):.0f} s were left; call again"
        if reason:
            report["left_out"][section.name] = reason
            continue
        say(section.name)
        add(report, section, _run(bench, section))
        say(f"{section.name}: {report['times_faster_than_one_card'].get(section.name, 'nothing was measured')}")
        write_json(report, out)


def _run(bench: Bench, section: Section) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found = section.run(bench)
    except Exception as error:  # one section that fails must not cost the others
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {first_line(error)}"}
    release()
    made = {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
    return found | {"took_s": round(time.perf_counter() - start, 1), **made}


# ---- the command


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["*"], metavar="PATTERN", help='such as "train*4 cards"')
    parser.add_argument("--list", action="store_true", help="say which sections there are and what each takes")
    parser.add_argument(
        "--calculate", action="store_true", help="no GPU: write the tables of docs/internals/scaling.md"
    )
    parser.add_argument("--rounds", type=int, default=2, help="measured turns of each way")
    parser.add_argument("--warm-up", type=int, default=1, help="training steps of each way before")
    parser.add_argument("--no-calibration", dest="calibrate", action="store_false", help="forecast by operations")
    parser.add_argument("--budget-s", type=float, default=540.0, help="of this call; sections that take longer wait")
    parser.add_argument("--comfyui", type=Path, help="the checkout that samples; left out: where the tests find it")
    parser.add_argument("--comfyui-python", type=Path, help="left out: the checkout's own")
    parser.add_argument("--checkpoint", type=Path, help="FLUX.2-dev as a file, for several processes")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on four emulated cards")
    parser.add_argument("--out", type=Path, help="the report; a later call goes on in the same file")
    options = parser.parse_args(arguments)
    options.busy, options.card_gb = [], 0.0  # of train_step.py
    return parser, options


def main() -> None:
    parser, options = parse()
    if options.calculate:
        from scaling_calculation import write_page

        return write_page()
    sections = chosen(make_sections(), options.sections)
    if not sections or options.list:
        lines = [f"{each.name}: about {each.about_s:.0f} s" for each in sections or make_sections()]
        print("\n".join(lines if options.list else ["no section is called so; there are:", *lines]))
        return None
    bench = Bench(options, take_devices(parser, MOST_CARDS, is_tiny=options.tiny))
    try:
        report = open_report(options, len(bench.devices))
    except ValueError as error:
        parser.error(str(error))
    with emulation(is_on=options.tiny, num_cards=MOST_CARDS), tempfile.TemporaryDirectory() as folder:
        bench.cards, bench.store = find_cards(bench.devices, is_tiny=options.tiny), CalibrationStore(Path(folder))
        run_sections(bench, report, sections)
    call = {"sections": options.sections, "rounds": options.rounds, "elapsed_s": round(elapsed_s(), 1)}
    report["calls"].append(call)
    print_or_write(report, options.out)
    return None


if __name__ == "__main__":
    main()
