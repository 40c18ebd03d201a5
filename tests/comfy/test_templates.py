"""Every shipped template runs in a real ComfyUI: its graph as shipped, with tiny files in place of the real ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.tests.comfy.server import ROOT, Server
from devicebridge.tests.comfy.small_flux2 import original_weights, save_comfy_sized_pipeline
from devicebridge.tests.comfy.workers import run_script
from devicebridge.tests.tiny_pipeline import save_tiny_dataset
from devicebridge.tests.workflows import read_workflow, set_values, training_values
from PIL import Image
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfy

FLUX, WAN = "tiny_flux2.safetensors", "tiny_wan.safetensors"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_comfy_sized_pipeline(tmp_path_factory.mktemp("template_models") / "small_flux2")


@pytest.fixture(scope="module")
def images(server: Server) -> None:
    folder = server.base / "input" / "my_images"
    if not folder.exists():
        save_tiny_dataset(folder, num_images=3)


@pytest.fixture(scope="module")
def files(server: Server, comfyui: Path, pipeline: Path) -> None:
    models = server.base / "models" / "diffusion_models"
    models.mkdir(parents=True, exist_ok=True)
    save_file(original_weights(pipeline / "transformer"), models / FLUX)
    done = run_script("native_job_worker.py", comfyui, server.base, "save", "wan", models / WAN)
    assert done.returncode == 0, done.stderr[-3000:]


def _graph(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "assets" / f"{name}_api.json").read_text(encoding="utf-8"))


def _of_kind(graph: dict[str, Any], *kinds: str) -> dict[str, dict[str, Any]]:
    return {key: node for key, node in graph.items() if node["class_type"] in kinds}


def with_stand_ins(graph: dict[str, Any], family: str, channels: int = 32) -> dict[str, Any]:
    """Tiny files and encoders, and few small steps; nodes and links stay as they are."""
    graph["encoders"] = {
        "class_type": "TestTinyEncoders",
        "inputs": {"family": family, "seed": 0, "channels": channels},
    }
    places = {key: 0 for key in _of_kind(graph, "CLIPLoader")} | {key: 1 for key in _of_kind(graph, "VAELoader")}
    for key in places:
        del graph[key]
    for node in graph.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in places:
                node["inputs"][name] = ["encoders", places[value[0]]]
    if family == "wan":  # whose encoder has no tiny build
        for index, node in enumerate(_of_kind(graph, "CLIPTextEncode").values()):
            node |= {"class_type": "TestCondition", "inputs": {"family": family, "seed": index}}
    # unipc makes tensors of lists of tensors, which emulated cards do not
    small = {
        "sampler_name": "euler", "steps": 2, "width": 64, "height": 64, "length": 5,
        "filename_prefix": f"template_{family}",
    }  # fmt: skip
    for node in graph.values():
        if not node["class_type"].startswith("DeviceBridge"):
            node["inputs"] |= {name: value for name, value in small.items() if name in node["inputs"]}
    for node in _of_kind(graph, "DeviceBridgeLoadDiffusionModelSplit", "UNETLoader").values():
        node["inputs"]["unet_name"] = WAN if family == "wan" else FLUX
    return graph


def over_two_cards(graph: dict[str, Any]) -> dict[str, Any]:
    ((_, loader),) = _of_kind(graph, "DeviceBridgeLoadDiffusionModelSplit").items()
    ((sampler, _),) = _of_kind(graph, "KSampler").items()
    ((_, decode),) = _of_kind(graph, "VAEDecode").items()
    graph["on"] = {"class_type": "TestCardsOn", "inputs": {"devices": "lazy:0,lazy:1"}}
    graph["off"] = {"class_type": "TestCardsOff", "inputs": {"samples": [sampler, 0]}}
    loader["inputs"]["devices"] = ["on", 0]
    decode["inputs"]["samples"] = ["off", 0]
    return graph


def _quick_training(graph: dict[str, Any], pipeline: Path, **train: Any) -> dict[str, Any]:
    return set_values(graph, training_values(pipeline, "my_images", sample_steps=2, **train))


@pytest.mark.parametrize(
    ("name", "family", "ending"),
    [("sample_FLUX.2_over_two_GPUs", "flux2", "png"), ("sample_Wan_over_two_GPUs", "wan", "webp")],
)
def test_a_sampling_template_draws_over_two_cards(server, files, name, family, ending):
    outputs = server.succeed(over_two_cards(with_stand_ins(_graph(name), family))).outputs
    (shown,) = (output["blocks"] for output in outputs.values() if "blocks" in output)
    assert [card for card, _ in shown] == ["lazy:0", "lazy:1"]
    pictures = sorted((server.base / "output").glob(f"template_{family}*.{ending}"))
    with Image.open(pictures[-1]) as picture:
        assert getattr(picture, "n_frames", 1) == (5 if family == "wan" else 1)


def test_the_ring_attention_template_reports_the_fix_and_draws(server: Server, files: None) -> None:
    outputs = server.succeed(with_stand_ins(_graph("ring_attention_with_the_LSE_fix"), "flux2")).outputs
    texts = [output["text"][0] for output in outputs.values() if "text" in output]
    assert any(text.startswith(("Active", "Not needed")) for text in texts), outputs


def test_the_training_template_trains_and_the_resuming_one_goes_on(server, images, pipeline):
    """To the same LoRA as without a stop."""
    training = _graph("train_a_LoRA_over_two_GPUs")
    folder = server.base / "output" / "devicebridge"
    server.succeed(_quick_training(training, pipeline, name="template_whole", steps=4))
    server.succeed(_quick_training(training, pipeline, name="template_parts", steps=2))
    resuming = _graph("resume_a_stopped_training")
    server.succeed(_quick_training(resuming, pipeline, name="template_parts", steps=4))
    whole, parts = (folder / name / f"{name}.safetensors" for name in ("template_whole", "template_parts"))
    found, expected = load_file(parts), load_file(whole)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_end_to_end_template_plans_trains_draws_samples_and_samples_with_the_lora(server, files, images, pipeline):
    graph = with_stand_ins(_graph("train_FLUX.2_on_two_24_GB_cards"), "flux2")
    values = {"DeviceBridgePlanTraining.cards": "2x24GB"}
    graph = set_values(_quick_training(graph, pipeline, name="template_end", steps=2, sample_every=2), values)
    outputs = server.succeed(graph).outputs
    (plan,) = (text for each in outputs.values() for text in each.get("text", ()) if text.startswith("verdict"))
    assert plan.split()[1] == "fits"
    samples = sorted(path.name for path in (server.base / "output/devicebridge/template_end/samples").glob("*.png"))
    assert samples == [f"{step:06d}_{index}.png" for step in (0, 2) for index in (0, 1)]
    assert list((server.base / "output").glob("template_flux2*.png"))


TEMPLATES = sorted((ROOT / "example_workflows").glob("*.json"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_says_where_its_files_are_from(path: Path) -> None:
    """ComfyUI offers the download of what is named so and is not there."""
    for node in read_workflow(path)["nodes"]:
        named = {model["name"]: model for model in node["properties"].get("models", [])}
        files = {value for value in node["widgets_values"] if str(value).endswith(".safetensors")}
        assert files == named.keys(), node["type"]
        for name, model in named.items():
            assert model["url"].startswith("https://") and model["url"].endswith(f"/{name}") and model["directory"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_has_a_note_that_is_legible_and_a_small_picture(path: Path) -> None:
    """Inline code is blue on grey-blue in the dark theme; the browser's cards are square."""
    notes = [node["widgets_values"][0] for node in read_workflow(path)["nodes"] if node["type"] == "MarkdownNote"]
    assert len(notes) == 1 and "`" not in notes[0] and "**" in notes[0]
    picture = path.with_suffix(".jpg")
    assert picture.stat().st_size <= 60_000
    with Image.open(picture) as image:
        assert image.width >= 400 and image.height == image.width
