"""Training through a real ComfyUI: the same LoRA as from the command line, and Cancel that loses nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.headless import run as headless
from devicebridge.tests.comfy.server import ROOT, Finished, Messages, Server
from devicebridge.tests.comfy.small_flux2 import original_weights, save_comfy_sized_pipeline
from devicebridge.tests.comfy.workers import run_script
from devicebridge.tests.comfy_host import allow_folders
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from devicebridge.tests.waiting import until
from devicebridge.tests.workflows import from_folder, read_workflow, set_values, training_values
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("servers_environment")]

EXAMPLE = ROOT / "example_workflows" / "train_a_LoRA_over_two_GPUs.json"
EXAMPLE_API = ROOT / "tests" / "assets" / "train_a_LoRA_over_two_GPUs_api.json"

JOB = """
[model]
path = "{model}"
dtype = "float32"
[split]
devices = ["cpu"]
[data]
folders = [{{path = "{data}"}}]
resolutions = [32]
[train]
steps = {steps}
[lora]
rank = 2
alpha = 2.0
[optimizer]
learning_rate = 0.01
[cache]
dtype = "float32"
[output]
folder = "{folder}"
name = "{name}"
tensorboard = false
"""


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("models") / "tiny_flux2", "flux2")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dataset(tmp_path_factory.mktemp("data") / "tiny_images")


def _settings(pipeline: Path, dataset: Path, **train: Any) -> dict[str, Any]:
    return training_values(pipeline, dataset, **train) | {"DeviceBridgeQuantize.quantize": "none"}


@pytest.fixture
def graph(pipeline: Path, dataset: Path) -> Callable[..., dict[str, Any]]:
    """Makes the example's API form with these settings of the train node."""

    def make(**train: Any) -> dict[str, Any]:
        return set_values(read_workflow(EXAMPLE_API), _settings(pipeline, dataset, **train))

    return make


def _run_folder(server: Server, name: str) -> Path:
    return server.base / "output" / "devicebridge" / name


def _read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _wait_for_step(folder: Path, step: int) -> None:
    until(lambda: [each for each in _steps(folder) if each["step"] >= step], 180, lambda: _read_events(folder)[-3:])


def test_the_lora_is_byte_for_byte_that_of_the_command_line(server, comfyui, graph, pipeline, dataset, tmp_path):
    finished = server.succeed(graph(name="same", steps=4, strategy="tensor"))  # of an older version's workflow
    job = tmp_path / "job.toml"
    folder = tmp_path / "run"
    job.write_text(JOB.format(model=pipeline, data=dataset, steps=4, folder=folder, name="same"), encoding="utf-8")
    done = run_script("command_line.py", comfyui, "train", job, has_pack=True)  # so that both have the same packages
    assert done.returncode == 0, done.stderr
    ours = _run_folder(server, "same") / "same.safetensors"
    assert ours.read_bytes() == (folder / "same.safetensors").read_bytes()
    train_output = next(output for output in finished.outputs.values() if "lora" in output)
    (line,) = [text for text in train_output["text"] if "tensor parallel" in text]
    assert 'strategy of Train LoRA Across GPUs = "tensor"' in line and '"auto" is taken' in line
    saved = {"filename": "same.safetensors", "subfolder": "devicebridge/same", "type": "output"}
    assert train_output["lora"] == [saved]


def test_the_cores_nodes_take_the_outputs(server: Server, graph: Any) -> None:
    """Save LoRA Weights writes our tensors with the steps in the name, Plot Loss Graph draws."""
    finished = server.succeed(graph(name="core", steps=5))
    (saved,) = (server.base / "output" / "loras").glob("my_lora_5_steps_*.safetensors")
    ours = load_file(_run_folder(server, "core") / "core.safetensors")
    theirs = load_file(saved)
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any("images" in output for output in finished.outputs.values())


@pytest.mark.parametrize("scheme", ["auto", "int8-compute"])
def test_the_report_of_quantizing_is_an_ordinary_text(server: Server, graph: Any, scheme: str) -> None:
    """Measured inside the inference mode that ComfyUI runs nodes in; training goes on from the same socket."""
    whole = set_values(graph(name=f"report_{scheme}", steps=2), {"DeviceBridgeQuantize.quantize": scheme})
    (quantize,) = (key for key, node in whole.items() if node["class_type"] == "DeviceBridgeQuantize")
    whole["preview"] = {"class_type": "PreviewAny", "inputs": {"source": [quantize, 1]}}
    (text,) = server.succeed(whole).outputs["preview"]["text"]
    assert text.startswith("none: all weights" if scheme == "auto" else f"28 linears to {scheme}, ")  # devices is cpu
    assert ("\nauto: " in text) == (scheme == "auto")


