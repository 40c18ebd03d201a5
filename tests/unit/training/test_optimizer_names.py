"""Which optimizers a job may name: naming one must not run the code of any package that happens to be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from devicebridge.config.job import OptimizerConfig
from devicebridge.training.optimizer import make_optimizer
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


def test_another_module_is_imported_where_the_job_allows_it(foreign: Path) -> None:
    assert isinstance(_make("foreign_module.Mine", allow_import=True), torch.optim.SGD)
    assert foreign.exists()


@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim.RAdam", "torchao.optim.AdamW4bit"])
def test_listed_modules_are_used_by_name(name: str) -> None:
    assert type(_make(name)).__name__ == name.rpartition(".")[2]


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match="pip install --upgrade torchao"):
        _make("adamw8bit")


@pytest.mark.parametrize(
    ("name", "message"), [("torch.optim.LBFGS", "several times"), ("torch.optim.lr_scheduler", "")]
)
def test_what_is_no_optimizer_for_this_loop_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _make(name)


@pytest.mark.parametrize("name", ["", "..", ".", "nope", "a..b", "torch.optim.", "torch.optim.Adam W"])
def test_what_is_no_dotted_name_is_refused_even_where_imports_are_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="there is no optimizer"):
        _make(name, allow_import=True)


def test_the_learning_rate_is_that_of_the_job_whatever_the_options_say() -> None:
    made = _make("torch.optim.SGD", learning_rate=0.25, options={"lr": 0.5})
    assert made.param_groups[0]["lr"] == 0.25
