"""The nodes against a stand-in for ComfyUI: their sockets, what they make of them, and how they treat Cancel."""

import ast
import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tomlkit
import torch
from devicebridge.config import job as config
from devicebridge.config.data import CacheConfig
from devicebridge.config.job import ModelConfig, SplitConfig, job_keys
from devicebridge.encoding.comfy_data import load_encoded, read_conditioning
from devicebridge.events import Event
from devicebridge.jobs import encode_job
from devicebridge.jobs import job as job_module
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.resolve import preview_model
from devicebridge.patches import ring_lse
from devicebridge.planning import plan as plan_view
from devicebridge.planning.dry_run import NoForecast
from devicebridge.runs.record import KeptJobs
from devicebridge.tests import comfy_stub
from devicebridge.tests.clips import save_clip, save_image
from devicebridge.tests.tiny_pipeline import save_tiny_pipeline
from PIL import Image
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[3]
NODE_IDS = [
    "DeviceBridgeLoadModelForTraining", "DeviceBridgeQuantize", "DeviceBridgeTrainingDataset",
    "DeviceBridgeImagesToCaption", "DeviceBridgeWriteCaptions", "DeviceBridgeCacheCaptionsAndLatents",
    "DeviceBridgeDatasetFromLatents", "DeviceBridgePlanTraining", "DeviceBridgeTrainLora",
    "DeviceBridgeTrainLoraSimple", "DeviceBridgeSplitModel", "DeviceBridgeLoadDiffusionModelSplit",
    "DeviceBridgeRingLseFix",
]  # fmt: skip
# What the stand-in for ComfyUI has no parts of.
STUB_LACKS = {
    "DeviceBridgeCacheCaptionsAndLatents", "DeviceBridgeTrainLoraSimple", "DeviceBridgeSplitModel",
    "DeviceBridgeLoadDiffusionModelSplit",
}  # fmt: skip


def _schemas(nodes: ModuleType) -> dict[str, Any]:
    return {schema.node_id: schema for schema in (node.define_schema() for node in nodes.NODES)}


def _defaults(schema: Any) -> dict[str, Any]:
    return {entry.id: entry.options["default"] for entry in schema.inputs if "default" in entry.options}


def test_the_extension_lists_the_nodes(nodes: ModuleType) -> None:
    async def listed() -> list[Any]:
        return await nodes.make_extension().get_node_list()

    found = {node.define_schema().node_id: node for node in asyncio.run(listed())}
    assert list(found) == NODE_IDS
    known = {node_id: node for node_id, node in found.items() if node in nodes.NODES}
    assert set(found) - set(known) == STUB_LACKS


def test_node_ids_are_literals_for_the_registrys_scanner() -> None:
    found = []
    for path in sorted((ROOT / "nodes").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.keyword) and call.arg == "node_id" and isinstance(call.value, ast.Constant):
                found.append(call.value.value)
    assert sorted(found) == sorted(NODE_IDS)


def test_every_socket_has_a_tooltip_and_every_node_a_description(nodes: ModuleType) -> None:
    for schema in _schemas(nodes).values():
        assert schema.description and schema.category.startswith(("DeviceBridge/", "advanced/multigpu"))
        for entry in schema.inputs:
            assert len(entry.options.get("tooltip", "")) > 20, f"{schema.node_id}.{entry.id}"
        for entry in schema.outputs:
            assert entry.tooltip, f"{schema.node_id}.{entry.id}"


_INTERNAL = ("job file", "torchrun", "executor", "placement", "gradient_accumulation_steps", "microbatch")


def test_no_text_of_a_node_has_a_key_a_flag_or_an_internal_word() -> None:
    """Of all nodes, also those that the stand-in cannot build; test_locales.py compares this file with the nodes."""
    texts = json.loads((ROOT / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
    key = re.compile(r"(?<![\w./])(?:" + "|".join(map(re.escape, job_keys())) + r")(?![\w/]|\.\w)")
    wrong = []
    for node_id, node in texts.items():
        said = [node["display_name"], node["description"]]
        for socket in (*node["inputs"].values(), *node["outputs"].values()):
            said += [socket["name"], socket.get("tooltip", ""), *socket.get("options", {}).values()]
        for text in said:
            found = key.findall(text) + [each for each in ("--", *_INTERNAL) if each in text]
            wrong += [(node_id, found, text)] if found else []
    assert wrong == [], "\n".join(map(str, wrong))


def test_no_input_is_called_seed(nodes: ModuleType) -> None:
    """The front end changes such an input after every run, and a resumed run with another seed is refused."""
    for schema in _schemas(nodes).values():
        assert not {entry.id for entry in schema.inputs} & {"seed", "noise_seed"}


def test_every_choice_of_a_socket_is_one_of_its_setting(nodes: ModuleType) -> None:
    """What was released under another word is read as today's."""
    checked = 0
    for node in (nodes.load._inputs(), nodes.load._QUANTIZE_INPUTS, nodes.captions._inputs(), nodes.train._INPUTS):
        for socket in (each for each in node if isinstance(each, nodes.sockets.Socket)):
            for option in socket.make_input().options.get("options", ()) if socket.key.choices else ():
                assert socket.read({socket.id: option}) in socket.key.choices, f"{socket.id}: {option}"
                checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    "name", ["../elsewhere", "../output_evil", "a/../../output2/b", "a/../../b", "/etc", ".", "", "a/.."]
)
def test_written_folders_stay_in_the_output_folder(nodes: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match="leads out of"):
        nodes.train.folders.folder_in_output(name, "name")


def test_models_are_listed_from_their_folders(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    for name in ("diffusion_models/a.safetensors", "checkpoints/sdxl.safetensors", "diffusion_models/readme.txt"):
        (host.root / "models" / name).touch()
    (host.root / "models/diffusion_models/maker").mkdir()
    (host.root / "models/diffusion_models/maker/a-Q4_K_S.gguf").touch()
    (host.root / "models/diffusers/maker/b/transformer").mkdir(parents=True)
    (host.root / "models/diffusers/maker/b/model_index.json").touch()
    packed = str(Path("maker/a-Q4_K_S.gguf"))
    assert nodes.train.folders.list_models() == ["a.safetensors", "sdxl.safetensors", packed, "maker/b"]
    assert nodes.train.folders.find_model(packed, "") == host.root / "models/diffusion_models" / packed
    with pytest.raises(ValueError, match="a-Q4_K_S.gguf.*ComfyUI-GGUF.*Split Model Across GPUs"):  # to sample from it
        nodes.train.folders.find_checkpoint(packed)
    assert nodes.train.folders.find_model("sdxl.safetensors", "") == host.root / "models/checkpoints/sdxl.safetensors"
    assert nodes.train.folders.find_model("maker/b", "") == host.root / "models/diffusers/maker/b"
    assert nodes.train.folders.find_model("a.safetensors", "") == host.root / "models/diffusion_models/a.safetensors"


def test_a_model_that_is_not_there_is_named_with_what_is(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    for name in ("a.safetensors", "c.gguf"):
        (host.root / "models/diffusion_models" / name).touch()
    with pytest.raises(ValueError, match=r"'b.safetensors'.*: a\.safetensors, c\.gguf$"):  # no socket takes a full path
        nodes.train.folders.find_model("b.safetensors", "")
    with pytest.raises(ValueError, match="path is empty"):
        nodes.train.folders.find_model("[path below]", " ")
    host.allow(Path("/nowhere"))
    with pytest.raises(ValueError, match="does not exist"):
        nodes.train.folders.find_model("[path below]", "/nowhere/model")


def test_a_refused_model_is_refused_in_the_words_of_the_node(nodes, tmp_path, monkeypatch):
    def no_model(*_: Any) -> Any:
        raise ValueError("no diffusion model that ComfyUI knows")

    monkeypatch.setattr(nodes.load.host, "read_native", no_model)
    save_file({"layers.0.weight": torch.zeros(2, 2)}, file := tmp_path / "other.safetensors")
    save_file({"decoder.conv_in.weight": torch.zeros(2, 2)}, vae := tmp_path / "vae.safetensors")
    (folder := tmp_path / "folder").mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "QwenImageTransformer2DModel"}))
    (folder / "model.safetensors").write_bytes(file.read_bytes())
    cases = [
        (file, {}, "that ComfyUI knows"), (file, {"variant": "flux2-dev"}, "set variant to auto"),
        (vae, {}, "vae.safetensors is a VAE.*in model"),
        (folder, {}, "choose that in model"),
    ]  # fmt: skip
    for path, sockets, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            nodes.load.recognised(path, sockets)
        assert "model.family" not in str(caught.value)


