"""Noise of 8-bit linears from a sample of their rows: against float64, and against the whole layer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from devicebridge.families.flux2 import FLUX2
from devicebridge.quantization.quantize import Quantizer, QuantizeSettings, Stored8
from devicebridge.tests.quantize_noise import NUM_SAMPLE_ROWS, SignalToNoise, measure_noise
from torch import nn

SCHEMES = ["fp8", "int8", "fp8-compute", "int8-compute"]
FIELDS = ("weight", "output", "output_outliers", "grad_input", "grad_input_outliers")
# Between two draws of the inputs: the largest value of a row sets the step of int8, so with outliers a few random
# numbers per row, and whether two of them meet in a rotated block, decide.
INPUTS_DB = {"weight": 0.02, "output": 0.3, "grad_input": 0.3, "output_outliers": 2.0, "grad_input_outliers": 1.0}
# Between a sample of the rows and all of them: 256 rows whose energies differ ninefold give the energy of the whole
# layer within 4 % (one standard deviation, 0.16 dB). Every output is a row's own; six gradients of outliers are few.
ROWS_DB = {"weight": 0.2, "output": 0.2, "output_outliers": 0.3, "grad_input": 0.7, "grad_input_outliers": 1.0}


def make_weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    """Normal weights whose rows differ in size by a factor of three, as float32 numbers that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 0.01 * 3 ** torch.rand((out_features, 1), generator=generator)
    return (torch.randn((out_features, in_features), generator=generator) * sizes).bfloat16().float()


def store(weight: torch.Tensor, settings: QuantizeSettings) -> Stored8:
    quantizer = Quantizer(FLUX2, settings)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return quantizer.store(quantizer.finish("transformer_blocks.0.attn.to_q", linear))


def measure(weight: torch.Tensor, settings: QuantizeSettings, out_features: int = 0, **options: int) -> SignalToNoise:
    stored, size = store(weight, settings), out_features or weight.shape[0]
    return measure_noise(weight, stored, out_features=size, multiplies=settings.is_compute, **options)


def spread_rows(weight: torch.Tensor) -> torch.Tensor:
    starts = [round(run * (weight.shape[0] - 16) / 15) for run in range(16)]
    return torch.cat([weight[start : start + 16] for start in starts])


# ---- the same in numpy and float64, from the definitions ----


def round_e4m3(values: np.ndarray) -> np.ndarray:
    _, exponent = np.frexp(values)
    step = 2.0 ** (np.maximum(exponent - 1, -6) - 3)
    return np.clip(np.round(values / step) * step, -448, 448)


def round_rows(values: np.ndarray, scheme: str, largest: float) -> np.ndarray:
    scale = np.abs(values).max(1, keepdims=True) / largest
    scaled = values / scale
    return scale * (round_e4m3(scaled) if scheme.startswith("fp8") else np.clip(np.round(scaled), -128, 127))


