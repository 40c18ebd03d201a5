"""Bases in few bits that train as their files have them: GGUF, int8 with rotation, scaled float8, mixed ones."""

from typing import Any

import pytest
from devicebridge.tests.comfy.conftest import names_that_run
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
# What every form must hold: a number per weight in 8 bits, rotated or not, or blocks of GGUF.
KINDS = {
    "GGUF mixed": {"Q4_0 torch.uint8 0", "Q4_K torch.uint8 0", "Q5_1 torch.uint8 0"},
    "mixed": {f"rows torch.{kind}" for kind in ("float8_e4m3fn 0", "float8_e5m2 0", "int8 0", "int8 16")},
    "GGUF Q8_0": {"Q8_0 torch.uint8 0"}, "GGUF of Z-Image": {"Q8_0 torch.uint8 0", "Q5_0 torch.uint8 0"},
    "int8 convrot": {"rows torch.int8 16"}, "scaled fp8": {"rows torch.float8_e4m3fn 0"},
}  # fmt: skip
ALWAYS = ("GGUF mixed", "mixed")
EACH = [pytest.param(each, marks=[] if each in ALWAYS else pytest.mark.long) for each in KINDS]


@pytest.fixture(scope="module")
def found(request, comfyui, tmp_path_factory):
    names = names_that_run(request)
    lines = run_worker("native_stored_worker.py", comfyui, tmp_path_factory.mktemp("stored"), *names, timeout=900)
    return {line["name"]: line["steps"] for line in lines}


@pytest.mark.parametrize("name", EACH)
def test_a_base_trains_as_its_file_has_it(name: str, found: dict[str, dict[str, Any]]) -> None:
    steps = found[name]
    assert {step: each["fault"] for step, each in steps.items()} == dict.fromkeys(steps, "")
    assert set(steps["kept"]["kinds"]) == KINDS[name] and steps["kept"]["linears"] > 10
    assert steps["counted"]["bytes"] < steps["counted"]["plain"]
    started = [layout for layout, error in steps["starts"].items() if isinstance(error, float)]
    assert len(started) >= (2 if "Z-Image" in name else 4), steps["starts"]
