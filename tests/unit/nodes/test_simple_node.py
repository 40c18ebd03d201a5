"""Few inputs, and the node that trains of four choices: what it decides, and that it trains as the nodes it runs."""

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.jobs import job as job_module
from devicebridge.planning.dry_run import NoForecast
from devicebridge.runs.store import run_name
from devicebridge.tests import comfy_stub
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[3]
MOST_VISIBLE = 6  # links among them: no page folds those


def test_a_node_shows_at_most_six_inputs(nodes: ModuleType) -> None:
    shown = {
        schema.node_id: [each.id for each in schema.inputs if not each.options.get("advanced")]
        for schema in (node.define_schema() for node in nodes.NODES)
    }
    assert {name: ids for name, ids in shown.items() if len(ids) > MOST_VISIBLE} == {}
    links = ("MODEL", "CLIP", "VAE", "CLIP_VISION", "DEVICEBRIDGE_MODEL", "DEVICEBRIDGE_DATASET")
    for schema in (node.define_schema() for node in nodes.NODES):
        assert not [each.id for each in schema.inputs if each.options.get("advanced") and each.io_type in links]


@pytest.fixture
def simple(nodes: ModuleType, host: comfy_stub.FakeHost, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = nodes.simple
    small = module._Settings(2, 32, 2, 1e-2, 1)
    monkeypatch.setattr(module, "SETTINGS", {kind: (small, small, small) for kind in module.SETTINGS})
    save_tiny_pipeline(host.root / "models" / "diffusers" / "tiny", "flux2")
    images = save_tiny_dataset(host.root / "input" / "dogs", num_images=3)
    (images / "image_1.txt").unlink()
    return module


def _sockets(**others: Any) -> dict[str, Any]:
    return {"model": "tiny", "images": "dogs", "trigger_word": "ohwx dog", "quality": "normal", **others}


def test_four_choices_train_the_lora_that_the_five_nodes_train(nodes, simple, host):
    lora, path = simple.TrainLoraSimple.execute(**_sockets()).args
    assert Path(path) == host.root / "output/devicebridge/ohwx_dog/ohwx_dog.safetensors"
    (model,) = nodes.load.LoadModelForTraining.execute(model="tiny", path="").args
    folder = {
        "folder": "dogs", "evaluation_folder": "[none]", "trigger_word": "ohwx dog", "default_caption": "ohwx dog",
    }  # fmt: skip
    (dataset,) = nodes.dataset.TrainingDatasetNode.execute(**folder, resolutions="32").args
    own = {"text_encoders": "[model folder]", "vae": "[model folder]", "cache_folder": "other"}
    model = nodes.load.Quantize.execute(model=model).args[0]
    (dataset,) = nodes.captions.CacheCaptionsAndLatents.execute(model=model, dataset=dataset, **own).args
    train = {"steps": 2, "rank": 2, "alpha": 2.0, "learning_rate": 1e-2, "accumulation": 1, "name": "by_hand"}
    expected = nodes.train.TrainLora.execute(model=model, dataset=dataset, resume=False, **train).args[0]
    assert lora.keys() == expected.keys() and all(torch.equal(lora[name], expected[name]) for name in expected)
    assert load_file(path).keys() == lora.keys()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("", "ohwx dog", "dogs"), "ohwx_dog"), (("", "***", "/data/my dogs"), "my_dogs"), (("", "", "..."), "my_lora"),
        (("", "Cache", "dogs"), "Cache_lora"), (("", "a" * 300, "dogs"), "a" * 40),
        (("mine.safetensors", "ohwx", "dogs"), "mine"),
    ],
)  # fmt: skip
def test_a_run_is_called_by_what_can_name_a_folder(given: tuple[str, str, str], name: str) -> None:
    assert run_name(*given) == name


