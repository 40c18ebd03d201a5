"""Job files of models that only ComfyUI can build, and the graph with ComfyUI's CLIP and VAE, with tiny stand-ins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devicebridge.runs.queue import MEMORY
from devicebridge.runs.record import KeptJobs, read_record
from devicebridge.tests.clips import save_image
from devicebridge.tests.comfy.server import ENVIRONMENT, ROOT, Server
from devicebridge.tests.comfy.workers import run_script
from devicebridge.tests.comfy_host import comfy_python
from devicebridge.tests.waiting import until
from devicebridge.tests.workflows import from_folder, node_of, read_workflow, set_values
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfy
WORKER = Path(__file__).with_name("native_job_worker.py")
EXAMPLE_API = ROOT / "tests" / "assets" / "train_a_LoRA_over_two_GPUs_api.json"
MODEL, SIDE = "tiny_flux2.safetensors", 64
OURS = (
    "import runpy, sys; runpy.run_path(sys.argv[1])['load_pack'](); "
    "from devicebridge.cli.main import main; sys.exit(main(sys.argv[2:]))"
)


def _worker(comfyui: Path, base: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script(WORKER.name, comfyui, base, *command)


def _ours(comfyui: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of `devicebridge` with the Python of the tests, which knows no ComfyUI but by COMFYUI_PATH."""
    whole = [sys.executable, "-c", OURS, ROOT / "bootstrap.py", *command]
    environment = {**os.environ, **ENVIRONMENT, "COMFYUI_PATH": str(comfyui)}
    return subprocess.run(list(map(str, whole)), capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def checkpoint(comfyui: Path, server: Server) -> Path:
    """A tiny FLUX.2 among ComfyUI's diffusion models, and files of that name for its encoders."""
    path = server.base / "models" / "diffusion_models" / MODEL
    for kind in ("diffusion_models", "text_encoders", "vae"):
        (server.base / "models" / kind).mkdir(parents=True, exist_ok=True)
        save_file({"x": torch.zeros(1)}, server.base / "models" / kind / MODEL)
    done = _worker(comfyui, server.base, "save", "flux2", path)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


@pytest.fixture(scope="module")
def images(server: Server) -> Path:
    folder = server.base / "input" / "native_images"
    for index in range(2):
        save_image(folder / f"{index}.png", SIDE, SIDE, seed=index, caption=f"a red house {index}")
    return folder


def _graph(images: Path, name: str, **train: Any) -> dict[str, Any]:
    settings = {
        **from_folder(Path()), "LoadModelForTraining.path": "", "TrainingDataset.folder": images.name,
        "TrainingDataset.resolutions": str(SIDE), "CacheCaptionsAndLatents.cache_folder": "cache_native",
        "TrainLora.steps": 2, "TrainLora.accumulation": 1, "TrainLora.sample_prompts": "", "TrainLora.rank": 2,
        "TrainLora.alpha": 2.0, "TrainLora.learning_rate": 0.01, "TrainLora.random_seed": 7,
        "TrainLora.lora_dtype": "float32", "TrainLora.name": name,
        **{f"TrainLora.{key}": value for key, value in train.items()},
    }  # fmt: skip
    graph = set_values(read_workflow(EXAMPLE_API), {f"DeviceBridge{key}": value for key, value in settings.items()})
    graph["encoders"] = {"class_type": "TestTinyEncoders", "inputs": {"family": "flux2_native", "seed": 0}}
    graph["stock"] = {"class_type": "UNETLoader", "inputs": {"unet_name": MODEL, "weight_dtype": "default"}}
    node_of(graph, "CacheCaptionsAndLatents")["inputs"] |= {"stock_clip": ["encoders", 0], "stock_vae": ["encoders", 1]}
    node_of(graph, "LoadModelForTraining")["inputs"] |= {"stock_model": ["stock", 0]}
    return graph


def _job(images: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": MODEL, "family": "comfyui", "dtype": "float32"}, "split": {"devices": ["cpu"]},
        "data": {"resolutions": [SIDE], "folders": [{"path": str(images)}]},
        "cache": {"stock_clip": [MODEL], "stock_clip_type": "flux2", "stock_vae": MODEL},
        "train": {"steps": 2, "seed": 7}, "lora": {"rank": 2, "alpha": 2.0}, "optimizer": {"learning_rate": 0.01},
        "output": {"folder": str(folder), "lora_dtype": "float32", "tensorboard": False},
    }  # fmt: skip
    import tomlkit

    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path = folder.with_suffix(".toml")
    path.write_text(tomlkit.dumps(values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(server: Server, checkpoint: Path, images: Path) -> dict[str, torch.Tensor]:
    """The LoRA of the graph: Load Diffusion Model, ComfyUI's CLIP and VAE, cache, training."""
    server.succeed(_graph(images, "native_graph"))
    return load_file(server.base / "output" / "devicebridge" / "native_graph" / "native_graph.safetensors")


def test_a_job_file_trains_the_lora_of_the_graph(comfyui, server, trained, images, tmp_path):
    """The job draws pictures as well, of which the LoRA knows nothing."""
    samples = {"prompts": ["a red house 0", "a blue boat"], "every_steps": 0, "steps": 2}
    stock = str(server.base / "models" / "diffusion_models" / MODEL)  # the worker has a VAE in the place of any file's
    job = _job(images, tmp_path / "run", samples=samples, cache={"stock_vae": stock})
    done = _worker(comfyui, server.base, "train", job)
    assert done.returncode == 0, done.stderr[-3000:]
    drawn = {path.name: Image.open(path) for path in (tmp_path / "run" / "samples").iterdir()}
    assert sorted(drawn) == [f"{step:06d}_{index}.png" for step in (0, 2) for index in (0, 1)], done.stderr[-3000:]
    assert all(each.size == (SIDE, SIDE) for each in drawn.values())
    assert drawn["000002_0.png"].tobytes() != drawn["000002_1.png"].tobytes()
    (path,) = (tmp_path / "run").glob("*.safetensors")
    found = load_file(path)
    assert found.keys() == trained.keys() and any(key.startswith("diffusion_model.double_blocks.0") for key in found)
    assert all(torch.equal(found[name], trained[name]) for name in trained)
    with safe_open(path, "pt") as file:
        text, latents = (file.metadata()[f"devicebridge_{each}_source"] for each in ("text", "latent"))
    assert " CLIP " in text and " VAE " in latents
    again = _worker(comfyui, server.base, "train", job, "--resume")
    assert again.returncode == 0 and "complete: 2 of 2 steps are done" in again.stdout, again.stderr[-3000:]
    verified = _worker(comfyui, server.base, "cache", job, "--verify")
    assert verified.returncode == 0 and "4 entries whole, 0 missing" in verified.stdout, verified.stderr[-3000:]


@pytest.mark.long
def test_a_job_file_trains_with_references(comfyui, server, trained, images, tmp_path):
    (before := tmp_path / "before").mkdir()
    for index in range(2):
        Image.new("RGB", (96, 48), (200, 90 * index, 10)).save(before / f"{index}.png")
    folders = [{"path": str(images), "references": [str(before)]}]
    data = {"resolutions": [SIDE], "condition": "reference", "reference_megapixels": 0.01, "folders": folders}
    job = _job(images, tmp_path / "run", data=data)
    done = _worker(comfyui, server.base, "train", job)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "run").glob("*.safetensors")
    found = load_file(path)
    assert found.keys() == trained.keys() and not all(torch.equal(found[name], trained[name]) for name in trained)
    verified = _worker(comfyui, server.base, "cache", job, "--verify")
    assert verified.returncode == 0 and "conditions: 2 entries whole, 0 missing" in verified.stdout, verified.stdout
    (before / "1.png").unlink()
    refused = _worker(comfyui, server.base, "train", job, "--resume")
    assert refused.returncode == 2 and f"1.png: has no reference in {before}" in refused.stderr, refused.stderr[-2000:]


@pytest.mark.usefixtures("trained")
def test_a_graph_trains_it_in_the_background(server: Server, images: Path) -> None:
    """Captions and latents are those of the run before; only the process with ComfyUI's code can build the model."""
    server.succeed(_graph(images, "native_behind", background=True))
    folder = server.base / "output" / "devicebridge" / "native_behind"
    log = KeptJobs(server.base / "user" / MEMORY / "jobs").file(folder).with_suffix(".log")
    states = lambda: [each.state for each in [read_record(folder)] if each and each.state != "running"]  # noqa: E731
    assert until(states, said=lambda: log.read_text(encoding="utf-8")) == ["finished"]
    found = load_file(folder / "native_behind.safetensors")
    expected = load_file(server.base / "output" / "devicebridge" / "native_graph" / "native_graph.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_two_ranks_encode_once_train_the_lora_of_one_process_and_draw_its_pictures(
    comfyui: Path, server: Server, checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    train = {"steps": 2, "seed": 7, "gradient_accumulation_steps": 2}
    stock = str(server.base / "models" / "diffusion_models" / MODEL)  # the worker has a VAE in the place of any file's
    drawn = {"samples": {"prompts": ["a blue boat"], "every_steps": 0, "steps": 2}, "cache": {"stock_vae": stock}}
    loras, pictures = {}, {}
    for name in ("alone", "data", "fsdp"):
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name != "alone" else []
        strategy = "auto" if name == "alone" else name
        job = _job(images, tmp_path / name, train=train, parallel={"strategy": strategy}, **drawn)
        command = [comfy_python(comfyui), *ranks, WORKER, comfyui, server.base, "train", job]
        environment = {**os.environ, **ENVIRONMENT}
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        (path,) = (tmp_path / name).glob("*.safetensors")
        loras[name] = load_file(path)
        pictures[name] = np.asarray(Image.open(tmp_path / name / "samples" / "000002_0.png")).astype(int)
    for name in ("data", "fsdp"):
        for tensor, expected in loras["alone"].items():
            assert torch.allclose(loras[name][tensor], expected, rtol=1e-4, atol=1e-6), (name, tensor)
        assert np.abs(pictures[name] - pictures["alone"]).max() <= 1, name


def test_the_command_goes_on_with_comfyuis_python_and_plans(comfyui, checkpoint, images, tmp_path):
    """Before anything is encoded: text sizes come from the class."""
    job = _job(images, tmp_path / "planned", model={"path": str(checkpoint)}, cache={"stock_vae": str(checkpoint)})
    job.write_text(job.read_text().replace(f'stock_clip = ["{MODEL}"]', f'stock_clip = ["{checkpoint}"]'))
    job.write_text(job.read_text().replace('devices = ["cpu"]\n', ""))
    done = _ours(comfyui, "plan", job, "--cards", "2x24GB", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found["devices"]) == 2 and all(device["allocated"] > 0 for device in found["devices"]), found


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "nowhere.safetensors"}}, "which is not in ComfyUI's folders"),
        pytest.param(
            {"cache": {"stock_vae": ""}}, "holds no VAE; name the VAE of the model with cache.stock_vae",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"cache": {"stock_vae": "empty.safetensors"}}, "empty.safetensors (0 bytes) is not a safetensors file",
            marks=pytest.mark.long,
        ),
        ({"cache": {"stock_vae": "packed.gguf"}}, "packed.gguf is a GGUF file"),
        pytest.param(
            {"cache": {"stock_clip_type": "flux9"}}, "cache.stock_clip_type is 'flux9'; ComfyUI knows",
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_what_a_job_file_names_wrongly_is_told(comfyui, server, checkpoint, images, tmp_path, sections, message):
    for name in ("empty.safetensors", "packed.gguf"):
        (server.base / "models" / "vae" / name).touch()
    done = _worker(comfyui, server.base, "train", _job(images, tmp_path / "refused", **sections))
    assert done.returncode == 2 and message in done.stderr, done.stderr[-3000:]
