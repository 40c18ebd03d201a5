"""How a training would do on several machines, by calculation: what each way of sharing takes in memory and time.

The plan of one card, or of one machine, is the planner's (plan_training.py). This adds what processes exchange:

    data, and all strategies inside a machine    the LoRA's gradients once a step, an all-reduce
    fsdp, hsdp                                   besides, the weights of every block twice a microbatch, an all-gather,
                                                 hidden behind the computation of other blocks as far as it is shorter

A ring of n processes passes (n - 1) / n of the bytes of an all-gather through its slowest link, and twice that of an
all-reduce (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Nothing of this was measured on such
a cluster; every text that shows it says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .block_times import ASSUMED_FLOPS_PER_S, ASSUMED_LINK_BYTES_PER_S
from .cards import Card

_LINK = re.compile(r"(?P<number>[0-9]{1,6}(?:\.[0-9]{1,6})?) *(?P<unit>Gbit|GB)(?:/s)?", re.IGNORECASE)
MOST_NODES = 1024


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike.

    Args:
        cards: of one of them.
        link: bytes per second between machines, each way. card_link: between the cards of one.
    """

    cards: tuple[Card, ...]
    nodes: int
    link: float
    card_link: float = ASSUMED_LINK_BYTES_PER_S

    @property
    def num_cards(self) -> int:
        return len(self.cards) * self.nodes

    @property
    def slowest_link(self) -> float:
        """Of all cards together."""
        return min(self.link, self.card_link) if self.nodes > 1 else self.card_link

    def degree(self, strategy: str) -> int:
        """How many cards share one copy of the weights."""
        return len(self.cards) if strategy == "hsdp" else self.num_cards

    def all_reduce_s(self, num_bytes: float, processes: int) -> float:
        """Of processes all over the cluster."""
        return 2 * num_bytes * (processes - 1) / processes / self.slowest_link

    def all_gather_s(self, num_bytes: float, processes: int, *, within: bool) -> float:
        """Args: within: whether they are all in one machine."""
        return num_bytes * (processes - 1) / processes / (self.card_link if within else self.slowest_link)


