"""Training on what ComfyUI's own CLIP and VAE make, in a real ComfyUI with tiny random ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.fingerprint import file_fingerprint
from devicebridge.data.image import ImageRequest
from devicebridge.encoding.key import comfy_latent_key, comfy_text_key
from devicebridge.encoding.store import CacheStore
from devicebridge.runs.queue import MEMORY
from devicebridge.runs.record import KeptJobs
from devicebridge.tests.clips import save_image
from devicebridge.tests.comfy.server import ROOT, Server
from devicebridge.tests.comfy.workers import case_tests
from devicebridge.tests.tiny_pipeline import save_tiny_pipeline
from devicebridge.tests.waiting import until
from devicebridge.tests.workflows import from_folder, node_of, read_workflow, set_values
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("servers_environment")]

EXAMPLE_API = ROOT / "tests" / "assets" / "train_a_LoRA_over_two_GPUs_api.json"
SIDE = 32
_BEHIND_THE_CACHE = ("DeviceBridgeTrainLora", "SaveLoRA", "LossGraphNode")


test_case = case_tests("stock_cases.py")


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Transformers with the widths of the tiny encoders; their own encoders are not asked."""
    base = tmp_path_factory.mktemp("models")
    return {family: save_tiny_pipeline(base / family, family) for family in ("flux1", "flux2")}


@pytest.fixture
def images(server: Server, request: pytest.FixtureRequest) -> Path:
    """Three images of the size they are trained at, with captions, in ComfyUI's input folder."""
    folder = server.base / "input" / "".join(letter for letter in request.node.name if letter.isalnum())
    for index in range(3):
        save_image(folder / f"{index}.png", SIDE, SIDE, seed=index, caption=f"a (red:1.3) house {index}")
    return folder


def _graph(family: str, pipeline: Path, images: Path, **train: Any) -> dict[str, Any]:
    """The example workflow, with the tiny CLIP and VAE as node "encoders" connected to its cache node."""
    settings = {
        **from_folder(pipeline), "TrainingDataset.folder": images.name, "TrainingDataset.resolutions": str(SIDE),
        "CacheCaptionsAndLatents.cache_folder": f"cache_{images.name}",
        "CacheCaptionsAndLatents.caption_weights": True,  # as core's nodes read them
        "TrainLora.steps": 2, "TrainLora.accumulation": 1, "TrainLora.rank": 2, "TrainLora.alpha": 2.0,
        "TrainLora.learning_rate": 0.01, "TrainLora.lora_dtype": "float32",
        **{f"TrainLora.{name}": value for name, value in train.items()},
    }  # fmt: skip
    values = {f"DeviceBridge{name}": value for name, value in settings.items()}
    graph = set_values(read_workflow(EXAMPLE_API), values)
    graph["encoders"] = {"class_type": "TestTinyEncoders", "inputs": {"family": family, "seed": 0}}
    node_of(graph, "CacheCaptionsAndLatents")["inputs"] |= {"stock_clip": ["encoders", 0], "stock_vae": ["encoders", 1]}
    return graph


def _up_to_the_cache(graph: dict[str, Any]) -> dict[str, Any]:
    return {key: node for key, node in graph.items() if node["class_type"] not in _BEHIND_THE_CACHE}


