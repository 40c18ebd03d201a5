"""A LoRA that is held whole, and the slices of it that the trees of a divided model compute with (tensor_training.py).

All that travels between two devices is one flat copy: a LoRA has hundreds of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from .shard_trees import Slices
from .slices import Slice

# Of one parameter, what the devices have of it and of its gradient: a slice of both; all of it and a part of the sum
# that is its gradient; all of both.
_Share = Literal["slice", "sum", "same"]


@dataclass(frozen=True)
class _Trained:
    """One parameter of the LoRA.

    Args:
        whole: what the optimizer changes.
        own: of every device, in order. slices: of every device; None for all of it.
    """

    name: str
    whole: nn.Parameter
    own: tuple[nn.Parameter, ...]
    share: _Share
    slices: tuple[Slice | None, ...]

    def slice_of(self, rank: int) -> torch.Tensor:
        part = self.slices[rank]
        return self.whole.detach() if part is None else part.copied(self.whole.detach())

    def add(self, rank: int, gradient: torch.Tensor) -> None:
        """One device's gradient to the whole one's."""
        if self.whole.grad is None:
            self.whole.grad = torch.zeros_like(self.whole)
        target, part = self.whole.grad, self.slices[rank]
        if part is None:
            target.add_(gradient)
            return
        start = 0
        for first, last in part.ranges:
            length = last - first
            target.narrow(part.dim, first, length).add_(gradient.narrow(part.dim, start, length))
            start += length


class LoraSlices:
    """Keeps the trees' LoRAs equal to the whole one.

    Args:
        whole: trained parameters by name. own: of every device, those of its tree, by the same names.
        slices: of every device, of the base weights.
    Raises: ValueError if the trees train something else than the whole.
    """

    def __init__(
        self,
        whole: Mapping[str, nn.Parameter],
        own: Sequence[Mapping[str, nn.Parameter]],
        slices: Sequence[Slices],
    ) -> None:
        if any(each.keys() != whole.keys() for each in own):
            raise ValueError("the devices do not train the same parameters; attach the same LoRA to each tree")
        self._devices = [next(iter(each.values())).device for each in own]
        self._by_owner: dict[torch.device, list[_Trained]] = {}
        for name, parameter in whole.items():
            trained = _describe(name, parameter, tuple(each[name] for each in own), slices)
            self._by_owner.setdefault(parameter.device, []).append(trained)

    @torch.no_grad()
    def deal_out(self) -> None:
        """Give every tree its slices of the values."""
        for held in self._by_owner.values():
            for rank, device in enumerate(self._devices):
                flat = torch.cat([each.slice_of(rank).flatten() for each in held]).to(device)
                own = [each.own[rank] for each in held]
                for parameter, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
                    parameter.copy_(part.view(parameter.shape))

    @torch.no_grad()
    def bring_gradients(self) -> None:
        """Add the trees' gradients to those of the whole, one device after the other."""
        for owner, held in self._by_owner.items():
            for rank in range(len(self._devices)):
                given = [each for each in held if rank == 0 or each.share != "same"]
                self._bring(rank, owner, [each for each in given if each.own[rank].grad is not None])

    def _bring(self, rank: int, owner: torch.device, given: Sequence[_Trained]) -> None:
        gradients = [gradient for each in given if (gradient := each.own[rank].grad) is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(owner)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for each, gradient, part in zip(given, gradients, parts, strict=True):
            each.add(rank, part.view(gradient.shape))

    def drop_gradients(self) -> None:
        """Those of the trees."""
        for each in (each for held in self._by_owner.values() for each in held):
            for parameter in each.own:
                parameter.grad = None


def _describe(name: str, whole: nn.Parameter, own: tuple[nn.Parameter, ...], slices: Sequence[Slices]) -> _Trained:
    """Raises: ValueError for a parameter that is neither A nor B of a LoRA, or whose slices do not fit."""
    linear, _, rest = name.partition(".lora_")
    parts = tuple(each.get(f"{linear}.weight") for each in slices)
    first, share = parts[0], "same"  # type: Slice | None, _Share
    if first is not None:
        if rest.partition(".")[0] not in ("A", "B"):
            raise ValueError(f"nobody has described how {name} is divided among devices")
        share = "slice" if (first.dim == 1) == rest.startswith("A") else "sum"
    trained = _Trained(name, whole, own, share, parts if share == "slice" else (None,) * len(parts))
    for rank, parameter in enumerate(own):
        if trained.slice_of(rank).shape != parameter.shape:
            raise ValueError(f"{name} has the shape {list(parameter.shape)} on device {rank}, which is no slice of it")
    return trained
