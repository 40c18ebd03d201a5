"""What is read off ComfyUI's own models before training, against what their forwards do."""

import os
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
IS_LONG = bool(os.environ.get("LONG_TESTS"))
_IMAGE, _MASK, _SEEN = "concat_latent_image", "concat_mask", "clip_vision_output"
# As ComfyUI's conditioning nodes for these models give it, but for what its classes do without.
NEEDS = {
    "Cosmos-Predict2 image-to-video": [], "Kandinsky 5": [], "FLUX.1 Fill": [_IMAGE], "HunyuanVideo I2V": [_IMAGE],
    "SkyReels I2V": [_IMAGE], "SD 1.5 inpainting": [_IMAGE, _MASK], "SD 1.5 InstructPix2Pix": [_IMAGE],
    "CogVideoX image-to-video": [_IMAGE], "HunyuanVideo 1.5": [], "Wan 2.1 T2V, 2.2 T2V 14B": [],
    "Wan 2.1 I2V": [_IMAGE, _SEEN], "Wan 2.2 I2V 14B": [_IMAGE], "Wan 2.1 Fun Control": [_IMAGE, _SEEN],
    "Wan 2.2 Fun Control": [_IMAGE], "Wan Dancer": [_IMAGE, _SEEN], "Wan SCAIL": [_SEEN],
}  # fmt: skip
# What the refusal says; () for what is trained.
REFUSED = {
    "SVD": ("SVD_img2vid is given 4 channels of another picture", "train Wan I2V"),
    "SD x4 upscaler": ("SD_X4Upscaler is given 3 channels of another picture", "draws from text alone"),
    "SD 1.5 InstructPix2Pix": (), "Stable Cascade B": ("stage B draws from what stage C has made", "train stage C"),
    "Stable Cascade C": (), "Stable Cascade C of a file with sums": ("cuts, joins or makes tensors", ".to_q.weight"),
}  # fmt: skip
# File and setting -> least and largest noise level, and what is warned of. Wan's published pairs change at 0.875 of the
# noise, those with an image at 0.9; the model's shift of 8 has no part in it.
_SAYS_NOT = "objective.expert does not say which"
EXPERTS: dict[str, tuple[tuple[float, float], str]] = {
    "wan2.2_t2v_high_noise.safetensors high_noise": ((0.875, 1.0), ""),
    "wan2.2_t2v_low_noise.safetensors low_noise": ((0.0, 0.875), ""),
    "wan2.2_t2v_low_noise.safetensors high_noise": ((0.875, 1.0), "seems to be the other one"),
    "wan2.2_t2v_low_noise.safetensors ": ((0.0, 1.0), _SAYS_NOT), "wan2.1_t2v.safetensors ": ((0.0, 1.0), ""),
    "image_to_video.safetensors ": ((0.0, 1.0), _SAYS_NOT), "image_to_video.safetensors high_noise": ((0.9, 1.0), ""),
    "image_to_video.safetensors low_noise": ((0.0, 0.9), ""), "wan2.2_ti2v_5B.safetensors ": ((0.0, 1.0), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reading")
    return run_worker("native_reading_worker.py", comfyui, folder, str(int(IS_LONG)), *NEEDS)[-1]


def test_as_many_tokens_are_counted_as_blocks_are_given(found: dict[str, Any]) -> None:
    wrong = {name: each for name, each in found["tokens"].items() if each[0] != each[1]}
    assert found["tokens"] and not wrong, wrong


@pytest.mark.parametrize("name", NEEDS)
def test_a_model_asks_for_what_its_own_code_reads(name: str, found: dict[str, Any]) -> None:
    assert found["needs"][name] == NEEDS[name]


def test_a_plan_knows_how_large_a_text_is_before_captions_are_encoded(found: dict[str, Any]) -> None:
    wrong = {name: each for name, each in found["text"].items() if each}
    assert len(found["text"]) > (20 if IS_LONG else 5) and not wrong, wrong


def test_a_model_that_does_not_run_without_its_skips_is_planned_in_words(found: dict[str, Any]) -> None:
    says = found["plans"]["HunyuanDiT"]
    assert says.startswith("there is no forecast of memory for ComfyUI's HunYuanDiT: its forward does not")
    assert "a step takes about" in says


def test_a_model_that_goes_by_the_sides_of_a_clip_is_planned_of_these_sides(found: dict[str, Any]) -> None:
    """Dancer cuts its music by them; its sample is no square."""
    others = {name: says for name, says in found["plans"].items() if name != "HunyuanDiT"}
    assert len(others) == (4 if IS_LONG else 2) and not any(others.values()), others


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_data_here_is_refused_by_its_header(name: str, found: dict[str, Any]) -> None:
    says = found["refused"][name]
    assert all(words in says for words in REFUSED[name]) and bool(says) == bool(REFUSED[name]), says


@pytest.mark.parametrize("name", ["PixelDiT", "Stable Cascade C"])
def test_what_a_loader_cuts_is_read_as_it_cuts_it(name: str, found: dict[str, Any]) -> None:
    assert found["cut"][name] == []


@pytest.mark.parametrize("case", EXPERTS)
def test_an_expert_draws_the_noise_levels_of_its_own_as_the_whole_model_would(case: str, found: dict[str, Any]) -> None:
    *bounds, apart, warned = found["experts"][case]
    wanted, words = EXPERTS[case]
    assert bounds == pytest.approx(wanted, abs=2e-3) and apart < 2e-3, (bounds, apart)
    assert (words in warned) if words else not warned


def test_a_range_of_noise_levels_is_the_network_s_own(found: dict[str, Any]) -> None:
    assert len(found["ranges"]) == 5
    for name, bounds in found["ranges"].items():
        assert bounds == pytest.approx([0.3, 0.6], abs=2e-3), name


def test_comfyui_s_own_list_says_which_models_are_computed_in_float16(found: dict[str, Any]) -> None:
    refused = found["float16"].pop("Qwen-Image")
    assert "QwenImage in torch.float16" in refused
    assert len(found["float16"]) == 2
    for name, apart in found["float16"].items():
        assert 1e-6 < apart < 1e-2, (name, apart)


def test_a_model_without_experts_refuses_one(found: dict[str, Any]) -> None:
    (says,) = found["experts"]["wan2.2_ti2v_5B.safetensors low_noise"]
    assert 'objective.expert = "low_noise" is of Wan 2.2\'s experts' in says and "remove the setting" in says


def test_published_models_are_planned_before_captions_are_encoded(found: dict[str, Any]) -> None:
    """HiDream's experts are chosen by numbers, of which a plan has none, and a UNet's blocks all differ: it says so."""
    assert len(found["full"]) > 1
    without = {name for name in found["full"] if name.startswith(("HiDream-I1", "SDXL", "SD 1.5"))}
    assert {name: fault for name, fault in found["full"].items() if fault} == dict.fromkeys(without, "NoForecast")
