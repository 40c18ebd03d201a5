"""LoRA kinds on ComfyUI's own classes: stock loaders read LoKr in full, and training goes on from any LoRA file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
NAMES = ("flux2", *(pytest.param(name, marks=pytest.mark.long) for name in ("wan", "sdxl")))


@pytest.fixture(scope="module", params=NAMES)
def examined(request: pytest.FixtureRequest, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kinds")
    return run_worker("lora_kinds_worker.py", comfyui, folder, request.param)[0]


def test_lokr_trains_alike_in_every_way(examined: dict[str, Any]) -> None:
    losses = examined["lokr"]["losses"]
    for way, reference in {"recompute": "plain", "split": "plain", "pipeline": "accumulated"}.items():
        assert losses[way] == pytest.approx(losses[reference], rel=1e-5), way
    assert len(set(losses["plain"])) == 3


def test_the_stock_loader_maps_all_of_lokr_and_computes_what_was_trained(examined: dict[str, Any]) -> None:
    found, written = examined["lokr"]["keys"]
    assert found == written > 0
    assert examined["lokr"]["difference"] < 1e-5 < 1e-3 < examined["lokr"]["change"]


def test_training_begins_as_the_stock_model_with_the_same_file(examined: dict[str, Any]) -> None:
    for spelling, found in examined["spellings"].items():
        assert found["difference"] < 1e-5 < 1e-3 < found["change"], spelling


def test_the_preset_attention_is_a_part_of_all(examined: dict[str, Any]) -> None:
    attention, every = examined["attention"]
    assert 0 < attention < every
