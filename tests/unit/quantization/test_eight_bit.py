"""Frozen 8-bit linears: numbers equal to a slow emulation, types change around them, state survives.

Legend: M rows, K in_features, N out_features. With LoRA, and by their noise, layers are in test_quantize.py.
"""

import importlib.util
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from devicebridge.quantization import eight_bit, eight_bit_kernels, kernel_choice
from devicebridge.quantization.eight_bit import ROTATIONS, grad_input8, linear8, make_rotation, quantize_rows, rotate
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.kernel_choice import KernelChoice, using_kernels
from devicebridge.tests.noise import decibels, gradient
from torch import nn

FP8, INT8 = "fp8-compute", "int8-compute"
COMPUTE = {FP8: torch.float8_e4m3fn, INT8: torch.int8}
VARIANTS = [(FP8, 0), (INT8, 0), (INT8, 64)]
EVERY_VARIANT = pytest.mark.parametrize(("scheme", "rotation"), VARIANTS, ids=["fp8", "int8", "int8 rotated"])
# (M, K, N): ordinary; wide as FLUX.2's fused projection; narrow; M odd, K and N multiples of 16 and of nothing more.
SHAPES = [(64, 256, 128), (48, 128, 1152), (96, 1024, 64), (33, 192, 208)]


def make_linear(num_in, num_out, dtype=torch.float32, bias=True, decades=2.5):
    torch.manual_seed(0)
    linear = nn.Linear(num_in, num_out, bias=bias, dtype=dtype)
    # Rows of different sizes, as trained layers have: a scale per tensor, or one applied to the wrong dim, would show.
    weight = torch.randn(num_out, num_in) * torch.logspace(-decades, 0, num_out)[torch.randperm(num_out), None]
    linear.weight.data = weight.to(dtype)
    return linear.requires_grad_(False)


def make_rows(num_rows, width, dtype=torch.float32, seed=1, decades=2.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, width, generator=generator)
    return (x * torch.logspace(-decades, 0, num_rows)[:, None]).to(dtype)


