"""What one forward of published models takes that are split for sampling, and H200s as they were assumed for forecasts.

The work is what planning/times.py says of ComfyUI's classes at full size, which needs ComfyUI. The speeds are
those of docs/internals/experiments.md, 2026-11-23.
"""

from devicebridge.planning.cards import MachineSpeed
from devicebridge.planning.times import ForwardWork, Ways

FLUX2 = ForwardWork(286.5e12, 3.72e9, 56.6e6, 80)  # 4096 picture tokens: 1024 x 1024
FLUX2_512 = ForwardWork(91.6e12, 1.24e9, 18.9e6, 80)
WAN = ForwardWork(581e12, 17.9e9, 149e6, 280)  # 14040: 832 x 480, 33 frames
QWEN = ForwardWork(85.2e12, 3.78e9, 28.3e6, 360)


def machine_of(num_cards: int = 2, flops_per_s: float = 660e12, bytes_per_s: float = 300e9) -> MachineSpeed:
    """Cards that are all alike."""
    return MachineSpeed((flops_per_s,) * num_cards, bytes_per_s, "2026-11-23")


def ways_of(work: ForwardWork, machine: MachineSpeed, can_overlap: bool = True) -> Ways:
    count = len(machine.flops_per_s)
    return Ways(work, machine, [1 / count] * count, [1 / count] * count, can_overlap, count)
