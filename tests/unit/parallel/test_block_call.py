"""Calls with keywords, and results of any form, computed again for the backward as if they were plain."""

import weakref

import pytest
import torch
from devicebridge.parallel.offload.recompute import checkpoint_calls, recompute
from devicebridge.tests.toy import slopes
from torch import nn

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """Called as ComfyUI calls its own: tensors by position and by keyword, and an object that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.seen: list[object] = []

    def forward(self, x, context=None, *, scale, options=None):
        self.seen.append(options)
        out = torch.tanh(self.linear(x)) * scale
        return None, {"x": out if context is None else out + context.sin(), "steps": 3}


def _recompute(call, *values):
    return recompute(call, values, CPU)


def _inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, dtype=torch.float64, generator=generator) for _ in range(3)]


def _run(block, x, context, scale, options):
    nothing, rest = block(x, context=context, scale=scale, options=options)
    assert nothing is None and rest["steps"] == 3
    return rest["x"].square().sum()


def _made():
    torch.manual_seed(2)
    return Block()


def test_gradients_are_central_differences():
    block = _made()
    checkpoint_calls([block], _recompute, ("options",))
    tensors = _inputs()
    wanted = [*(tensor.requires_grad_() for tensor in tensors), block.linear.weight]
    _run(block, *tensors, {}).backward()
    plain = _made()
    expected = slopes(lambda: _run(plain, *tensors, {}), [*tensors, plain.linear.weight])
    for each, slope in zip(wanted, expected, strict=True):
        torch.testing.assert_close(each.grad, slope, rtol=1e-6, atol=1e-7)


def test_the_block_is_computed_twice_with_its_hooks_and_the_same_shared_object():
    block, options, calls = _made(), {"block": 1}, []
    block.register_forward_hook(lambda *args: calls.append(args))
    checkpoint_calls([block], _recompute, ("options",))
    tensors = [tensor.requires_grad_() for tensor in _inputs()]
    _run(block, *tensors, options).backward()
    assert len(block.seen) == len(calls) == 2 and all(each is options for each in block.seen)


def test_a_second_time_wraps_no_second_time():
    block = _made()
    cls = type(block)
    for _ in range(2):
        checkpoint_calls([block], _recompute, ("options",))
    assert type(block).__mro__[1] is cls and type(block).__name__ == "Block" and isinstance(block, Block)


def test_what_waits_in_host_memory_is_nowhere_else():
    """Autograd holds the call itself until a backward has ended."""
    block, calls, held = _made(), [], []

    def checkpoint(call, *values):
        calls.append(call)
        held.extend(map(weakref.ref, values))
        return call(*(value.clone() for value in values))  # as a store gives them back

    checkpoint_calls([block], checkpoint, ("options",))
    output = _run(block, *(tensor.requires_grad_() * 1 for tensor in _inputs()), {})
    assert calls and output.requires_grad
    assert len(held) == 3 and not any(each() is not None for each in held)
