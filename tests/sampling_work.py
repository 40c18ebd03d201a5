"""What one forward of published models takes that are split for sampling, and H200s as they were assumed for forecasts.

The work is what planning/divided_work.py says of ComfyUI's classes at full size, which needs ComfyUI. The speeds are
those of docs/internals/experiments.md, 2026-11-23.
"""

from __future__ import annotations

from itertools import combinations

from devicebridge.planning.machine_speed import CardSpeed, ExchangeSpeed, MachineSpeed
from devicebridge.planning.ways import Ways, Work, WorkBySize

FLUX2 = Work(286.5e12, 3.72e9, 56.6e6, 80)  # 4096 picture tokens: 1024 x 1024
FLUX2_512 = Work(91.6e12, 1.24e9, 18.9e6, 80)
WAN = Work(581e12, 17.9e9, 149e6, 280)  # 14040: 832 x 480, 33 frames
QWEN = Work(85.2e12, 3.78e9, 28.3e6, 360)


def machine_of(
    num_cards: int = 2,
    flops_per_s: float = 660e12,
    bytes_per_s: float = 300e9,
    *,
    is_direct: bool = True,
) -> MachineSpeed:
    """Cards and links that are all alike."""
    cards = tuple(CardSpeed(f"card {index}", flops_per_s) for index in range(num_cards))
    pairs = combinations(range(num_cards), 2)
    links = tuple(ExchangeSpeed(pair, bytes_per_s, is_direct) for pair in pairs)
    return MachineSpeed(cards, links, 0.1, "2026-11-23")


class _Always(WorkBySize):
    """The same work for any number of tokens."""

    def at(self, num_tokens: int) -> Work:
        return self.given[0]


def ways_of(work: Work, machine: MachineSpeed, can_overlap: bool = True) -> Ways:
    """Blocks and heads in equal shares."""
    count = len(machine.cards)
    return Ways(_Always(1, (work,) * 3), machine, [1 / count] * count, [1 / count] * count, can_overlap)
