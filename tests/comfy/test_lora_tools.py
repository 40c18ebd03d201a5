"""ComfyUI's own loader reads every result of `devicebridge lora`, and adds to each weight what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
NAMES = ("flux1", "flux2", "wan", "sdxl", "qwen_image")


@pytest.fixture(scope="module")
def examined(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run_worker("lora_tools_worker.py", comfyui, tmp_path_factory.mktemp("tools"), *NAMES)
    return {each["name"]: each for each in found}


@pytest.mark.parametrize("name", NAMES)
def test_every_result_adds_what_was_asked_for(name: str, examined: dict[str, Any]) -> None:
    found = examined[name]["found"]
    assert len(found) == (11 if name.startswith("flux") else 9 if name == "wan" else 7) + 17
    for kind, (difference, unread) in found.items():
        assert difference < {"extract": 1e-3, "resize": 1e-4, "merge to a rank": 1e-4}.get(kind, 1e-5) and not unread, (
            kind
        )


@pytest.mark.parametrize("name", ["flux1", "flux2", "wan"])
def test_it_is_said_how_many_layers_the_loader_finds(name: str, examined: dict[str, Any]) -> None:
    loaders = examined[name]["loaders"]
    assert len({counted for _, _, counted in loaders}) > 1
    for spelling, said, counted in loaders:
        assert said[0].split(", not")[0] == counted, spelling


@pytest.mark.parametrize("name", NAMES)
def test_its_own_loader_says_what_it_does_not_map(name: str, examined: dict[str, Any]) -> None:
    assert examined[name]["unread"] == [f"diffusion_model.nowhere.lora_{each}.weight" for each in "AB"]
