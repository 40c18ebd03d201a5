"""Pictures that models of ComfyUI's own classes draw while they train, beside those of a stock KSampler."""

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

# In short: test_training_of_native_jobs.py has a job with pictures, tests/unit/nodes/test_native_drawing.py the steps.
pytestmark = [pytest.mark.comfy, pytest.mark.long]
EACH = ("SDXL", "Wan 2.1 T2V, 2.2 T2V 14B", "FLUX.1", "FLUX.2", "SD 1.5", "SDXL v-prediction", "Cosmos-Predict2")
EACH += ("HunyuanVideo", "LTX-2 without sound")
VIDEO = ("Wan", "HunyuanVideo", "LTX-2")


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lines = run_worker("native_pictures_worker.py", comfyui, tmp_path_factory.mktemp("drawn"), *EACH)
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", EACH)
def test_latents_are_those_of_a_ksampler_with_the_same_lora(name: str, found: dict[str, Any]) -> None:
    """Before the first step without a LoRA, after the last with the one that was written; two prompts each."""
    assert len(found[name]["errors"]) == 4 and max(found[name]["errors"]) < 1e-4, found[name]
    assert found[name]["moved"] > 1e-3 and found[name]["differs"] > 5e-4, found[name]


@pytest.mark.parametrize("name", EACH)
def test_pictures_are_those_of_vae_decode(name: str, found: dict[str, Any]) -> None:
    assert max(found[name]["levels"]) <= 1 and found[name]["spread"] > 20, found[name]
    ending = "webp" if name.startswith(VIDEO) else "png"
    assert found[name]["files"] == [f"{step:06d}_{index}.{ending}" for step in (0, 2) for index in (0, 1)]


@pytest.mark.parametrize("name", EACH)
def test_the_lora_file_is_the_same_with_and_without_pictures(name: str, found: dict[str, Any]) -> None:
    assert found[name]["same file"]
