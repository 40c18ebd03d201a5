"""Tiny models of ComfyUI's own classes, trained in a real ComfyUI: every strategy gives the LoRA of one device."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.server import ENVIRONMENT
from devicebridge.tests.comfy_host import comfy_python

pytestmark = pytest.mark.comfy
WORKER = Path(__file__).with_name("native_training_worker.py")
NAMES = ("flux2",)


@pytest.fixture(scope="module", params=NAMES)
def trained(request: pytest.FixtureRequest, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("native")
    command = [str(comfy_python(comfyui)), str(WORKER), str(comfyui), str(folder), request.param]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"name"')))


def test_every_strategy_trains_the_lora_of_one_device(trained: dict[str, Any]) -> None:
    for way, losses in trained["losses"].items():
        expected = trained["losses"]["accumulated" if way in ("pipeline", "data") else "plain"]
        if way != "accumulated":
            assert losses == pytest.approx(expected, rel=1e-5), way
            assert trained["difference"][way] < 1e-4, way
    assert len(set(trained["losses"]["plain"])) == 3


def test_a_resumed_run_is_bit_for_bit_that_which_did_not_stop(trained: dict[str, Any]) -> None:
    assert trained["losses"]["resumed"] == trained["losses"]["recompute"]


def test_the_stock_loader_maps_every_key(trained: dict[str, Any]) -> None:
    found, written = trained["keys"]
    assert found == written > 0