def round_slowly(rows: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: the nearest of all values of the type, ties to the even code. -> float64 values, scales [M, 1]"""
    largest = 448.0 if scheme == FP8 else 127.0
    amax = rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
    target = (rows * (largest / amax)).double()
    if scheme == FP8:
        codes = torch.arange(127, dtype=torch.uint8)  # 0 to 448; the code after it is NaN
        grid = codes.view(torch.float8_e4m3fn).double()
    else:
        grid = torch.arange(128).double()
    upper = torch.searchsorted(grid, target.abs()).clamp(1, len(grid) - 1)
    lower = upper - 1
    down, up = target.abs() - grid[lower], grid[upper] - target.abs()
    chosen = torch.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, lower)
    return grid[chosen] * target.sign(), (amax / largest).double()


@EVERY_VARIANT
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_grad_input_equal_a_slow_emulation(shape, scheme, rotation):
    rows, num_in, num_out = shape
    linear, x, grad = make_linear(num_in, num_out), make_rows(rows, num_in), make_rows(rows, num_out, seed=2)
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    turn = make_rotation(rotation) if rotation else None
    q, s = round_slowly(linear.weight if turn is None else rotate(linear.weight, turn), scheme)
    a, t = round_slowly(x if turn is None else rotate(x, turn), scheme)
    h, u = round_slowly(grad * s.float().view(-1), scheme)
    expected_out = (a @ q.T) * t * s.view(-1) + linear.bias.double()
    expected_grad = (h @ q) * u
    if turn is not None:
        expected_grad = rotate(expected_grad, turn.T)
    # float8 products leave torch in bfloat16 (half a step is 2^-9 to 2^-8) before the bias joins; the rest is float32.
    bound = 2**-7 if scheme == FP8 else 1e-5
    for expected, found in ((expected_out, layer(x)), (expected_grad, gradient(layer, x, grad))):
        size = expected.square().mean(1, keepdim=True).sqrt()
        assert ((found.double() - expected).abs() / torch.maximum(size, expected.abs())).max() < bound


@pytest.mark.parametrize("block", ROTATIONS)
def test_a_rotation_is_orthogonal_exact_and_spreads_outliers_and_means(block):
    turn = make_rotation(block)
    torch.testing.assert_close(turn @ turn.T, torch.eye(block), rtol=0, atol=1e-6)
    assert torch.equal(turn.abs(), torch.full((block, block), 1 / math.sqrt(block)))
    assert torch.equal(turn.bfloat16().float(), turn)
    mean = rotate(torch.ones(1, block), turn)
    assert mean.abs().max() <= math.sqrt(2) + 1e-6  # Rudin-Shapiro: |sum| <= sqrt(2 B), times 1 / sqrt(B)
    x = torch.randn(3, 2 * block)
    torch.testing.assert_close(rotate(rotate(x, turn), turn.T), x)


def test_a_rotation_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match="blocks of 64 does not divide 80 input features; use one of .0, 16."):
        FrozenLinear8.from_linear(make_linear(80, 16), INT8, rotation=64)
    with pytest.raises(ValueError, match="float8, which gains nothing by it"):
        FrozenLinear8.from_linear(make_linear(64, 16), FP8, rotation=64)
    with pytest.raises(ValueError, match="blocks of 32 was requested; use one of"):
        FrozenLinear8.from_linear(make_linear(64, 16), INT8, rotation=32)


@EVERY_VARIANT
@pytest.mark.parametrize("forward", ["vendor", "unit", "dequantize"])
@pytest.mark.parametrize("backward", ["transpose", "dequantize"])
def test_every_way_to_compute_agrees(forward, backward, scheme, rotation):
    """Also with slices so small that weights are taken in several."""
    linear, x, grad = make_linear(256, 128), make_rows(64, 256), make_rows(64, 128, seed=2)
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    parts, choices = (layer.weight, layer.scale), {layer.weight.dtype: KernelChoice(forward, backward)}
    with using_kernels(choices):
        out = linear8(x, *parts, layer.bias, layer.rotation)
        found = grad_input8(grad, *parts, layer.rotation)
    least = 28 if scheme == FP8 else 35
    assert decibels(linear(x), out) > least and decibels(grad @ linear.weight, found) > least
    with pytest.MonkeyPatch.context() as patch, using_kernels(choices):
        patch.setattr(eight_bit, "_PIECE", 48 * 128)
        patch.setattr(eight_bit, "_SLICE", 48 * 128)
        torch.testing.assert_close(linear8(x, *parts, layer.bias, layer.rotation), out)
        torch.testing.assert_close(grad_input8(grad, *parts, layer.rotation), found)


@EVERY_VARIANT
@pytest.mark.parametrize(
    "shape", [(0, 64, 32), (1, 64, 32), (16, 64, 32), (17, 64, 40), (40, 192, 30)], ids=lambda shape: str(shape)
)
def test_few_rows_and_odd_sizes_are_multiplied_plainly(shape, scheme, rotation, monkeypatch):
    for name in ("_int_mm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("CUDA refuses this shape"))
    rows, num_in, num_out = shape
    linear, x, grad = make_linear(num_in, num_out), make_rows(rows, num_in), make_rows(rows, num_out, seed=2)
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    plain = make_linear(num_in, num_out)
    plain.weight.data = layer.dequantize()
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient(layer, x, grad), grad @ plain.weight, rtol=1e-4, atol=1e-4)


def test_float64_and_sums_too_long_for_int32_are_multiplied_plainly(monkeypatch):
    monkeypatch.setattr(torch, "_int_mm", lambda *a, **k: pytest.fail("int32 could overflow"))
    layer = FrozenLinear8.from_linear(make_linear(eight_bit_kernels.MAX_INT8_TERMS // 16 * 16 + 16, 16), INT8)
    assert layer(torch.zeros(17, layer.in_features)).shape == (17, 16)
    assert FrozenLinear8.from_linear(make_linear(32, 32), INT8)(torch.zeros(20, 32).double()).dtype is torch.float64
    assert 127 * 127 * eight_bit_kernels.MAX_INT8_TERMS < 2**31 <= 127 * 127 * (eight_bit_kernels.MAX_INT8_TERMS + 1)


@EVERY_VARIANT
@pytest.mark.parametrize("forward", ["vendor", "unit"])
def test_the_shapes_and_layouts_cuda_demands(forward, scheme, rotation, monkeypatch):
    """The rules of the header, checked on what reaches torch in a forward and a backward, sliced and not."""
    calls = []

    def int_mm(a, b):
        calls.append("_int_mm")
        assert a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0
        assert a.is_contiguous() and b.stride(0) == 1
        return a.int() @ b.int()

    def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        calls.append("_scaled_mm")
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0 and out_dtype is torch.bfloat16
        assert a.stride(1) == 1 and a.stride(0) > 1 and b.stride(0) == 1 and b.stride(1) > 1
        assert scale_a.dtype is scale_b.dtype is torch.float32
        if forward == "unit":
            assert scale_a.shape == scale_b.shape == () and scale_a == scale_b == 1
        else:
            assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1])
            assert scale_a.is_contiguous() and scale_b.is_contiguous()
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    linear = make_linear(192, 96)
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    x, grad = make_rows(23, 192), make_rows(23, 96, seed=2)
    monkeypatch.setattr(eight_bit, "_SLICE", 32 * 96)
    with using_kernels({layer.weight.dtype: KernelChoice(forward, "transpose")}):
        assert decibels(grad @ linear.weight, gradient(layer, x, grad)) > 27
    assert calls == [{FP8: "_scaled_mm", INT8: "_int_mm"}[scheme]] * (1 + 192 // 32)


@EVERY_VARIANT
def test_leading_dims_and_strides_of_the_input_do_not_matter(scheme, rotation):
    layer = FrozenLinear8.from_linear(make_linear(64, 32), scheme, rotation=rotation)
    x = make_rows(40, 64)
    expected = layer(x)
    torch.testing.assert_close(layer(x.view(2, 5, 4, 64)), expected.view(2, 5, 4, 32), rtol=0, atol=0)
    torch.testing.assert_close(layer(x.t().contiguous().t()), expected, rtol=0, atol=0)
    wide = torch.cat([x, x], 1)
    torch.testing.assert_close(layer(wide[:, 64:]), expected, rtol=0, atol=0)
    torch.testing.assert_close(layer(x[3]), layer(x[3:4])[0], rtol=0, atol=0)
    assert layer(x[:0].view(0, 5, 64)).shape == (0, 5, 32)
    one = torch.ones(()).expand(40, 32)  # what sum().backward() hands on
    torch.testing.assert_close(gradient(layer, x, one), gradient(layer, x, one.contiguous()), rtol=0, atol=0)
    sliced = torch.cat([make_rows(40, 32, seed=2)] * 2, 1)[:, 32:]
    torch.testing.assert_close(gradient(layer, x, sliced), gradient(layer, x, sliced.contiguous()), rtol=0, atol=0)


@EVERY_VARIANT
def test_zero_rows_give_zeros_and_broken_rows_give_nan_there_alone(scheme, rotation):
    linear = make_linear(64, 32, bias=False)
    linear.weight[5] = 0
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    x, grad = make_rows(24, 64), make_rows(24, 32, seed=2)
    for rows in (x, grad):
        rows[3] = 0
        rows[4, 1], rows[6, 2], rows[8, 3] = torch.inf, torch.nan, -torch.inf
    for found_in, found in ((x, layer(x)), (grad, gradient(layer, x, grad))):
        assert found[3].eq(0).all()
        assert found[[4, 6, 8]].isnan().all()
        sound = [index for index in range(24) if index not in (4, 6, 8)]
        assert found[sound].isfinite().all()
        scale = quantize_rows(found_in, COMPUTE[scheme], rotation=None)[1].view(-1)
        assert scale.isnan().nonzero().view(-1).tolist() == [4, 6, 8]
    assert layer(x)[:4, 5].eq(0).all()
    clean = make_rows(24, 64)
    clean[3] = 0
    torch.testing.assert_close(layer(x)[:3], layer(clean)[:3], rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e-38, 1e-33, 1e-20, 1e20, 1e36])
@pytest.mark.parametrize("dtype", COMPUTE.values(), ids=COMPUTE)
def test_rows_of_any_size_are_rounded_without_overflow(dtype, size):
    values, scale = quantize_rows(torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * size, dtype)
    assert scale.isfinite().all() and scale.gt(0).all() and values.float().isfinite().all()
    if size >= 1e-30:
        torch.testing.assert_close(values.double() * scale.double(), torch.tensor([[1, -0.5, 0.25, 0]]).double() * size,
                                   rtol=0.02, atol=0)  # fmt: skip
    else:
        assert (values.double() * scale.double()).abs().max() <= 1.1 * size


@EVERY_VARIANT
def test_from_linear_leaves_the_linear_alone_and_halves_the_bytes(scheme, rotation):
    linear = make_linear(256, 128, torch.bfloat16)
    before = linear.weight.clone()
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    assert torch.equal(linear.weight, before) and layer.bias is linear.bias
    assert isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == (256, 128)
    assert type(layer.weight) is nn.Parameter and layer.weight.dtype is COMPUTE[scheme]
    assert not layer.weight.requires_grad and layer.weight.is_contiguous()
    assert layer.scale.dtype is torch.float32 and layer.scale.shape == (128, 1)
    assert layer.compute_dtype is torch.bfloat16 and not layer.packing
    assert decibels(before.float(), layer.dequantize().float()) > (30 if scheme == FP8 else 38)
    with pytest.raises(AssertionError, match="torch"):
        FrozenLinear8.from_linear(layer, scheme)


@EVERY_VARIANT
def test_types_change_around_the_eight_bit_parts(scheme, rotation):
    layer = FrozenLinear8.from_linear(make_linear(64, 32, torch.bfloat16), scheme, rotation=rotation)
    parts = {name: value.clone() for name, value in layer.state_dict().items() if name != "bias"}
    for change, dtype in (
        (lambda: layer.to(torch.float32), torch.float32), (lambda: layer.half(), torch.float16),
        (lambda: layer.to("cpu", torch.bfloat16), torch.bfloat16), (lambda: layer.double(), torch.float64),
    ):  # fmt: skip
        assert change() is layer
        assert layer.compute_dtype is layer.bias.dtype is dtype
        found = layer.state_dict()
        assert all(found[name].dtype is value.dtype and found[name].equal(value) for name, value in parts.items())
    layer.to("meta")
    assert {value.device.type for value in layer.state_dict().values()} == {"meta"}
    assert layer.weight.dtype is COMPUTE[scheme]
    layer.to_empty(device="cpu")
    assert layer.weight.dtype is COMPUTE[scheme] and layer.scale.dtype is torch.float32


class Model(nn.Module):
    """Two linears."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = make_linear(64, 96, dtype, decades=0.3)
        self.second = make_linear(96, 32, dtype, decades=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x / 8).to(next(self.second.parameters()).device)) * 3)


