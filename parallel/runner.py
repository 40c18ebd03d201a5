"""What computes the microbatches of a training step. Every parallel strategy for training is a Runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch(Generic[T]):
    """One microbatch of a step."""

    prepare: Callable[[], T]  # work of the host alone, such as reading files; called in order, ahead of time
    # One forward -> the loss, a scalar on the model's last device, already divided by the number of microbatches.
    forward: Callable[[T], torch.Tensor]
    # Whether no other one may compute meanwhile, as for the first of its shape through compiled blocks: while torch
    # compiles, it intercepts the modules of all threads.
    is_alone: Callable[[T], bool] = lambda prepared: False
    name: str = ""  # among all of the run, for what is drawn while it computes
    is_new: Callable[[], bool] = lambda: False  # whether blocks may have to be compiled for it

    def compute(self, prepared: T) -> torch.Tensor:
        """Forward and backward, given what prepare returned; the loss, detached."""
        loss = self.forward(prepared)
        del prepared  # not held for the backward
        loss.backward()
        return loss.detach()


class Runner:
    """Computes the microbatches of a step: one after the other in the calling thread, by the one copy of the model."""

    num_replicas = 1  # copies of the model; those of the first so many microbatches of a step all differ
    in_lockstep = False  # whether several processes compute every forward, each with its share of the weights

    def __init__(self, model: nn.Module, main_device: torch.device) -> None:
        self._replica = model, main_device

    def replica_for(self, index: int) -> tuple[nn.Module, torch.device]:
        """Which copy of the model the microbatch of this index must go through, and the device of its inputs."""
        return self._replica

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """Forward and backward of every microbatch, gradients added to the first copy's; the losses in order, detached.
        Raises: the first exception of a microbatch. The step is lost then: drop the gradients."""
        return [microbatch.compute(microbatch.prepare()) for microbatch in microbatches]

    def sync(self) -> None:
        """To be called whenever the first copy's trained values have changed."""
