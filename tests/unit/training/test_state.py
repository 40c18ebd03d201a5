"""Checkpoints: whole or not there, and every optimizer continues bit for bit."""

import os

import pytest
import torch
from devicebridge.config.job import OptimizerConfig, ScheduleConfig
from devicebridge.training.optimizer import (
    learning_rate_factor,
    make_optimizer,
    pack_optimizer,
    set_learning_rate,
    unpack_optimizer,
)
from devicebridge.training.state import TrainingState, list_checkpoints, load_checkpoint, save_checkpoint
from torch import nn


def _state(step, value=0.0):
    return TrainingState(
        step=step, adapter={"a.lora_A.weight": torch.full((2, 3), value)},
        optimizer=({"state.0.exp_avg": torch.ones(2)}, {"state.0.exp_avg": {"kind": "tensor", "place": "cpu"}}),
        random={"cpu": torch.get_rng_state()}, facts={"config": {"x": 1}, "losses": [0.1, 0.25]},
    )  # fmt: skip


def test_round_trip_and_pruning(tmp_path):
    for step in (5, 10, 15, 15):  # a step that is saved again is replaced
        save_checkpoint(tmp_path, _state(step, value=step), keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010", "step-000015"]
    state = load_checkpoint(list_checkpoints(tmp_path)[-1])
    assert state.step == 15 and state.facts == {"config": {"x": 1}, "losses": [0.1, 0.25]}
    assert torch.equal(state.adapter["a.lora_A.weight"], torch.full((2, 3), 15.0))
    assert torch.equal(state.random["cpu"], torch.get_rng_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]  # nothing temporary


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, _state(5), keep_last=2)

    def crash(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("devicebridge.training.state.write_atomically", crash)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, _state(10), keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000005"]
    assert load_checkpoint(tmp_path / "step-000005").step == 5


def _train(optimizer, parameter, steps, seed):
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(), OptimizerConfig(name="adamw8bit"),
        OptimizerConfig(name="torch.optim.SGD", options={"momentum": 0.9}), OptimizerConfig(name="torch.optim.Adagrad"),
    ],
    ids=lambda config: config.name,
)  # fmt: skip
def test_optimizers_continue_bit_for_bit(config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # torchao compiles its step
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    straight = nn.Parameter(start.clone())
    optimizer = make_optimizer([straight], config)
    set_learning_rate(optimizer, 0.02)
    _train(optimizer, straight, 3, seed=10)
    state = TrainingState(3, {"p": straight.detach().clone()}, pack_optimizer(optimizer), {}, {})
    path = save_checkpoint(tmp_path, state, keep_last=1)
    _train(optimizer, straight, 3, seed=20)
    loaded = load_checkpoint(path)
    resumed = nn.Parameter(loaded.adapter["p"].clone())
    fresh = make_optimizer([resumed], config)
    unpack_optimizer(fresh, loaded.optimizer)
    _train(fresh, resumed, 3, seed=20)
    assert torch.equal(straight, resumed)
    assert not torch.equal(straight, loaded.adapter["p"])


def test_foreign_classes_and_options_are_refused():
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="does not take the options.*speed"):
        make_optimizer([parameter], OptimizerConfig(options={"speed": 3}))
    description = {"kind": "composite", "place": "cpu", "class": f"{os.__name__}:system", "names": [], "context": None}
    with pytest.raises(ValueError, match="only torchao"):
        unpack_optimizer(torch.optim.SGD([parameter], lr=1), ({}, {"state.0.x": description}))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_against_the_transformers_ones(name):
    """transformers counts from one step later: its step 0 has rate zero, which ours skips."""
    from transformers import get_scheduler

    total, warmup = 21, 5
    ours = [learning_rate_factor(ScheduleConfig(name, warmup), step, total) for step in range(total)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler({"constant": "constant_with_warmup"}.get(name, name), optimizer, warmup + 1, total)
    reference = []
    for _ in range(total + 1):
        reference.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert ours == pytest.approx(reference[1:])
    assert learning_rate_factor(ScheduleConfig(name, 0, 0.1), 20, 21) == pytest.approx(1 if name == "constant" else 0.1)
