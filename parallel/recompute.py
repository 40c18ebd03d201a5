"""Blocks that are computed again for the backward, instead of keeping their activations (gradient checkpointing).

torch.utils.checkpoint does this for any code, with Python hooks on every saved tensor; where the host is the bottleneck
that costs some per cent of a step, and its care for random numbers sets the CPU's generator, which all threads share.
Here a block is one autograd node: forward without a graph, and in the backward once more with one, run at once.

Random numbers (dropout) come out as the first time: generators that the first forward advanced are set back for the
second and then restored. Those of other devices than the block's and the CPU's are not looked at.

Only tensors among the positional arguments get gradients, at any depth; outputs are a tensor or a tuple of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import once_differentiable

from ..patches.hooks import map_tensors
from .devices import random_states, restore_random_states

_SEAT = torch.empty(0)  # stands where a tensor was


def recompute(block: nn.Module, args: tuple[Any, ...], device: torch.device) -> Any:
    """What block(*args) returns, its activations not kept.

    Args:
        device: of the block and of all tensors in args.
    Raises: TypeError if the block returns something else than a tensor or a tuple of tensors.
    """
    if not torch.is_grad_enabled():
        return block(*args)
    if torch.is_autocast_enabled(device.type) if torch.amp.is_autocast_available(device.type) else False:
        return torch.utils.checkpoint.checkpoint(block.__call__, *args, use_reentrant=False)
    tensors: list[torch.Tensor] = []

    def seat(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return _SEAT

    seats = map_tensors(args, seat)
    anchor = None
    if not any(tensor.requires_grad for tensor in tensors):
        if not any(parameter.requires_grad for parameter in block.parameters()):
            return block(*args)
        anchor = torch.empty(0, device=device, requires_grad=True)  # else autograd would see nothing to do
    return _Recomputed.apply(anchor, block, device, seats, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        block: nn.Module,
        device: torch.device,
        seats: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.block, ctx.seats = block, seats
        ctx.save_for_backward(*tensors)
        before = random_states([device])
        output = block(*_fill(seats, tensors))
        after = random_states([device])
        ctx.random = {name: state for name, state in before.items() if not torch.equal(state, after[name])}
        return _checked(output, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in saved]
        with torch.enable_grad(), _replayed(ctx.random):
            output = ctx.block(*_fill(ctx.seats, inputs))
        outputs = output if isinstance(output, tuple) else (output,)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return (None, None, None, None, *(tensor.grad for tensor in inputs))


def _fill(seats: Any, tensors: Any) -> Any:
    """The arguments, with these tensors in their seats."""
    remaining = iter(tensors)
    return map_tensors(seats, lambda seat: next(remaining))


def _checked(output: Any, block: nn.Module) -> Any:
    parts = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise TypeError(
            f"{type(block).__name__} returns {type(output).__name__} with something else than tensors; gradient "
            "checkpointing needs a tensor or a tuple of tensors. Switch it off for this model"
        )
    return output


@contextmanager
def _replayed(states: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside, these generators stand as then; outside, nothing has happened."""
    if not states:
        yield
        return
    devices = [torch.device(name) for name in states if name != "cpu"]
    now = {name: state for name, state in random_states(devices).items() if name in states}
    restore_random_states(states)
    try:
        yield
    finally:
        restore_random_states(now)