@pytest.mark.parametrize("has_forecast", [True, False])
def test_what_does_not_fit_is_refused_before_captions_are_encoded(nodes, simple, host, monkeypatch, has_forecast):
    error = ValueError("one card lacks 3 GB") if has_forecast else NoForecast("a UNet", "no two blocks are alike")
    asked: list[Any] = []

    def plan_job(job: Any, *cards: Any, **how: Any) -> Any:
        asked.append(job)
        raise error

    monkeypatch.setattr(simple.host, "list_gpus", lambda: (torch.device("cpu"),))
    monkeypatch.setattr(job_module, "plan_job", plan_job)
    if has_forecast:
        with pytest.raises(ValueError, match="lacks 3 GB"):
            simple.TrainLoraSimple.execute(**_sockets())
        assert not (host.root / "output" / "devicebridge" / "cache").exists()
    else:
        simple.TrainLoraSimple.execute(**_sockets())
    (job,) = asked
    assert (job.lora.rank, job.train.gradient_accumulation_steps, job.data.resolutions) == (2, 1, (32,))
    assert job.data.folders[0].caption == job.data.trigger_word == "ohwx dog"


def test_the_nodes_button_plans_and_trains_nothing(simple: Any, host: comfy_stub.FakeHost, monkeypatch: Any) -> None:
    monkeypatch.setattr(job_module, "plan_job", mock.Mock(side_effect=NoForecast("a", "b", "2 steps take an hour")))
    asked = SimpleNamespace(unique_id="7", prompt={"7": {"inputs": {"plan_only": True}}})
    monkeypatch.setattr(simple.TrainLoraSimple, "hidden", asked)
    output = simple.TrainLoraSimple.execute(**_sockets())
    assert "steps 2" in output.ui["text"][0] and "an hour" in output.ui["text"][1] and len(output.args) == 2
    assert not (host.root / "output" / "devicebridge" / "ohwx_dog").exists()