def _trained(server: Server, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    path = server.base / "output" / "devicebridge" / name / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def _entries(server: Server, images: Path) -> dict[Path, int]:
    folder = server.base / "output" / f"cache_{images.name}"
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


def _keep_cores_results(graph: dict[str, Any], image: Path, caption: str, folder: Path) -> None:
    """What core's nodes make of one image and its caption, into files."""
    nodes = {
        "text": ("CLIPTextEncode", {"clip": ["encoders", 0], "text": caption}),
        "image": ("LoadImage", {"image": f"{image.parent.name}/{image.name}"}),
        "latent": ("VAEEncode", {"pixels": ["image", 0], "vae": ["encoders", 1]}),
        "keep_text": ("TestKeepTensors", {"path": str(folder / "text.st"), "conditioning": ["text", 0]}),
        "keep_latent": ("TestKeepTensors", {"path": str(folder / "latent.st"), "latent": ["latent", 0]}),
    }
    graph |= {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}


@pytest.mark.parametrize("family", ["flux2", "flux1"])
def test_the_cache_holds_what_cores_nodes_make(server, pipelines, images, tmp_path, family):
    graph = _graph(family, pipelines[family], images, name=f"stock_{family}")
    caption = (images / "1.txt").read_text(encoding="utf-8")
    _keep_cores_results(graph, images / "1.png", caption, tmp_path)
    server.succeed(graph)
    _, metadata = _trained(server, f"stock_{family}")
    store = CacheStore(server.base / "output" / f"cache_{images.name}")
    clip, vae = metadata["devicebridge_text_source"], metadata["devicebridge_latent_source"]
    assert clip.startswith("comfyui ") and " CLIP " in clip and " VAE " in vae
    text = store.get(comfy_text_key(caption, clip, weighs=True))
    core = load_file(tmp_path / "text.st")
    assert text.keys() == core.keys() == ({"cond", "pooled_output"} if family == "flux1" else {"cond"})
    assert all(torch.equal(text[name], core[name][0]) for name in core)
    image = file_fingerprint(images / "1.png")
    latent = store.get(comfy_latent_key(image, ImageRequest("", (SIDE, SIDE), (0, 0, SIDE, SIDE)), vae))
    assert torch.equal(latent["samples"], load_file(tmp_path / "latent.st")["samples"][0])


def test_one_caption_changed_is_one_encoded_and_the_models_own_encoders_share_no_entry(server, pipelines, images):
    server.succeed(_up_to_the_cache(_graph("flux2", pipelines["flux2"], images)))
    before = _entries(server, images)
    assert len(before) == 3 + 3 + 1  # images, captions and the empty one
    (images / "0.txt").write_text("a blue house", encoding="utf-8")
    server.succeed(_graph("flux2", pipelines["flux2"], images, name="edited_once"))
    after = _entries(server, images)
    assert len(after) == len(before) + 1 and before.items() <= after.items()
    own = _graph("flux2", pipelines["flux2"], images, name="edited_own")
    inputs = node_of(own, "CacheCaptionsAndLatents")["inputs"]
    del inputs["stock_clip"], inputs["stock_vae"], own["encoders"]
    server.succeed(own)
    assert len(_entries(server, images)) == len(after) + 3 + 4
    assert _trained(server, "edited_own")[1]["devicebridge_text_source"] == "transformers"
    stock, own_lora = _trained(server, "edited_once")[0], _trained(server, "edited_own")[0]
    assert not all(torch.equal(stock[name], own_lora[name]) for name in stock)


@pytest.mark.parametrize("how", ["here", pytest.param("background", marks=pytest.mark.long)])
def test_a_prompt_that_is_no_caption_is_drawn_and_encoded_as_core_does(server, pipelines, images, tmp_path, how):
    """By the CLIP that the graph's cache node had, also for a training that runs elsewhere."""
    prompt, name = "a (blue:1.2) boat", f"drawn_{how}"
    settings = {"sample_prompts": prompt, "sample_every": 0, "sample_steps": 2, "background": how == "background"}
    graph = _graph("flux2", pipelines["flux2"], images, name=name, **settings)
    _keep_cores_results(graph, images / "1.png", prompt, tmp_path)
    server.succeed(graph)
    folder = server.base / "output" / "devicebridge" / name
    log = KeptJobs(server.base / "user" / MEMORY / "jobs").file(folder).with_suffix(".log")
    until((folder / f"{name}.safetensors").exists, said=lambda: log.read_text(encoding="utf-8"))  # written last
    assert (folder / "samples" / "000002_0.png").exists()
    source = _trained(server, name)[1]["devicebridge_text_source"]
    store = CacheStore(server.base / "output" / f"cache_{images.name}")
    found = store.get(comfy_text_key(prompt, source, weighs=True))["cond"]
    assert torch.equal(found, load_file(tmp_path / "text.st")["cond"][0])


def test_cancel_keeps_the_captions_that_are_done(server: Server, pipelines: dict[str, Path], images: Path) -> None:
    for index in range(3, 20):
        (images / f"{index}.png").write_bytes((images / "0.png").read_bytes())
        (images / f"{index}.txt").write_text(f"picture {index}", encoding="utf-8")
    graph = _up_to_the_cache(_graph("flux2", pipelines["flux2"], images))
    prompt = server.queue(graph)
    until(lambda: len(_entries(server, images)) >= 3)
    server.post("/interrupt", {"prompt_id": prompt})
    assert server.wait(prompt).status == "interrupted"
    kept = _entries(server, images)
    assert 3 <= len(kept) < 21
    server.succeed(graph)
    assert kept.items() <= _entries(server, images).items() and len(_entries(server, images)) == 21 + 3


def test_cores_lists_train_the_same_lora(server: Server, pipelines: dict[str, Path], images: Path) -> None:
    """Make Training Dataset on one image gives what the cache node gives; lists of several come in any order."""
    for index in (1, 2):
        (images / f"{index}.png").unlink()
    server.succeed(_graph("flux1", pipelines["flux1"], images, name="of_images"))
    server.succeed(_with_lists(_graph("flux1", pipelines["flux1"], images, name="of_lists"), images))
    (tensors, metadata), (expected, _) = _trained(server, "of_lists"), _trained(server, "of_images")
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert metadata["devicebridge_text_source"] == "comfyui CONDITIONING"
    assert metadata["ss_num_train_images"] == "1" and str(server.base) not in json.dumps(metadata)


def _with_lists(graph: dict[str, Any], images: Path, bucketed: bool = False) -> dict[str, Any]:
    for name in ("CacheCaptionsAndLatents", "TrainingDataset"):
        graph = {key: node for key, node in graph.items() if node["class_type"] != f"DeviceBridge{name}"}
    made = {"images": ["files", 0], "texts": ["files", 1], "vae": ["encoders", 1], "clip": ["encoders", 0]}
    source = "bucketed" if bucketed else "made"
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "files": ("LoadImageTextDataSetFromFolder", {"folder": images.name}),
        "made": ("MakeTrainingDataset", made),
        "bucketed": ("ResolutionBucket", {"latents": ["made", 0], "conditioning": ["made", 1]}),
        "lists": (
            "DeviceBridgeDatasetFromLatents",
            {"latents": [source, 0], "conditioning": [source, 1], "cache_folder": f"cache_{images.name}"},
        ),
    }
    graph |= {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}
    node_of(graph, "TrainLora")["inputs"]["dataset"] = ["lists", 0]
    return graph


def test_resolution_bucket_gives_batches_and_nothing_is_kept_twice(server, pipelines, images):
    Image.new("RGB", (SIDE, 2 * SIDE), "orange").save(images / "2.png")  # in place of one of the size of the others
    pipeline = pipelines["flux2"]
    graph = _with_lists(_graph("flux2", pipeline, images, name="bucketed", batch_size=2), images, bucketed=True)
    server.succeed(graph)
    before = _entries(server, images)
    assert len(before) == 3 + 3
    server.succeed(_with_lists(_graph("flux2", pipeline, images, name="unbucketed"), images))
    assert _entries(server, images) == before


def test_what_does_not_fit_is_refused(server: Server, pipelines: dict[str, Path], images: Path) -> None:
    finished = server.run(_graph("flux1", pipelines["flux2"], images, name="unfit"))
    assert finished.status == "error" and "the stock CLIP does not fit" in finished.error
    lists = _with_lists(_graph("flux2", pipelines["flux1"], images, name="unfit_lists"), images)
    finished = server.run(lists)
    assert finished.status == "error" and "the encoded dataset does not fit the model" in finished.error
    assert "16 channels, but flux1-dev takes 4" in finished.error and "no pooled_output" not in finished.error
