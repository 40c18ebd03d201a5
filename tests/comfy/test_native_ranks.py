"""Tiny models of ComfyUI's own classes whose weights two processes share (fsdp), each with a real ComfyUI in it. What
each of them can is kept in tests/assets/native_ranks.json, of which docs/families.md is made; UPDATE_GOLDEN=1 writes it
anew, UPDATE_GOLDEN="Krea 2;Anima" these rows. STEPS="compiled fp8-compute" runs these steps alone, and
what was recorded of others stays."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.conftest import names_that_run
from devicebridge.tests.comfy.server import ENVIRONMENT
from devicebridge.tests.comfy_host import comfy_python
from devicebridge.tests.ranks.launching import ENVIRONMENT as RANKS
from devicebridge.tests.ranks.launching import torchrun

pytestmark = [pytest.mark.comfy, pytest.mark.skipif(sys.platform != "linux", reason="needs gloo over loopback")]
KNOWN = Path(__file__).parents[1] / "assets" / "native_ranks.json"
NAMES = tuple(json.loads(KNOWN.with_name("native_training.json").read_text(encoding="utf-8")))
# A buffer in the file; blocks of which only the parts are called; weights that are used before the forward.
ALWAYS = ("SD 3.5", "SDXL", "LTX-2.3 with a voice")
ORDER = ("shared", "int8-compute", "fp8-compute", "compiled", "resumed")
ENDED = "ended"
UPDATED = os.environ.get("UPDATE_GOLDEN", "")
ASKED = tuple(name for name in NAMES if name in UPDATED.split(";"))
IS_LONG = bool(os.environ.get("LONG_TESTS") or UPDATED)
STEPS = os.environ.get("STEPS", "" if IS_LONG else "shared")
EACH = [pytest.param(name, marks=[] if name in (*ALWAYS, *ASKED) else pytest.mark.long) for name in ASKED or NAMES]


def _run(comfyui: Path, folder: Path, strategy: str, names: tuple[str, ...], count: int) -> dict[str, dict[str, str]]:
    """The fault of every step of these models. One that ended the processes has why, as ENDED; new ones go on."""
    faults: dict[str, dict[str, str]] = {}
    while left := [name for name in names if name not in faults]:
        arguments = [comfyui, folder / str(len(faults)), strategy, *left]
        command = torchrun(Path(__file__).with_name("native_ranks_worker.py"), *arguments, count=count)
        environment = {**RANKS, **ENVIRONMENT, "STEPS": STEPS}
        command[0] = str(comfy_python(comfyui))
        limit = 600 * len(left)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=limit)
        lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
        faults |= {each["name"]: {step: found["fault"] for step, found in each["steps"].items()} for each in lines}
        if done.returncode and (left := [name for name in left if name not in faults]):
            faults[left[0]] = {ENDED: done.stderr[-4000:]}
        assert lines or done.returncode, done.stdout
    return faults


def _in_order(steps: dict[str, str]) -> dict[str, str]:
    """As the worker runs them."""
    return dict(sorted(steps.items(), key=lambda each: ORDER.index(each[0])))


@pytest.fixture(scope="module")
def found(request: Any, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    faults = _run(comfyui, tmp_path_factory.mktemp("shared"), "fsdp", names_that_run(request), 2)
    if UPDATED and not any(ENDED in each for each in faults.values()):
        known = json.loads(KNOWN.read_text(encoding="utf-8"))
        kept = known if STEPS else {}
        merged = {name: _in_order({**kept.get(name, {}), **steps}) for name, steps in faults.items() if steps}
        KNOWN.write_text(json.dumps({**known, **merged}, indent=1) + "\n", encoding="utf-8")
    return faults


@pytest.mark.parametrize("name", EACH)
def test_processes_that_share_the_weights_compute_what_one_does(name: str, found: dict[str, dict[str, str]]) -> None:
    """Loss and gradients of a step. In long runs likewise in 8 bits and with compiled blocks, and the losses of a job
    that stops and goes on."""
    if not found[name]:
        pytest.skip(f"the ComfyUI of these tests has no class of {name}")
    known = json.loads(KNOWN.read_text(encoding="utf-8"))[name]
    assert ENDED not in found[name], found[name][ENDED]
    assert found[name] == {step: known[step] for step in found[name]}
    assert not found[name].get("shared") and not found[name].get("resumed")
