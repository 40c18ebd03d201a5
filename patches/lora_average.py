"""The exponential moving average (EMA) of a LoRA: what it was over the last steps, with less of each one's noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_PREFIX = "ema."


class LoraAverage:
    """The average of a LoRA's parameters, in float32 beside them.

    Args:
        parameters: by name, as the optimizer changes them.
        decay: share of the average that a step keeps. The first steps keep less, min(decay, (1 + t) / (10 + t)), so
            that the fresh LoRA is soon forgotten.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = dict(parameters), decay
        self._values = {name: each.detach().float().clone() for name, each in parameters.items()}
        self._by_device: dict[torch.device, list[str]] = {}  # foreach takes tensors of one
        for name, each in parameters.items():
            self._by_device.setdefault(each.device, []).append(name)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after this step, counted from 1."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        for names in self._by_device.values():
            now = [self._parameters[name].detach().float() for name in names]
            torch._foreach_lerp_([self._values[name] for name in names], now, weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters are the average."""
        trained = {name: each.detach().clone() for name, each in self._parameters.items()}
        try:
            self._set(self._values)
            yield
        finally:
            self._set(trained)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Tensor]) -> None:
        for name, each in self._parameters.items():
            each.copy_(values[name])

    def tensors(self) -> dict[str, Tensor]:
        """The average on the CPU, by "ema.<name>"."""
        return {f"{_PREFIX}{name}": each.cpu() for name, each in self._values.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put saved ones back, bit for bit. Raises: ValueError if they are of other parameters."""
        expected = {f"{_PREFIX}{name}": each for name, each in self._values.items()}
        if {name: each.shape for name, each in tensors.items()} != {
            name: each.shape for name, each in expected.items()
        }:
            raise ValueError("the saved average is not of this LoRA")
        for name, each in expected.items():
            each.copy_(tensors[name])


def split_average(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's LoRA, and the average that lies beside it."""
    average = {name: each for name, each in tensors.items() if name.startswith(_PREFIX)}
    return {name: each for name, each in tensors.items() if name not in average}, average