def convert(model: Model, scheme: str, rotation: int = 0) -> Model:
    model.first = FrozenLinear8.from_linear(model.first, scheme, rotation=rotation)
    model.second = FrozenLinear8.from_linear(model.second, scheme, rotation=rotation and 16)
    return model


def test_nothing_is_saved_for_the_backward():
    """Neither activations, nor weights that a hook would move to the host."""
    layer, saved = FrozenLinear8.from_linear(make_linear(64, 32), INT8), []
    x = make_rows(20, 64).requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = layer(x)
    assert saved == []
    out.sum().backward()
    assert x.grad is not None


@EVERY_VARIANT
def test_autocast_decides_the_type_as_for_a_plain_linear(scheme, rotation):
    linear = make_linear(64, 32)
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    x, grad = make_rows(20, 64).requires_grad_(True), make_rows(20, 32, torch.bfloat16, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        assert out.dtype is linear(x).dtype is torch.bfloat16
    torch.testing.assert_close(out, layer(x.bfloat16()), rtol=0, atol=0)
    out.backward(grad)
    assert x.grad.dtype is torch.float32
    assert decibels(grad.float() @ linear.weight, x.grad) > 27


@EVERY_VARIANT
def test_inference_mode_and_weights_made_in_it(scheme, rotation):
    x = make_rows(20, 64)
    expected = FrozenLinear8.from_linear(make_linear(64, 32), scheme, rotation=rotation)(x)
    with torch.inference_mode():
        layer = FrozenLinear8.from_linear(make_linear(64, 32), scheme, rotation=rotation)
        assert torch.equal(layer(x), expected)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    assert gradient(layer, x, torch.ones(20, 32)).isfinite().all()  # the weight is an inference tensor and still serves


@EVERY_VARIANT
def test_compiled_without_a_graph_break(scheme, rotation):
    torch._dynamo.reset()
    model = convert(Model(torch.float32), scheme, rotation)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (24, 24, 8):
        x, grad = make_rows(rows, 64), make_rows(rows, 32, seed=2)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(gradient(compiled, x, grad), gradient(model, x, grad), rtol=0, atol=0)
    torch._dynamo.reset()


def test_gradients_of_weights_and_second_derivatives_are_refused():
    layer = FrozenLinear8.from_linear(make_linear(64, 32), FP8)
    x = make_rows(20, 64).requires_grad_(True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    for parameter in (layer.weight, layer.bias):
        parameter.requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen linear in few bits was set to require a gradient"):
            layer(x)
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("arch", "fp8", "int8"),
    [("gfx1030", False, False), ("gfx90a", False, True), ("gfx942", False, True), ("gfx1100", False, True),
     ("gfx1201", True, True), ("gfx950", True, True)],
)  # fmt: skip
def test_amd_cards_that_lack_a_format_are_known(arch, fp8, int8, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=f"{arch}:x"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    faults = [kernel_choice.fault(dtype, torch.device("cuda:0")) for dtype in COMPUTE.values()]
    assert [fault == "" for fault in faults] == [fp8, int8]


@pytest.mark.parametrize(
    ("capability", "fault", "platform", "expected"),
    [
        ((9, 0), "", "linux", [("vendor", "transpose", True), ("triton", "transpose", True)]),
        ((10, 0), "", "linux", [("vendor", "transpose", True), ("triton", "transpose", True)]),
        ((8, 9), "", "linux", [("vendor", "triton", True), ("triton", "triton", True)]),
        ((8, 6), "", "linux", [("dequantize", "dequantize"), ("triton", "triton", True)]),
        ((8, 6), "no Triton", "linux", [("dequantize", "dequantize"), ("vendor", "dequantize")]),
        ((12, 0), "", "win32", [("unit", "triton", True), ("triton", "triton", True)]),
        ((12, 0), "no Triton", "win32", [("unit", "dequantize"), ("vendor", "dequantize")]),
    ],
)
def test_each_card_gets_kernels_it_has(capability, fault, platform, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(eight_bit_kernels, "fault", lambda device: fault)
    monkeypatch.setattr(kernel_choice.sys, "platform", platform)
    choose = kernel_choice.choose_kernels.__wrapped__  # past the cache, which is for real cards
    found = [choose(torch.device("cuda:0"), dtype) for dtype in COMPUTE.values()]
    assert found == [KernelChoice(*each) for each in expected]


def test_a_second_import_under_another_name_works():
    """The host imports the pack by its path, others by name; operators are registered once for the whole process."""
    spec = importlib.util.spec_from_file_location("eight_bit_again", eight_bit.__file__)
    again = importlib.util.module_from_spec(spec)
    again.__package__ = eight_bit.__package__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "eight_bit_again", again)
        spec.loader.exec_module(again)
        layer, x = convert(Model(torch.float32), INT8).first, make_rows(20, 64)
        parts = (layer.weight.detach(), layer.scale, layer.bias, layer.rotation)
        for module in (again, eight_bit):
            compiled = torch.compile(module.linear8_op, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x, *parts, ""), layer(x))
    torch._dynamo.reset()