def test_the_trained_lora_changes_comfyuis_own_model_by_exactly_its_product(server, dataset, tmp_path):
    """Load Diffusion Model, Load LoRA Model with our output, Save: every adapted weight moves by B A alpha / rank."""
    pipeline = save_comfy_sized_pipeline(tmp_path / "model")
    weights = original_weights(pipeline / "transformer")
    models = server.base / "models" / "diffusion_models"
    models.mkdir(parents=True, exist_ok=True)
    save_file(weights, models / "small_flux2.safetensors")
    settings = _settings(pipeline, dataset, name="applied", steps=3, lora_dtype="float32")
    graph = set_values(read_workflow(EXAMPLE_API), settings)
    (train,) = (key for key, node in graph.items() if node["class_type"] == "DeviceBridgeTrainLora")
    unet = {"unet_name": "small_flux2.safetensors", "weight_dtype": "default"}
    graph["101"] = {"class_type": "UNETLoader", "inputs": unet}
    lora = {"model": ["101", 0], "lora": [train, 0], "strength_model": 1.0, "bypass": False}
    graph["102"] = {"class_type": "LoraModelLoader", "inputs": lora}
    graph["103"] = {"class_type": "ModelSave", "inputs": {"model": ["102", 0], "filename_prefix": "merged"}}
    log_start = server.log.stat().st_size
    server.succeed(graph)
    log = server.log.read_bytes()[log_start:].decode()
    assert "lora key not loaded" not in log
    (saved,) = (server.base / "output").glob("merged*.safetensors")
    merged = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in load_file(saved).items()}
    tensors = load_file(_run_folder(server, "applied") / "applied.safetensors")
    adapted = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    assert adapted
    for module in adapted:
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        change = b @ a * (tensors[f"{module}.alpha"] / a.shape[0])
        name = f"{module.removeprefix('diffusion_model.')}.weight"
        moved = merged[name].float() - weights[name]
        assert (moved - change).norm() < 1e-3 * change.norm(), module


def test_progress_texts_and_events_reach_the_browser(server: Server, graph: Any) -> None:
    with Messages(server.port, "watcher") as messages:
        server.queue(graph(name="watched", steps=3), "watcher")
        received = messages.until_done()
    texts = [data for kind, data in received if kind == "text"]
    assert any(text.startswith("Step 3/3: loss ") and "s/step" in text for text in texts), texts
    events = [data for kind, data in received if kind == "devicebridge.event"]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]
    bars = [(data["value"], data["max"]) for kind, data in received if kind == "progress"]
    assert (3, 3) in bars


