"""Triton kernels against plain torch and float64: in Triton's interpreter on the CPU, or on a card.

    TRITON_INTERPRET=1 python -m pytest tests/unit/quantization/test_eight_bit_kernels.py

Legend: M rows, I the contracted dim, J columns.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devicebridge.quantization import eight_bit
from devicebridge.quantization import eight_bit_kernels as kernels
from devicebridge.quantization.eight_bit import grad_input8, linear8, make_rotation
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.kernel_choice import KernelChoice, using_kernels

DTYPES = [torch.float8_e4m3fn, torch.int8]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["fp8", "int8"])


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not kernels.is_interpreted() else "cpu")


@pytest.fixture
def triton_works():
    if reason := kernels.fault(device()):
        pytest.skip(f"needs Triton on a CUDA device, or Triton and TRITON_INTERPRET=1: {reason}")


needs_triton = pytest.mark.usefixtures("triton_works")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


def random8(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (random(*shape, seed=seed) * 40).clamp(-120, 120).round().to(dtype)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for ties: at most one step apart in few places. A card contracts multiply and add, so a value within
    an ulp of a tie may fall either way. Triton 3.6's interpreter rounds float8 half up instead of half to even, and
    halves what is rounded up to a power of two."""
    is_float8, found, expected = found.dtype.is_floating_point, found.float(), expected.float()
    if kernels.is_interpreted() and is_float8:
        is_power = expected.abs().log2().frac() == 0
        found = torch.where(is_power & (found * 2 == expected), expected, found)
    step = expected.abs() / 8 + 2**-9 if is_float8 else 1
    assert ((found - expected).abs() <= step).all()
    allowed = 1e-4 if not kernels.is_interpreted() else 0.02 if is_float8 else 0
    assert (found != expected).float().mean() <= allowed


@needs_triton
@EVERY_DTYPE
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(  # less than a tile, a tile, one step, one step and a bit; columns that are multiplied first
    ("width", "is_multiplied"), [(48, False), (64, False), (4096, False), (4160, False), (208, True)]
)
def test_rows_are_rounded_as_plain_torch_rounds_them(width, is_multiplied, x_dtype, dtype):
    x = random(5, width, dtype=x_dtype)
    x[1], x[2] = 0, x[2] * 1e-3
    first = {"multiplier": random(width, seed=1).exp()} if is_multiplied else {}
    values, scale = kernels.quantize_rows(x, dtype, **first)
    expected, expected_scale = eight_bit.quantize_rows(x, dtype, **first)
    assert values.dtype is dtype and values.is_contiguous()
    assert torch.equal(scale, expected_scale)
    assert_rounded_alike(values, expected)


@needs_triton
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block", "width"), [(16, 48), (64, 192), (64, 8192)])
def test_rows_are_rotated_before_rounding(block, width, x_dtype):
    if x_dtype is torch.bfloat16 and kernels.is_interpreted():
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers; needs a CUDA device")
    x, turn = random(3, width, dtype=x_dtype), make_rotation(block).to(device())
    values, scale = kernels.quantize_rows(x, torch.int8, rotation=turn)
    expected, expected_scale = eight_bit.quantize_rows(x, torch.int8, rotation=turn)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0)
    difference = (values.int() - expected.int()).abs()  # sums in another order: ties fall either way
    assert difference.max() <= 1 and difference.float().mean() < 0.01


@needs_triton
@EVERY_DTYPE
def test_strided_rows_and_broken_rows(dtype):
    wide = random(6, 128)
    x = wide[:, :64]
    x[1, 3], x[2, 60], x[4, 0] = torch.nan, torch.inf, -torch.inf
    values, scale = kernels.quantize_rows(x, dtype)
    expected, expected_scale = eight_bit.quantize_rows(x, dtype)
    assert scale.isnan().view(-1).tolist() == [False, True, True, False, True, False]
    assert torch.equal(scale.nan_to_num(), expected_scale.nan_to_num())
    sound = [0, 3, 5]
    assert_rounded_alike(values[sound], expected[sound])


