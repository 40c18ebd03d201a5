"""Data parallel between processes: each rank computes its share of a step's microbatches, gradients are added up once.
Gradients and losses of all ranks go through one flat all-reduce, so LoRAs stay equal bit for bit. What is drawn on a
device (dropout) has its own stream for every microbatch; between runs all have the same, for optimizers that draw."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..devices import seed_devices
from ..runner import MicroBatch, Runner
from .group import Ranks


class AcrossRanks(Runner):
    """Ranks may have to compute equally many microbatches (in_lockstep, FSDP). Attributes: rank_losses: of
    the last run, the mean loss of each rank's microbatches, by rank."""

    def __init__(
        self, inner: Runner, parameters: Sequence[nn.Parameter], ranks: Ranks, seed: int, *, in_lockstep: bool
    ) -> None:
        self._inner, self._parameters, self._ranks, self._seed = inner, tuple(parameters), ranks, seed
        self.in_lockstep, self.num_replicas = in_lockstep, inner.num_replicas * ranks.count
        self.rank_losses: list[float] = []
        self._has_own_streams = type(inner) is Runner  # elsewhere microbatches mix on a device

    def replica_for(self, index: int) -> tuple[nn.Module, torch.device]:
        return self._inner.replica_for(index // self._ranks.count)

    def sync(self) -> None:
        self._inner.sync()

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """See Runner; the losses are of all ranks, on the CPU. Raises: RankLost if another rank has ended or hangs."""
        found = self.run_share(microbatches)
        self._ranks.wait()
        all_losses = self._add_up(found, len(microbatches))
        self._draw_from(f"after {microbatches[0].name}")
        shares = [all_losses[rank :: self._ranks.count] for rank in range(self._ranks.count)]
        self.rank_losses = [float(share.mean()) * len(all_losses) for share in shares if len(share)]
        return list(all_losses.unbind())

    def run_share(self, microbatches: Sequence[MicroBatch[Any]]) -> dict[int, float]:
        """Forward and backward of this rank's microbatches alone; their losses by index."""
        rank = self._ranks.place.rank
        own = range(rank, len(microbatches), self._ranks.count)
        with self._ranks.doing(is_long=any([each.is_new() for each in microbatches])):  # on whichever rank
            self._draw_from(f"step {rank} {microbatches[0].name}")
            share = [self._seeded(microbatches[index]) for index in own]
            if self.in_lockstep and len(share) < -(-len(microbatches) // self._ranks.count):
                # once more for nothing, because other ranks wait for this one's share of the weights
                last = self._seeded(microbatches[-1])
                share.append(replace(last, forward=lambda prepared: last.forward(prepared) * 0.0))
            losses = self._inner.run(share)[: len(own)]
            return dict(zip(own, [float(loss) for loss in losses], strict=True))

    def _seeded(self, microbatch: MicroBatch[Any]) -> MicroBatch[Any]:
        def forward(prepared: Any) -> torch.Tensor:
            self._ranks.alive()
            if self._has_own_streams:
                self._draw_from(microbatch.name)
            return microbatch.forward(prepared)

        return replace(microbatch, forward=forward)

    def _draw_from(self, name: str) -> None:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        seed_devices(self._ranks.devices, int.from_bytes(digest[:8], "little") >> 1)

    @torch.no_grad()
    def _add_up(self, losses: dict[int, float], count: int) -> torch.Tensor:
        """Every rank's gradients into ours, in float32; returns the losses of all microbatches. [count]"""
        main_device = self._parameters[0].device
        sizes = [parameter.numel() for parameter in self._parameters]
        flat = torch.zeros(sum(sizes) + len(sizes) + count, device=main_device)
        *parts, present, all_losses = flat.split([*sizes, len(sizes), count])
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.flatten())
        present.copy_(torch.tensor([float(each.grad is not None) for each in self._parameters]))
        all_losses.copy_(torch.tensor([losses.get(index, 0.0) for index in range(count)]))
        summed = self._ranks.add_up(flat)
        *parts, present, all_losses = summed.split([*sizes, len(sizes), count])
        for parameter, part, num in zip(self._parameters, parts, present.tolist(), strict=True):
            gradient = part.view(parameter.shape).to(parameter.device, parameter.dtype)
            parameter.grad = gradient if num else None
        return all_losses.cpu()


def fingerprint(parameters: Sequence[nn.Parameter]) -> str:
    """Of the values of parameters, to tell whether ranks have the same."""
    digest = hashlib.sha256()
    for each in parameters:
        digest.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
