"""Kahan summation over bfloat16 weights: they follow float32 ones, and memory is free between steps."""

from __future__ import annotations

import pytest
import torch
from devicebridge.config.job import OptimizerConfig
from devicebridge.planning.memory import optimizer_bytes
from devicebridge.training.optimizer import KahanSum, make_optimizer
from torch import nn

NAMES = ["adamw", "adafactor", "torch.optim.SGD"]


def _trained(name: str, dtype: torch.dtype, *, kahan: bool) -> tuple[torch.Tensor, object]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(32, 16, generator=generator)
    parameter = nn.Parameter(start.to(torch.bfloat16).to(dtype))
    config = OptimizerConfig(name=name, learning_rate=2e-4, weight_decay=0.0, kahan=kahan)
    optimizer = make_optimizer([parameter], config)
    for _ in range(60):
        gradient = 1 + 0.1 * torch.randn(start.shape, generator=generator)
        parameter.grad = gradient.to(torch.bfloat16).to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    return parameter.detach().float(), optimizer


@pytest.mark.parametrize("name", NAMES)
def test_weights_follow_those_of_float32_where_plain_ones_stand_still(name: str) -> None:
    exact, _ = _trained(name, torch.float32, kahan=False)
    plain, _ = _trained(name, torch.bfloat16, kahan=False)
    summed, optimizer = _trained(name, torch.bfloat16, kahan=True)
    assert isinstance(optimizer, KahanSum)
    (rest,) = optimizer.rests
    assert (summed - exact.to(torch.bfloat16).float()).abs().max() <= 2**-8 * exact.abs().max()
    assert (summed + rest.float() - exact).abs().max() < 60 * 2**-17 * exact.abs().max()  # 60 times the last of 16 bits
    assert (plain - exact).abs().mean() > 5 * (summed - exact).abs().mean()


def test_nothing_in_float32_is_held_between_steps() -> None:
    _, optimizer = _trained("torch.optim.SGD", torch.bfloat16, kahan=True)
    assert isinstance(optimizer, KahanSum)
    shadows = [each for group in optimizer.param_groups for each in group["params"]]
    assert all(each.untyped_storage().nbytes() == 0 and each.grad is None for each in shadows)
    assert all(each.dtype == torch.bfloat16 for each in optimizer.rests)


def test_the_forecast_counts_what_is_kept_and_what_a_step_takes() -> None:
    plain, whole = optimizer_bytes("adamw", "bfloat16"), optimizer_bytes("adamw", "float32")
    kahan = optimizer_bytes("adamw", "bfloat16", kahan=True)
    assert (kahan.state, kahan.step) == (whole.state + 2, whole.step + 8)
    average = optimizer_bytes("adamw", "bfloat16", ema=True)
    assert (average.state, average.step) == (plain.state + 4, plain.step)
