"""Which noise level a sample is trained at, what the model should predict there, what it predicts, and the loss. Flow
matching: x_t = (1 - t) x + t e, of t in [0, 1] by quantiles of a distribution, shifted: t' = s t / (1 + (s - 1) t); the
target is e - x. ComfyUI's own models (ModelFamily.host) have rules of their own. Draws are on the CPU, by position."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from ..config.job import ObjectiveConfig
from ..families.comfy.inputs import NOISE_MASK, is_tokens
from ..families.spec import ModelFamily, ShiftRule, TimestepSampling, Variant
from ..parallel.local.token_training import TokenModel
from .adapter import without_lora
from .batches import LoadedBatch

_WITH_SNR = ("EPS", "V_PREDICTION")  # what a model predicts whose sigma says its ratio of signal to noise
_LEAST_SHARE = 1e-9  # of all timesteps that may lie in a range
_SOME_TOKENS = 1024
LOWER_RATE = "anew with a lower optimizer.learning_rate and another output.folder"


def make_generator(*position: int | float | str) -> torch.Generator:
    """A CPU generator whose stream depends on position (seed, what for, step, ...) and on nothing else."""
    digest = hashlib.sha256(repr(position).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass(frozen=True)
class NoiseSchedule:
    """Maps quantiles to timesteps for one job."""

    sampling: TimestepSampling
    shift: ShiftRule
    mean: float
    std: float
    sigma_range: tuple[float, float]

    def sigmas(self, quantiles: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Timesteps in sigma_range for quantiles in (0, 1), float64 to float32. [B] -> [B] num_tokens: of a sample."""
        factor = self.shift.factor(num_tokens)

        def quantile_of(sigma: float) -> float:
            """Where a timestep lies in the shifted distribution, 0..1."""
            base = sigma / (factor - (factor - 1) * sigma)
            if self.sampling == "uniform" or base in (0.0, 1.0):
                return base
            return 0.5 * (1 + math.erf((math.log(base / (1 - base)) - self.mean) / self.std / math.sqrt(2)))

        low, high = map(quantile_of, self.sigma_range)
        if high - low < _LEAST_SHARE:
            found = "timesteps are drawn so that none lies in {:g} to {:g}".format(*self.sigma_range)
            helps = "objective.lowest_noise and highest_noise, or objective.timestep_sampling and what belongs to it"
            raise ValueError(f"{found}; change {helps}")
        u = low + (high - low) * quantiles.double()
        base = u if self.sampling == "uniform" else torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))
        return (factor * base / (1 + (factor - 1) * base)).float()


def make_noise_schedule(settings: ObjectiveConfig, family: ModelFamily, variant: Variant) -> NoiseSchedule:
    """The job's settings, else the family's. Raises: ValueError for an unknown shift preset, an expert of a model that
    has none, an empty range, or a weighting that is of other models."""
    spec = variant.timesteps or family.timesteps
    sampling = settings.timestep_sampling or spec.sampling
    shift = spec.shift if settings.shift == "" else settings.shift
    if not isinstance(shift, str):
        if shift <= 0:
            raise ValueError(f"a shift factor must be positive, not {shift}; 1 is no shift")
        rule = ShiftRule("constant", float(shift))
    elif shift not in spec.shift_presets:
        presets = ", ".join(spec.shift_presets)
        raise ValueError(f"{family.title} has no shift preset {shift!r}; give a number or one of {presets}")
    else:
        rule = spec.shift_presets[shift]
    sigma_range = variant.sigma_range
    if settings.expert and not variant.boundary:
        of_pair = "is that expert by its variant" if variant.partner else "is not one of two experts"
        found = f'objective.expert = "{settings.expert}" is of Wan 2.2\'s experts as ComfyUI has them'
        raise ValueError(f"{found}, and {variant.name} ({family.title}) {of_pair}; remove the setting")
    if settings.expert:
        is_high = settings.expert == "high_noise"
        sigma_range = (variant.boundary, 1.0) if is_high else (0.0, variant.boundary)
    time_of = family.host.time_of if family.host else float
    low, high = (x if x in (0.0, 1.0) else time_of(x) for x in (settings.lowest_noise, settings.highest_noise))
    both = max(sigma_range[0], low), min(sigma_range[1], high)
    if both[0] >= both[1]:
        found = f"objective.lowest_noise = {settings.lowest_noise:g} and highest_noise = {settings.highest_noise:g}"
        raise ValueError(f"{found} leave nothing of the noise levels that {variant.name} is an expert of; change them")
    if settings.loss_weighting and family.prediction_target not in _WITH_SNR:
        found = f'objective.loss_weighting = "{settings.loss_weighting}" is of models that predict noise or v'
        other = f"such as SD 1.5 and SDXL, and {family.title} predicts {family.prediction_target.lower()}"
        raise ValueError(f"{found}, {other}; remove it, and choose objective.timestep_sampling or shift")
    mean, std = (0.0, settings.sigmoid_scale) if sampling == "sigmoid" else (settings.logit_mean, settings.logit_std)
    made = NoiseSchedule(sampling, rule, mean, std, both)
    made.sigmas(torch.tensor([0.5]), _SOME_TOKENS)  # refuses what none would be drawn of
    return made


