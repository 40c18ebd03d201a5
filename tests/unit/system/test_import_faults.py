"""A package that cannot be imported is named by its first cause, wherever the error comes out."""

import importlib
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from devicebridge.cli import doctor
from devicebridge.cli import main as command_line
from devicebridge.system.import_faults import import_fault

CAUSE = "operator broken_vision::nms does not exist"
_LAZY = """
def __getattr__(name):
    try:
        import broken_model
    except Exception as error:
        raise RuntimeError(f"Could not import module {name!r}") from error
    raise AttributeError(name)
"""
FILES = {
    "broken_vision": f"raise RuntimeError({CAUSE!r})", "broken_model": "import broken_vision", "lazy_models": _LAZY,
    "outer_models": "import lazy_models\nlazy_models.Bloom",
    "optional_first": "try:\n    import never_there\nexcept ImportError:\n    import broken_vision",
    "other_version": "from json import no_such_name", "needs_missing": "import never_there",
    "whole": "thing = 1", "leaves": "print('a word')\nraise SystemExit(3)",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    info = tmp_path / "broken_vision-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_vision\nVersion: 0.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("devicebridge.system.import_faults._FIT_TORCH", ("broken_vision",))
    yield
    for name in FILES:
        sys.modules.pop(name, None)


def _lazily(*_: Any) -> Any:
    return importlib.import_module("lazy_models").Bloom


def _raised(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("broken_vision", ("broken_vision 0.9.0", CAUSE, "torch")), ("broken_model", ("broken_vision 0.9.0", CAUSE)),
        ("outer_models", ("broken_vision 0.9.0", CAUSE)), ("optional_first", ("broken_vision 0.9.0", CAUSE)),
        ("other_version", ("other_version", "no_such_name")),
        ("needs_missing", ("never_there", "pip install never_there")),
    ],
)  # fmt: skip
def test_the_first_cause_is_named(module: str, named: tuple[str, ...]) -> None:
    said = import_fault(_raised(lambda: importlib.import_module(module)))
    assert [each for each in named if each not in said] == [], said


@pytest.mark.parametrize("wrapped", [ValueError, RuntimeError])
def test_it_is_found_below_lazy_imports_and_words_of_ours(wrapped: type[Exception]) -> None:
    def act() -> None:
        try:
            _lazily()
        except RuntimeError as error:
            raise wrapped("the config gives values that no Bloom can be made with") from error

    said = import_fault(_raised(act))
    assert "broken_vision 0.9.0" in said and CAUSE in said and "Bloom" not in said


def test_other_errors_are_left_alone() -> None:
    def missing() -> None:
        try:
            importlib.import_module("never_there")
        except ImportError:
            raise ValueError("set rank")  # noqa: B904  (a context that is no cause)

    assert import_fault(_raised(missing)) == ""
    assert import_fault(_raised(lambda: [][1])) == ""


def test_every_command_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_make_parser", lambda: _Parser())
    said = io.StringIO()
    with redirect_stderr(said):
        assert command_line.main([]) == 2
    assert "broken_vision 0.9.0" in said.getvalue() and CAUSE in said.getvalue()


class _Parser:
    def parse_args(self, arguments: Any) -> Namespace:
        return Namespace(command=_lazily, verbose=False)


def test_the_doctor_imports_what_it_promises(monkeypatch, capsys):
    wanted = {"peft": "lazy_models:Bloom", "diffusers": "whole:thing", "av": "leaves:x"}
    monkeypatch.setattr(doctor, "_IMPORTED", wanted)
    facts = doctor.collect()
    assert "SystemExit: 3" in facts["import_faults"].pop("av") and capsys.readouterr().out == ""
    fault = facts["import_faults"].pop("peft")
    assert facts["import_faults"] == {"diffusers": ""} and "broken_vision 0.9.0" in fault and CAUSE in fault
    assert fault in [each["reason"] for each in facts["features"]]
