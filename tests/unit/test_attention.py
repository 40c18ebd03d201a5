"""Gradients of attention whose kernel was planned for another layout. Torch's cache of plans is emulated on the CPU:
it knows the layout of the first gradient that came and reads every other with its strides."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from devicebridge.patches import attention
from devicebridge.patches.attention import sound_attention
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.job import run_job

B, N, S, T, H = 2, 6, 20, 28, 16
NAME = "aten::_scaled_dot_product_cudnn_attention_backward"


class _Planned:
    """Torch's kernel: by definition, but for the layout that it takes the gradient to have."""

    def __init__(self):
        self.strides, self.layouts = {}, []

    def __call__(self, grad, query, key, value, out, *rest, scale=None):
        plan = tuple((each.shape, each.stride()) for each in (query, key, value))
        strides = self.strides.setdefault(plan, grad.stride())
        self.layouts.append(grad.stride())
        memory = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
        reach = grad.storage_offset() + sum((n - 1) * s for n, s in zip(grad.shape, strides, strict=True)) + 1
        memory = torch.cat([memory, torch.randn(max(0, reach - memory.numel())).to(grad.dtype)])  # the neighbour's
        read = memory.as_strided(grad.shape, strides, grad.storage_offset())
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in (query, key, value)]
            return torch.autograd.grad(_attend(*inputs, rest[3], scale), inputs, read)


def _attend(query, key, value, bias=None, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)


@pytest.fixture
def planned(monkeypatch):
    found = _Planned()
    monkeypatch.setattr(torch.ops.aten, "_cudnn_attention_backward", found)
    monkeypatch.setattr(attention, "_right_plans", set())
    return found


def _make(bias=False, scale=None):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, S, N, H), (B, T, N, H), (B, T, N, H)
    inputs = [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]
    mask = torch.randn(1, 1, S, T, generator=generator) if bias else None
    grad = torch.randn(B, S, N * H + 24, generator=generator)[..., : N * H].unflatten(-1, (N, H)).transpose(1, 2)
    out = torch.empty_like(inputs[0]).copy_(_attend(*inputs, mask, scale).detach())
    rows = grad.transpose(1, 2).contiguous().transpose(1, 2)
    return inputs, out, mask, {"slice": grad, "heads": grad.contiguous(), "rows": rows}


def _call(kernel, inputs, out, mask, grad, scale=None, dropout_p=0.0):
    plain = [each.detach() for each in inputs]
    return kernel(grad, *plain, out, *[None] * 3, mask, None, None, S, T, dropout_p, False, scale=scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients_are_right_whatever_layout_came_before(planned, bias, scale):
    inputs, out, mask, grads = _make(bias, scale)
    expected = torch.autograd.grad(_attend(*inputs, mask, scale), inputs, grads["heads"])
    for name in ("slice", "heads", "rows", "slice"):
        found = _call(attention._backward, inputs, out, mask, grads[name], scale)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert set(planned.layouts) == {out.stride()}


def test_the_emulated_cache_is_wrong_without(planned):
    inputs, out, mask, grads = _make()
    expected = torch.autograd.grad(_attend(*inputs), inputs, grads["heads"])
    first, second = (_call(planned, inputs, out, mask, grads[name])[0] for name in ("slice", "heads"))
    torch.testing.assert_close(first, expected[0])
    assert (second - expected[0]).norm() > 0.5 * expected[0].norm()


@pytest.mark.parametrize("name", ["slice", "heads"])
def test_a_plan_that_somebody_left_behind_ends_the_run_at_its_first_gradient(planned, name):
    inputs, out, mask, grads = _make()
    _call(planned, inputs, out, mask, grads[name])
    with pytest.raises(RuntimeError, match="wrong gradient.*Restart ComfyUI"):
        _call(attention._backward, inputs, out, mask, grads["rows"])


def test_each_plan_is_compared_once(planned, monkeypatch):
    inputs, out, mask, grads = _make()
    calls = []
    monkeypatch.setattr(attention, "_is_right", lambda *given: not calls.append(given))
    for _ in range(2):
        _call(attention._backward, inputs, out, mask, grads["rows"])
    assert len(calls) == 1
    others = [each.detach().contiguous() for each in inputs]  # same sizes, other strides
    _call(attention._backward, others, out, mask, grads["rows"])
    assert len(calls) == 2


def test_with_dropout_nothing_can_be_compared(planned, monkeypatch):
    inputs, out, mask, grads = _make()
    monkeypatch.setattr(attention, "_is_right", lambda *given: pytest.fail("compared"))
    _call(attention._backward, inputs, out, mask, grads["rows"], dropout_p=0.1)


def test_a_gradient_that_lies_as_the_output_does_is_not_copied():
    _, out, _, grads = _make()
    assert attention._in_layout_of(out, grads["rows"]) is grads["rows"]
    moved = torch.empty(out.numel() + 1)[1:].view(B, S, N, H).transpose(1, 2)
    assert moved.stride() == out.stride() and moved.data_ptr() % 16
    copied = attention._in_layout_of(out, moved)
    assert copied.data_ptr() % 16 == 0 and copied.stride() == out.stride() and torch.equal(copied, moved)


def test_a_row_of_zeros_is_right():
    """A loss that masks everything away has such gradients."""
    inputs, out, mask, grads = _make()
    nothing = torch.zeros_like(out)
    assert attention._is_right(nothing, nothing, *[each.detach() for each in inputs], out, mask, None)
    wrong = torch.full_like(nothing, math.nan)
    assert not attention._is_right(wrong, grads["rows"], *[each.detach() for each in inputs], out, mask, None)


# ---- while it is on


def _kernel():
    lines = torch._C._dispatch_dump(NAME).splitlines()
    return next((line for line in lines if line.startswith("CUDA:")), "")


def test_torchs_kernel_is_replaced_inside_and_back_afterwards():
    before = _kernel()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sound_attention():
            inside = _kernel()
            with sound_attention():
                assert _kernel() == inside
            assert _kernel() == inside
    assert inside != before == _kernel()
    with pytest.raises(ZeroDivisionError), sound_attention():
        raise ZeroDivisionError
    assert _kernel() == before


def test_a_torch_without_the_kernel_does_without_cudnn(monkeypatch):
    class Older:
        pass

    monkeypatch.setattr(torch.ops, "aten", Older())
    found = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for is_allowed in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(is_allowed)
            with sound_attention():
                assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.cudnn_sdp_enabled() is is_allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(found)


def test_whatever_a_run_computes_with_a_graph_has_our_kernel_and_afterwards_nothing_has(tmp_path, monkeypatch):
    attend, before = torch.nn.functional.scaled_dot_product_attention, _kernel()
    was_ours = []

    def watch(query, *args, **kwargs):
        if query.requires_grad:
            was_ours.append(_kernel() != before)
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    run_job(make_tiny_job(tmp_path, "flux1", train={"steps": 2}))
    assert was_ours and all(was_ours)
    assert _kernel() == before
