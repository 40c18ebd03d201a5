"""The ComfyUI at hand has every part that the rows of the contract name, whichever way it is asked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from devicebridge.contract.rows import NODES
from devicebridge.tests.comfy_host import comfy_python

pytestmark = pytest.mark.comfy

WORKER = Path(__file__).with_name("contract_worker.py")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def told(comfyui: Path) -> dict[str, Any]:
    command = [str(comfy_python(comfyui)), str(WORKER), str(comfyui)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(command, cwd=comfyui, env={**os.environ, **ENVIRONMENT}, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_running_comfyui_has_every_part(told: dict[str, Any]) -> None:
    assert (told["living"], told["pending"]) == ([], [])


def test_asking_it_imports_nothing(told: dict[str, Any]) -> None:
    assert told["imported"] == []


def test_its_source_has_every_part(told: dict[str, Any]) -> None:
    assert told["written"] == []


def test_every_method_that_stands_in_for_one_of_comfyuis_has_a_row(told: dict[str, Any]) -> None:
    assert told["overrides without a row"] == []


def test_where_a_function_is_gone_its_nodes_are_guarded_and_look_as_before(told: dict[str, Any]) -> None:
    assert told["guarded"] == [node for node, parts in NODES.items() if "split" in parts]
    assert told["same schemas"]