@needs_triton
@EVERY_DTYPE
@pytest.mark.parametrize("layout", ["row-major", "column-major", "slice"])
@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (40, 256, 80), (33, 144, 64), (70, 384, 208), (600, 128, 16)], ids=str
)  # I of one block, of several, and with a rest; M beyond a group of 16 tiles
def test_products_equal_those_in_float64(shape, layout, dtype):
    rows, inner, columns = shape
    a, b = random8(rows, inner, dtype=dtype), random8(inner, columns, dtype=dtype, seed=1)
    if layout == "column-major":
        b = b.t().contiguous().t()
    elif layout == "slice":  # of a weight, multiplied where it lies
        b = torch.cat([b, b], 1)[:, columns // 2 // 16 * 16 :][:, :columns]
    a_scale, b_scale, bias = random(rows, 1).exp(), random(columns, 1, seed=2).exp(), random(columns, seed=3)
    product = (a.double() @ b.double()) * a_scale.double()
    allowed = allowed_error(a, b) * a_scale
    assert ((kernels.matmul(a, a_scale, b, torch.float32) - product).abs() <= allowed + 1e-5 * product.abs()).all()
    expected = product * b_scale.view(-1).double() + bias.bfloat16().double()
    # The interpreter truncates what it stores as bfloat16.
    for out_dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8))[: 1 if kernels.is_interpreted() else 2]:
        found = kernels.matmul(a, a_scale, b, out_dtype, b_scale=b_scale, bias=bias.bfloat16())
        assert found.dtype is out_dtype and found.shape == (rows, columns)
        assert ((found - expected).abs() <= allowed * b_scale.view(-1) + 10 * 1e-3 + rtol * expected.abs()).all()


