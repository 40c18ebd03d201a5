"""Changed hosts are found out: a small ComfyUI is written to disk, changed in one place, and asked in both ways."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.contract import check
from devicebridge.contract.check import Host, check_parts, find_faults, pending_nodes, refusals
from devicebridge.contract.living import Living
from devicebridge.contract.rows import CONDITIONS, NATIVE, NODES, PAGE, ROWS, Row
from devicebridge.contract.written import Written
from devicebridge.system import processes

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "contract" / "written.py"
FILES = {
    "comfyui_version": '__version__ = "0.99.0"\n',
    "fake_host/__init__": "",
    "fake_host/base": """
class Base:
    def __init__(self, size):
        self.inherited = size
        self.backup = {}

    def clone(self, disable_dynamic=False, model_override=None):
        return self

    def load(self, *args, **kwargs):
        return None

    @property
    def shown(self):
        return self.inherited
""",
    "fake_host/patcher": """
import dataclasses
from fake_host.base import Base


class Patcher(Base):
    def __init__(self, model, device):
        super().__init__(0)
        self.model = model

    @classmethod
    def made(cls, path, extra=None):
        return cls(path, None)

    @staticmethod
    def plain(first):
        return first


@dataclasses.dataclass
class Schema:
    name: str
    inputs: list = None
""",
    "fake_host/names": """
from .patcher import *
from . import patcher as renamed

try:
    MODE = "apply"
except ImportError:
    MODE = "none"


def load(ckpt, safe=False, return_metadata=False):
    return ckpt, safe, return_metadata


def sample(model, conds, options):
    found = options.get("transformer_options", {}), "patches" in options
    return found, model, conds


def anything(*args, **kwargs):
    return args, kwargs


try:
    from .patcher import Patcher as Preferred
except ImportError:
    class Preferred:
        pass


class Marks:
    WORD = "apply"
