"""Jobs on folders of sounds, and of clips with sounds, train what ComfyUI's own nodes make of them."""

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worker("sounds_worker.py", comfyui, tmp_path_factory.mktemp("sounds"))[-1]


@pytest.mark.parametrize("model", ["ACE-Step 1.5", "LTX-2", "MiniMax H3"])
def test_a_job_on_files_trains_what_the_nodes_make_of_them(model: str, found: Any) -> None:
    of_folders, of_graph = found[model]
    assert of_folders == of_graph and len(of_folders) == 2 and min(of_folders) > 0


def test_files_are_decoded_as_load_audio_does(found: Any) -> None:
    assert found["loaded"] == []


def test_a_song_without_caption_is_what_workflows_sample_against(found: Any) -> None:
    assert found["dropped"] == [0, 0]


def test_a_vae_of_pictures_is_refused_for_sound(found: Any) -> None:
    assert "3 channels" in found["refused"]
