"""The doctor: right about versions, and never ill itself."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from devicebridge.cli import doctor
from devicebridge.headless import run as server
from devicebridge.planning import cards as machine_module
from devicebridge.system.versions import TESTED, VersionRange
from devicebridge.tests.emulated import CARDS, emulated_cards

SPLIT = "Split Model Across GPUs (sampling in ComfyUI)"


@pytest.fixture(autouse=True)
def _no_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **_: object) -> None:
        raise RuntimeError("none")

    monkeypatch.setattr(server, "find_comfyui", missing)
    monkeypatch.setattr(server, "find_comfy_cli", missing)


@pytest.mark.parametrize(
    ("first", "last", "version", "is_covered"),
    [
        ("2.11", "2.13", "2.13.0+cpu", True), ("2.11", "2.13", "2.11.1", True),
        ("2.11", "2.13", "2.14.0.dev20261101+rocm7", False), ("2.11", "2.13", "2.10.2", False),
        ("2.11", "2.13", "2.9.0", False), ("5", "5", "5.23.0", True), ("5", "5", "4.57.1", False),
        ("3.10", "3.13", "3.9.18", False), ("0.42", "0.42", "0.42.0rc1", True),
    ],
)  # fmt: skip
def test_versions_are_compared_by_the_parts_named(first: str, last: str, version: str, is_covered: bool) -> None:
    assert VersionRange(first, last, "").covers(version) is is_covered


def test_facts_are_plain_and_the_report_shows_them() -> None:
    facts = doctor.collect()
    assert json.loads(json.dumps(facts)) == facts
    text = doctor.report(facts)
    for name, found in facts["versions"].items():
        assert name in text and found["found"] in text
    assert facts["devices"][-1]["name"] == "cpu"
    assert "no  devicebridge run (ComfyUI workflows without a browser): no ComfyUI was found" in text


def test_nothing_installed_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    facts = doctor.collect()
    assert [feature["works"] for feature in facts["features"]] == [False] * len(facts["features"])
    text = doctor.report(facts)
    assert "torch cannot be imported" in text
    assert "diffusers    missing         needed for loading and training models" in text
    assert set(TESTED) >= {"torch", "diffusers", "peft", "torchao", "transformers", "safetensors", "python"}


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = doctor.collect()
    assert facts["torch_build"].startswith("cannot be imported")
    assert "no  LoRA training: torch cannot be imported" in doctor.report(facts)


def test_an_untested_version_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0")
    assert "not tested; tested: 0.42" in doctor.report(doctor.collect())


def _two_cards(**missing: None) -> dict[str, Any]:
    versions = {name: {"found": missing.get(name, "1")} for name in TESTED}
    return {"versions": versions, "devices": [{"name": "cuda:0"}, {"name": "cuda:1"}, {"name": "cpu"}]}


def test_a_split_needs_two_gpus_and_a_split_model_comfyui_but_nothing_for_training() -> None:
    versions = {name: {"found": "1" if name == "torch" else None} for name in TESTED}
    two, one = _two_cards(), {"devices": _two_cards()["devices"][1:]}
    sampling = two | {"versions": versions, "comfyui": "there"}
    for each, facts in ((SPLIT, sampling), ("LoRA training split over GPUs", two)):
        assert doctor.why_not(facts | one, each) == "needs two GPUs or more; torch finds 1"
        assert doctor.why_not(facts, each) == ""
    assert doctor.why_not(two | one, "LoRA training on a GPU") == ""
    assert doctor.why_not(sampling | {"comfyui": None}, SPLIT).startswith("no ComfyUI was found")
    run = next(name for name in doctor._FEATURES if name.startswith("devicebridge run"))
    assert "comfy-cli" in doctor.why_not(sampling | {"comfy_cli": None}, run)


def test_the_report_says_whether_comfyui_has_the_pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = server.ComfyUI(folder=tmp_path, python=Path(sys.executable), base=tmp_path)
    monkeypatch.setattr(server, "find_comfyui", lambda **_: found)
    assert "DeviceBridge in its custom_nodes: no" in doctor.report(doctor.collect())
    pack = tmp_path / "custom_nodes" / "bridge"
    pack.mkdir(parents=True)
    (pack / "pyproject.toml").write_text('[project]\nname = "devicebridge"\n')
    assert f"DeviceBridge in its custom_nodes: {pack}" in doctor.report(doctor.collect())


def test_the_report_says_what_a_comfyui_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This one has nothing but a version and folders, one of their functions under another name."""
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.99.0"\n', encoding="utf-8")
    (tmp_path / "folder_paths.py").write_text("def get_full_path(folder, filename):\n    pass\n", encoding="utf-8")
    found = server.ComfyUI(folder=tmp_path, python=Path(sys.executable), base=tmp_path)
    monkeypatch.setattr(server, "find_comfyui", lambda **_: found)
    (tmp_path / "sitecustomize.py").write_text("print('of another program')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = doctor.collect()
    assert json.loads(json.dumps(facts)) == facts
    lines = doctor.report(facts).splitlines()
    assert "    folder_paths.get_full_path takes 'folder' where 'folder_name' was" in lines
    assert "    comfy.samplers cannot be imported (No module named 'comfy')" in lines
    refused = next(line for line in lines if "so these do not work" in line)
    assert "DeviceBridgeSplitModel" in refused and "training of ComfyUI's own models" in refused
    two = {**facts, "devices": [{"name": "cuda:0"}, {"name": "cuda:1"}]}
    assert doctor.why_not(two, SPLIT).startswith("ComfyUI 0.99.0 changed what DeviceBridge relies on here: ")


def test_a_package_that_comfyui_imports_and_its_python_lacks_is_no_change(monkeypatch, tmp_path):
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "model_management.py").write_text("import frobnicator\n")
    found = server.ComfyUI(folder=tmp_path, python=Path(sys.executable), base=tmp_path)
    monkeypatch.setattr(server, "find_comfyui", lambda **_: found)
    text = doctor.report(facts := doctor.collect())
    assert "cannot import ComfyUI (No module named 'frobnicator'). Name its own" in text and "has changed" not in text
    two = {**facts, "devices": [{"name": "cuda:0"}, {"name": "cuda:1"}]}
    assert doctor.why_not(two, SPLIT) == facts["python_fault"]