def snr_weights(settings: ObjectiveConfig, kind: str, sigmas: torch.Tensor) -> torch.Tensor | None:
    """Factor of each sample's loss by snr = 1 / sigma^2; None where all count alike. [B] -> [B] For eps min(snr, gamma)
    / snr (arXiv 2303.09556) or 1 / sqrt(snr) (arXiv 2310.08442); an error of v is (snr + 1) / snr times one of eps."""
    if not settings.loss_weighting:
        return None
    snr = sigmas.double().pow(-2)
    of_eps = snr.clamp(max=settings.min_snr_gamma) / snr if settings.loss_weighting == "min_snr" else snr.rsqrt()
    return (of_eps if kind == "EPS" else of_eps * snr / (snr + 1)).float()


def draw_quantiles(batch_size: int, generator: torch.Generator) -> torch.Tensor:
    """One quantile per sample, uniform in (0, 1), float64. [B]"""
    return torch.rand(batch_size, generator=generator, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)


class NoisyLatents(NamedTuple):
    """Latents with noise, what the network should say of them, and how noisy they are; float32."""

    noisy: torch.Tensor  # [B, C, F, H, W], as is target
    target: torch.Tensor
    sigmas: torch.Tensor  # as the network is given them, in its family's own measure. [B]


def noise_latents(
    family: ModelFamily,
    latents: torch.Tensor,
    noise: torch.Tensor,
    times: torch.Tensor,
    given: Mapping[str, torch.Tensor] = {},
) -> NoisyLatents:
    """Latents and noise, float32 [B, C, F, H, W], at times in 0..1, [B], as the network is trained on them."""
    if family.host is not None:
        return NoisyLatents(*family.host.add_noise(latents, noise, times, given))
    assert NOISE_MASK not in given, "only ComfyUI's own models read a noise mask"
    return NoisyLatents(add_noise(latents, noise, times), noise - latents, times)


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """x_t for clean latents and noise, all float32. [B, C, F, H, W], sigmas [B]"""
    t = sigmas.view(-1, *[1] * (latents.ndim - 1))
    return (1 - t) * latents + t * noise


