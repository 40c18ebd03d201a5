"""What ComfyUI's own models say of samples with noise masks in one batch is what they say of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

# Which samples share a batch is in tests/unit/encoding/test_comfy_data.py, too.
pytestmark = [pytest.mark.comfy, pytest.mark.long]


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worker("native_batches_worker.py", comfyui, tmp_path_factory.mktemp("batches"))[-1]


@pytest.mark.parametrize("build", ["LTX-Video", "LTX-2", "Wan 2.2 TI2V 5B", "Cosmos-Predict2", "with masks of guides"])
def test_a_batch_of_masked_samples_says_what_each_says_alone(build: str, found: Any) -> None:
    """LTX-2 asks the first sample's mask whether a frame has one noise level, and LTX-Video the first one's guides."""
    assert found[build]["together"] == [[0, 2], [1, 3]], "masks of frames, and masks of places"
    assert found[build]["apart"] < 1e-5
