"""Changed hosts are found out: a small ComfyUI is written to disk, changed in one place, and asked."""

import functools
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge import compat
from devicebridge.compat import Need, find_faults, refusals
from devicebridge.system import processes

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

    def load(self, device=None, *args, **kwargs):
        return None
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
from . import patcher

def load(ckpt, safe=False, return_metadata=False):
    return ckpt, safe, return_metadata


def sample(model, conds, options):
    found = options.get("transformer_options", {}), "patches" in options
    return found, model, conds


def anything(*args, **kwargs):
    return args, kwargs

""",
}


def _need(place: str, form: str, is_overridden: bool = False) -> Need:
    name, _, given = form.removesuffix(")").partition("(")
    return Need("split", f"fake_host.{place}", name, tuple(filter(None, given.split(", "))), is_overridden)


KEPT = (
    _need("names", "load(ckpt, return_metadata=)"), _need("names", "anything(a, b=)"),
    _need("names", "sample(model, conds, options)"), _need("names", "sample(model, conds, options)", True),
    _need("names", "Patcher(model, device)"), _need("names:Patcher", "made(path)"),
    _need("names:Patcher", "plain(first)"), _need("names", "Schema(name=, inputs=)"),
    _need("patcher:Patcher", "clone(disable_dynamic=)"),
    _need("patcher:Patcher", "clone(disable_dynamic, model_override)", True),
    _need("patcher", "Patcher.load(...)", True),
)  # fmt: skip
# File, text, what stands there then, and what is said of it.
CHANGES = {
    "a function renamed": ("names", "def load(", "def read(", "fake_host.names.load is gone"),
    "a parameter removed": (
        "names", ", return_metadata=False):\n    return ckpt, safe, return_metadata", "):\n    return ckpt, safe",
        "fake_host.names.load: got an unexpected keyword argument 'return_metadata'",
    ),
    "parameters exchanged": (
        "names", "load(ckpt, safe=False,", "load(safe, ckpt,", "fake_host.names.load takes 'safe' where 'ckpt' was",
    ),
    "a parameter more that is needed": (
        "names", "safe=False, return_metadata=False):", "safe, return_metadata=False):",
        "fake_host.names.load: missing a required argument: 'safe'",
    ),
    "a method that is handed more": (
        "base", "model_override=None)", "model_override=None, force=False)",
        "fake_host.patcher.Patcher.clone now also takes 'force'",
    ),
    "a wrapped function that is handed less": (
        "names", "sample(model, conds, options):", "sample(model, conds):\n    options = {}",
        "fake_host.names.sample: too many positional arguments",
    ),
    "a field gone": ("patcher", "    inputs: list = None\n", "", "unexpected keyword argument 'inputs'"),
    "a method of a class changed": (
        "patcher", "def made(cls, path,", "def made(cls, file,",
        "fake_host.names.Patcher.made takes 'file' where 'path' was",
    ),
    "a module that cannot be imported": (
        "names", "from . import patcher", "import no_such_package_here",
        "fake_host.names cannot be imported (No module named 'no_such_package_here')",
    ),
}  # fmt: skip
HARMLESS = {
    "a further parameter": ("names", "safe=False", "safe=False, threads=1"),
    "a further method": ("base", "    def load", "    def more(self):\n        return 1\n\n    def load"),
    "takes anything": ("names", "load(ckpt, safe=False, return_metadata=False)", "load(ckpt, safe=0, **k)"),
}
Host = Callable[[dict[str, str]], None]


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def _changed(file: str, old: str, new: str) -> dict[str, str]:
    path = f"fake_host/{file}"
    assert old in FILES[path]
    return {**FILES, path: FILES[path].replace(old, new)}


def _texts(needs: tuple[Need, ...] = KEPT) -> list[str]:
    return [text for _, text in find_faults(needs)]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "comfyui_version", raising=False)
    yield lambda files: _write(tmp_path, files)
    for name in [name for name in sys.modules if name.split(".")[0] in ("fake_host", "comfyui_version")]:
        del sys.modules[name]


def test_a_host_that_keeps_every_need_has_no_faults(host: Host) -> None:
    host(FILES)
    assert _texts() == []
    assert compat.version() == "0.99.0"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_host_is_named(host: Host, change: str) -> None:
    *edit, told = CHANGES[change]
    host(_changed(*edit))
    assert any(told in text for text in _texts()), _texts()


@pytest.mark.parametrize("change", HARMLESS)
def test_what_is_only_added_is_no_change(host: Host, change: str) -> None:
    host(_changed(*HARMLESS[change]))
    assert _texts() == []


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
    "a cached method": ("base.Base.clone", functools.lru_cache),
    "a class of its own": ("names.Patcher", lambda old: type("StandIn", (), {})),
    "a subclass": ("names.Patcher", _subclass),
    "a wrapper around the method that sets an attribute": ("patcher.Patcher.__init__", _wrapping),
    "a wrapper around a function": ("names.sample", _wrapping),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_host_that_another_pack_has_patched_is_not_refused(host, monkeypatch, patch):
    host(FILES)
    path, change = PATCHES[patch]
    owner: Any = importlib.import_module(f"fake_host.{path.split('.')[0]}")
    importlib.import_module("fake_host.names")
    *classes, name = path.split(".")[1:]
    for each in classes:
        owner = getattr(owner, each)
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    assert _texts() == []
    assert _texts((*KEPT, _need("names", "lost()"))) == ["fake_host.names.lost is gone"]


def test_a_finder_of_modules_that_fails_leaves_the_needs_unjudged(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(FILES)
    importlib.import_module("fake_host.names")

    class Finder:
        find_spec = staticmethod(_raises)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert _texts((_need("other", "read()"), _need("names", "lost()"))) == ["fake_host.names.lost is gone"]


def test_each_node_is_refused_for_its_own_parts_only(host: Host) -> None:
    *edit, told = CHANGES["a parameter removed"]
    host(_changed(*edit))
    found = refusals(find_faults(KEPT))
    assert set(found) == {"DeviceBridgeSplitModel", "DeviceBridgeLoadDiffusionModelSplit"}
    assert found["DeviceBridgeSplitModel"] == (
        f"ComfyUI 0.99.0 changed what DeviceBridge relies on here: {told}. Update DeviceBridge, or use ComfyUI 0.33.0, "
        "with which this version of it was tested"
    )


def test_many_changes_are_counted(host: Host) -> None:
    host(FILES)
    found = refusals(find_faults(_need("names", f"lost_{number}()") for number in (0, 0, 1, 2, 3, 4)))
    assert "lost_0 is gone; fake_host.names.lost_1 is gone; fake_host.names.lost_2 is gone, and 2 more" in str(found)


def test_every_part_that_is_asked_about_is_some_nodes() -> None:
    assert {need.part for need in compat.NEEDS} == set(compat.PARTS)


def test_a_host_without_the_schemas_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    monkeypatch.delitem(sys.modules, "comfy_api.v0_0_2", raising=False)
    with pytest.raises(RuntimeError, match=r"comfy_api.v0_0_2 cannot be imported"):
        compat.check("schemas")


def test_the_program_prints_what_a_folder_has_changed(tmp_path: Path) -> None:
    """It begins to import the folder's modules, and never the pack's own `nodes`."""
    _write(tmp_path, {**FILES, "folder_paths": "import nodes\n"})
    answer = processes.run([sys.executable, compat.__file__, tmp_path], timeout_s=60)
    found = json.loads(answer or "")
    assert found["version"] == "0.99.0"
    assert "folder_paths cannot be imported (No module named 'nodes')" in found["faults"]
    assert set(found["refused"]) == {name for names in compat.PARTS.values() for name in names}