def test_encoders_are_found_by_the_names_of_comfyuis_templates(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    from devicebridge.nodes.host.native.files import known_files

    there = {
        "text_encoders": (
            "umt5_xxl_fp8_e4m3fn_scaled", "umt5_xxl_fp16", "clip_l_hidream", "T5XXL_FP8_scaled", "t5xxl-unchained-f16",
            "t5xxl_fp16", "qwen_3_4b-abliterated", "qwen_3_8b_fp8_abliterated", "qwen_3_4b",
        ),
        "vae": ("Wan2.1_VAE_upscale2x_imageonly_real_v1", "wan_2.1_vae", "wan2.2_vae", "ae", "flux2-vae"),
    }  # fmt: skip
    for kind, names in there.items():
        for name in names:
            file = host.root / "models" / kind / f"{name}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    (host.root / "models/text_encoders/clip_l").mkdir()
    (host.root / "models/text_encoders/clip_l/config.json").touch()
    found = {}
    for variant in ("wan2.1-t2v-14b", "wan2.2-ti2v-5b", "flux1-dev", "flux2-klein-4b", "flux2-klein-9b", "flux2-dev"):
        info = SimpleNamespace(variant=SimpleNamespace(name=variant), family=SimpleNamespace(name="own"))
        known = known_files(info)
        found[variant] = [n.removesuffix(".safetensors") for n in (*known.names["text_encoders"], *known.names["vae"])]
    assert found == {
        "wan2.1-t2v-14b": ["umt5_xxl_fp16", "wan_2.1_vae"], "wan2.2-ti2v-5b": ["umt5_xxl_fp16", "wan2.2_vae"],
        "flux1-dev": ["", "t5xxl_fp16", "ae"], "flux2-klein-4b": ["qwen_3_4b", "flux2-vae"],
        "flux2-klein-9b": ["", "flux2-vae"], "flux2-dev": ["", "flux2-vae"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "names", "loaded"),
    [
        ("comfyui-SD15", ["model"], ""), ("comfyui-SDXL", ["model"], ""),
        ("comfyui-SDXL", ["clip_l", "clip_g"], "sdxl"), ("comfyui-SDXL", ["clip_l"], "takes 2"),
        ("comfyui-SD15", ["clip_l"], "connect its CLIP"),
    ],
)  # fmt: skip
def test_a_checkpoints_own_clip_or_as_many_files_as_its_class_takes(nodes, host, monkeypatch, variant, names, loaded):
    from devicebridge.nodes.host.native import files

    paths = [str(host.root / "models/text_encoders" / f"{name}.safetensors") for name in names]
    model = host.root / "models/text_encoders/model.safetensors"
    save_file({"conditioner.x": torch.zeros(1)}, model)
    for path in paths:
        Path(path).touch()
    monkeypatch.setattr(files, "load_clip_files", lambda paths, kind, model: (list(paths), kind))
    family = SimpleNamespace(name="comfyui", title="ComfyUI's class")
    info = SimpleNamespace(path=model, family=family, variant=SimpleNamespace(name=variant))
    training = SimpleNamespace(model=SimpleNamespace(path=str(model), family="comfyui"), read=lambda: info)
    sockets = {"text_encoders": paths[0], "text_encoder_2": "\n".join(paths[1:])}
    if " " in loaded:
        with pytest.raises(ValueError, match=loaded):
            nodes.captions._clip_of_files(training, sockets)
    else:
        assert nodes.captions._clip_of_files(training, sockets) == (paths, loaded)


def test_a_file_of_an_own_family_without_encoders_says_which_are_looked_for(nodes, host):
    file = host.root / "models/diffusion_models/flux1-dev-fp8.safetensors"
    file.touch()
    family, variant = SimpleNamespace(name="flux1", title="FLUX.1"), SimpleNamespace(name="flux1-dev")
    info = SimpleNamespace(path=file, family=family, variant=variant, pipeline_folder=None)
    model = SimpleNamespace(model=SimpleNamespace(path=str(file), family=""), read=lambda: info)
    with pytest.raises(ValueError, match=r"clip_l, t5xxl.*stock_clip"):
        nodes.captions._with_files(model, dict.fromkeys(("text_encoders", "vae"), nodes.host.folders.OWN_PART))


@pytest.mark.parametrize(
    ("name", "ranges", "is_expert", "expert"),
    [
        ("wan2.2_14B", ((0.0, 1.0), (0.9, 1.0)), False, None), ("flux1-dev", ((0.0, 1.0), (0.0, 1.0)), False, ""),
        ("wan2.2_vace", ((0.0, 1.0),), True, None), ("wan2.2_vace_low_noise", ((0.0, 1.0),), True, "low_noise"),
        ("wan2.1_vace", ((0.0, 1.0),), False, ""),
    ],
)  # fmt: skip
def test_a_file_that_may_be_one_of_two_experts_is_refused_or_trained_as_its_name_says(
    nodes: ModuleType, tmp_path: Path, name: str, ranges: Any, is_expert: bool, expert: str | None
) -> None:
    file = tmp_path / f"{name}.safetensors"
    file.touch()
    boundary = 0.875 if "vace" in name else 0.0
    one, *others = (SimpleNamespace(sigma_range=each, is_expert=is_expert, boundary=boundary) for each in ranges)
    info = SimpleNamespace(path=file, variant=one, others=tuple(others))
    if expert is None:
        with pytest.raises(ValueError, match="high_noise or low_noise"):
            nodes.simple.expert_of(info)
    else:
        assert nodes.simple.expert_of(info) == expert


@pytest.mark.parametrize("name", ["../mine", "x" * 195, "optimizer"])
def test_a_bad_name_is_refused_before_captions_are_encoded(simple: Any, host: comfy_stub.FakeHost, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        simple.TrainLoraSimple.execute(**_sockets(name=name))
    assert not (host.root / "output/devicebridge/cache").exists()


def test_the_expert_reaches_the_job(simple: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simple, "expert_of", lambda info: "low_noise")
    with pytest.raises(ValueError, match="low_noise.* is of Wan 2.2's experts"):
        simple.TrainLoraSimple.execute(**_sockets())


@pytest.mark.parametrize("name", ["DeviceBridgeTrainLoraSimple.md", "DeviceBridgeTrainLoraSimple/zh.md"])
def test_the_help_page_says_the_settings(name: str, nodes: ModuleType) -> None:
    page = (ROOT / "web" / "docs" / name).read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.search(r"\| \d+", line)]
    assert len(rows) == len(nodes.simple.SETTINGS)
    for row, settings in zip(rows, nodes.simple.SETTINGS.values(), strict=True):
        cells = [re.findall(r"\d+", cell) for cell in row.split("|")[2:5]]
        assert [[*map(int, each[:3])] for each in cells] == [[s.steps, s.accumulation, s.resolution] for s in settings]