@dataclass(frozen=True)
class Part:
    """What one process does alone, from a plan of its cards.

    Args:
        needed: of the card that needs most, of usable there.
        step_s: of its share of the microbatches.
        lora_bytes: of its gradients as they travel, in float32.
        setting: as people read it.
        kept: of each card, how many of its last blocks keep their activations.
    """

    needed: int
    usable: int
    step_s: float
    lora_bytes: int
    setting: str
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Bytes of the base as it is held: each block, and all else."""

    blocks: Sequence[int]
    home: int

    def held(self, degree: int) -> int:
        """Of a card, where so many share them: its share, what stays whole, and the block at work
        beside the next one, which is gathered ahead."""
        return (sum(self.blocks) + self.home) // degree + self.home + 2 * max(self.blocks)

    def elsewhere(self, degree: int) -> int:
        """By how much that is less than all of them; negative for a model of few blocks."""
        return sum(self.blocks) + self.home - self.held(degree)


@dataclass(frozen=True)
class Option:
    """One way to use a cluster.

    Args:
        processes: in all. inside: what each does.
        needed: bytes of the card that needs most; 0 where nothing fits. step_s: seconds of a step; None if it does not
            fit, why says then why not.
        exchange_s: of that, what is not hidden behind computation.
        gathered_s: how long all-gathers take, hidden or not.
        kept_blocks: of each card of a process, how many of its last blocks keep their activations.
    """

    strategy: str
    processes: int
    inside: str
    needed: int = 0
    usable: int = 0
    step_s: float | None = None
    exchange_s: float = 0.0
    gathered_s: float = 0.0
    why: str = ""
    kept_blocks: tuple[int, ...] = ()


def with_copies(cluster: Cluster, strategy: str, processes: int, part: Part) -> Option:
    """Every process trains a whole model with its cards; gradients are added up."""
    exchange = cluster.all_reduce_s(part.lora_bytes, processes)
    step = part.step_s + exchange
    return Option(strategy, processes, part.setting, part.needed, part.usable, step, exchange, kept_blocks=part.kept)


def with_shares(cluster: Cluster, strategy: str, part: Part, weights: Weights, microbatches: int) -> Option:
    """Every card has a share of the weights: of all cards (fsdp), or of a machine's (hsdp).

    Args:
        part: one card's with the whole model, whatever it needs.
        microbatches: of one card in a step.
    """
    degree, blocks = cluster.degree(strategy), sum(weights.blocks)
    needed = part.needed - weights.elsewhere(degree)
    is_within = strategy == "hsdp" or cluster.nodes == 1
    once = cluster.all_gather_s(blocks, degree, within=is_within)
    gathered = 2 * microbatches * once
    reduced = cluster.all_reduce_s(part.lora_bytes, cluster.num_cards)
    first = cluster.all_gather_s(max(weights.blocks), degree, within=is_within)  # nothing computes before it
    exchange = max(0.0, gathered - part.step_s) + reduced + first
    found = Option(
        strategy, cluster.num_cards, part.setting, needed, part.usable, None, exchange, gathered, kept_blocks=part.kept
    )
    if needed > part.usable:
        return replace(found, why=f"a card needs {needed / 1e9:.1f} GB of {part.usable / 1e9:.1f} GB")
    return replace(found, step_s=part.step_s + exchange)


def best_of(options: Sequence[Option]) -> Option | None:
    """The fastest that fits."""
    fitting = [each for each in options if each.step_s is not None]
    return min(fitting, key=lambda each: each.step_s or 0.0, default=None)


def parse_link(text: str) -> float:
    """Bytes per second of "25Gbit" or "3.1GB". Raises: ValueError."""
    match = _LINK.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise ValueError(f'link: {text!r} is no speed; write gigabits or gigabytes per second: "25Gbit", "3.1GB"')
    return float(match["number"]) * (1e9 / 8 if match["unit"].lower() == "gbit" else 1e9)


def _rate(cluster: Cluster) -> str:
    """How fast the cards are taken for, as jobs/cluster.py and planning/report.py take it."""
    if all(card.kind for card in cluster.cards):
        return "published speeds of cards"
    return f"{ASSUMED_FLOPS_PER_S / 1e12:.0f} TFLOP/s for a card whose speed is not known"


def describe_cluster(cluster: Cluster, options: Sequence[Option], microbatches: int) -> str:
    """For people."""
    best = best_of(options)
    rows = [["strategy", "processes", "in each", "blocks kept", "GB of a card", "step", "of it exchange"]]
    for each in options:
        is_best = "-> " if each is best else "   "
        time = "does not fit" if each.step_s is None else f"{each.step_s:.2f} s"
        needed = f"{each.needed / 1e9:.1f} of {each.usable / 1e9:.1f}" if each.needed else ""
        exchange = "" if each.step_s is None else f"{each.exchange_s:.2f} s"
        kept = " + ".join(map(str, each.kept_blocks))
        rows.append([is_best + each.strategy, str(each.processes), each.inside, kept, needed, time, exchange])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    between = f", {cluster.link / 1e9:.3g} GB/s between machines" if cluster.nodes > 1 else ""
    counted = f"{microbatches} microbatch{'es' if microbatches != 1 else ''}"
    lines = [
        f"{cluster.nodes} x {len(cluster.cards)} cards, {counted} in a step{between}, "
        f"{cluster.card_link / 1e9:.3g} GB/s between the cards of a machine",
        "",
        *table,
        *(f"{each.strategy}: {each.why}" for each in options if each.why),
        "",
        "blocks kept: so many of each card's last blocks keep their activations, the others are computed again",
        "a calculation and no measurement: blocks by their operations "
        f"at {_rate(cluster)}, rings over the slowest link",
    ]
    if microbatches % cluster.num_cards:
        lines.append(
            f"with {counted} in a step some of {cluster.num_cards} cards wait for others; set "
            f"train.gradient_accumulation_steps to {cluster.num_cards} or a multiple of it"
        )
    if best is None:
        lines.append("nothing fits; plan with more cards, or with --quantize int8-compute")
    return "\n".join(lines)
