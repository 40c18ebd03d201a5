"""Tiny models of ComfyUI's own classes, trained in a real ComfyUI. What each of them can is kept in
tests/assets/native_training.json, of which docs/families.md is made; "newer" there is written by hand.
UPDATE_GOLDEN=1 writes it anew, which takes long; UPDATE_GOLDEN="Krea 2;Anima" writes these rows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.conftest import names_that_run
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
KNOWN = Path(__file__).parents[1] / "assets" / "native_training.json"
NAMES = tuple(json.loads(KNOWN.read_text(encoding="utf-8")))
ALWAYS = ("FLUX.1", "SDXL")
UPDATED = os.environ.get("UPDATE_GOLDEN", "")
ASKED = tuple(name for name in NAMES if name in UPDATED.split(";"))
UNCOMPILED = (
    () if os.environ.get("LONG_TESTS") or UPDATED else ("Wan 2.1 T2V, 2.2 T2V 14B", "SDXL")
)  # see native_steps.py
AT_ONCE = NAMES if UPDATED == "1" else (*ALWAYS, *ASKED)
EACH = [pytest.param(each, marks=[] if each in AT_ONCE else pytest.mark.long) for each in ASKED or NAMES]

# Without these nobody should train a model, whatever the table says of the rest.
NEEDED = ("loss", "gradients", "recompute", "split", "8 bits", "5 steps", "resume", "stock LoRA")


@pytest.fixture(scope="module")
def lines(request, comfyui, tmp_path_factory):
    folder, names = tmp_path_factory.mktemp("native"), names_that_run(request)
    return run_worker("native_training_worker.py", comfyui, folder, *names, timeout=600 * len(names))


@pytest.fixture(scope="module")
def found(lines: list[dict[str, Any]]) -> dict[str, Any]:
    models = {
        result["name"]: {
            "class": result["class"],
            "faults": {step: each["fault"] for step, each in result["steps"].items()},
        }
        for result in lines
        if "missing" not in result
    }
    if UPDATED:
        known = json.loads(KNOWN.read_text(encoding="utf-8"))
        models = {name: {**known[name], **model} for name, model in models.items()}
        KNOWN.write_text(json.dumps({**known, **models}, indent=1) + "\n", encoding="utf-8")
    return models


def _faults(name: str, found: dict[str, Any]) -> dict[str, Any]:
    if name not in found:
        pytest.skip(f"the ComfyUI of these tests has no class of {name}")
    return found[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", EACH)
def test_a_class_does_what_is_said_of_it(name: str, found: dict[str, Any]) -> None:
    known = json.loads(KNOWN.read_text(encoding="utf-8"))[name]
    if name in UNCOMPILED:
        del known["faults"]["compiled"]
    assert _faults(name, found)["faults"] == known["faults"]
    assert found[name]["class"] == known["class"]


# Classes without a written row, after their file was examined, and which steps are refused in which words.
_OTHER_INPUTS, _AT_HOME = {"tokens": "other inputs"}, {"pipeline": "main device between its blocks"}
_DERIVED = {
    "FLUX.1": {}, "Chroma": {}, "Qwen-Image": {}, "Wan 2.1 T2V, 2.2 T2V 14B": {}, "HunyuanVideo": {}, "SD 3.5": {},
    "Krea 2": {}, "LTX-Video": _AT_HOME, "Lumina 2": _OTHER_INPUTS, "Cosmos-Predict2": {},
    "moss": {}, "flux3": _AT_HOME,
    "FLUX.1 Kontext": dict.fromkeys(("gradients", "split", "pipeline", "tokens", "stock LoRA"), "other inputs"),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(e, marks=[pytest.mark.long] * (e != "FLUX.1")) for e in _DERIVED])
def test_derived_rows_are_trained_as_written_ones(name: str, comfyui: Path, tmp_path: Path) -> None:
    (found,) = run_worker("native_training_worker.py", comfyui, tmp_path, f"derived {name}", timeout=300)
    assert "nobody has described it" in found["before"] and "examine" in found["before"]
    for step, each in found["steps"].items():
        word = _DERIVED[name].get(step, "")
        assert word in each["fault"] if word else not each["fault"], (step, each)
    if "tokens" not in _DERIVED[name]:
        assert found["steps"]["tokens"]["3 cards"] < 1e-5


@pytest.mark.parametrize("name", EACH)
def test_what_can_be_trained_is_trained_right(name: str, found: dict[str, Any]) -> None:
    faults = {step: _faults(name, found)["faults"][step] for step in NEEDED}
    assert not any(faults.values()), faults


def test_no_class_is_left_out(request: pytest.FixtureRequest, lines: list[dict[str, Any]]) -> None:
    assert tuple(each["name"] for each in lines) == names_that_run(request)