def allowed_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of a product of 8-bit matrices. [M, J] Cards since Hopper keep about 14 bits of a running float8 sum, aligned to
    the largest term; int8 sums are exact."""
    terms = a.float().abs() @ b.float().abs()
    return terms * 2**-12 if a.is_floating_point() and not kernels.is_interpreted() else torch.full_like(terms, 1e-3)


@needs_triton
@EVERY_DTYPE
@pytest.mark.parametrize("shape", [(16, 16), (128, 128), (300, 144), (16, 400)], ids=str)
def test_transpose_copies_every_byte(shape, dtype):
    matrix = random8(*shape, dtype=dtype)
    for source in (matrix, torch.cat([matrix, matrix], 1)[:, : shape[1]]):
        found = kernels.transpose(source)
        assert found.is_contiguous() and found.dtype is dtype
        assert torch.equal(found.view(torch.int8), source.t().contiguous().view(torch.int8))


@needs_triton
@pytest.mark.parametrize("sums_dtype", [torch.int32, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rescale(sums_dtype, has_bias):
    sums = (random(7, 1300) * 1000).to(sums_dtype)
    a_scale, b_scale = random(7, 1).exp(), random(1300, 1, seed=1).exp()
    bias = random(1300, seed=2) if has_bias else None
    expected = sums.double() * a_scale * b_scale.view(-1) + (0 if bias is None else bias)
    found = kernels.rescale(sums, a_scale, torch.float32, b_scale, bias)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-2)


@needs_triton
@pytest.mark.parametrize(
    "choice",
    [
        KernelChoice("triton", "triton", True), KernelChoice("triton", "transpose", True),
        KernelChoice("vendor", "transpose", True), KernelChoice("unit", "triton", True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("scheme", "rotation"), [("fp8-compute", 0), ("int8-compute", 0), ("int8-compute", 64)])
def test_a_layer_on_these_kernels_computes_what_plain_torch_computes(choice, scheme, rotation):
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 96, device=device()).requires_grad_(False)
    layer = FrozenLinear8.from_linear(linear, scheme, rotation=rotation)
    x, grad = random(24, 128), random(24, 96, seed=1)
    parts = (layer.weight, layer.scale)
    results = []
    for each in (choice, KernelChoice("vendor", "transpose")):
        with using_kernels({layer.weight.dtype: each}):
            out = linear8(x, *parts, layer.bias, layer.rotation)
            results.append((out, grad_input8(grad, *parts, layer.rotation)))
    exact = (linear(x), grad @ linear.weight)
    for found, plain, reference in zip(*results, exact, strict=True):
        losses = [10 * math.log10((r - reference).square().sum() / reference.square().sum()) for r in (found, plain)]
        # The interpreter's float8 (above) is a little wrong; a card agrees to a tenth of a decibel.
        assert losses[0] < losses[1] + (12 if kernels.is_interpreted() and scheme == "fp8-compute" else 0.3)


@needs_triton
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize(("scheme", "rotation"), [("fp8-compute", 0), ("int8-compute", 0), ("int8-compute", 64)])
def test_a_grad_input_by_slices_goes_through_the_forwards_product(scheme, rotation, num_slices, monkeypatch):
    """Where the forward is one kernel, each transposed slice is multiplied by that kernel, and cuBLAS is not asked."""
    torch.manual_seed(0)
    layer = FrozenLinear8.from_linear(torch.nn.Linear(192, 96, device=device()), scheme, rotation=rotation)
    grad = random(24, 96, seed=1)
    parts = (layer.weight, layer.scale, layer.rotation)
    # The same rounded rows and sums as in the kernel that reads the weight as it lies.
    with using_kernels({layer.weight.dtype: KernelChoice("triton", "triton", True)}):
        expected = grad_input8(grad, *parts)
    for name in ("_int_mm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("the forward is our kernel"))
    choices = {layer.weight.dtype: KernelChoice("triton", "transpose", True)}
    calls, matmul = [], kernels.matmul

    def counted(a, a_scale, b, *args, **kwargs):
        calls.append(tuple(b.shape))
        assert a.is_contiguous() and b.stride(0) == 1 and b.stride(1) >= b.shape[0]  # as the forward's weight lies
        return matmul(a, a_scale, b, *args, **kwargs)

    monkeypatch.setattr(kernels, "matmul", counted)
    monkeypatch.setattr(eight_bit, "_SLICE", 96 * 192 // num_slices)
    with using_kernels(choices):
        found = grad_input8(grad, *parts)
    assert calls == [(96, 192 // num_slices)] * num_slices
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_importing_touches_no_device_and_needs_no_triton():
    """In a process of its own, where Triton cannot be imported."""
    code = (
        "import sys, runpy, torch\n"
        "sys.modules['triton'] = None\n"
        "runpy.run_path(sys.argv[1])['load_pack']()\n"
        "from devicebridge.quantization import eight_bit, eight_bit_kernels as kernels\n"
        "assert not torch.cuda.is_initialized() and not kernels.is_interpreted()\n"
        "fault = kernels.fault(torch.device('cuda:0'))\n"
        "assert fault.startswith('Triton is not installed'), fault\n"
    )
    bootstrap = str(Path(eight_bit.__file__).parent.parent / "bootstrap.py")
    subprocess.run([sys.executable, "-c", code, bootstrap], check=True)


def test_why_kernels_do_not_run_is_said(monkeypatch):
    monkeypatch.setattr(kernels, "_MISSING", "")
    monkeypatch.setattr(kernels, "is_interpreted", lambda: False)
    monkeypatch.setattr(kernels, "triton", type("Fake", (), {"__version__": "3.1.0", "CompilationError": KeyError}))
    assert kernels.fault(torch.device("cuda:0")) == "Triton 3.1.0 is older than 3.2"
    kernels.triton.__version__ = "3.6.0"
    assert kernels.fault(torch.device("cpu")) == "Triton does not run on cpu"

    def no_compiler(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    kernels._launch_fault.cache_clear()
    monkeypatch.setattr(kernels, "quantize_rows", no_compiler)
    monkeypatch.setattr(torch, "ones", lambda *args, device: None)
    assert kernels.fault(torch.device("cuda:0")) == "Triton does not work on cuda:0: Failed to find C compiler"
    kernels._launch_fault.cache_clear()


def test_every_card_has_a_tuner_of_its_own():
    """What one card has room for may not start on another."""
    if kernels.triton is None:
        pytest.skip("needs Triton")
    one, other = (kernels._tuned_matmul(torch.device("cuda", index)) for index in (0, 1))
    assert one is not other and one.cache is not other.cache
    assert one is kernels._tuned_matmul(torch.device("cuda", 0))


@pytest.mark.parametrize("block", [64, 256])
def test_a_rotation_too_wide_for_the_kernel_comes_before_it(block, monkeypatch):
    seen = []

    def fake(x, dtype, **first):
        seen.append(first.get("rotation"))
        return eight_bit.quantize_rows(x, dtype, **first)

    monkeypatch.setattr(kernels, "quantize_rows", fake)
    x, turn = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)).bfloat16(), make_rotation(block)
    choice = KernelChoice("triton", "transpose", has_triton=True)
    values, scale = eight_bit._quantize(x, torch.int8, choice, rotation=turn)
    expected, expected_scale = eight_bit.quantize_rows(x, torch.int8, rotation=turn)
    assert (seen[0] is not None) == (block == 64)
    torch.testing.assert_close(scale, expected_scale, rtol=2**-7, atol=0)
    assert (values.int() - expected.int()).abs().max() <= 2
