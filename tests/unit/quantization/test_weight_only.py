"""Weight-only linears: rounded to the nearest value, gradients as if the weight were q * s.

Legend: M rows, K in_features, N out_features. FrozenLinear8, which multiplies in 8 bits, is in test_eight_bit.py.
Noise, files, copies and cards of every scheme are in test_quantize.py.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch._inductor.config as inductor
from devicebridge.quantization import weight_only
from devicebridge.quantization.weight_only import WEIGHT_ONLY, adopt, convert, values_and_scale
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.noise import gradient
from torch import nn

EVERY_SCHEME = pytest.mark.parametrize("scheme", WEIGHT_ONLY)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
LARGEST = {"fp8": 448.0, "int8": 127.5}


def make_linear(num_in: int, num_out: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(num_in, num_out, bias=bias, dtype=dtype)
    # Rows of different sizes, as trained layers have: a scale per tensor, or one on the wrong dim, would show.
    weight = torch.randn(num_out, num_in) * torch.logspace(-1.5, 0, num_out)[torch.randperm(num_out), None]
    linear.weight.data = weight.to(dtype)
    return linear.requires_grad_(False)


def make_rows(num_rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


def stored(linear: nn.Linear) -> torch.Tensor:
    """The weight in float64, from the plain tensors alone."""
    values, scale = values_and_scale(linear.weight)
    return values.to(torch.float32).double() * scale.double()


@EVERY_DTYPE
@EVERY_SCHEME
def test_every_value_is_the_nearest_of_its_type(scheme, dtype):
    linear = make_linear(64, 48, dtype)
    exact = linear.weight.detach().clone().double()
    assert convert(linear, scheme) is linear
    values, scale = values_and_scale(linear.weight)
    assert values.dtype is WEIGHT_ONLY[scheme] and values.shape == (48, 64) and values.is_contiguous()
    assert scale.dtype is torch.float32 and scale.shape == (48, 1)
    amax = exact.abs().amax(1, keepdim=True)  # torchao computes the scale in the weight's type
    torch.testing.assert_close(scale.double(), amax / LARGEST[scheme], rtol=torch.finfo(dtype).eps, atol=0)
    codes = torch.arange(256, dtype=torch.uint8).view(WEIGHT_ONLY[scheme]).to(torch.float32).double()
    grid = codes[codes.isfinite()].unique()
    target = exact / scale.double()
    best = (target[..., None] - grid).abs().amin(-1)
    # Ties, and targets that half precision made of near ties, may fall either way.
    assert ((values.to(torch.float32).double() - target).abs() <= best * (1 + 1e-3) + 2e-3).all()


@EVERY_SCHEME
def test_forward_and_backward_are_those_of_the_stored_weight(scheme):
    """Against float64: nothing but the weight is rounded."""
    linear, x, grad = convert(make_linear(80, 48), scheme), make_rows(20, 80), make_rows(20, 48, seed=2)
    weight = stored(linear)
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.T + linear.bias.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(gradient(linear, x, grad).double(), grad.double() @ weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear.weight.dequantize().double(), weight, rtol=1e-6, atol=0)


@EVERY_DTYPE
@EVERY_SCHEME
def test_rows_of_zeros_stay_zero(scheme, dtype):
    linear = make_linear(32, 4, dtype)
    linear.weight[1] = 0.0
    linear.bias.zero_()
    convert(linear, scheme)
    assert stored(linear)[1].eq(0).all() and stored(linear)[0].ne(0).any()
    assert values_and_scale(linear.weight)[1].gt(0).all()
    x = torch.ones(2, 32, dtype=dtype, requires_grad=True)
    linear(x).sum().backward()
    assert linear(x)[:, 1].eq(0).all() and linear(x).isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_a_dropped_layer_is_freed_without_the_garbage_collector(scheme):
    """Pieces of a layer that is loaded would else lie on the card until it runs."""
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    exact = weakref.ref(linear.weight)
    gc.disable()
    try:
        linear = convert(linear, scheme)
        held = [weakref.ref(each) for each in (linear, *values_and_scale(linear.weight))]
        del linear
        assert [each() for each in (exact, *held)] == [None] * 4
    finally:
        gc.enable()


@EVERY_SCHEME
def test_neither_way_in_moves_the_random_numbers_or_settings_of_the_process(scheme):
    with inductor.patch(coordinate_descent_tuning=False, force_fuse_int_mm_with_mul=False):
        linear, state, precision = make_linear(64, 48), torch.get_rng_state(), torch.get_float32_matmul_precision()
        values, scale = values_and_scale(convert(linear, scheme).weight)
        adopt(linear, scheme, values, scale, torch.float32)
        assert torch.equal(torch.get_rng_state(), state)
        assert not inductor.coordinate_descent_tuning and not inductor.force_fuse_int_mm_with_mul
        assert torch.get_float32_matmul_precision() == precision


@EVERY_SCHEME
def test_a_layer_is_converted_and_adopted_on_its_card(scheme):
    expected = stored(convert(make_linear(64, 48), scheme))
    with emulated_cards():
        layer = convert(make_linear(64, 48).to(CARDS[1]), scheme)
        values, scale = values_and_scale(layer.weight)
        second = adopt(nn.Linear(64, 48, bias=False, device="meta"), scheme, values, scale, torch.float32)
        for parts in (values_and_scale(layer.weight), values_and_scale(second.weight)):
            assert {part.device for part in parts} == {CARDS[1]}
            assert torch.equal(on_cpu(parts[0]).to(torch.float32).double() * on_cpu(parts[1]).double(), expected)
        x = make_rows(20, 64).to(CARDS[1])
        torch.testing.assert_close(on_cpu(second(x)), on_cpu(layer(x) - layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY_SCHEME
def test_rounding_in_pieces_gives_the_same_bits(scheme, dtype, monkeypatch):
    """A large weight is rounded some rows at a time; the last piece here is a smaller one, and one row is zero."""

    def converted() -> nn.Linear:
        linear = make_linear(64, 50, dtype)
        linear.weight.data[7] = 0
        return convert(linear, scheme)

    whole = converted()
    monkeypatch.setattr(weight_only, "_PIECE", 64 * 16 + 5)
    pieces = converted()
    for a, b in zip(values_and_scale(whole.weight), values_and_scale(pieces.weight), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    x, grad = make_rows(20, 64).to(dtype), make_rows(20, 50, seed=2).to(dtype)
    assert torch.equal(whole(x), pieces(x)) and torch.equal(gradient(whole, x, grad), gradient(pieces, x, grad))
    assert not any(parameter.requires_grad for parameter in pieces.parameters())


@EVERY_SCHEME
def test_compiled_without_a_graph_break(scheme):
    torch._dynamo.reset()
    layer, x, grad = convert(make_linear(64, 48), scheme), make_rows(20, 64), make_rows(20, 48, seed=2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(gradient(compiled, x, grad), gradient(layer, x, grad))
    torch._dynamo.reset()


def test_an_unknown_torchao_is_refused(monkeypatch):
    monkeypatch.setattr(weight_only.import_torchao(), "quantize_", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match=r"left a linear without int8 values; torchao .* is unknown"):
        convert(make_linear(64, 48), "int8")
