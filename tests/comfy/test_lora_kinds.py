"""LoRA kinds on ComfyUI's own classes: stock loaders read all in full, and training goes on from any file."""

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
_LONG = ("wan", "sdxl", "chroma", "qwen_image", "qwen_image_21", "minimax_h3")
NAMES = ("flux2", *(pytest.param(name, marks=pytest.mark.long) for name in _LONG))


@pytest.fixture(scope="module", params=NAMES)
def examined(request: pytest.FixtureRequest, comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kinds")
    found = run_worker("lora_kinds_worker.py", comfyui, folder, request.param)  # of {} it reads no line
    return found[0] if found else pytest.skip(f"the ComfyUI of these tests has no class of {request.param}")


def test_dora_trains_alike_in_stages(examined: dict[str, Any]) -> None:
    losses = examined["dora"]["losses"]
    assert losses["pipeline"] == pytest.approx(losses["accumulated"], rel=1e-5)
    assert len(set(losses["plain"])) == len(set(losses["pipeline"])) == 3


@pytest.mark.parametrize("kind", ["lokr", "loha", "dora", "dokr", "oft"])
def test_the_stock_loader_maps_all_of_it_and_computes_what_was_trained(kind: str, examined: dict[str, Any]) -> None:
    found, written = examined[kind]["keys"]
    assert found == written > 0
    assert examined[kind]["written"] < 1e-5
    assert examined[kind]["difference"] < 1e-5 < 1e-3 < examined[kind]["change"]


def test_training_begins_as_the_stock_model_with_the_same_file(examined: dict[str, Any]) -> None:
    for spelling, found in examined["spellings"].items():
        assert found["difference"] < 1e-5 < 1e-3 < found["change"], spelling


def test_the_preset_attention_is_a_part_of_all(examined: dict[str, Any]) -> None:
    attention, every = examined["attention"]
    assert 0 < attention < every


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("OFT with a constraint", "constraint"), ("zeros", "changes nothing"), ("a bias", "kind diff"),
        ("twice", "there twice"), ("Tucker", "kind loha"), ("OFT with a scale", "kind oft"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_right_is_refused_for_what_it_is(what: str, named: str, examined: dict[str, Any]) -> None:
    layer, message = examined["refusals"][what]
    assert named in message
    assert what in ("zeros", "twice") or layer in message
