"""How much noise rounding to 8 bits adds to a linear, measured on a sample of its rows.

Legend: M rows of random inputs, K in_features, N out_features of the whole layer, n rows of the weight in the sample.

Noise is given as signal to noise in dB, 10 log10(sum(exact^2) / sum((found - exact)^2)), of the stored weight, of the
output and of grad_input. Exact is the unrounded weight with unrounded inputs in float32, found is what the scheme's own
code computes. Inputs are unit normal, or the same with 6 channels 30 times larger, which is what int8 is weak against.
Real activations and gradients lie between the two, mostly; a LoRA's training sees less of all this than the numbers
say, for rounding errors of different layers and steps do not add up in one direction.

Why n rows stand for N. Every row has a scale of its own, so the error of a row, of its output channel, and of the terms
it adds to grad_input depends on no other row, with one exception: an input row of grad_input (gy * s) is rounded with
one scale, set by its largest value over all N. For int8 that is 1 to 2 dB between 256 values and 50 000. So gy is drawn
for all N, with the scales of sampled rows in place of those of the others, and the largest value is given to the
scheme's code in a row of zeros that adds nothing to the result. Outlier channels of gy are rare: all six are put into
the sample, at evenly spaced ranks of the row scales, and the sums of the other rows count (N - 6) / (n - 6) times.
Cross terms have a mean of zero and are left out.

With 256 rows spread over a layer of random weights whose sizes differ threefold, weight and output are within 0.3 dB
of the whole layer's and grad_input within 0.7 dB, 1 dB with outliers. Other inputs of the same kind change what is said
of outliers by 1 dB, up to 2 dB with narrow rotations, for there a few numbers decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from devicebridge.quantization.eight_bit import grad_input8, linear8, make_rotation, rotate
from devicebridge.quantization.quantize import Stored8

NUM_SAMPLE_ROWS = 256
_NUM_INPUTS = 128
_NUM_OUTLIERS = 6
_OUTLIER_GAIN = 30.0
_SEED = 602_214_076  # random weights are often made with seed 0, and inputs must not be the same numbers again
_PADDING_ROWS = 16  # what the 8-bit products want as a multiple


@dataclass(frozen=True)
class SignalToNoise:
    """dB of one linear; infinite where nothing was rounded. *_outliers: inputs with 6 channels 30 times larger."""

    weight: float
    output: float
    output_outliers: float
    grad_input: float
    grad_input_outliers: float


@torch.no_grad()
def measure_noise(
    exact: torch.Tensor, stored: Stored8, *, out_features: int, multiplies: bool, seed: int = _SEED
) -> SignalToNoise:
    """Signal to noise of a linear from some of its rows; the same numbers for the same seed.

    The cost is some products of the sample with 128 rows: a quarter of a second for 256 rows of 6144.

    Args:
        exact: rows of the unrounded weight. [n, K]
        stored: the same rows as the scheme stores them. [n, K]
        out_features: N.
        multiplies: whether the scheme computes in 8 bits; else it computes in x's type with dequantized weights.
    """
    exact = exact.float()
    layer = _Layer(stored, multiplies)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((_NUM_INPUTS, exact.shape[1]), generator=generator)
    x_outliers = x.clone()
    x_outliers[:, torch.randperm(exact.shape[1], generator=generator)[:_NUM_OUTLIERS]] *= _OUTLIER_GAIN
    gradients = _Gradients(exact, layer, out_features, generator)
    return SignalToNoise(
        weight=_compare(exact, layer.weight).decibels,
        output=_compare(x @ exact.t(), layer.forward(x)).decibels,
        output_outliers=_compare(x_outliers @ exact.t(), layer.forward(x_outliers)).decibels,
        grad_input=gradients.measure(num_outliers=0).decibels,
        grad_input_outliers=gradients.measure(num_outliers=min(_NUM_OUTLIERS, exact.shape[0] // 2)).decibels,
    )


@dataclass(frozen=True)
class _Energy:
    """Sums of squares."""

    signal: float
    noise: float

    def __add__(self, other: _Energy) -> _Energy:
        return _Energy(self.signal + other.signal, self.noise + other.noise)

    def times(self, factor: float) -> _Energy:
        return _Energy(self.signal * factor, self.noise * factor)

    @property
    def decibels(self) -> float:
        return 10 * math.log10(self.signal / self.noise) if self.signal and self.noise else math.inf


def _compare(exact: torch.Tensor, found: torch.Tensor) -> _Energy:
    error = found.float() - exact
    return _Energy(*(float(each.square().sum(dtype=torch.float64)) for each in (exact, error)))


class _Layer:
    """A linear as a scheme computes it, in float32 beside the rounding."""

    def __init__(self, stored: Stored8, multiplies: bool) -> None:
        self._values, self._multiplies = stored.weight, multiplies
        self._scale = stored.scale.float()
        self._rotation = make_rotation(stored.rotation) if stored.rotation else None
        plain = stored.weight.float() * self._scale
        self.weight = plain if self._rotation is None else rotate(plain, self._rotation.t())  # [n, K]
        self.scale = self._scale.view(-1)  # [n]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._multiplies:
            return x @ self.weight.t()
        return linear8(x, self._values, self._scale, None, self._rotation)

    def grad_input(self, grad: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
        """grad [M, n] -> [M, K]. peak: what the largest grad * scale of each row is over the whole layer. [M]"""
        if not self._multiplies:
            return grad @ self.weight
        values = self._values.view(torch.int8)  # of which zeros can be made; they are the same bits in float8
        zeros = values.new_zeros((_PADDING_ROWS, values.shape[1]))
        weight = torch.cat([values, zeros]).view(self._values.dtype)
        scale = torch.cat([self._scale, torch.ones((_PADDING_ROWS, 1))])
        padding = torch.zeros((grad.shape[0], _PADDING_ROWS))
        padding[:, 0] = peak
        return grad_input8(torch.cat([grad, padding], 1), weight, scale, self._rotation)


class _Gradients:
    """Incoming gradients of the sampled rows, and how large those of the other rows become."""

    def __init__(self, exact: torch.Tensor, layer: _Layer, out_features: int, generator: torch.Generator) -> None:
        self._exact, self._layer, self._out_features = exact, layer, out_features
        num_rows = exact.shape[0]
        self._grad = torch.randn((_NUM_INPUTS, num_rows), generator=generator)
        self._by_scale = layer.scale.argsort()
        self._peak_elsewhere = torch.zeros(_NUM_INPUTS)
        num_others = out_features - num_rows
        if num_others:
            scale = layer.scale[torch.randint(num_rows, (num_others,), generator=generator)]
            others = torch.randn((_NUM_INPUTS, num_others), generator=generator)
            self._peak_elsewhere = others.mul_(scale).abs_().amax(1)

    def measure(self, num_outliers: int) -> _Energy:
        num_rows = self._grad.shape[1]
        ranks = (torch.arange(num_outliers) + 0.5) * (num_rows / max(num_outliers, 1))
        outliers = self._by_scale[ranks.long()]
        grad = self._grad.clone()
        grad[:, outliers] *= _OUTLIER_GAIN
        peak = torch.maximum((grad * self._layer.scale).abs().amax(1), self._peak_elsewhere)
        usual = grad.clone()
        usual[:, outliers] = 0
        energy = self._energy(usual, peak).times((self._out_features - num_outliers) / (num_rows - num_outliers))
        return energy + self._energy(grad - usual, peak) if num_outliers else energy

    def _energy(self, grad: torch.Tensor, peak: torch.Tensor) -> _Energy:
        return _compare(grad @ self._exact, self._layer.grad_input(grad, peak))
