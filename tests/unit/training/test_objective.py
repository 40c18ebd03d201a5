"""Noise levels and loss against independent computations."""

import dataclasses
import math
import random
from types import SimpleNamespace

import pytest
import torch
from devicebridge.config.job import ObjectiveConfig
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ShiftRule
from devicebridge.jobs.job import run_job
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.objective import (
    NoiseSchedule,
    NoisyBatch,
    Objective,
    describe_growth,
    draw_quantiles,
    make_generator,
    make_noise_schedule,
    noise_latents,
    prediction_loss,
    snr_weights,
)

NO_SHIFT = ShiftRule("constant")


def _schedule(**changes):
    base = NoiseSchedule("logit_normal", NO_SHIFT, 0.0, 1.0, (0.0, 1.0))
    return dataclasses.replace(base, **changes)


def test_logit_normal_sigmas_have_the_distribution_of_a_squashed_normal():
    sigmas = _schedule(mean=0.3, std=0.7).sigmas(draw_quantiles(200_000, make_generator(0)), 1)
    reference = torch.sigmoid(0.3 + 0.7 * torch.randn(200_000, generator=make_generator(1)))
    grid = torch.linspace(0.05, 0.95, 19)
    assert torch.allclose(sigmas.quantile(grid), reference.quantile(grid), atol=0.005)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "sigmoid"])
def test_shift_is_the_published_formula(sampling):
    u = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    plain = _schedule(sampling=sampling).sigmas(u, 1)
    shifted = _schedule(sampling=sampling, shift=ShiftRule("constant", 3.0)).sigmas(u, 1)
    assert torch.allclose(shifted, 3 * plain / (1 + 2 * plain), atol=1e-6)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
@pytest.mark.parametrize("bounds", [(0.875, 1.0), (0.0, 0.875)])
def test_an_expert_sees_the_family_distribution_cut_to_its_range(sampling, bounds):
    shift = ShiftRule("constant", 5.0)
    u = draw_quantiles(100_000, make_generator(2))
    whole = _schedule(sampling=sampling, shift=shift).sigmas(u, 1)
    part = _schedule(sampling=sampling, shift=shift, sigma_range=bounds).sigmas(u, 1)
    kept = whole[(whole >= bounds[0]) & (whole <= bounds[1])]
    assert part.min() >= bounds[0] - 1e-6 and part.max() <= bounds[1] + 1e-6
    grid = torch.linspace(0.1, 0.9, 9)
    assert torch.allclose(part.quantile(grid), kept.quantile(grid), atol=0.01)


def test_settings_override_the_family_and_unknown_presets_are_refused():
    family = FAMILIES["flux2"]
    variant = family.variants[0]
    default = make_noise_schedule(ObjectiveConfig(), family, variant)
    assert default.sampling == family.timesteps.sampling
    assert make_noise_schedule(ObjectiveConfig(shift=2.5), family, variant).shift == ShiftRule("constant", 2.5)
    sigmoid = make_noise_schedule(ObjectiveConfig(timestep_sampling="sigmoid", sigmoid_scale=2.0), family, variant)
    assert (sigmoid.mean, sigmoid.std) == (0.0, 2.0)
    with pytest.raises(ValueError, match="no shift preset 'fast'; give a number or one of"):
        make_noise_schedule(ObjectiveConfig(shift="fast"), family, variant)


def test_add_noise_and_loss_are_the_flow_matching_equations():
    (first, again, other), g = (make_generator(1, "train", step, 0) for step in (2, 2, 3)), make_generator(3)
    drawn = torch.rand(3, generator=first)
    assert torch.equal(drawn, torch.rand(3, generator=again))
    assert not torch.equal(drawn, torch.rand(3, generator=other))
    x, e = torch.randn(2, 4, 1, 6, 6, generator=g), torch.randn(2, 4, 1, 6, 6, generator=g)
    t = torch.tensor([0.25, 0.75])
    noisy, target, _ = noise_latents(FAMILIES["flux2"], x, e, t)
    assert torch.equal(noisy[1], 0.25 * x[1] + 0.75 * e[1]) and torch.equal(target, e - x)
    assert prediction_loss(e - x, e - x) == 0
    assert prediction_loss(e - x + 2, e - x).item() == pytest.approx(4)
    assert prediction_loss((e - x).bfloat16(), e - x).dtype == torch.float32


def test_mask_weighs_cells_and_keeps_the_scale():
    x, e = torch.zeros(1, 2, 1, 2, 2), torch.zeros(1, 2, 1, 2, 2)
    prediction = torch.tensor([[1.0, 3.0], [5.0, 7.0]]).expand(1, 2, 1, 2, 2)
    mask = torch.tensor([[[[[0.0, 1.0], [0.0, 0.5]]]]])
    assert prediction_loss(prediction, e - x, mask).item() == pytest.approx((9 + 0.5 * 49) / 1.5)
    assert prediction_loss(prediction, e - x, torch.zeros_like(mask)) == 0


def _said(losses):
    return [step for step in range(1, len(losses) + 1) if describe_growth(losses[:step])]