def _split(nodes: ModuleType, devices: str, balance: str, split_at: str, memory_limit_gb: str) -> Any:
    sockets = {"devices": devices, "balance": balance, "split_at": split_at, "memory_limit_gb": memory_limit_gb}
    return nodes.load._read_split(sockets)[0]


def test_auto_devices_without_a_gpu_warn_and_go_on(nodes, monkeypatch, caplog):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with caplog.at_level("WARNING"):
        assert _split(nodes, "auto", "bytes", "", "").devices == ()
    assert "no GPU" in caplog.text


def test_split_settings_are_read(nodes: ModuleType) -> None:
    split = _split(nodes, "auto", "manual", "12, 30", "20, 14.5, 3")
    assert (split.split_at, split.memory_limit_gb) == ((12, 30), (20.0, 14.5, 3.0))
    with pytest.raises(ValueError, match="'x' in '12, x' is no whole number"):
        _split(nodes, "auto", "manual", "12, x", "")
    with pytest.raises(ValueError, match="split_at"):
        _split(nodes, "auto", "manual", "", "")


@pytest.fixture
def model(nodes: ModuleType, tmp_path: Path) -> Any:
    folder = save_tiny_pipeline(tmp_path / "flux2", "flux2")
    return nodes.load.TrainingModel(ModelConfig(path=str(folder)), SplitConfig(devices=("cpu",)))


def _quantized(nodes: ModuleType, model: Any, quantize: str, **settings: Any) -> tuple[Any, str]:
    return nodes.Quantize.execute(model=model, quantize=quantize, **settings).args


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8-compute", "int8-compute", "none"])
def test_the_report_is_shown_and_handed_on(nodes, host, model, scheme):
    """Of a workflow as it was first released, which names model and quantize, and nothing else."""
    with torch.inference_mode():  # as the host runs every node
        found, report = _quantized(nodes, model, scheme)
    assert found == dataclasses.replace(model, model=dataclasses.replace(model.model, quantize=scheme))
    assert report == preview_model(found.model, model.split.devices)
    (text,) = host.texts
    assert text.startswith(f"{report}\nWarning: ") and scheme in report and "a size of its own" in text
    output = nodes.Quantize.execute(model=model, quantize=scheme)
    assert output.ui.keys() == {"text"}, "a picture of the text would push the node over its neighbours"


def test_the_sockets_of_the_quantize_node_reach_their_settings(nodes, host, model):
    defaults = _defaults(nodes.Quantize.define_schema())
    found = _quantized(nodes, model, **{**defaults, "quantize": "int8-compute"})[0].model
    assert (found.quantize, found.rotation, found.quantized_cache) == ("int8-compute", 64, "")
    found = _quantized(nodes, model, quantize="int8-compute", rotation="16", cache=True)[0].model
    assert found.rotation == 16
    assert found.quantized_cache == str(host.root / "output/devicebridge/cache/quantized")
    assert not Path(found.quantized_cache).exists() and model.model.quantize == "none"


