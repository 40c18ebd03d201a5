"""How a job ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class TrainingResult:
    """How a job ended.

    Args:
        status: "finished", or "stopped" before its last step.
        step: optimizer steps done.
        lora_path: the LoRA file, None if the job was stopped before training began.
        lora: its tensors as saved, on the CPU.
        losses: training loss of every step, resumed ones included.
        eval_before, eval_after: evaluation loss before the first and after the last step done, None without a folder.
        checkpoint: the newest full state, to resume from.
        resume_hint: how to continue; "" when finished.
        memory: a line per card, forecast against measured; () where nothing was forecast.
        pace: the same for the time of a step; "" where blocks were not timed.
    """

    status: str
    step: int = 0
    lora_path: Path | None = None
    lora: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    eval_before: float | None = None
    eval_after: float | None = None
    checkpoint: Path | None = None
    resume_hint: str = ""
    memory: tuple[str, ...] = ()
    pace: str = ""
