"""Questions for the planner: of full-size models, each run dry once per process, and of models with made-up costs."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.config.job import JobConfig, make_job
from devicebridge.families.registry import find_family
from devicebridge.planning.cards import Card
from devicebridge.planning.costs import BlockCost, ModelCosts, StepCost
from devicebridge.planning.dry_run import Work
from devicebridge.planning.question import Question
from devicebridge.planning.times import ASSUMED_FLOPS_PER_S

GB = 10**9


def make_plan_job(**sections: dict[str, Any]) -> JobConfig:
    values: dict[str, Any] = {
        "model": {"path": "x", "quantize": "fp8-compute"}, "data": {"folders": [{"path": "x"}], "resolutions": [512]},
        "lora": {"rank": 32}, "train": {"steps": 10}, "output": {"folder": "x"},
    }  # fmt: skip
    return make_job({name: values.get(name, {}) | sections.get(name, {}) for name in values.keys() | sections.keys()})


def published_info(family_name: str = "flux2") -> CheckpointInfo:
    family = find_family(family_name)
    variant = family.variants[0]
    return CheckpointInfo(Path("x"), family, variant, variant.transformer_config, "diffusers", {}, None)


@cache
def full_size(family_name: str = "flux2") -> ModelCosts:
    info = published_info(family_name)
    assert info.variant is not None
    return ModelCosts(info, info.variant)


class MadeUpCosts(ModelCosts):
    """A model of equal blocks.

    Args:
        halved: the block where it is quantized.
        units: seconds of each block's forward on a card of speed 1, in full precision.
        keys: bytes of the keys and values of a block.
    """

    largest_linear = 0  # type: ignore[assignment]

    def __init__(
        self, block: BlockCost, count: int = 10, halved: BlockCost | None = None, units: Sequence[float] = (),
        keys: float = 0.0,
    ) -> None:  # fmt: skip
        self.info = published_info()
        self.family, self.variant = self.info.family, self.info.variant  # type: ignore[assignment]
        self.names = tuple(f"transformer_blocks.{index}" for index in range(count))
        self._blocks = block, halved or block
        self._units, self._keys = units or (1.0,) * count, keys

    def dry_run(self, work: Work, kernels: Any) -> StepCost:
        block = self._blocks[work.quantize is not None]
        return StepCost(self.names, (block,) * len(self.names), 0, 0, 0, 0, 0, 0)

    def block_flops(self, bucket: tuple[int, int], frames: int) -> list[float]:
        return [ASSUMED_FLOPS_PER_S * unit for unit in self._units]

    def key_bytes(self, bucket: tuple[int, int], frames: int, element_size: int) -> list[float]:
        return [self._keys] * len(self.names)


def make_question(
    costs: ModelCosts, cards: Sequence[Card], bucket: tuple[int, int] = (512, 512), /, **given: Any
) -> Question:
    """given: sections of the job, and what else a Question takes."""
    names = ("frames", "link", "cuts", "host_bytes")
    own = {name: given.pop(name) for name in names if name in given}
    return Question(costs, make_plan_job(**given), tuple(cards), bucket, **own)


def make_cards(*sizes_gb: float, speeds: tuple[float, ...] = (), refuses: frozenset[str] = frozenset()) -> list[Card]:
    speeds = speeds or (1.0,) * len(sizes_gb)
    return [
        Card(torch.device("cuda", index), int(gb * GB), int(gb * GB), speed, refuses=refuses)
        for index, (gb, speed) in enumerate(zip(sizes_gb, speeds, strict=True))
    ]