def test_auto_is_left_to_the_plan(nodes: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by those of the machine that the node runs on: a plan may be of other cards."""
    found, report = _quantized(nodes, model, "auto")
    assert found.model.quantize == "auto" and report.startswith("none: all weights"), "as training on a CPU"
    monkeypatch.setattr(resolve_module, "foresee_scheme", lambda machine, info: "int8-compute")
    found, report = _quantized(nodes, model, "auto")
    assert found.model.quantize == "auto" and "linears to int8-compute, " in report
    assert report.endswith("auto: the training's plan decides, and takes int8-compute on these devices if it fits")


def _make_images(folder: Path, count: int = 2) -> Path:
    for index in range(count):
        save_image(folder / f"{index}.png", seed=index, caption=f"picture {index}")
    return folder


def _dataset(nodes: ModuleType, **changes: Any) -> Any:
    node = nodes.TrainingDatasetNode
    settings = {**_defaults(node.define_schema()), "folder": "dogs", "resolutions": "64", **changes}
    return node.execute(**settings).args[0]


def test_a_dataset_holds_what_its_sockets_say(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    _make_images(host.root / "input/dogs", 3)
    held_out = _make_images(host.root / "held_out")
    host.allow(held_out)
    dataset = _dataset(nodes, repeats=2, resolutions="64, 96", evaluation_folder=str(held_out), evaluate_every=5)
    assert dataset.data.folders[0].path == str(host.root / "input/dogs")
    assert dataset.data.folders[0].repeats == 2
    assert dataset.data.resolutions == (64, 96)
    assert (dataset.evaluation.folder, dataset.evaluation.every_steps) == (str(held_out), 5)
    assert host.texts[-1].splitlines()[0] == "12 samples per epoch, 4 for evaluation"


def test_a_dataset_with_references_names_their_folders_and_runs_again_when_they_change(nodes, host):
    _make_images(host.root / "input/dogs", 2)
    before = _make_images(host.root / "input/before", 2)
    data = _dataset(nodes, condition="kontext", references="before\n").data
    assert data.condition == "kontext" and data.folders[0].references == (str(before),)
    assert _dataset(nodes).data.condition == "" and not _dataset(nodes).data.folders[0].references
    look = nodes.TrainingDatasetNode.fingerprint_inputs
    states = [look(folder="dogs", evaluation_folder="", references="before")]
    (before / "1.png").unlink()
    assert look(folder="dogs", evaluation_folder="", references="before") not in states
    with pytest.raises(ValueError, match=r"1\.png: has no reference in .*before"):
        _dataset(nodes, condition="kontext", references="before")
    with pytest.raises(ValueError, match="needs condition, which says how the model is given it"):
        _dataset(nodes, references="before")


def test_an_evaluation_folder_that_would_lack_references_is_refused_with_what_can_be_done(nodes, host):
    for name in ("dogs", "before", "held_out"):
        _make_images(host.root / "input" / name, 2)
    asked = {"condition": "kontext", "references": "before", "evaluation_folder": "held_out"}
    with pytest.raises(ValueError, match=r"needs references of the images in evaluation_folder.*; name their folder"):
        _dataset(nodes, **asked)
    beside = _make_images(host.root / "input/held_out_before", 2)
    dataset = _dataset(nodes, **asked, evaluation_references="held_out_before")
    assert dataset.evaluation.references == (str(beside),) and "2 for evaluation" in host.texts[-1]
    look = nodes.TrainingDatasetNode.fingerprint_inputs
    named = {"folder": "dogs", "evaluation_folder": "held_out", "evaluation_references": "held_out_before"}
    state = look(**named)
    (beside / "1.png").unlink()
    assert look(**named) != state
    with pytest.raises(ValueError, match=r"1\.png: has no reference in .*held_out_before"):
        _dataset(nodes, **asked, evaluation_references="held_out_before")


def test_what_a_conditioning_said_is_said_to_the_model_again(nodes: ModuleType) -> None:
    """Through the cache's form, in a batch of two; tests/comfy/test_native_conditions.py asks the real sampler."""
    model = importlib.import_module(f"{nodes.__name__}.host.native.model")
    seen = SimpleNamespace(last_hidden_state=torch.randn(1, 4, 3), image_sizes=[(3, 32, 48)])
    latents = [torch.randn(1, 2, 2, width) for width in (2, 3)]
    options = {
        "method": "index", "vace_strength": [1.0, 0.5], "latents": latents, "seen": [seen], "steps": 3, "on": True,
    }  # fmt: skip
    item = [[torch.randn(1, 2, 3), {**options, "ids": torch.arange(3)}]]
    entry = read_conditioning(item, "it", keeps_all=True)
    found = model._options({name: torch.stack([each] * 2) for name, each in entry.items()})
    assert (found["method"], found["vace_strength"], found["steps"], found["on"]) == ("index", [1.0, 0.5], 3, True)
    assert [torch.equal(each[1:], latent) for each, latent in zip(found["latents"], latents, strict=True)] == [True] * 2
    assert torch.equal(found["ids"], torch.arange(3)) and found["seen"][0].image_sizes == [[3, 32, 48]]
    assert torch.equal(found["seen"][0].last_hidden_state[:1], seen.last_hidden_state)
    assert getattr(found["seen"][0], "image_embeds", None) is None
    other = {name: torch.stack([each, each + name.startswith("words.")]) for name, each in entry.items()}
    with pytest.raises(ValueError, match="method differs in one batch; set train.batch_size to 1"):
        model._options(other)


def test_datasets_chain_and_the_last_decides(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    _make_images(host.root / "input/dogs")
    _make_images(host.root / "input/cats")
    first = _dataset(nodes, folder="cats", repeats=3, resolutions="96")
    both = _dataset(nodes, previous=first)
    assert [(Path(folder.path).name, folder.repeats) for folder in both.data.folders] == [("cats", 3), ("dogs", 1)]
    assert both.data.resolutions == (64,)


def test_a_dataset_of_clips_holds_what_its_sockets_say(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    folder = _make_images(host.root / "input/dogs")
    save_clip(folder / "run.mp4", 12)
    (folder / "run.txt").write_text("a dog runs", encoding="utf-8")
    data = _dataset(nodes).data
    assert (data.frames, data.fps, data.window, data.num_windows) == ((), 0.0, "start", 1)
    assert host.texts[-1].splitlines()[0] == "3 samples per epoch (1 of clips)"
    data = _dataset(nodes, frames="1, 5", fps="24", window="uniform", num_windows=3).data
    assert (data.frames, data.fps, data.window, data.num_windows) == ((1, 5), 24.0, "uniform", 3)
    assert host.texts[-1].splitlines()[0] == "5 samples per epoch (3 of clips)"
    assert _dataset(nodes, fps="source").data.fps == "source"
    for changes, words in (
        ({"fps": "fast"}, "fps: 'fast' is neither a number, auto nor source"),
        ({"frames": "5, x"}, "frames: 'x'"),
        ({"num_windows": 2}, "num_windows above 1 belongs to"),
    ):
        with pytest.raises(ValueError, match=words):
            _dataset(nodes, **changes)


def test_a_folder_of_folders_with_json_is_taken_and_said_with_counts(nodes, host):
    for name in ("10_dog/a.png", "10_dog/b.png", "cat/a.png"):
        (host.root / "input" / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((64, 64), 9).convert("RGB").save(host.root / "input" / "pets" / name)
    (host.root / "input/pets/captions.json").write_text('{"10_dog/a": ["x, y", "z"], "cat/a.png": "w"}')
    given = {"folder": "pets", "evaluation_folder": "[none]", "resolutions": "32", "shuffle_tags": True, "keep_tags": 1}
    (dataset,) = nodes.dataset.TrainingDatasetNode.execute(**given, tag_variants=2).args
    assert (dataset.data.shuffle_tags, dataset.data.keep_tags, dataset.data.tag_variants) == (True, 1, 2)
    assert host.texts[-1].splitlines()[:3] == [
        "21 samples per epoch",
        "captions: 2 from captions.json, 1 from their folder; "
        "4 different texts, up to 4 of an image, of which each step draws one",
        "folders: 10_dog (2, 20 per epoch), cat (1, 1 per epoch)",
    ]
    state = nodes.dataset.TrainingDatasetNode.fingerprint_inputs(**given)
    (host.root / "input/pets/cat/a.txt").write_text("new")
    assert nodes.dataset.TrainingDatasetNode.fingerprint_inputs(**given) != state


def test_an_unreadable_image_is_refused_by_name(nodes: ModuleType, host: comfy_stub.FakeHost) -> None:
    (_make_images(host.root / "input/dogs") / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="broken.png"):
        _dataset(nodes)


@pytest.fixture
def sockets(nodes: ModuleType, host: comfy_stub.FakeHost) -> dict[str, Any]:
    _make_images(host.root / "input/dogs")
    (toy := host.root / "models" / "toy").mkdir(parents=True)
    model = nodes.load.TrainingModel(ModelConfig(path=str(toy)), SplitConfig(devices=("cpu",)))
    settings = _defaults(nodes.TrainLora.define_schema())
    return {"model": model, "dataset": _dataset(nodes), **settings}


def _job(nodes: ModuleType, sockets: dict[str, Any], **changes: Any) -> Any:
    settings = {**sockets, **changes}
    model, dataset = settings.pop("model"), settings.pop("dataset")
    return nodes.train.make_job(model, dataset, settings)


def test_defaults_make_the_jobs_defaults(nodes: ModuleType, host: comfy_stub.FakeHost, sockets: dict[str, Any]) -> None:
    job = _job(nodes, sockets)
    folder = str(host.root / "output/devicebridge/my_lora")
    assert job.output == config.OutputConfig(folder=folder, name="my_lora", tensorboard=False)
    assert job.train == config.LoopConfig(steps=1000, gradient_accumulation_steps=4)
    assert job.cache == config.CacheConfig(folder=str(host.root / "output/devicebridge/cache"))
    assert (job.lora, job.objective) == (config.LoraSettings(), config.ObjectiveConfig())
    assert (job.optimizer, job.schedule) == (config.OptimizerConfig(), config.ScheduleConfig())


CHANGES: list[tuple[Any, ...]] = [  # socket, its setting, a value, and what that is in the job where it is another
    ("name", "output.name", "other"), ("name", "output.name", " other.safetensors", "other"),
    ("steps", "train.steps", 7), ("learning_rate", "optimizer.learning_rate", 0.5), ("rank", "lora.rank", 3),
    ("alpha", "lora.alpha", 2.5), ("batch_size", "train.batch_size", 5),
    ("accumulation", "train.gradient_accumulation_steps", 6), ("random_seed", "train.seed", 99),
    ("gradient_checkpointing", "train.gradient_checkpointing", False), ("optimizer", "optimizer.name", "adamw8bit"),
    ("weight_decay", "optimizer.weight_decay", 0.25), ("schedule", "schedule.name", "cosine"),
    ("warmup_steps", "schedule.warmup_steps", 4), ("clip_norm", "train.clip_norm", 0.0),
    ("dropout", "lora.dropout", 0.5), ("dora", "lora.dora", True),
    ("targets", "lora.targets", "*.to_q\n*.to_k, *.to_v", ("*.to_q", "*.to_k", "*.to_v")),
    ("training_dtype", "lora.dtype", "bfloat16"), ("timestep_sampling", "objective.timestep_sampling", "sigmoid"),
    ("shift", "objective.shift", "3.0", 3.0), ("shift", "objective.shift", "dynamic"),
    ("guidance", "objective.guidance", 3.5), ("save_every", "output.save_every_steps", 8),
    ("keep_last", "output.keep_last", 9), ("lora_layout", "output.lora_layout", "diffusers"),
    ("lora_dtype", "output.lora_dtype", "float32"), ("tensorboard", "output.tensorboard", True),
    ("compile_blocks", "train.compile", "auto"), ("offload_activations", "train.offload_activations", "on"),
    ("cuda_graphs", "train.cuda_graphs", "auto"),
    ("sample_prompts", "samples.prompts", "a cat, asleep\n\n a dog \n", ("a cat, asleep", "a dog")),
    ("sample_every", "samples.every_steps", 7), ("sample_steps", "samples.steps", 8),
    ("sample_guidance", "samples.guidance", 1.0), ("sample_width", "samples.width", 512),
    ("sample_height", "samples.height", 0), ("sample_seed", "samples.seed", 5), ("lora_kind", "lora.kind", "lokr"),
    ("layers", "lora.layers", "attention"), ("start_from", "lora.start_from", ""),
    ("ema_decay", "train.ema_decay", 0.99), ("processes", "parallel.processes", 2),
    ("strategy", "parallel.strategy", "fsdp"), ("expert", "objective.expert", "low_noise"),
]  # fmt: skip
OF_TEXT = {"text_encoder", "text_encoder_rank", "text_encoder_learning_rate"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_socket_reaches_its_setting_and_no_other(nodes, sockets, change):
    (socket, key, value), expected = change[:3], change[-1]
    section, name = key.split(".")
    before, after = _job(nodes, sockets), _job(nodes, sockets, **{socket: value})
    assert getattr(getattr(after, section), name) == expected
    changed = {section: dataclasses.replace(getattr(after, section), **{name: getattr(getattr(before, section), name)})}
    if socket == "name":
        changed["output"] = before.output
    assert dataclasses.replace(after, **changed) == before


def test_a_height_of_pictures_goes_with_a_width(nodes, sockets):
    samples = _job(nodes, sockets, sample_width=512, sample_height=768).samples
    assert (samples.width, samples.height) == (512, 768)
    with pytest.raises(ValueError, match="768 belongs to a width"):
        _job(nodes, sockets, sample_height=768)


def test_a_lora_to_start_from_is_found_among_the_hosts(nodes, host, sockets):
    file = host.root / "models/loras/mine.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert _job(nodes, sockets, start_from="mine.safetensors").lora.start_from == str(file)
    with pytest.raises(ValueError, match="is not there"):
        _job(nodes, sockets, start_from="other.safetensors")


def test_lokr_and_its_factor_and_kahan_reach_the_job(nodes: ModuleType, sockets: dict[str, Any]) -> None:
    """None of them is allowed alone, so that no row of the table could change it."""
    job = _job(nodes, sockets, lora_kind="lokr", lokr_factor=8, kahan=True, training_dtype="bfloat16")
    assert (job.lora.kind, job.lora.factor, job.optimizer.kahan) == ("lokr", 8, True)


def test_every_socket_of_the_train_node_is_in_the_table(nodes: ModuleType) -> None:
    ids = {entry.id for entry in nodes.TrainLora.define_schema().inputs}
    assert ids - {"model", "dataset", "resume", "background", "continue_changed", "lokr_factor", "kahan", *OF_TEXT} == {
        socket for socket, *_ in CHANGES
    }


def test_text_encoders_are_trained_from_the_files_of_the_clip_that_encoded(nodes, sockets):
    source = "comfyui 0.33.0 CLIP " + 64 * "0"
    own = dataclasses.replace(sockets["model"].model, family="comfyui", variant="")
    model = dataclasses.replace(sockets["model"], model=own)
    cache = CacheConfig(folder="cache", text_source=source)
    files = {"clip_files": ("clip_l.safetensors", "clip_g.safetensors"), "clip_type": "stable_diffusion"}
    settings = {"text_encoder": True, "text_encoder_rank": 3, "text_encoder_learning_rate": 2e-5}
    cached = dataclasses.replace(sockets["dataset"], cache=cache)
    job = _job(nodes, {**sockets, "model": model, "dataset": dataclasses.replace(cached, **files)}, **settings)
    assert (job.cache.stock_clip, job.cache.stock_clip_type) == (files["clip_files"], files["clip_type"])
    assert (job.cache.text_source, job.lora.text_rank, job.optimizer.text_rate) == (source, 3, 2e-5)
    with pytest.raises(ValueError, match="stock CLIP of Cache Captions and Latents straight to Load Checkpoint"):
        _job(nodes, {**sockets, "model": model, "dataset": cached}, **settings)
    without = _job(nodes, {**sockets, "model": model, "dataset": dataclasses.replace(cached, **files)})
    assert without.cache == cache, "of a job that does not train it nothing is loaded"


@pytest.mark.parametrize(
    "name", ["../../evil", "a/b", "", "  ", "..", "Adapter", ".jobs", "Cache", "checkpoints", "samples"]
)
def test_a_name_that_is_no_file_name_is_refused(nodes: ModuleType, sockets: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        _job(nodes, sockets, name=name)


def test_a_refused_setting_is_named(nodes: ModuleType, sockets: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^batch_size 0: is a whole number from 1 to 1024$"):
        _job(nodes, sockets, batch_size=0)


@pytest.fixture
def training(nodes: ModuleType, host: comfy_stub.FakeHost, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces run_job by three make-believe steps; the test sets when the user presses Cancel."""

    class Training:
        cancel_at = 99
        calls: list[dict[str, Any]] = []

        def run(self, job: Any, *, info: Any, resume: bool, on_event: Any, should_stop: Any) -> Any:
            mode = {"inference": torch.is_inference_mode_enabled(), "host": list(host.calls)}
            self.calls.append({"resume": resume, **mode})
            on_event(Event("phase", values={"name": "training"}))
            step = 0
            while step < 3 and not should_stop():
                step += 1
                host.is_interrupted = host.is_interrupted or step == self.cancel_at
                values = {"loss": 0.5 / step, "learning_rate": 1e-4, "elapsed_s": 2.0}
                on_event(Event("step", step, 3, values))
            folder = Path(job.output.folder)
            return job_module.TrainingResult(
                status="finished" if step == 3 else "stopped", step=step,
                lora_path=folder / f"{job.output.name}.safetensors", lora={"a": torch.ones(1)},
                losses=[0.5 / (index + 1) for index in range(step)], eval_before=None, eval_after=None,
                checkpoint=folder / "checkpoints" / "step-000001", resume_hint="",
            )  # fmt: skip

    training = Training()
    training.calls = []
    monkeypatch.setattr(job_module, "run_job", training.run)
    return training


def test_the_hosts_models_leave_first_and_a_changed_run_is_continued(nodes, host, sockets, training):
    with torch.inference_mode():  # as the host runs every node
        output = nodes.TrainLora.execute(**{**sockets, "continue_changed": True})
    assert output.args[3] == str(host.root / "output/devicebridge/my_lora/my_lora.safetensors")
    (call,) = training.calls
    assert (call["resume"], call["inference"], call["host"]) == ("continue", False, ["unload", "empty cache"])
    assert host.progress == [(0, 1), (1, 3), (2, 3), (3, 3)] and host.texts[1] == "Training"
    assert "Step 3/3: loss 0.16667, 2.00 s/step, about 0 s left" in host.texts


@pytest.mark.parametrize("background", [False, True])
def test_a_training_that_would_write_over_a_link_is_refused_before_it_begins(
    nodes, host, sockets, training, tmp_path, background
):
    folder, outside = host.root / "output" / "devicebridge" / "my_lora", tmp_path.parent / f"{tmp_path.name}_outside"
    folder.mkdir(parents=True)
    (folder / "samples").symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of ComfyUI's output folder"):
        nodes.TrainLora.execute(**{**sockets, "background": background})
    assert training.calls == [] and not outside.exists()


def test_the_job_of_a_run_is_kept_where_no_request_writes(nodes, host, sockets, training):
    nodes.TrainLora.execute(**sockets)
    kept = KeptJobs(host.root / "user" / "__devicebridge" / "jobs")
    assert kept.find(host.root / "output" / "devicebridge" / "my_lora") == _job(nodes, sockets)


@pytest.mark.parametrize(("resume", "hint"), [(False, "Turn on resume and run"), (None, "Run")])
def test_cancel_ends_the_job_in_order_and_then_the_prompt(nodes, host, sockets, training, resume, hint):
    """The host's progress bar raises on Cancel; were that to pass, a step would end half-way and nothing be saved."""
    training.cancel_at = 2
    with pytest.raises(comfy_stub.InterruptProcessingException):
        nodes.TrainLora.execute(**{**sockets, "resume": resume})
    assert host.texts[-1] == f"Cancelled after 2 steps; everything is saved. {hint} again to continue."
    assert host.is_interrupted is False, "the request is answered and must not stop the next prompt"


def test_cancel_in_the_last_step_keeps_the_result(nodes, host, sockets, training):
    training.cancel_at = 3
    output = nodes.TrainLora.execute(**sockets)
    assert output.args[2] == 3
    assert host.is_interrupted is True, "the host still has to stop before the next node"


def test_every_setting_on_a_node_is_read(nodes: ModuleType, sockets: dict[str, Any]) -> None:
    """A node reads the sections and lists that it asks for; a socket of others would be shown and change nothing."""
    found = {node.define_schema().node_id: _shown_and_unread(nodes, node, sockets) for node in nodes.NODES}
    assert sum(shown for shown, _ in found.values()) > 60
    unread = {node_id: settings for node_id, (_, settings) in found.items() if settings}
    assert not unread, f"shown and never read, see read_sections in nodes/sockets.py: {unread}"


def _shown_and_unread(nodes: ModuleType, node: Any, sockets: dict[str, Any]) -> tuple[int, list[str]]:
    """How many sockets are made from settings, and "socket (key)" of those that execute reads in no way."""
    module, base, listed = sys.modules[node.__module__], nodes.sockets, set()
    make_input, plain, shown = base.Socket.make_input, base.read_section, []

    def read_section(kind: type, entries: Any, *given: Any, **more: Any) -> Any:
        listed.update(each.id for each in entries if isinstance(each, base.Socket) and each.key.owner is kind)
        return plain(kind, entries, *given, **more)

    names = inspect.signature(node.execute).parameters
    links = {name: sockets[name] for name in ("model", "dataset") if name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base.Socket, "make_input", lambda socket, *ids: shown.append(socket) or make_input(socket, *ids))
        for each in (module, base):
            patch.setattr(each, "read_section", read_section, raising=False)
        patch.setattr(nodes.load.folders, "find_model", lambda *names: Path("/models/toy"))
        given = {**_defaults(node.define_schema()), "folder": "dogs", "resolutions": "64", **links}
        with contextlib.suppress(Exception):  # when everything is read: there is no such model
            node.execute(**given)
    read = {*names, *listed, *re.findall(r'sockets\["(\w+)"\]', inspect.getsource(module))}
    return len(shown), [f"{e.id} ({e.key.path})" for e in shown if e.id not in read]


def test_the_plan_node_shows_the_plan_of_the_job(nodes, host, sockets, monkeypatch):
    asked = []
    monkeypatch.setattr(job_module, "plan_job", lambda job, cards, **how: asked.append((job, cards, list(host.calls))))
    monkeypatch.setattr(plan_view, "describe_plan", lambda plan, steps: f"the plan of {steps} steps")
    monkeypatch.setattr(plan_view, "describe_verdict", lambda plan, steps: ["fits", f"{steps} steps take an hour"])
    monkeypatch.setattr(plan_view, "draw_plan", lambda plan: Image.new("RGB", (8, 4)))
    node = nodes.PlanTraining
    settings = {**_defaults(node.define_schema()), "rank": 32, "batch_size": 2, "optimizer": "adamw8bit"}
    settings |= {"training_dtype": "bfloat16", "offload_activations": "on", "targets": "*.to_q\n*.to_k", "dora": True}
    settings |= {"steps": 7, "ema_decay": 0.9, "kahan": True}
    lokr = {"lora_kind": "lokr", "layers": "attention", "lokr_factor": 4, "targets": "", "dora": False}
    for more in ({"cards": "24GB, 12GB@0.5"}, {"cards": " "} | lokr):
        output = node.execute(model=sockets["model"], dataset=sockets["dataset"], **settings | more)
        assert output.args[0] == "the plan of 7 steps" and output.args[1].shape == (1, 4, 8, 3)
        assert host.texts[-1] == "fits. 7 steps take an hour", "short: the canvas renderer shows two lines"
        (shown,) = output.ui["images"]
        assert Image.open(host.root / "temp" / shown["filename"]).size == (8, 4) and shown["type"] == "temp"
    (job, named, calls), (of_lokr, own, later_calls) = asked
    assert (job.lora.rank, job.train.batch_size, job.optimizer.name) == (32, 2, "adamw8bit")
    assert (job.lora.dtype, job.train.offload_activations) == ("float32", "on")  # as kahan has it
    assert (job.lora.targets, job.lora.dora) == (("*.to_q", "*.to_k"), True)
    assert (of_lokr.lora.kind, of_lokr.lora.layers, of_lokr.lora.factor) == ("lokr", "attention", 4)
    assert (job.train.ema_decay, job.optimizer.kahan) == (0.9, True)
    model, data = sockets["model"], sockets["dataset"].data
    assert (job.model, job.split, job.data) == (model.model, model.split, data)
    assert [(card.total_bytes, card.speed) for card in named] == [(24 * 10**9, 1.0), (12 * 10**9, 0.5)]
    assert own == [] and calls == [] and later_calls, "ComfyUI lets go of its models only for a plan of its own cards"
    without = NoForecast("a UNet", "no two blocks are alike", "7 steps take an hour")
    monkeypatch.setattr(job_module, "plan_job", mock.Mock(side_effect=without))
    output = node.execute(model=sockets["model"], dataset=sockets["dataset"], **settings | {"cards": ""})
    assert output.args[0] == host.texts[-1] == output.ui["text"][0] and "7 steps take an hour" in output.args[0]


def test_the_cache_node_hands_its_settings_on(nodes, host, sockets, monkeypatch):
    (host.root / "models/vae/ae.safetensors").touch()
    seen = []
    monkeypatch.setattr(job_module, "check_job", lambda job, **how: seen.append(job) or job)
    monkeypatch.setattr(encode_job, "cache_job", lambda plan, events, stop, encoders: (_Samples(), None))
    node = nodes.CacheCaptionsAndLatents
    settings = {**_defaults(node.define_schema()), "vae": "ae.safetensors", "vae_device": "cpu"}
    settings |= {"text_quantize": "int8", "text_device": " stream:cuda:1 ", "text_window_gb": 6.5}
    dataset = node.execute(model=sockets["model"], dataset=sockets["dataset"], **settings).args[0]
    assert dataset.data == sockets["dataset"].data
    assert dataset.cache.vae == str(host.root / "models/vae/ae.safetensors")
    assert (dataset.cache.text_device, dataset.cache.vae_device) == ("stream:cuda:1", "cpu")
    assert dataset.cache.text_window_gb == 6.5
    assert dataset.cache.text_quantize == "int8"
    assert dataset.cache.folder == str(host.root / "output/devicebridge/cache")
    assert seen[0].cache == dataset.cache
    assert host.texts[-1] == "2 samples are encoded"
    assert _job(nodes, {**sockets, "dataset": dataset}).cache == dataset.cache


class _Samples:
    samples = (1, 2)
    store = SimpleNamespace(path=lambda key: Path("/cache") / key)

    @staticmethod
    def keys() -> set[str]:
        return set()


class _Link(str):
    """What a link carries; it may be gone, which a plain string cannot."""


class _Named:
    """In place of HostClip and HostVae, which name what a socket holds."""

    def __init__(self, name: str) -> None:
        self.fingerprint = name


def test_stock_encoders_take_the_place_of_the_models_own(nodes, host, sockets, monkeypatch, caplog):
    seen: list[Any] = []
    clip, vae = f"comfyui 0.33.0 CLIP {'a' * 64}", f"comfyui 0.33.0 VAE {'b' * 64}"
    monkeypatch.setattr(nodes.captions, "HostClip", lambda value, weighs: _Named(f"comfyui 0.33.0 CLIP {value * 64}"))
    monkeypatch.setattr(nodes.captions, "HostVae", lambda value: _Named(f"comfyui 0.33.0 VAE {value * 64}"))
    monkeypatch.setattr(job_module, "check_job", lambda job, **how: job)
    monkeypatch.setattr(encode_job, "cache_job", lambda *arguments: seen.append(arguments) or (_Samples(), None))
    node = nodes.CacheCaptionsAndLatents
    settings = {**_defaults(node.define_schema()), "vae": "gone.safetensors", "text_quantize": "int8"}
    links = {"model": sockets["model"], "dataset": sockets["dataset"]}
    dataset = node.execute(**links, **settings, stock_clip=(stock := _Link("a")), stock_vae="b").args[0]
    assert (dataset.cache.text_source, dataset.cache.latent_source) == (clip, vae)
    assert (dataset.cache.vae, dataset.cache.text_quantize) == ("", "none")
    assert (seen[0][3].clip.fingerprint, seen[0][3].vae.fingerprint) == (clip, vae)
    assert host.texts[-1].splitlines()[-1].startswith("Warning: vae 'gone.safetensors' has no effect")
    shown = "\n".join(host.texts[-1].splitlines()[:-1])
    assert shown == f'2 samples are encoded\ntext_source = "{clip}"\nlatent_source = "{vae}"'
    assert "gone.safetensors" in caplog.text and _job(nodes, {**sockets, "dataset": dataset}).cache == dataset.cache
    one = node.execute(**links, **{**settings, "vae": ""}, stock_clip=stock).args[0].cache
    assert (one.text_source, one.latent_source) == (clip, "") and seen[1][3].vae is None
    for socket in ("stock_clip", "stock_vae"):
        with pytest.raises(ValueError, match=f"{socket} is connected, but its loader found none"):
            node.execute(**links, **settings, **{socket: None})


def test_prompts_that_are_no_captions_are_encoded_by_the_captions_clip_before_the_training(
    nodes: ModuleType, host: comfy_stub.FakeHost, sockets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from devicebridge.nodes import captions
    from devicebridge.nodes.view import JobView

    seen: list[Any] = []
    monkeypatch.setattr(nodes.captions, "HostClip", lambda value, weighs: _Named(value))
    monkeypatch.setattr(encode_job, "missing_prompts", lambda job: list(job.samples.prompts))
    monkeypatch.setattr(encode_job, "fill_cache", lambda plan, part, *rest: seen.append((plan, part, rest[-1].clip)))
    job, clip = _job(nodes, {**sockets, "sample_prompts": "a cat"}), _Link("clip")
    find = captions.remember_clip({"stock_clip": clip}, lambda files: "another", weighs=False)
    dataset = dataclasses.replace(sockets["dataset"], find_clip=find)
    captions.encode_texts(dataset, sockets["model"], job, None, JobView("1"), lambda: "plan")
    ((plan, part, used),) = seen
    assert (plan, part, used.fingerprint) == ("plan", "captions", "clip")
    del clip, used, seen[:]
    with pytest.raises(ValueError, match="sample_prompts 'a cat' are no captions .* has let go of the CLIP"):
        captions.encode_texts(dataset, sockets["model"], job, None, JobView("1"), lambda: None)
    captions.encode_texts(dataset, sockets["model"], _job(nodes, sockets), None, JobView("1"), print)  # none to draw
    names = {"text_encoders": "clip.safetensors", "text_encoder_2": "[none]"}
    found = captions.remember_clip({**names, "vae": "x"}, dict, weighs=False)()
    assert found.fingerprint == names, "one of files is loaded again"


_CHECKED = ["read in training", "cards", "check in training"]
_BEHIND = ["read in training", "check in training", "clip", "encode", "start in training"]
_ENCODED = [*_CHECKED, "clip", "encode", "cards in training", "train in training"]


@pytest.mark.parametrize(
    ("how", "refused", "is_forecast", "expected"),
    [
        ({}, "cards", None, _CHECKED[:2]), ({}, "check", True, _CHECKED), ({}, "", True, _ENCODED),
        ({"processes": 2}, "", False, [*_ENCODED[:-1], "start in training"]), ({"resume": True}, "", False, _ENCODED),
        # One in the background waits for its cards in the queue, so nobody refuses them here.
        ({"background": True}, "", False, _BEHIND),
    ],
)  # fmt: skip
def test_prompts_are_encoded_after_every_check_and_as_captions_are(
    nodes, sockets, training, monkeypatch, how, refused, is_forecast, expected
):
    """Of one of ComfyUI's own models, with a prompt that is no caption. "in training", ComfyUI's kernels are others.
    What other processes train is checked without a forecast of it."""
    done, forecasts, is_training = [], [], [False]
    result = training.run(_job(nodes, sockets), info=None, resume=False, on_event=id, should_stop=lambda: False)

    @contextlib.contextmanager
    def native_training() -> Iterator[None]:
        is_training[0] = True
        yield
        is_training[0] = False

    def note(what: str, answer: Any = None) -> Any:
        def called(*given: Any, **options: Any) -> Any:
            done.append(f"{what} in training" if is_training[0] else what)
            forecasts.extend(options[name] for name in ("is_to_train",) if name in options)
            if what == refused:
                raise RuntimeError(f"refused by {what}")
            return answer

        return called

    for place, called in {
        "nodes.host.native.model.native_training": native_training, "nodes.host.read_native": note("read", "info"),
        "nodes.train.refuse_cards_of_others": note("cards"), "nodes.train._start_in_background": note("start"),
        "jobs.job.check_job": note("check"), "jobs.job.run_job": note("train", result),
        "jobs.in_processes.run_in_processes": note("start", result), "jobs.encode_job.fill_cache": note("encode"),
        "jobs.encode_job.missing_prompts": lambda job: list(job.samples.prompts),
    }.items():  # fmt: skip
        monkeypatch.setattr(f"devicebridge.{place}", called)
    model = dataclasses.replace(sockets["model"].model, family="comfyui")
    given = {**sockets, "model": dataclasses.replace(sockets["model"], model=model), "sample_prompts": "a cat", **how}
    given["dataset"] = dataclasses.replace(sockets["dataset"], find_clip=note("clip", _Named("clip")))
    with pytest.raises(RuntimeError, match="refused") if refused else contextlib.nullcontext():
        nodes.TrainLora.execute(**given)
    assert done == expected and forecasts == ([] if is_forecast is None else [is_forecast])


def test_lists_become_a_dataset_that_only_the_training_node_takes(nodes, host, sockets):
    latents = [{"samples": torch.randn(1, 16, 2, 2)}, {"samples": torch.randn(2, 16, 2, 2)}]
    item = [torch.ones(1, 3, 8), {"pooled_output": None}]
    node = nodes.DatasetFromLatents
    assert node.define_schema().is_input_list
    lists = {"latents": latents, "conditioning": [[item], [item, item]], "cache_folder": ["mine"]}
    dataset = node.execute(**lists).args[0]
    path = Path(dataset.data.encoded)
    assert path.parent == host.root / "output" / "mine" / "datasets" and len(load_encoded(path)) == 3
    assert host.progress[-1] == (3, 3) and host.texts[-1].startswith("3 samples are kept")
    assert _job(nodes, {**sockets, "dataset": dataset}).data.encoded == str(path)
    cache = nodes.CacheCaptionsAndLatents
    with pytest.raises(ValueError, match="arrived encoded; connect it to the training node"):
        cache.execute(model=sockets["model"], dataset=dataset, **_defaults(cache.define_schema()))
    folder = nodes.TrainingDatasetNode
    with pytest.raises(ValueError, match="previous is a dataset that arrived encoded"):
        folder.execute(**{**_defaults(folder.define_schema()), "folder": str(host.root)}, previous=dataset)
    host.is_interrupted = True
    with pytest.raises(comfy_stub.InterruptProcessingException):
        node.execute(**{**lists, "cache_folder": ["another"]})
    assert list((host.root / "output" / "another").rglob("*.safetensors")) and "kept" in host.texts[-1]


def test_the_fix_is_applied_and_taken_away(nodes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    applied = [False]
    monkeypatch.setattr(ring_lse, "apply_ring_lse_fix", lambda: applied.append(True) or "Active: because")
    monkeypatch.setattr(ring_lse, "remove_ring_lse_fix", lambda: applied.pop())
    node = nodes.RingLseFix
    assert node.execute(enabled=False).args == (None, "Off")
    assert node.execute(enabled=True, anything="x").args == ("x", "Active: because")
    assert node.execute(enabled=False).args[1] == "Taken away"


def test_a_field_of_several_lines_has_its_name_in_it(nodes: ModuleType) -> None:
    """The canvas shows no label beside it."""
    fields = [each for node in nodes.NODES for each in node.define_schema().inputs if each.options.get("multiline")]
    assert fields and all(each.options["placeholder"].startswith(each.id) for each in fields)


def test_defaults_of_nodes_and_templates_keep_both_cards_busy_and_save(nodes: ModuleType) -> None:
    wanted = {
        "DeviceBridgeTrainLora": {"accumulation": 4, "save_every": 250},
        "DeviceBridgeCacheCaptionsAndLatents": {"text_device": "auto"},
        "DeviceBridgeQuantize": {"quantize": "auto"},
    }
    for name, values in wanted.items():
        assert values.items() <= _defaults(_schemas(nodes)[name]).items()
    for path in (ROOT / "example_workflows").glob("*.json"):
        for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
            assert wanted.get(node["type"], {}).items() <= node["widgets_values_named"].items(), path.stem
    for path in (ROOT / "examples").glob("*.toml"):
        settings = tomlkit.parse(path.read_text(encoding="utf-8"))
        assert settings["model"].get("quantize", "auto") == "auto", path.name
        assert settings["train"]["gradient_accumulation_steps"] >= 4, path.name
