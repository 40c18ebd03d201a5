"""The counting of scripts/check_house.py, on a small tree in which every fact is known."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def house() -> Any:
    found = runpy.run_path(str(ROOT / "scripts" / "check_house.py"), run_name="check_house")
    return SimpleNamespace(**found)


def _write(folder: Path, **texts: str) -> Path:
    """Files by their path, with __ for the folder's slash."""
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_circles_are_found_through_functions_type_checking_packages_and_the_packs_name(tmp_path: Path, house: Any):
    _write(
        tmp_path, a__one="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .two import Two\n",
        a__two="def late():\n    from ..b import three\n", b__three="import devicebridge.a.one\n",
        b__four="from .five import five\nimport json\n",
        b__five="from json import four\nfrom devicebridge.a import two\n",
    )  # fmt: skip
    (tmp_path / "b" / "__init__.py").write_text("from .four import something\n")
    (tmp_path / "c.py").write_text("from . import b\n")
    assert house.import_circles(house.read_modules(tmp_path)) == [["a.one", "a.two", "b.three"]]
    (tmp_path / "b" / "five.py").write_text("from . import NUMBER\n")
    assert house.import_circles(house.read_modules(tmp_path))[1] == ["b", "b.five", "b.four"]


def test_long_modules_long_functions_and_many_parameters_are_counted_from_one_over_the_limit(tmp_path, house):
    def function(name: str, num_lines: int) -> str:
        return f"def {name}():\n" + "    pass\n" * (num_lines - 1)

    _write(
        tmp_path, long="x = 1\n" * 501, just="x = 1\n" * 500, families__comfy__image="x = 1\n" * 900,
        functions=function("sixty", 60) + function("more", 61) + function("_make_parser", 100),
        methods="class A:\n    def eight(self, a, b, c, d, *e, f, g, **h): ...\n"
        "    def nine(self, a, b, c, d, e, /, f, g, *, h, i): ...\n",
        kernels="@triton.jit\ndef one(a, b, c, d, e, f, g, h, i): ...\n"
        "@triton.jit(do_not_specialize=[])\ndef other(a, b, c, d, e, f, g, h, i): ...\n",
    )  # fmt: skip
    modules = house.read_modules(tmp_path)
    assert house.long_modules(modules) == ["long 501"]
    assert house.long_functions(modules) == ["functions.more 61"]
    assert house.many_parameters(modules) == ["methods.A.nine 9"]


def test_auto_and_callers_count_once_per_function_and_not_for_the_function_around(tmp_path: Path, house: Any):
    _write(
        tmp_path,
        a="""
def outer(x):
    def inner(y):
        return y == "auto" or "auto" != y
    return inner(x), find_devices(), devices.find_devices()

def listed(x):
    return x in ("off", "auto"), find_devices

def plain(x="auto"):
    return x or {"auto": 1}
""",
    )
    modules = house.read_modules(tmp_path)
    assert house.comparing_with_auto(modules) == ["a.outer.inner", "a.listed"]
    assert house.calling(modules, "find_devices") == ["a.outer"]


def test_tests_benchmarks_scripts_and_hidden_folders_are_no_source(tmp_path: Path, house: Any):
    _write(tmp_path, tests__a="1\n", benchmarks__a="1\n", scripts__a="1\n", _venv="1\n", training__a="1\n2\n")
    (tmp_path / "_venv.py").rename(tmp_path / "top.py")
    _write(tmp_path / ".venv", lib="1\n" * 9)
    facts = house.find_facts(tmp_path)
    assert facts["source lines"] == (3, ["training.a 2", "top 1"])
    assert facts["files in training/"] == (1, ["training.a"])


def test_a_count_above_its_limit_is_marked_and_fails(tmp_path: Path, house: Any, monkeypatch: pytest.MonkeyPatch):
    facts = house.find_facts(_write(tmp_path, a="from .b import x\n", b="from .a import y\n"))
    limits = {name: count for name, (count, _) in facts.items()}
    monkeypatch.setitem(house.main.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(house.main.__globals__, "LIMITS", tmp_path / "limits.json")
    for each, worse in ((limits, []), ({**limits, "import circles": 0}, ["import circles"])):
        assert [line.split("  ")[0] for line in house.table(facts, each) if "WORSE" in line] == worse
        (tmp_path / "limits.json").write_text(house.json.dumps(each))
        assert house.main([]) == len(worse)


@pytest.fixture
def project(tmp_path: Path, house: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small one under git, at its limits: room a with 9 lines, room b with 3."""
    _write(tmp_path, a__x="1\n" * 9, b__x="1\n" * 3, tests__x="1\n")
    names = house.main.__globals__
    monkeypatch.setitem(names, "ROOT", tmp_path)
    monkeypatch.setitem(names, "LIMITS", tmp_path / "scripts" / "limits.json")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "limits.json").write_text("{}")
    assert house.main(["--lower"]) == 0
    _commit(tmp_path)
    return tmp_path


def _commit(project: Path) -> None:
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm one"):
        subprocess.run(["git", *command.split()], cwd=project, check=True)


def test_a_room_takes_the_lines_that_another_gave_up(project: Path, house: Any):
    _write(project, a__x="1\n" * 5, b__x="1\n" * 7)
    assert house.main([]) == 1
    assert house.main(["--lower"]) == 0 and house.main([]) == 0
    _write(project, b__x="1\n" * 8)
    assert house.main(["--lower"]) == 1, "more of both"


def test_a_limit_rises_with_a_decision_alone(project: Path, house: Any):
    _write(project, tests__x="1\n" * 2)
    assert house.main([]) == house.main(["--lower"]) == 1
    assert house.main(["--set", "lines of tests"]) == 1
    _commit(project)
    assert house.main([]) == 1, "in the last commit, too"
    (project / "docs" / "decisions").mkdir(parents=True)
    (project / "docs" / "decisions" / "0001.md").write_text("A test more.\n")
    subprocess.run(["git", "reset", "-q", "--soft", "HEAD^"], cwd=project, check=True)
    assert house.main([]) == 0
    _commit(project)
    assert house.main([]) == 0


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--quik", 2)])
def test_a_question_about_mutants_makes_none(argument: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "scripts" / "mutants.py"
    monkeypatch.setattr(sys, "argv", [str(script), argument])
    monkeypatch.setattr("subprocess.check_output", lambda *given, **more: pytest.fail("it copies the source"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == code