""",
}
KEPT = (
    Row("call", "fake_host.names.load", ("ckpt", "return_metadata="), "split"),
    Row("call", "fake_host.names.anything", ("a", "b="), "split"),
    Row("wrap", "fake_host.names.sample", ("model", "conds", "options"), "split"),
    Row("says", "fake_host.names.sample", ("transformer_options", "patches"), "split"),
    Row("is", "fake_host.names.Marks.WORD", ("apply",), "split"),
    Row("has", "fake_host.names.MODE", (), "split"),
    Row("has", "fake_host.names.Preferred.clone", (), "split"),
    Row("has", "fake_host.names.renamed.Patcher", (), "split"),
    Row("call", "fake_host.names.Patcher", ("model", "device"), "split"),
    Row("call", "fake_host.names.Patcher.made", ("path",), "split"),
    Row("call", "fake_host.names.Patcher.plain", ("first",), "split"),
    Row("call", "fake_host.names.Schema", ("name=", "inputs="), "split"),
    Row("has", "fake_host.patcher.Patcher.model", (), "split"),
    Row("has", "fake_host.patcher.Patcher.inherited", (), "split"),
    Row("has", "fake_host.patcher.Patcher.shown", (), "split"),
    Row("has", "fake_host.patcher.Patcher.backup", (), "split"),
    Row("override", "fake_host.patcher.Patcher.clone", ("disable_dynamic", "model_override"), "split"),
    Row("override", "fake_host.patcher.Patcher.load", ("...",), "split"),
    Row("call", "fake_host.patcher.Patcher.clone", ("disable_dynamic=",), "split"),
)
CHANGES = {
    "a function renamed": ("names", "def load(", "def read(", "fake_host.names.load is gone"),
    "a parameter removed": (
        "names",
        ", return_metadata=False):\n    return ckpt, safe, return_metadata",
        "):\n    return ckpt, safe",
        "fake_host.names.load no longer takes 'return_metadata'",
    ),
    "a parameter renamed": ("names", "ckpt", "path", "fake_host.names.load takes 'path' where 'ckpt' was"),
    "parameters exchanged": (
        "names",
        "load(ckpt, safe=False,",
        "load(safe, ckpt,",
        "fake_host.names.load takes 'safe' where 'ckpt' was",
    ),
    "a parameter more that is needed": (
        "names",
        "load(ckpt, ",
        "load(ckpt, mode, ",
        "fake_host.names.load now needs 'mode'",
    ),
    "a method that is handed more": (
        "base",
        "model_override=None)",
        "model_override=None, force=False)",
        "fake_host.patcher.Patcher.clone now also takes 'force'",
    ),
    "a wrapped function that is handed more": (
        "names",
        "sample(model, conds, options)",
        "sample(model, conds, options, seed)",
        "fake_host.names.sample now also takes 'seed'",
    ),
    "a key renamed": ("names", '"patches"', '"changes"', "fake_host.names.sample no longer knows 'patches'"),
    "a value changed": ("names", 'WORD = "apply"', 'WORD = "run"', "WORD is 'run', no longer 'apply'"),
    "an attribute of a base gone": ("base", "self.backup = {}", "pass", "fake_host.patcher.Patcher.backup is gone"),
    "an attribute renamed": ("patcher", "self.model =", "self.inner =", "fake_host.patcher.Patcher.model is gone"),
    "a class gone": ("patcher", "class Patcher", "class Loader", "fake_host.names.renamed.Patcher is gone"),
    "a field gone": ("patcher", "    inputs: list = None\n", "", "Schema no longer takes 'inputs'"),
    "a method of a class changed": (
        "patcher",
        "def made(cls, path,",
        "def made(cls, file,",
        "takes 'file' where 'path'",
    ),
}
HARMLESS = {
    "a further parameter": ("names", "safe=False", "safe=False, threads=1"),
    "a further method": ("base", "    def load", "    def more(self):\n        return 1\n\n    def load"),
    "takes anything": (
        "names",
        "load(ckpt, safe=False, return_metadata=False)",
        "load(ckpt, safe=0, return_metadata=0, **k)",
    ),
}
Asked = Callable[[dict[str, str]], Host]


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def _changed(file: str, old: str, new: str) -> dict[str, str]:
    path = f"fake_host/{file}"
    assert old in FILES[path]
    return {**FILES, path: FILES[path].replace(old, new)}


@pytest.fixture(params=["living", "written"])
def ask(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Makes a host of files, asked as a running one or as one on the disk."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def made(files: dict[str, str]) -> Host:
        _write(tmp_path, files)
        return Written(tmp_path) if request.param == "written" else Living(may_import=True)

    yield made
    for name in [name for name in sys.modules if name.split(".")[0] in ("fake_host", "comfyui_version")]:
        del sys.modules[name]


def test_a_host_that_keeps_every_row_has_no_faults(ask: Asked) -> None:
    host = ask(FILES)
    assert [fault.text for fault in find_faults(host, KEPT)] == []
    assert host.version == "0.99.0"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_host_is_named(ask: Asked, change: str) -> None:
    file, old, new, text = CHANGES[change]
    assert any(text in fault.text for fault in find_faults(ask(_changed(file, old, new)), KEPT)), change


@pytest.mark.parametrize("change", HARMLESS)
def test_what_is_only_added_is_no_change(ask: Asked, change: str) -> None:
    assert find_faults(ask(_changed(*HARMLESS[change])), KEPT) == []


def test_a_module_that_is_gone_is_named(ask: Asked) -> None:
    row = Row("call", "fake_host.lost.read", ("path",), "split")
    assert [fault.text for fault in find_faults(ask(FILES), [row])] == ["fake_host.lost.read is gone"]


def test_a_running_host_is_not_made_to_import_what_it_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    lost = Row("has", "fake_host.names.nothing", (), "split")
    assert find_faults(Living(), [lost, *KEPT]) == []
    assert not [name for name in sys.modules if name.startswith("fake_host.")]
    sys.modules.pop("fake_host", None)
    sys.modules.pop("comfyui_version", None)


def test_what_some_hosts_lack_is_asked_about_only_where_it_is(ask: Asked) -> None:
    host = ask(FILES)
    absent = Row("call", "fake_host.lost.read", ("path",), "split", is_optional=True)
    other = Row("call", "fake_host.names.load", ("path",), "split", is_optional=True)
    assert [fault.row for fault in find_faults(host, [absent, other])] == [other]


def test_a_function_that_another_pack_has_put_there_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: Any = importlib.import_module("fake_host.names")
    monkeypatch.setattr(names, "sample", lambda a, b, c: (a, b, c))
    assert find_faults(Living(), KEPT) == []
    monkeypatch.delattr(names, "sample")
    assert {fault.text for fault in find_faults(Living(), KEPT)} == {"fake_host.names.sample is gone"}
    for name in [name for name in sys.modules if name.split(".")[0] in ("fake_host", "comfyui_version")]:
        del sys.modules[name]


def _callable_object(**attributes: Any) -> Any:
    return type("Callable", (), {"__call__": lambda self, *args: None, **attributes})()


def _raises(*args: Any) -> Any:
    raise RuntimeError("not like this")


def _endless() -> Any:
    def stand_in() -> None: ...

    stand_in.__wrapped__ = stand_in  # type: ignore[attr-defined]
    return stand_in


def _executed() -> Any:
    return types.FunctionType((lambda a, b, c: None).__code__, {"__name__": None})


def _wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return stand_in


def _subclass(cls: Any) -> Any:
    class StandIn(cls):  # type: ignore[misc]
        def __init__(self, first: Any, second: Any, third: Any) -> None: ...

        def clone(self, own: Any) -> Any: ...

    return StandIn


PATCHES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a function whose __wrapped__ loops": ("names.sample", lambda old: _endless()),
    "a callable object": ("names.sample", lambda old: _callable_object()),
    "an object that fails when it is looked at": ("names.load", lambda old: _callable_object(__getattr__=_raises)),
    "a function made by exec": ("names.load", lambda old: _executed()),
    "a partial for a method": ("patcher.Patcher.clone", lambda old: functools.partial(lambda *given: None)),
    "a cached method": ("base.Base.clone", functools.lru_cache),
    "a class of its own": ("names.Patcher", lambda old: type("StandIn", (), {})),
    "an object for a class": ("patcher.Patcher", lambda old: _callable_object()),
    "a subclass": ("names.Patcher", _subclass),
    "another way to make it": ("patcher.Patcher.__init__", lambda old: lambda self: None),
    "a wrapper around the method that sets an attribute": ("patcher.Patcher.__init__", _wrapping),
    "a wrapper around a function": ("names.sample", _wrapping),
}


@pytest.fixture
def host_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _write(tmp_path, FILES)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("comfyui_version", "fake_host.names", "fake_host.base", "fake_host.patcher"):
        importlib.import_module(name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("fake_host", "comfyui_version")]:
        del sys.modules[name]


@pytest.mark.parametrize("patch", PATCHES)
def test_a_host_that_another_pack_has_patched_is_not_refused(
    host_modules: None, monkeypatch: pytest.MonkeyPatch, patch: str
) -> None:
    path, change = PATCHES[patch]
    owner: Any = sys.modules[f"fake_host.{path.split('.')[0]}"]
    *classes, name = path.split(".")[1:]
    for each in classes:
        owner = getattr(owner, each)
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert [fault.text for fault in find_faults(Living(), KEPT)] == []
    lost = Row("has", "fake_host.names.lost", (), "split")
    assert [fault.row for fault in find_faults(Living(), [*KEPT, lost])] == [lost]


def test_a_finder_of_modules_that_fails_leaves_the_rows_unjudged(
    host_modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        find_spec = staticmethod(_raises)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    host = Living()
    unknown = Row("has", "fake_host.other.read", (), "split")
    lost = Row("has", "fake_host.names.lost", (), "split")
    monkeypatch.setattr(check, "ROWS", (unknown, *KEPT))
    assert "DeviceBridgeSplitModel" in pending_nodes(host)
    assert [fault.row for fault in find_faults(host, [unknown, *KEPT, lost])] == [lost]


# ---- what is refused


def test_each_node_is_refused_for_its_own_parts_only(ask: Asked) -> None:
    file, old, new, text = CHANGES["a parameter removed"]
    host = ask(_changed(file, old, new))
    told = refusals(host.version, find_faults(host, KEPT))
    assert set(told) == {node for node, parts in NODES.items() if "split" in parts}
    assert told["DeviceBridgeSplitModel"] == (
        f"ComfyUI 0.99.0 changed what DeviceBridge relies on here: {text}. Update DeviceBridge, or use ComfyUI 0.33.0, "
        "with which this version of it was tested"
    )


def test_many_changes_are_counted(ask: Asked) -> None:
    gone = [Row("has", f"fake_host.names.lost_{number}", (), "nodes") for number in range(5)]
    told = refusals("1", find_faults(ask(FILES), gone))
    assert set(NODES) == set(told)
    assert (
        "lost_0 is gone; fake_host.names.lost_1 is gone; fake_host.names.lost_2 is gone, and 2 more"
        in told.popitem()[1]
    )


def test_a_host_without_the_schemas_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    with pytest.raises(RuntimeError, match=r"comfy_api.v0_0_2.ComfyExtension is gone"):
        check_parts(Living(may_import=True), ["nodes"])


def test_the_program_prints_what_a_folder_has_changed(tmp_path: Path) -> None:
    """With a Python that is told nothing; of the rows' modules this host has only its version."""
    _write(tmp_path, FILES)
    answer = processes.run([sys.executable, "-I", PROGRAM, tmp_path], timeout_s=60)
    found = json.loads(answer or "")
    assert found["version"] == "0.99.0"
    assert "folder_paths.get_full_path is gone" in found["faults"]
    assert not any("comfyui_version" in text for text in found["faults"])
    assert set(found["refused"]) == {*NODES, "devicebridge run"}


# ---- the rows


def test_every_part_is_some_nodes_and_every_node_has_known_parts() -> None:
    parts = {row.part for row in ROWS}
    assert {part for needed in NODES.values() for part in needed} | {"server", PAGE, NATIVE, CONDITIONS} == parts


def test_a_node_that_cannot_be_judged_yet_is_asked_when_it_is_run() -> None:
    class Waiting(Living):
        def is_pending(self, path: str) -> bool:
            return path.startswith("comfy.samplers.")

    assert pending_nodes(Waiting()) == {node for node, parts in NODES.items() if "split" in parts}
