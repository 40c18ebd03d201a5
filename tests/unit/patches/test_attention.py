"""Gradients of attention whose kernel was planned for another layout. Torch's cache of plans is emulated on the CPU:
it knows the layout of the first gradient that came and reads every other with its strides."""

import math
import threading
import warnings

import pytest
import torch
from devicebridge.jobs.job import run_job
from devicebridge.patches import attention
from devicebridge.patches.attention import sound_attention
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.loop import Trainer

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


def _call(kernel, inputs, out, mask, grad, scale=None, dropout=0.0, causal=False):
    plain = [each.detach() for each in inputs]
    return kernel(grad, *plain, out, *[None] * 3, mask, None, None, S, T, dropout, causal, scale=scale)


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


@pytest.mark.parametrize("what", ["dropout", "causal"])
def test_what_cannot_be_compared_is_not_and_proves_nothing(planned, monkeypatch, what):
    inputs, out, mask, grads = _make()
    calls = []
    monkeypatch.setattr(attention, "_is_right", lambda *given: not calls.append(given))
    _call(attention._backward, inputs, out, mask, grads["rows"], **{what: 1})
    assert not calls
    _call(attention._backward, inputs, out, mask, grads["rows"])
    assert len(calls) == 1


def test_whatever_torch_has_a_plan_of_its_own_for_is_compared_anew(planned, monkeypatch):
    """Layouts, the output's too; bias; number type."""
    inputs, out, mask, grads = _make(bias=True)
    calls = []
    monkeypatch.setattr(attention, "_is_right", lambda *given: not calls.append(given))

    def call(inputs=inputs, out=out, mask=mask):
        before = len(calls)
        _call(attention._backward, inputs, out, mask, grads["rows"].to(out.dtype))
        return len(calls) - before

    def half(tensor):
        return tensor.detach().bfloat16()

    assert [call(), call()] == [1, 0]
    assert [call(mask=None), call(mask=None)] == [1, 0]
    assert [call(mask=mask.expand(B, N, S, T).contiguous())] == [1]
    assert [call(out=out.contiguous())] == [1]
    assert [call([inputs[0].detach().contiguous(), *inputs[1:]])] == [1]
    assert [call([*map(half, inputs)], half(out), half(mask))] == [1]
    ran = []
    other = threading.Thread(target=lambda: ran.append(call()))
    other.start()
    other.join()
    assert ran == [1] and call() == 0


def test_a_gradient_that_lies_as_the_output_does_is_not_copied():
    _, out, _, grads = _make()
    assert attention._in_layout_of(out, grads["rows"]).data_ptr() == grads["rows"].data_ptr()
    moved = torch.empty(out.numel() + 1)[1:].view(B, S, N, H).transpose(1, 2)
    assert moved.stride() == out.stride() and moved.data_ptr() % 16
    copied = attention._in_layout_of(out, moved)
    assert copied.data_ptr() % 16 == 0 and copied.stride() == out.stride() and torch.equal(copied, moved)


def test_of_a_single_sample_the_strides_are_the_outputs_to_the_letter():
    out = torch.randn(1, S, N, H).transpose(1, 2)
    grad = torch.randn(S, N, H).transpose(0, 1).expand(1, N, S, H)
    assert grad.stride() != out.stride()
    same = attention._in_layout_of(out, grad)
    assert same.stride() == out.stride() and same.data_ptr() == grad.data_ptr() and torch.equal(same, grad)


