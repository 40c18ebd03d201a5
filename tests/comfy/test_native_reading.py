"""What is read off ComfyUI's own models before training, against what their forwards do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    is_long = str(int(bool(os.environ.get("LONG_TESTS"))))
    return run_worker("native_reading_worker.py", comfyui, tmp_path_factory.mktemp("reading"), is_long)[-1]


def test_as_many_tokens_are_counted_as_blocks_are_given(found: dict[str, Any]) -> None:
    wrong = {name: each for name, each in found["tokens"].items() if each[0] != each[1]}
    assert found["tokens"] and not wrong, wrong
