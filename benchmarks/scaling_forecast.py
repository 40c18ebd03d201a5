"""What the planner forecasts of a way to train FLUX.2 on some cards: seconds per sample, and bytes on each card.

Two users: scaling.py sets it beside what it measures, with times of blocks measured on the same cards. And
scaling_calculation.py asks for cards that nobody has measured, with times of blocks from benchmarks/results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.planning.block_times import BlockTimes
from devicebridge.planning.cards import Card
from devicebridge.planning.plan_training import plan_training
from devicebridge.planning.question import ModelCosts, Question
from random_job import make_question, make_random_job


@dataclass(frozen=True)
class Forecast:
    """Args: peak, weights, lora: bytes of each card. [num_cards]"""

    s_per_sample: float
    peak: tuple[int, ...]
    weights: tuple[int, ...]
    lora: tuple[int, ...]

    @property
    def moving(self) -> int:
        """The most that a card needs beside what it holds between steps."""
        return max(peak - weights for peak, weights in zip(self.peak, self.weights, strict=True))


@dataclass(frozen=True)
class KnownTimes:
    """Times of blocks that calibration.py has measured, for cards that are all alike; a BlockTimes.

    Args:
        blocks: forward and backward of each block. front_s, tail_s: as BlockTimes.ends.
        host_bytes_per_s, bytes_per_s: from the host to a card, and between two cards.
    """

    blocks: tuple[tuple[float, float], ...]
    front_s: float
    tail_s: float
    host_bytes_per_s: float
    bytes_per_s: float

    def of(self, block: int, card: Card, scheme: str) -> tuple[float, float]:
        return self.blocks[block]

    def ends(self, card: Card, scheme: str) -> tuple[float, float]:
        return self.front_s, self.tail_s

    def link(self, card: Card) -> float:
        return self.host_bytes_per_s

    def between(self, source: Card, target: Card) -> float | None:
        return self.bytes_per_s

    @property
    def recomputed_s(self) -> float:
        """Of a sample on one card whose blocks are all recomputed."""
        return sum(2 * forward + backward for forward, backward in self.blocks) + self.front_s + self.tail_s


def known_times(case: Mapping[str, Any], links: Mapping[str, float]) -> KnownTimes:
    """Of a case of calibration.py's report, and its links."""
    card = next(iter(case["cards"].values()))
    blocks = [
        (kind["forward_ms"] / 1e3, kind["backward_ms"] / 1e3)
        for kind in card["kinds"].values()
        for _ in range(kind["blocks"])
    ]
    from_host = [speed for name, speed in links.items() if name.startswith("host")]
    between = [speed for name, speed in links.items() if not name.startswith("host")]
    return KnownTimes(tuple(blocks), card["front_ms"] / 1e3, card["tail_ms"] / 1e3, min(from_host), min(between))


class Forecaster:
    """Of one model, scheme and size.

    Args:
        scheme: as a job file names it. side: pixels. rank: of the LoRA, whose numbers are lora_dtype.
        costs: of the model; one for all sizes and schemes.
    """

    def __init__(
        self, info: CheckpointInfo, costs: ModelCosts, scheme: str, side: int, rank: int, lora_dtype: str = "bfloat16"
    ) -> None:
        self._info, self._costs, self._side, self._rank = info, costs, side, rank
        self._scheme, self._lora_dtype = scheme, lora_dtype
        self.times: BlockTimes | None = None

    def question(
        self,
        cards: Sequence[Card],
        strategy: str = "none",
        num_batches: int = 1,
        cuts: Sequence[int] | None = None,
        kept: Sequence[int] = (),
    ) -> Question:
        """Of so many micro-batches; every block is recomputed but for the kept ones of each card."""
        job = make_random_job(
            model={"quantize": self._scheme, "dtype": "bfloat16"},
            data={"resolutions": [self._side]},
            lora={"rank": self._rank, "alpha": float(self._rank), "dtype": self._lora_dtype},
            train={"steps": 1, "gradient_accumulation_steps": num_batches},
            parallel={"strategy": strategy},
            split={"blocks_without_checkpointing": list(kept) or [0] * len(cards)},
        )
        return make_question(job, self._info, cards, self._side, cuts, self._costs)

    def of(
        self,
        cards: Sequence[Card],
        strategy: str = "none",
        num_batches: int = 1,
        cuts: Sequence[int] | None = None,
        kept: Sequence[int] = (),
    ) -> Forecast:
        """Raises: ValueError if these cards have no room for it; it says what is missing."""
        plan = plan_training(replace(self.question(cards, strategy, num_batches, cuts, kept), given_times=self.times))
        return Forecast(
            plan.step_s / num_batches,
            tuple(device.allocated for device in plan.devices),
            tuple(device.weights for device in plan.devices),
            tuple(device.lora for device in plan.devices),
        )