def _judge(inputs, out, grad, found, mask=None, scale=None):
    return attention._is_right(found, grad, *[each.detach() for each in inputs], out, mask, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_ones_are_right_and_ones_that_are_half_off_are_wrong(dtype):
    inputs, out, _, grads = _make()
    inputs = [each.detach().to(dtype).requires_grad_() for each in inputs]
    grad, out = grads["rows"].to(dtype), out.to(dtype)
    right = torch.autograd.grad(_attend(*inputs, None), inputs, grad)[0]
    assert _judge(inputs, out, grad, right) is True
    assert _judge(inputs, out, grad, 1.05 * right) is True
    assert _judge(inputs, out, grad, 1.5 * right) is False
    assert _judge(inputs, out, grad, torch.full_like(right, math.nan)) is False


def test_fewer_heads_of_keys_than_of_queries():
    inputs, _, _, grads = _make()
    few = [inputs[0], *(each.detach()[:, : N // 3].requires_grad_() for each in inputs[1:])]
    wide = [few[0], *(each.repeat_interleave(3, dim=1) for each in few[1:])]
    right = torch.autograd.grad(_attend(*wide), few, grads["rows"])[0]
    out = _attend(*wide).detach()
    assert _judge(few, out, grads["rows"], right) is True
    assert _judge(few, out, grads["rows"], -right) is False


@pytest.mark.parametrize("factor", [0.0, math.nan, math.inf])
def test_nothing_and_what_is_not_finite_cannot_tell(planned, factor):
    """A loss that is not finite is the training loop's to report; zeros are right whatever is read."""
    inputs, out, mask, grads = _make()
    useless = factor * grads["rows"]
    assert _judge(inputs, out, useless, useless) is None
    _call(attention._backward, inputs, out, mask, useless)
    assert not attention._right_plans
    _call(attention._backward, inputs, out, mask, grads["rows"])
    assert len(attention._right_plans) == 1


@pytest.mark.parametrize("what", ["values", "keys and values", "itself"])
def test_where_everything_cancels_it_cannot_tell(what):
    inputs, _, _, grads = _make()
    q, k, v = (each.detach().clone() for each in inputs)
    if what == "itself":  # scores so far apart that each query attends to one key
        q, k = 30 * k[:, :, :S], 30 * k
    else:
        v[:] = v[:, :, :1]
        k[:] = k[:, :, :1] if what == "keys and values" else k
    other = torch.randn_like(q)
    assert _judge([q, k, v], _attend(q, k, v), grads["rows"], other) is None


def test_a_plan_left_behind_is_found_though_the_first_gradient_is_zero_for_half_of_the_tokens(planned):
    """A text's outputs in the last block, which nothing reads."""
    inputs, out, mask, grads = _make()
    _call(planned, inputs, out, mask, grads["heads"])
    half = grads["rows"].clone()
    half[:, :, : S // 2 + 4] = 0
    with pytest.raises(RuntimeError, match="wrong gradient"):
        _call(attention._backward, inputs, out, mask, half)


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


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_torch_without_the_kernel_does_without_cudnn(monkeypatch, is_allowed):
    monkeypatch.setattr(attention, "_HAS_KERNEL", False)
    found, allowed = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled
    try:
        torch.backends.cuda.enable_cudnn_sdp(is_allowed)
        one, other = sound_attention(), sound_attention()
        one.__enter__()
        other.__enter__()
        one.__exit__(None, None, None)  # not in the order they came
        assert not allowed()
        other.__exit__(None, None, None)
        assert allowed() is is_allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(found)


def test_such_a_torch_trains_and_evaluates_without_cudnn(tmp_path, monkeypatch):
    """What has no graph makes no gradients, but must be computed by the kernel that training has."""
    monkeypatch.setattr(attention, "_HAS_KERNEL", False)
    inside, was_allowed = [], {"train_step": [], "evaluate": []}
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(*args, **kwargs):
        for name in inside:
            was_allowed[name].append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    def noted(name, method):
        def call(self, *args):
            inside.append(name)
            try:
                return method(self, *args)
            finally:
                inside.pop()

        return call

    for name in was_allowed:
        monkeypatch.setattr(Trainer, name, noted(name, getattr(Trainer, name)))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    found = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        run_job(make_tiny_job(tmp_path, "flux1", train={"steps": 1}))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(found)
    assert all(was_allowed.values()) and not any(sum(was_allowed.values(), []))