def hadamard(block: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    signs = [(-1) ** bin(row & (row >> 1)).count("1") for row in range(block)]  # Rudin-Shapiro
    return matrix * np.array(signs)[:, None] / math.sqrt(block)


def rotate(values: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    return (values.reshape(-1, len(matrix)) @ matrix).reshape(values.shape)


def decibels(exact: np.ndarray, found: np.ndarray) -> float:
    return 10 * math.log10((exact**2).sum() / ((found - exact) ** 2).sum())


def with_outliers(values: np.ndarray, channels: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[:, channels] *= 30
    return values


def reference(weight: torch.Tensor, scheme: str, block: int, seed: int) -> SignalToNoise:
    """Of a whole layer, with inputs of its own."""
    w, random = weight.double().numpy(), np.random.default_rng(seed)
    matrix = hadamard(block) if block else np.eye(1)
    largest = 448 if scheme.startswith("fp8") else 127 if scheme == "int8-compute" else 127.5  # torchao's int8
    rounded = round_rows(rotate(w, matrix), scheme, largest)
    scale = np.abs(rotate(w, matrix)).max(1) / largest
    is_compute = scheme.endswith("compute")

    def output(x: np.ndarray) -> float:
        a = rotate(x, matrix)
        return decibels(x @ w.T, (round_rows(a, scheme, largest) if is_compute else a) @ rounded.T)

    def grad_input(grad: np.ndarray) -> float:
        h = round_rows(grad * scale, scheme, largest) / scale if is_compute else grad
        return decibels(grad @ w, rotate(h @ rounded, matrix.T))

    x, grad = random.standard_normal((256, w.shape[1])), random.standard_normal((256, w.shape[0]))
    middle = np.argsort(scale)[((np.arange(6) + 0.5) / 6 * len(scale)).astype(int)]
    return SignalToNoise(
        weight=decibels(w, rotate(rounded, matrix.T)),
        output=output(x),
        output_outliers=output(with_outliers(x, random.permutation(w.shape[1])[:6])),
        grad_input=grad_input(grad),
        grad_input_outliers=grad_input(with_outliers(grad, middle)),
    )


CASES = [*((scheme, 0) for scheme in SCHEMES), ("int8-compute", 16), ("int8-compute", 64)]


@pytest.mark.parametrize(("scheme", "block"), CASES)
def test_a_whole_layer_is_measured_as_float64_says(scheme: str, block: int) -> None:
    weight = make_weight(512, 768)
    found = measure(weight, QuantizeSettings(scheme, block))
    expected = reference(weight, scheme, block, seed=3)
    for name in FIELDS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=INPUTS_DB[name]), name


@pytest.mark.parametrize(("scheme", "block"), CASES)
@pytest.mark.parametrize(("out_features", "in_features"), [(8192, 256), (2048, 1024)])
def test_a_sample_stands_for_the_whole_layer(scheme: str, block: int, out_features: int, in_features: int) -> None:
    """The tall layer is where a sample's own largest gradient would be too small: 2 dB for int8-compute."""
    weight, settings = make_weight(out_features, in_features, seed=1), QuantizeSettings(scheme, block)
    sample = spread_rows(weight)
    assert sample.shape[0] == NUM_SAMPLE_ROWS
    found, whole = measure(sample, settings, out_features), measure(weight, settings)
    for name in FIELDS:
        assert getattr(found, name) == pytest.approx(getattr(whole, name), abs=ROWS_DB[name]), name


def test_rotation_shows_where_there_are_outliers() -> None:
    weight = make_weight(256, 2048)
    plain, rotated = (measure(weight, QuantizeSettings("int8-compute", block)) for block in (0, 64))
    assert rotated.output_outliers > plain.output_outliers + 8
    assert rotated.output == pytest.approx(plain.output, abs=0.2)


def test_what_was_not_rounded_again_has_no_noise_in_its_weight() -> None:
    stored = store(make_weight(64, 128), QuantizeSettings("fp8"))
    plain = stored.weight.float() * stored.scale
    found = measure_noise(plain, stored, out_features=64, multiplies=False)
    assert [getattr(found, name) for name in FIELDS] == [math.inf] * 5
    multiplied = measure_noise(plain, stored, out_features=64, multiplies=True)
    assert multiplied.weight == math.inf and 30 < multiplied.output < 33  # only the inputs are rounded


def test_the_same_seed_gives_the_same_numbers() -> None:
    weight, settings = make_weight(256, 128), QuantizeSettings("int8-compute")
    state = torch.get_rng_state()
    assert measure(weight, settings, 4096) == measure(weight, settings, 4096)
    assert torch.equal(torch.get_rng_state(), state)
    assert measure(weight, settings, 4096) != measure(weight, settings, 4096, seed=1)


@pytest.mark.parametrize("shape", [(3, 5), (1, 16), (40, 24), (16, 7)])
@pytest.mark.parametrize("scheme", ["fp8-compute", "int8-compute"])
def test_layers_too_small_for_8_bit_products_are_measured_too(scheme: str, shape: tuple[int, int]) -> None:
    found = measure(make_weight(*shape), QuantizeSettings(scheme, 0))
    assert all(getattr(found, name) > 20 for name in ("weight", "output", "grad_input"))