def test_a_loss_that_grows_is_told_of_and_one_that_only_jumps_is_not():
    draw = random.Random(0)
    jumping = [draw.choice([0.03, 0.1, 0.4, 1.5]) for _ in range(1000)]
    assert _said(jumping) == [] and _said([0.5 - step / 1000 for step in range(400)]) == []
    growing = [loss * 1.02**step for step, loss in enumerate(jumping)]
    assert _said(growing)[0] == 200 and "over steps 1 to 50, and is" in describe_growth(growing[:200])
    high = [*jumping[:200], *(loss * 50 for loss in jumping[:50])]
    assert _said(high) == []  # one window is no rise yet


def test_a_run_whose_loss_grows_says_so_once(tmp_path, monkeypatch, caplog):
    grown = []
    told = lambda losses: grown.append(len(losses)) or "the loss grows"  # noqa: E731
    monkeypatch.setattr("devicebridge.training.loop.describe_growth", told)
    run_job(make_tiny_job(tmp_path, evaluation={"folder": ""}))
    assert grown == [1] and caplog.text.count("the loss grows") == 1


# --- how much each noise level counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "gamma"), [("EPS", 5.0), ("EPS", 1.0), ("V_PREDICTION", 5.0)])
@pytest.mark.parametrize("name", ["min_snr", "debiased"])
def test_weights_by_snr_are_the_published_ones(name, kind, gamma):
    """With a / (1 - a) of SD's own a, the product of 1 - beta (scaled linear, 0.00085 to 0.012, 1000 steps)."""
    kept, expected, sigmas = 1.0, [], []
    for step in range(1000):
        kept *= 1 - (0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * step / 999) ** 2
        snr = kept / (1 - kept)
        sigmas.append(math.sqrt((1 - kept) / kept))
        if name == "min_snr":
            expected.append(min(snr, gamma) / (snr if kind == "EPS" else snr + 1))
        else:  # an error of v is 1 / kept times that of eps
            expected.append(math.sqrt(1 / snr) * (1 if kind == "EPS" else kept))
    settings = ObjectiveConfig(loss_weighting=name, min_snr_gamma=gamma)
    found = snr_weights(settings, kind, torch.tensor(sigmas))
    assert torch.allclose(found, torch.tensor(expected), rtol=1e-5)
    assert snr_weights(ObjectiveConfig(), kind, torch.tensor(sigmas)) is None


def test_weights_by_snr_are_of_training_alone_and_go_with_a_sample_s_own():
    objective = Objective(
        ObjectiveConfig(loss_weighting="debiased"), _predicts("EPS"), None, None, torch.float32, False
    )
    batch = NoisyBatch({}, None, *[torch.zeros(2, 1, 1, 2, 2)] * 2, torch.tensor([0.5, 2.0]))
    assert objective.weighted(batch).weights.tolist() == [0.5, 2.0]
    own = dataclasses.replace(batch, weights=torch.tensor([3.0, 1.0]))
    assert objective.weighted(own).weights.tolist() == [1.5, 2.0]


def _predicts(kind, **more):
    return dataclasses.replace(FAMILIES["flux2"], prediction_target=kind, **more)


# --- a range of noise levels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["high", "low"])
def test_an_expert_keeps_to_its_part_of_the_range(name):
    variant = FAMILIES["wan"].variant(f"wan2.2-t2v-a14b-{name}")
    made = make_noise_schedule(ObjectiveConfig(lowest_noise=0.3, highest_noise=0.95), FAMILIES["wan"], variant)
    assert made.sigma_range == ((0.875, 0.95) if name == "high" else (0.3, 0.875))
    others = {"lowest_noise": 0.9} if name == "low" else {"highest_noise": 0.5}
    with pytest.raises(ValueError, match=f"a14b-{name}"):
        make_noise_schedule(ObjectiveConfig(**others), FAMILIES["wan"], variant)


def test_a_model_of_comfyui_s_is_asked_for_the_times_of_a_range():
    host = SimpleNamespace(time_of=lambda level: level**2)  # whatever its shift makes of it
    family, variant = _predicts("FLOW", host=host), FAMILIES["flux2"].variants[0]
    made = make_noise_schedule(ObjectiveConfig(lowest_noise=0.5, highest_noise=0.9), family, variant)
    assert made.sigma_range == (0.25, 0.81)
    assert make_noise_schedule(ObjectiveConfig(), family, variant).sigma_range == (0.0, 1.0)


def test_ranges_that_hold_no_noise_level_are_refused():
    with pytest.raises(ValueError, match="lowest_noise = 0.5 is not below highest_noise = 0.5"):
        ObjectiveConfig(lowest_noise=0.5, highest_noise=0.5)
    narrow = ObjectiveConfig(lowest_noise=0.9, timestep_sampling="logit_normal", logit_std=0.01, shift=1.0)
    variant = FAMILIES["flux2"].variants[0]
    with pytest.raises(ValueError, match="none lies in 0.9 to 1"):
        make_noise_schedule(narrow, FAMILIES["flux2"], variant)
    settings = ObjectiveConfig(loss_weighting="min_snr")  # which flow models have not
    make_noise_schedule(settings, _predicts("EPS"), variant)
    with pytest.raises(ValueError, match=r"loss_weighting = \"min_snr\" is of .* velocity"):
        make_noise_schedule(settings, FAMILIES["flux2"], variant)
