"""What a model of ComfyUI's is given beside its caption, beside what ComfyUI's sampler and nodes make of the same."""

from pathlib import Path
from typing import Any

import pytest
from devicebridge.families.comfy.conditions import WAYS
from devicebridge.tests.comfy.workers import run_worker

pytestmark = [pytest.mark.comfy, pytest.mark.long]


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worker("native_conditions_worker.py", comfyui, tmp_path_factory.mktemp("conditions"))[-1]


def test_what_goes_through_the_cache_reaches_the_model_as_the_sampler_gives_it(found: Any) -> None:
    """Strings, numbers, lists and outputs of CLIP vision; nothing is left out, nothing is another number."""
    assert len(found["given"]) == 6 and not any(found["given"].values()), found["given"]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_what_is_made_of_files_is_what_the_nodes_make(way: str, found: Any) -> None:
    assert found["made"][way] == ""


@pytest.mark.parametrize("way", ["first-frame", "vace", "first-frame, by a noise mask"])
def test_a_job_on_folders_trains_what_the_graph_trains(way: str, found: Any) -> None:
    of_folders, of_graph = found["trained"][way]
    assert of_folders == of_graph and min(of_folders) > 0, "of a step, and where the same files are held out"


def test_a_job_is_told_what_its_model_takes_and_that_it_draws_no_pictures(found: Any) -> None:
    assert 'data.condition = "first-frame" is for a WanModel' in found["refused"]["other model"]
    assert "it takes vace" in found["refused"]["other model"]
    for way in ("first-frame", "fun-control"):
        assert "image embedder, which reads CLIP vision" in found["refused"][f"{way} without CLIP vision"]
    assert "ComfyUI's VaceWanModel is given vace_frames beside a prompt" in found["refused"]["pictures"]