def prediction_loss(
    prediction: torch.Tensor,
    target: torch.Tensor,
    mask: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean squared error in float32, [B, C, F, H, W] -> scalar. mask: in 0..1, [B, 1 or C, 1 or F, H, W]; the mean is
    weighted by it, so that a small mask does not weaken the step. weights: factor of each sample's error, [B], or of
    each value's, [B or 1, 1, 1, 1, N], which does."""
    error = (prediction.float() - target.float()).square()
    if weights is not None:
        factors = weights if weights.ndim == error.ndim else weights.view(-1, *[1] * (error.ndim - 1))
        error = error * factors.to(error.device, torch.float32)
    if mask is None:
        return error.mean()
    weight = mask.to(error.device, torch.float32).expand_as(error)
    return (error * weight).sum() / weight.sum().clamp_min(1e-8)


def predict(
    family: ModelFamily,
    model: nn.Module,
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    guidance: float | None,
) -> torch.Tensor:
    """What a model says of noisy latents, on its output's device. [B, C, F, H, W] given: text and conditions."""
    host = family.host
    if host is None:
        inputs = family.make_inputs(noisy, sigmas, given, guidance)
        shape = noisy.shape
        del noisy, given  # packed anew in the inputs
        output = model(**inputs, return_dict=False)[0]
        return family.read_prediction(output, torch.empty(shape, device="meta"))
    if not isinstance(model, TokenModel):
        return host.predict(model, noisy, sigmas, given, guidance)

    def of_one(tree: nn.Module, device: torch.device) -> torch.Tensor:
        there = {name: each.to(device) for name, each in given.items()}
        return host.predict(tree, noisy.to(device), sigmas.to(device), there, guidance)

    size = noisy.shape, tuple((name, each.shape) for name, each in sorted(given.items()))
    return model.through(of_one, is_one_frame=noisy.shape[2] == 1, size=size)


@dataclass(frozen=True)
class NoisyBatch:
    """One forward's worth of data on the CPU: see LoadedBatch and NoisyLatents. text: with the conditions."""

    text: Mapping[str, torch.Tensor]
    mask: torch.Tensor | None
    noisy: torch.Tensor
    target: torch.Tensor
    sigmas: torch.Tensor
    weights: torch.Tensor | None = None
    outside: torch.Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """Makes noisy batches, and their losses. dtype: that the model computes in. pins: batches are in pinned memory."""

    settings: ObjectiveConfig
    family: ModelFamily
    variant: Variant
    schedule: NoiseSchedule
    dtype: torch.dtype
    pins: bool

    def noisy(self, batch: LoadedBatch, quantiles: torch.Tensor, generator: torch.Generator) -> NoisyBatch:
        """One batch at these quantiles, with noise from the generator; still on the host."""
        noise = torch.randn(batch.latents.shape, generator=generator)
        times = self.schedule.sigmas(quantiles, batch.num_tokens)
        made = noise_latents(self.family, batch.latents, noise, times, batch.conditions)
        given = {**batch.text, **batch.conditions}
        text = {name: self._pinned(self.in_type(states)) for name, states in given.items()}
        mask, outside = (None if each is None else self._pinned(each) for each in (batch.mask, batch.outside))
        noisy, target, sigmas = map(self._pinned, (self.in_type(made.noisy), made.target, made.sigmas))
        return NoisyBatch(text, mask, noisy, target, sigmas, batch.weights, outside)

    def in_type(self, states: torch.Tensor) -> torch.Tensor:
        """In the type that the model computes in; ComfyUI's own models round by themselves. Masks stay masks."""
        is_ours = states.is_floating_point() and self.family.host is None
        return states.to(self.dtype) if is_ours else states

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self.pins and tensor.numel() else tensor

    def weighted(self, batch: NoisyBatch) -> NoisyBatch:
        """For training: with the weights of its noise levels."""
        factors = snr_weights(self.settings, self.family.prediction_target, batch.sigmas)
        if factors is None or batch.weights is None:
            return batch if factors is None else replace(batch, weights=factors)
        return replace(batch, weights=batch.weights * factors.view(-1, *[1] * (batch.weights.ndim - 1)))

    def loss(self, batch: NoisyBatch, model: nn.Module, device: torch.device) -> torch.Tensor:
        """Loss of one batch; a scalar on the device of the model's output, float32."""
        held, prior = batch.outside if self.settings.masked_prior else None, None
        if held is not None and held.any():
            with torch.no_grad(), without_lora(model):
                prior = self._predicted(batch, model, device)
        prediction = self._predicted(batch, model, device)
        target, mask, held = (
            None if each is None else each.to(prediction.device, non_blocking=True)
            for each in (batch.target, batch.mask, held)
        )
        assert target is not None
        loss = prediction_loss(prediction, target, mask, batch.weights)
        if prior is None:
            return loss
        return loss + self.settings.masked_prior * prediction_loss(prediction, prior, held, batch.weights)

    def _predicted(self, batch: NoisyBatch, model: nn.Module, device: torch.device) -> torch.Tensor:
        guidance = self.variant.training_guidance if self.settings.guidance is None else self.settings.guidance
        return self.predict(batch.noisy, batch.sigmas, batch.text, model, device, guidance)

    def predict(
        self,
        noisy: torch.Tensor,
        sigmas: torch.Tensor,
        text: Mapping[str, torch.Tensor],
        model: nn.Module,
        device: torch.device,
        guidance: float | None,
    ) -> torch.Tensor:
        """As the function, of inputs on the host, of a model that takes them on this device."""
        return predict(
            self.family,
            model,
            noisy.to(device, non_blocking=True),  # which no name here keeps in memory
            sigmas.to(device, non_blocking=True),
            {name: t if is_tokens(name) else t.to(device, non_blocking=True) for name, t in text.items()},
            guidance,
        )


_WINDOW = 50
_NUM_LEFT_OUT = 2
_FACTOR, _FACTOR_BEFORE = 5.0, 3.0  # of the last window, and of the one before it


def describe_growth(losses: Sequence[float]) -> str:
    """A warning where the mean of a window, less its highest, is far above the lowest one over two windows; else ""."""
    if len(losses) % _WINDOW or len(losses) < 3 * _WINDOW:
        return ""
    windows = [losses[start : start + _WINDOW] for start in range(0, len(losses), _WINDOW)]
    means = [sum(sorted(each)[:-_NUM_LEFT_OUT]) / (_WINDOW - _NUM_LEFT_OUT) for each in windows]
    lowest = min(range(len(means) - 2), key=means.__getitem__)
    if means[-2] < _FACTOR_BEFORE * means[lowest] or means[-1] < max(means[-2], _FACTOR * means[lowest]):
        return ""
    was = f"{means[lowest]:.3g} over steps {lowest * _WINDOW + 1} to {(lowest + 1) * _WINDOW}"
    now = f"{means[-1]:.3g} over the last {_WINDOW}"
    return f"the loss grows: its mean was {was}, and is {now}. If that goes on, stop and start {LOWER_RATE}"
