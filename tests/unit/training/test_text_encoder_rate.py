"""Text encoders learn at a rate of their own, in the same optimizer."""

from __future__ import annotations

import pytest
import torch
from devicebridge.config.job import OptimizerConfig
from devicebridge.training.optimizer import (
    AnyOptimizer,
    make_optimizer,
    pack_optimizer,
    set_learning_rate,
    unpack_optimizer,
)
from torch import nn


def _optimizer(dtype: torch.dtype, **values: object) -> tuple[list[nn.Parameter], AnyOptimizer]:
    """Over three parameters, of which the last two are of text encoders."""
    settings = {"name": "torch.optim.SGD", "learning_rate": 0.5, "weight_decay": 0.0, **values}
    parameters = [nn.Parameter(torch.zeros(2, dtype=dtype)) for _ in range(3)]
    return parameters, make_optimizer(parameters, OptimizerConfig(**settings), 2)  # type: ignore[arg-type]


def _moved(parameters: list[nn.Parameter], optimizer: AnyOptimizer, rate: float) -> list[float]:
    set_learning_rate(optimizer, rate)
    before = [float(each[0].detach()) for each in parameters]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return [was - float(each[0].detach()) for was, each in zip(before, parameters, strict=True)]


@pytest.mark.parametrize(("dtype", "kahan"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_schedule_scales_both_rates(dtype: torch.dtype, kahan: bool) -> None:
    parameters, optimizer = _optimizer(dtype, text_encoder_learning_rate=0.125, kahan=kahan)
    assert _moved(parameters, optimizer, 0.5) == [0.5, 0.125, 0.125]
    assert _moved(parameters, optimizer, 0.25) == [0.25, 0.0625, 0.0625]


def test_without_one_there_is_one_rate_and_one_group() -> None:
    for given in ({}, {"text_encoder_learning_rate": 0.5}):
        parameters, optimizer = _optimizer(torch.float32, **given)
        assert len(optimizer.param_groups) == 1
        assert _moved(parameters, optimizer, 0.25) == [0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    "given", [{"options": {"momentum": 0.5}}, {"name": "adamw"}, {"name": "adamw8bit"}, {"name": "adafactor"}]
)
def test_a_restored_optimizer_keeps_both(given: dict[str, object]) -> None:
    values = {"text_encoder_learning_rate": 0.125, **given}
    parameters, optimizer = _optimizer(torch.float32, **values)
    _moved(parameters, optimizer, 0.5)
    others, restored = _optimizer(torch.float32, **values)
    unpack_optimizer(restored, pack_optimizer(optimizer))
    for mine, other in zip(parameters, others, strict=True):
        other.data.copy_(mine.detach())
    first, *rest = found = _moved(parameters, optimizer, 0.25)
    assert found == _moved(others, restored, 0.25) and rest[0] == rest[1] != first
