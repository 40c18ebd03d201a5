"""Optimizers: which a job may name, without running the code of other packages; sums of bfloat16; two rates."""

import os
import sys
from pathlib import Path

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
from torch import nn


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed module that writes a file when it is imported."""
    (tmp_path / "foreign_module.py").write_text(
        f"import pathlib, torch\npathlib.Path({str(tmp_path / 'was_imported')!r}).touch()\nMine = torch.optim.SGD\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_module", raising=False)
    return tmp_path / "was_imported"


def _make(name: str, **values: object) -> torch.optim.Optimizer:
    return make_optimizer([nn.Parameter(torch.zeros(2, 2))], OptimizerConfig(name=name, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["foreign_module.Mine", "foreign_module.Missing", "torch.hub.load", "os.path"])
def test_naming_another_module_imports_nothing_and_says_what_would_work(foreign: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"torch\.optim, torchao\.optim.*optimizer\.allow_import = true"):
        _make(name)
    assert not foreign.exists()
    assert isinstance(_make("foreign_module.Mine", allow_import=True), torch.optim.SGD) and foreign.exists()


@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim.RAdam", "torchao.optim.AdamW4bit"])
def test_listed_modules_are_used_by_name(name: str) -> None:
    made = _make(name, learning_rate=0.25, options={"lr": 0.5})
    assert type(made).__name__ == name.rpartition(".")[2] and made.param_groups[0]["lr"] == 0.25


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match="pip install --upgrade torchao"):
        _make("adamw8bit")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch.optim.LBFGS", "several times"), ("torch.optim.lr_scheduler", "is not a torch.optim.Optimizer"),
        *((name, "there is no opt") for name in ("", "..", ".", "nope", "a..b", "torch.optim.", "torch.optim.Adam W")),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_for_this_loop_is_refused_even_where_imports_are_allowed(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _make(name, allow_import=True)


def _optimizer(**values: object) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Over three parameters, of which the last two are of text encoders."""
    settings = {"name": "torch.optim.SGD", "learning_rate": 0.5, "weight_decay": 0.0, **values}
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    return parameters, make_optimizer(parameters, OptimizerConfig(**settings), 2)  # type: ignore[arg-type]


def _moved(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, rate: float) -> list[float]:
    set_learning_rate(optimizer, rate)
    before = [float(each[0].detach()) for each in parameters]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return [was - float(each[0].detach()) for was, each in zip(before, parameters, strict=True)]


def test_a_schedule_scales_both_rates() -> None:
    parameters, optimizer = _optimizer(text_encoder_learning_rate=0.125)
    assert _moved(parameters, optimizer, 0.5) == [0.5, 0.125, 0.125]
    assert _moved(parameters, optimizer, 0.25) == [0.25, 0.0625, 0.0625]


def test_without_one_there_is_one_rate_and_one_group() -> None:
    for given in ({}, {"text_encoder_learning_rate": 0.5}):
        parameters, optimizer = _optimizer(**given)
        assert len(optimizer.param_groups) == 1
        assert _moved(parameters, optimizer, 0.25) == [0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    "given", [{"options": {"momentum": 0.5}}, {"name": "adamw"}, {"name": "adamw8bit"}, {"name": "adafactor"}]
)
def test_a_restored_optimizer_keeps_both(given: dict[str, object]) -> None:
    values = {"text_encoder_learning_rate": 0.125, **given}
    parameters, optimizer = _optimizer(**values)
    _moved(parameters, optimizer, 0.5)
    others, restored = _optimizer(**values)
    unpack_optimizer(restored, pack_optimizer(optimizer))
    for mine, other in zip(parameters, others, strict=True):
        other.data.copy_(mine.detach())
    first, *rest = found = _moved(parameters, optimizer, 0.25)
    assert found == _moved(others, restored, 0.25) and rest[0] == rest[1] != first


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
