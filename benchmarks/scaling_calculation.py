"""What 2, 4 and 8 cards would gain by every strategy, calculated from what two cards were measured at; no GPU needed.

`python benchmarks/scaling.py --calculate` writes the tables of docs/internals/scaling.md, and that of clusters in
docs/guides/choosing_a_strategy.md. Training: the planner's own
seconds and bytes, with times of blocks measured on an H200 (calibration.py). The planner knows one process; FSDP and
hybrids are what `plan --nodes` calculates (planning/cluster.py). Sampling: the forecast that `way` auto goes by, with
speeds assumed for H200s.

What Python takes: all threads of a process share one lock, so no strategy of one process is faster than issuing every
block's kernels once per sample. One thread was measured at that for compiled fp8-compute blocks that keep their
activations (host_time.py). Uncompiled blocks take more by the ratio that host_time.py found on a CPU, and recomputed
ones by what they compute more. That is an estimate, and rather too low.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devicebridge.parallel.placement import parameter_bytes, plan_placement
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.cluster import Cluster, Option, Part, Weights, with_copies, with_shares
from devicebridge.planning.question import ModelCosts
from devicebridge.system.files import write_atomically
from devicebridge.tests.sampling_work import FLUX2, WAN, machine_of, ways_of
from random_job import make_empty, make_info
from scaling_forecast import Forecaster, KnownTimes, known_times

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals" / "scaling.md"
GUIDE = ROOT / "docs" / "guides" / "choosing_a_strategy.md"
RESULTS = ROOT / "benchmarks" / "results"
COUNTS = (2, 4, 8)
RANK, BATCHES = 32, 8
_CARD_GB = 141  # of an H200
_ENDLESS = 10**15  # bytes of a card that holds whatever there is
_PART = re.compile(
    r"(?<=<!-- tables, by benchmarks/scaling.py --calculate -->\n).*?(?=<!-- end of tables -->)", re.DOTALL
)

# What two H200 took, seconds per sample: result, section, way -> our row.
_MEASURED = {
    ("bf16", 512): ("train_step_flux2-512_bf16_pipeline_2xh200_2026-11-22", "pipeline 8"),
    ("bf16", 1024): ("train_step_flux2-1024_2xh200_2026-11-22", "pipeline 8"),
    ("fp8-compute", 512): ("train_step_flux2-512_fp8_threads_2xh200_2026-11-22", "pipeline 8"),
}


@dataclass(frozen=True)
class Cell:
    """One strategy on so many cards.

    Args:
        seconds: per sample, of the cards alone. python_s: that one process takes at least for its share of a sample; 0
            where it counts already. gb: of the fullest card.
    """

    seconds: float
    python_s: float
    gb: float

    @property
    def slowest_s(self) -> float:
        return max(self.seconds, self.python_s)

    def text(self, one_s: float) -> str:
        waiting = f", with Python {self.python_s:.3f} s ({one_s / self.python_s:.1f})"
        cards = f"{self.seconds:.3f} s ({one_s / self.seconds:.1f})"
        return f"{cards}{waiting if self.python_s > self.seconds else ''}, {self.gb:.0f} GB"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


class TrainingCase:
    """FLUX.2-dev in one scheme at one size.

    Args:
        costs: of the model; one for all cases.
    """

    def __init__(self, costs: ModelCosts, scheme: str, side: int) -> None:
        self.scheme, self.side, self._costs = scheme, side, costs
        report, planned = _read("calibration_2xh200_2026-11-22"), "none" if scheme == "bf16" else scheme
        self.times: KnownTimes = known_times(report["cases"][f"{planned}, {side} px"], report["links_bytes_per_s"])
        self._forecaster = Forecaster(costs.info, costs, planned, side, RANK)
        self._forecaster.times = self.times

    @cached_property
    def one(self) -> Cell:
        found = self._forecaster.of(_cards(1))
        return Cell(found.s_per_sample, 0.0, found.peak[0] / 1e9)

    @cached_property
    def python_s(self) -> float:
        """Of one process, for the launches of a sample's uncompiled, recomputed blocks; see the module."""
        on_card, on_cpu = (_read(f"host_time_{where}_2026-11-22")["ms_per_block"] for where in ("2xh200", "cpu"))
        compiled = on_card["fp8-compute, compiled"]["host"]["alone"] / 1e3
        uncompiled = _alone(on_cpu, f"{self.scheme}, uncompiled") / _alone(on_cpu, f"{self.scheme}, compiled")
        forward, backward = (sum(each) for each in zip(*self.times.blocks, strict=True))
        return compiled * uncompiled * (2 * forward + backward) / (forward + backward) * len(self.times.blocks)

    # ---- one process, as the planner has it

    def pipeline(self, count: int, num_batches: int = BATCHES) -> Cell:
        seconds = [2 * forward + backward for forward, backward in self.times.blocks]
        seconds[-1] += self.times.tail_s
        placed = plan_placement(
            self._costs.names, [c.device for c in _cards(count)], block_cost=seconds, home_cost=self.times.front_s
        )
        cuts = [index for index in range(1, len(seconds)) if placed.devices[index] != placed.devices[index - 1]]
        found = self._forecaster.of(_cards(count), "pipeline", num_batches, cuts)
        return Cell(found.s_per_sample, self.python_s, max(found.peak) / 1e9)

    def data(self, count: int) -> Cell:
        """With one flat copy of the LoRA from and to each card per step, one after the other."""
        found = self._forecaster.of(_cards(count), "data", BATCHES)
        copying = 2 * (count - 1) * found.lora[0] / self.times.bytes_per_s / BATCHES
        return Cell(found.s_per_sample + copying, self.python_s, max(found.peak) / 1e9)

    def tensor(self, count: int) -> Cell:
        """The cards alone, and the planner's forecast, which counts Python's share already."""
        found = self._forecaster.of(_cards(count), "tensor", 1)
        waiting = 3 * sum(self._exchanged) * (count - 1) / self.times.bytes_per_s  # forward twice, backward
        ends = self.times.front_s + self.times.tail_s
        alone = (self.times.recomputed_s - ends) / count + waiting + ends
        return Cell(alone, found.s_per_sample, max(found.peak) / 1e9)

    @cached_property
    def _exchanged(self) -> list[float]:
        return self._costs.exchanged((self.side, self.side), 1, 2)

    # ---- several processes

    def fsdp(self, count: int) -> Cell:
        """Every rank computes samples of its own, and gathers weights beside the computation."""
        one, batches = self._forecaster.of(_cards(1)), BATCHES // count
        part = self._part(int(one.peak[0]), self.one.seconds * batches)
        found = with_shares(self._cluster(count), "fsdp", part, self._weights, batches)
        return self._cell(found, self.python_s / count)

    def hybrid(self, count: int) -> Cell:
        """Copies of two cards each: a pipeline inside, gradients added up between."""
        copies = count // 2
        inside = self.pipeline(2, BATCHES // copies)
        part = self._part(int(inside.gb * 1e9), inside.seconds * BATCHES / copies)
        return self._cell(with_copies(self._cluster(count), "hybrid", copies, part), self.python_s / copies)

    def _part(self, needed: int, step_s: float) -> Part:
        """What one process takes for its share of a step; the LoRA is in 16 bits, its gradients travel in 32."""
        return Part(needed, _ENDLESS, step_s, 2 * int(self._forecaster.of(_cards(1)).lora[0]), "")

    def _cluster(self, count: int) -> Cluster:
        """One machine with links as measured."""
        return Cluster(tuple(_cards(count)), 1, self.times.bytes_per_s, card_link=self.times.bytes_per_s)

    def _cell(self, found: Option, python_s: float) -> Cell:
        assert found.step_s is not None
        return Cell(found.step_s / BATCHES, python_s, found.needed / 1e9)

    @cached_property
    def _weights(self) -> Weights:
        model = make_empty(self._costs.info.config)
        sizes, home = parameter_bytes(model, self._costs.names, 2)
        return Weights([size if self.scheme == "bf16" else size // 2 for size in sizes], home)

    # ---- the table

    @property
    def measured_s(self) -> float | None:
        known = _MEASURED.get((self.scheme, self.side))
        if known is None:
            return None
        section = _read(known[0])["sections"][f"flux2-{self.side}, {self.scheme}"]
        return float(section["ways"][known[1]]["s_per_sample"])

    def lines(self, counts: Sequence[int] = COUNTS) -> Iterator[str]:
        """Rows of a Markdown table, one per strategy."""
        for name, find in self.strategies.items():
            two, *others = (
                find(count).text(self.one.seconds) if count > 2 or find != self.hybrid else "" for count in counts
            )
            is_measured = name == f"pipeline, {BATCHES} micro-batches" and self.measured_s is not None
            yield _row(name, two, f"{self.measured_s:.3f} s" if is_measured else "", *others)

    @property
    def strategies(self) -> Mapping[str, Callable[[int], Cell]]:
        return {
            "data, one process": self.data,
            f"pipeline, {BATCHES} micro-batches": self.pipeline,
            "pipeline, 16 micro-batches": lambda count: self.pipeline(count, 16),
            "tensor": self.tensor,
            "fsdp, a process per card": self.fsdp,
            "data between processes, pipelines of two cards": self.hybrid,
        }


def _alone(report: Mapping[str, Any], blocks: str) -> float:
    return float(report[blocks]["host"]["alone"])


def _cards(count: int) -> list[Card]:
    return parse_cards(f"{count}x{_CARD_GB}GB")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def training_cases() -> list[TrainingCase]:
    info = make_info(make_published_config(), is_tiny=False)
    assert info.variant is not None
    costs = ModelCosts(info, info.variant)
    return [TrainingCase(costs, scheme, side) for scheme in ("bf16", "fp8-compute") for side in (512, 1024)]


def make_published_config() -> dict[str, Any]:
    from random_job import VARIANT

    return dict(VARIANT.transformer_config)


# ---- sampling


def sampling_lines(counts: Sequence[int] = COUNTS) -> Iterator[str]:
    """A row per model, number of forwards and way."""
    report = _read("tensor_five_cases_2xh200_2026-11-23")["cases"]
    cases = [
        ("FLUX.2-dev 1024², one picture", FLUX2, 1, "tensor_flux2"),
        ("FLUX.2-dev 1024², four pictures", FLUX2, 4, ""),
        ("Wan 14B, 33 frames, no CFG", WAN, 1, "tensor_wan"),
        ("Wan 14B, 33 frames, CFG", WAN, 2, "tensor_wan_cfg"),
    ]
    for name, work, forwards, measured in cases:
        one = forwards * ways_of(work, machine_of(2))._card_s(work.flops)[0]
        for way in ("blocks", "tensor"):
            found = [getattr(ways_of(work, machine_of(count)).seconds(1, forwards), way) for count in counts]
            cells = [f"{seconds:.3f} s ({one / seconds:.1f})" for seconds in found]
            known = report.get(measured, {})
            text = f"{known[way]['s_per_step_median']:.3f} s" if way in known else ""
            yield _row(f"{name}, {way}", f"{one:.3f} s", cells[0], text, *cells[1:])


# ---- clusters

# FLUX.2-dev, bf16, 512², LoRA rank 32, recomputed: seconds of a microbatch on one H200, bytes of 56 blocks and of what
# is outside them, and of the LoRA's gradients. Between the cards of a machine 300 GB/s are assumed.
_ONE_CARD = Part(0, _ENDLESS, 0.61, 800_000_000, "")
_WEIGHTS = Weights([62_800_000_000 // 56] * 56, 1_500_000_000)
_CARD_LINK, _LINKS = 300e9, {"25 Gbit/s": 25e9 / 8, "100 Gbit/s": 100e9 / 8}


def cluster_lines(counts: Sequence[int] = (2, 4, 8, 16)) -> Iterator[str]:
    """Seconds per sample of the whole job, one microbatch per card and step: a row per number of cards."""
    ways: list[tuple[str, str, float]] = [("data", "", 0.0), ("fsdp", "", 0.0)]  # in one machine; of two by their link
    ways += [(way, name, link) for way in ("hsdp", "fsdp", "data") for name, link in _LINKS.items()]
    heads = [f"`{way}`, 2 machines, {name}" if name else f"`{way}`, one machine" for way, name, _ in ways]
    yield _row("cards", *heads)
    yield _row(*["---"] * (len(ways) + 1))
    for count in counts:
        yield _row(str(count), *(f"{_of_cluster(count, way, link):.3f}" for way, _, link in ways))


def _of_cluster(count: int, way: str, link: float) -> float:
    machines = 2 if link else 1
    cluster = Cluster(tuple(_cards(count // machines)), machines, link or _CARD_LINK, _CARD_LINK)
    if way == "data":
        found = with_copies(cluster, way, count, _ONE_CARD)
    else:
        found = with_shares(cluster, way, _ONE_CARD, _WEIGHTS, 1)
    assert found.step_s is not None
    return found.step_s / count


# ---- the pages


def tables() -> Iterator[str]:
    for case in training_cases():
        yield f"**FLUX.2-dev, {case.scheme}, {case.side}²**: one card {case.one.seconds:.3f} s, {case.one.gb:.0f} GB;"
        yield f"Python {case.python_s:.3f} s."
        yield ""
        yield _row("strategy", "2 cards", "measured", "4 cards", "8 cards")
        yield _row(*["---"] * 5)
        yield from case.lines()
        yield ""
    yield "**Sampling**, seconds per step:"
    yield ""
    yield _row("model, way", "1 card", "2 cards", "measured", "4 cards", "8 cards")
    yield _row(*["---"] * 6)
    yield from sampling_lines()


def write_page() -> None:
    """The tables between the markers of both pages."""
    for page, lines in ((GUIDE, cluster_lines()), (PAGE, tables())):
        text, made = page.read_text(encoding="utf-8"), "\n".join(lines)
        assert _PART.search(text), f"{page.name} has no place for the tables"
        write_atomically(page, _PART.sub(f"\n{made}\n\n", text).encode())
        print(made)
