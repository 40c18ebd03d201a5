"""Whether compiled blocks compute what uncompiled ones do: outputs, and gradients of inputs and LoRA, block by block.

Equal they are not: a compiler rounds at other places, and what is then rounded to 8 bits may fall to another side.
Through 56 blocks that grows until nothing can be told (FLUX.2 with random weights: 0.67 of a gradient's length in
fp8-compute, docs/experiments.md). So every block is compared alone: the inputs that it has in the model, the same
random gradient of its outputs. How far rounding explains a difference is measured, too, by a second pass through the
uncompiled block whose inputs and gradient are off by as much as their type rounds them. A block that loses a gradient
anywhere, or passes on another one, is further off than that.

A block adds to what passes it by, its input and the gradient of its output. Only what it adds is compared: in deep
models the rest is many times larger and would hide it. Of large tensors a part is looked at, taken evenly from all
over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..patches.hooks import map_tensors

# A compiled block may be off by so much, and by so many times what a block is whose inputs are rounded otherwise.
# Measured on H200: up to 0.007 (tests/gpu/test_compiled_on_gpus.py).
_LEAST, _TIMES = 0.02, 4.0
_MOST_VALUES = 2**18  # of a tensor that are compared: 1 MiB

Forward = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Of the tensor of a block that is the furthest off for what rounding explains.

    Args:
        name: of the tensor.
        difference: |compiled - plain| / |plain|; infinite for one that has values where the other has zeros, or that is
            not finite.
        explained: what such a difference may be.
    """

    name: str
    difference: float
    explained: float

    @property
    def excess(self) -> float:
        """How many times as far off as rounding explains; above 1 something is wrong."""
        return self.difference / self.explained

    def __str__(self) -> str:
        return f"{self.name} is off by {self.difference:.3g}, rounding explains {self.explained:.2g}"


class BlockCheck:
    """Compares every block that is called (patches/compile_blocks.py, CompiledBlocks.watched), from any thread.

    Where memory does not suffice it compares nothing more.

    Args:
        names: of all blocks.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.found: list[Comparison] = []
        self.is_short_of_memory = False
        self._names = names

    def __call__(self, block: nn.Module, compiled: Forward, plain: Forward, arguments: Arguments) -> None:
        if self.is_short_of_memory:
            return
        trained = {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
        try:
            comparison = compare_forwards(compiled, plain, arguments, trained)
        except torch.cuda.OutOfMemoryError:
            self.is_short_of_memory = True
            return
        if comparison is not None:
            self.found.append(replace(comparison, name=f"{self._names[block]}, {comparison.name}"))

    @property
    def worst(self) -> Comparison | None:
        """Which rounding explains least; None if nothing was compared."""
        return max(self.found, key=lambda each: each.excess, default=None)


def compare_forwards(
    compiled: Forward, plain: Forward, arguments: Arguments, trained: Mapping[str, nn.Parameter]
) -> Comparison | None:
    """Run a block's two forwards, and backwards where gradients are on; None if nothing it gives is finite.

    The arguments, the parameters' gradients and the caller's graph are left alone; numbers are drawn from the device's
    generator.

    Args:
        trained: the block's parameters that train.
    """
    directions: list[torch.Tensor] = []
    expected = _results(plain, arguments, trained, directions)
    again = _results(
        plain, map_tensors(arguments, _rounded_otherwise), trained, [_rounded_otherwise(d) for d in directions]
    )
    found = _results(compiled, arguments, trained, directions)
    comparisons = [_compare(name, found[name], again[name], expected[name]) for name in expected]
    known = [each for each in comparisons if each is not None]
    return max(known, key=lambda each: each.excess, default=None)


def _results(
    forward: Forward, arguments: Arguments, trained: Mapping[str, nn.Parameter], directions: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a forward gives, and where gradients are on what its backward does, as samples by name.

    Args:
        directions: gradients of the outputs that have one; drawn if empty.
    """
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    args, named = map_tensors(
        arguments, lambda tensor: _noted(tensor.detach().requires_grad_(tensor.requires_grad), inputs)
    )
    map_tensors(forward(*args, **named), lambda output: _noted(output, outputs))
    found = {f"output {index}": _added(output, inputs) for index, output in enumerate(outputs)}
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs:
        return found
    if not directions:
        directions += [torch.randn_like(output) for output in outputs]
    leaves = {f"the gradient of input {index}": leaf for index, leaf in enumerate(inputs) if leaf.requires_grad}
    leaves |= {f"the gradient of {name}": parameter for name, parameter in trained.items()}
    gradients = torch.autograd.grad(outputs, list(leaves.values()), directions, allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[name] = _added(torch.zeros_like(leaf) if gradient is None else gradient, directions)
    return found


def _noted(tensor: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
    into.append(tensor)
    return tensor


def _added(tensor: torch.Tensor, passed: list[torch.Tensor]) -> torch.Tensor:
    """A sample of it, less the first of its size among what may have passed by."""
    by = next((each for each in passed if each.shape == tensor.shape and each.is_floating_point()), None)
    return _sample(tensor) if by is None else _sample(tensor) - _sample(by)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most so many values, in float32, of all rows and columns."""
    step = -(-tensor.numel() // _MOST_VALUES) | 1  # odd, so that it is no multiple of a row
    return tensor.detach().flatten()[::step].float()


def _rounded_otherwise(tensor: torch.Tensor) -> torch.Tensor:
    """Off by up to the distance of two neighbouring values."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand_like(tensor).mul_(2).sub_(1).mul_(torch.finfo(tensor.dtype).eps)
    return noise.add_(1).mul_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _compare(name: str, found: torch.Tensor, again: torch.Tensor, expected: torch.Tensor) -> Comparison | None:
    """None where the expected values are not finite."""
    length, off = expected.norm().item(), (found - expected).norm().item()
    if not math.isfinite(length):
        return None
    noise = (again - expected).norm().item()
    noise = noise if math.isfinite(noise) else 0.0
    scale = length or noise  # of a block that adds less than its output's type can hold
    is_lost = length > noise and not found.any()
    if not scale or is_lost or not math.isfinite(off):
        return Comparison(name, math.inf if off else 0.0, _LEAST)
    return Comparison(name, off / scale, _LEAST + _TIMES * noise / scale)
