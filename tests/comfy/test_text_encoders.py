"""A LoRA on CLIP text encoders beside that on the UNet: tiny SD 1.5, SD 2 and SDXL in a real ComfyUI."""

from pathlib import Path

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
NUM_STEPS = 11


@pytest.mark.long
def test_every_build_with_clip_trains_it_right(comfyui: Path, tmp_path: Path) -> None:
    lines = run_worker("text_encoders_worker.py", comfyui, tmp_path, timeout=600)
    found = {line["name"]: line["steps"] for line in lines}
    assert found.keys() == {"SD 1.5", "SD 2", "SDXL"}
    faults = {f"{name}, {step}": each["fault"] for name, steps in found.items() for step, each in steps.items()}
    assert len(faults) == 3 * NUM_STEPS and not any(faults.values()), faults
    assert {"text_encoders.clip_l.", "text_encoders.clip_g."} <= found["SDXL"]["gradients"].keys()
