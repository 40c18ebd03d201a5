"""A LoRA on CLIP text encoders beside that on the UNet: tiny SD 1.5, SD 2 and SDXL in a real ComfyUI."""

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
WORKER = Path(__file__).with_name("text_encoders_worker.py")
NUM_STEPS = 10


def _proved(comfyui: Path, folder: Path, *builds: str) -> dict[str, dict[str, Any]]:
    """By build: its steps, each with its fault and figures."""
    command = [str(comfy_python(comfyui)), str(WORKER), str(comfyui), str(folder), *builds]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line["steps"] for line in lines}


def test_both_encoders_of_sdxl_have_right_gradients_and_the_stock_loader_takes_what_they_learned(
    comfyui: Path, tmp_path: Path
) -> None:
    (steps,) = _proved(comfyui, tmp_path, "SDXL: other CLIP, gradients, stock LoRA").values()
    assert not {step: each["fault"] for step, each in steps.items() if each["fault"]}
    assert len(steps) == 3 and {"text_encoders.clip_l.", "text_encoders.clip_g."} <= steps["gradients"].keys()


@pytest.mark.long
def test_every_build_with_clip_trains_it_right(comfyui: Path, tmp_path: Path) -> None:
    found = _proved(comfyui, tmp_path)
    assert found.keys() == {"SD 1.5", "SD 2", "SDXL"}
    faults = {f"{name}, {step}": each["fault"] for name, steps in found.items() for step, each in steps.items()}
    assert len(faults) == 3 * NUM_STEPS and not any(faults.values()), faults