def test_a_comfyui_whose_python_does_not_start_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = server.ComfyUI(folder=tmp_path, python=tmp_path / "none", base=tmp_path)
    monkeypatch.setattr(server, "find_comfyui", lambda **_: found)
    assert f"not asked; {found.python} does not start it" in doctor.report(doctor.collect())


def test_on_windows_the_report_says_that_comfyui_shows_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {**doctor.collect(), "comfyui": "there", "contract": {"faults": [], "refused": {}}}
    cards = [{**facts["devices"][-1], "name": name} for name in ("cuda:0", "cuda:1", "cpu")]
    hint = "unless it is started with --cuda-device all"
    assert hint in doctor.report({**facts, "system": "Windows 11 AMD64", "devices": cards})
    assert hint not in doctor.report({**facts, "system": "Windows 11 AMD64", "devices": cards[1:]})
    assert hint not in doctor.report({**facts, "system": "Linux 6.18 x86_64", "devices": cards})


def test_links_are_measured_kept_and_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEVICEBRIDGE_CACHE", str(tmp_path))
    with emulated_cards(2):
        lines = doctor._measure(list(CARDS[:2]))
        assert "GB/s each way at once" in lines[2]
        (path,) = (tmp_path / "calibration").iterdir()
        assert lines[3].startswith("measured 2") and lines[3].endswith(f"kept in {path}")
        monkeypatch.setattr(machine_module, "measure_machine", lambda devices: 1 / 0)
        assert doctor._measure(list(CARDS[:2])) == lines
    facts = doctor.collect() | {"machine_speed": lines}
    assert all(f"\n  {line}" in doctor.report(facts) for line in lines)


def test_a_card_that_cannot_be_measured_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEVICEBRIDGE_CACHE", str(tmp_path))

    def full(devices: object) -> None:
        raise RuntimeError("no room on lazy:1")

    monkeypatch.setattr(machine_module, "measure_machine", full)
    with emulated_cards(2):
        assert doctor._measure(list(CARDS[:2])) == ["not measured: no room on lazy:1"]
