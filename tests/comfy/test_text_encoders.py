"""A LoRA on CLIP text encoders beside that on the UNet: tiny SD 1.5, SD 2 and SDXL in a real ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
NUM_STEPS = 12


def _proved(comfyui: Path, folder: Path, *builds: str) -> dict[str, dict[str, Any]]:
    """By build: its steps, each with its fault and figures."""
    lines = run_worker("text_encoders_worker.py", comfyui, folder, *builds, timeout=600)
    return {line["name"]: line["steps"] for line in lines}


@pytest.mark.long
def test_both_encoders_of_sdxl_have_right_gradients_and_the_stock_loader_takes_what_they_learned(
    comfyui: Path, tmp_path: Path
) -> None:
    (steps,) = _proved(comfyui, tmp_path, "SDXL: other CLIP, gradients, stock LoRA, nodes, start").values()
    assert not {step: each["fault"] for step, each in steps.items() if each["fault"]}
    assert len(steps) == 5 and {"text_encoders.clip_l.", "text_encoders.clip_g."} <= steps["gradients"].keys()


@pytest.mark.long
def test_every_build_with_clip_trains_it_right(comfyui: Path, tmp_path: Path) -> None:
    found = _proved(comfyui, tmp_path)
    assert found.keys() == {"SD 1.5", "SD 2", "SDXL"}
    faults = {f"{name}, {step}": each["fault"] for name, steps in found.items() for step, each in steps.items()}
    assert len(faults) == 3 * NUM_STEPS and not any(faults.values()), faults