def test_cancel_leaves_a_checkpoint_that_continues_exactly(server: Server, graph: Any) -> None:
    steps = 30
    server.succeed(graph(name="whole", steps=steps))
    folder = _run_folder(server, "cancelled")
    with Messages(server.port, "canceller") as messages:
        prompt = server.queue(graph(name="cancelled", steps=steps), "canceller")
        _wait_for_step(folder, 2)
        server.post("/interrupt", {"prompt_id": prompt})
        received = messages.until_done()
    assert received[-1][0] == "execution_interrupted", "the queue shows it as interrupted, not as failed"
    texts = [data for kind, data in received if kind == "text"]
    assert "everything is saved. Turn on resume and run again to continue." in texts[-1]
    done = max(event["step"] for event in _read_events(folder) if event["kind"] == "step")
    assert 2 <= done < steps
    assert (folder / "checkpoints" / f"step-{done:06d}").is_dir()
    server.succeed(graph(name="cancelled", steps=steps, resume=True))
    whole = load_file(_run_folder(server, "whole") / "whole.safetensors")
    resumed = load_file(folder / "cancelled.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses = {name: _losses(_run_folder(server, name)) for name in ("whole", "cancelled")}
    assert losses["cancelled"] == losses["whole"] and len(losses["whole"]) == steps


def _losses(folder: Path) -> list[float]:
    return [event["values"]["loss"] if "values" in event else event["loss"] for event in _steps(folder)]


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [event for event in _read_events(folder) if event["kind"] == "step"]


def test_the_same_graph_run_again_gives_its_lora_and_a_changed_one_a_new_run(server: Server, graph: Any) -> None:
    first = server.succeed(graph(name="again", steps=2))
    server.empty_cache()
    again = server.succeed(graph(name="again", steps=2))
    changed = server.succeed(graph(name="again", steps=2, learning_rate=0.5))

    def told(finished: Finished) -> dict[str, Any]:
        return next(output for output in finished.outputs.values() if "lora" in output)

    assert told(again)["lora"] == told(first)["lora"]
    assert told(again)["text"][0].startswith("Finished before: nothing was trained.")
    assert told(changed)["lora"][0]["filename"] == "again_2.safetensors"
    assert len(_steps(_run_folder(server, "again"))) == 2 and len(_steps(_run_folder(server, "again_2"))) == 2


@pytest.fixture
def _comfy_cli() -> None:
    if shutil.which("comfy") is None:
        pytest.skip("needs comfy-cli: pip install comfy-cli")


def _edited(folder: Path, values: dict[str, Any]) -> Path:
    workflow = folder / "workflow.json"
    workflow.write_text(json.dumps(set_values(read_workflow(EXAMPLE), values)), encoding="utf-8")
    return workflow


@pytest.mark.usefixtures("_comfy_cli")
def test_devicebridge_run_starts_runs_and_stops(comfyui: Path, pipeline: Path, dataset: Path, tmp_path: Path) -> None:
    """The pack is in no custom_nodes folder here; the run makes it visible."""
    allow_folders(tmp_path / "user", pipeline, dataset)
    lines: list[str] = []
    result = headless.run_workflow(
        _edited(tmp_path, _settings(pipeline, dataset, name="headless", steps=3)), comfyui=comfyui, base=tmp_path,
        on_progress=lines.append, server_arguments=["--disable-api-nodes"],
    )  # fmt: skip
    assert (result.exit_code, result.message) == (0, "")
    lora = tmp_path / "output" / "devicebridge" / "headless" / "headless.safetensors"
    assert lora in result.outputs and all(path.is_file() for path in result.outputs)
    assert any(line.startswith("training: Step 3/3: loss ") for line in lines)


@pytest.mark.usefixtures("_comfy_cli")
def test_a_timeout_of_devicebridge_run_leaves_a_checkpoint(comfyui, pipeline, dataset, tmp_path, monkeypatch):
    """The time is over when a step is done, however long the server took to start."""
    monkeypatch.setattr(headless.threading, "Timer", timer := mock.Mock())

    def end_the_time(line: str) -> None:
        if line.partition("/1000000")[0][-1] in "123456789" and "/1000000" in line:
            timer.call_args.args[1]()

    allow_folders(tmp_path / "user", pipeline, dataset)
    folder = tmp_path / "output" / "devicebridge" / "late"
    result = headless.run_workflow(
        _edited(tmp_path, _settings(pipeline, dataset, name="late", steps=1_000_000)), comfyui=comfyui, base=tmp_path,
        on_progress=end_the_time, timeout_s=20.0, server_arguments=["--disable-api-nodes"],
    )  # fmt: skip
    assert result.exit_code == 124 and timer.call_args.args[0] == 20.0
    done = max(event["step"] for event in _steps(folder))
    assert (folder / "checkpoints" / f"step-{done:06d}").is_dir()


@pytest.mark.usefixtures("_comfy_cli")
def test_devicebridge_run_passes_on_failure_and_its_reason(comfyui: Path, tmp_path: Path) -> None:
    result = headless.run_workflow(
        _edited(tmp_path, {f"DeviceBridge{key}": value for key, value in from_folder(Path("/nowhere/model")).items()}),
        comfyui=comfyui, base=tmp_path, server_arguments=["--disable-api-nodes"],
    )  # fmt: skip
    assert result.exit_code == 1
    assert "/nowhere/model" in result.message or "my_images" in result.message


@pytest.mark.long
def test_two_processes_train_the_lora_of_one_and_end_with_cancel(server: Server, graph: Any) -> None:
    loras = {}
    for name, count in (("by_one", 1), ("by_two", 2)):
        server.succeed(graph(name=name, steps=4, accumulation=2, processes=count, strategy="auto"))
        loras[count] = load_file(_run_folder(server, name) / f"{name}.safetensors")
    for name, expected in loras[1].items():
        assert torch.allclose(loras[2][name].float(), expected.float(), rtol=0.02, atol=1e-5), name  # in bfloat16
    with Messages(server.port, "of_two") as messages:
        prompt = server.queue(graph(name="stopped", steps=2000, accumulation=2, processes=2, strategy="fsdp"), "of_two")
        _wait_for_step(_run_folder(server, "stopped"), 2)
        server.post("/interrupt", {"prompt_id": prompt})
        received = messages.until_done()
    assert received[-1][0] == "execution_interrupted"
    found = json.loads((_run_folder(server, "stopped") / "run.json").read_text(encoding="utf-8"))
    assert found["status"] == "stopped"
