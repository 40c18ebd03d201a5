"""Files in 8 bits that training of ComfyUI's own models keeps as they are, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy
FORMATS = ("plain cast", "scaled fp8", "old scaled fp8", "int8 rows")


@pytest.fixture(scope="module")
def found(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worker("native_source_worker.py", comfyui, tmp_path_factory.mktemp("sources"))[-1]


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_in_8_bits_is_kept_as_it_is_or_dequantized_exactly(form: str, found: Any) -> None:
    assert found["missing"][form] == 0, "linears that do not hold the file's own values"
    assert found["wrong"][form] == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nvfp4", "holds quantized weights in nvfp4"),
        ("mxfp8", "holds quantized weights in mxfp8"),
        ("gguf", "is no whole GGUF file"),
        ("lora", "has patches (a LoRA's, say), which training would leave out"),
        ("meanflow", "distilled to jump to the sampler's next noise level (time_r_in)"),
        (
            "first sample alone",
            "reference_latents is read of the first sample of a batch alone; set train.batch_size to 1",
        ),
        ("one at a time", "train.batch_size is 2, but ComfyUI's MiniMaxH3Model computes one sample at a time"),
        ("other loader", "does not come from Load Diffusion Model or Load Checkpoint"),
    ],
)
def test_what_training_cannot_hold_is_refused_with_the_reason(what: str, message: str, found: Any) -> None:
    assert message in found["refused"][what]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("one missing", ("1 missing", "double_blocks.1.img_attn.proj.weight")),
        ("one to detect by missing", ("tensors",)), ("first half", ("missing",)), ("blocks alone", ("24 tensors",)),
        ("one narrower", ("1 mismatched", "double_blocks.1.img_attn.proj.weight", "[128, 127]", "[128, 128]")),
        ("one flat", ("1 mismatched", "double_blocks.1.img_attn.proj.weight")), ("one row", ("part.safetensors",)),
        ("endless", ("double_blocks.4000.x",)),
    ],
)  # fmt: skip
def test_an_incomplete_file_is_refused_by_what_is_missing(what: str, named: tuple[str, ...], found: Any) -> None:
    said = found["refused"][what]
    assert "part.safetensors" in said
    assert [each for each in named if each not in said] == [], said


def test_clips_without_sound_train_a_model_that_needs_one(found: Any) -> None:
    *losses, length = found["silent"]
    assert len(losses) == 2 and all(0 < each < 100 for each in losses)
    assert length == 8  # of five frames at 24 per second, at 40 per second


def test_a_lora_of_diffusers_is_a_beginning_for_minimax_h3(found: Any) -> None:
    said = found["diffusers"]
    assert said["layers"] == 24 and not said["missing"] and said["apart"] < 1e-5, said
    assert "norm_out.linear" in said["other"]


def test_a_model_that_turns_the_next_noise_level_off_is_not_refused_for_it(found: Any) -> None:
    assert found["refused"]["meanflow refiner"] == ""


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Chroma", "Chroma"), ("SD 3.5", "OpenAISignatureMMDITWrapper"), ("Z-Image", "NextDiT"),
        ("Qwen-Image", "QwenImageTransformer2DModel"), ("SDXL", "UNetModel"), ("SDXL checkpoint", "UNetModel"),
        ("HiDream-O1 with a reference", "HiDreamO1Transformer"),
    ],
)  # fmt: skip
def test_the_load_node_has_comfyui_build_what_is_of_no_own_family(file: str, name: str, found: Any) -> None:
    assert found["node"][file] == f"comfyui {name}"
