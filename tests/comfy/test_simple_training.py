"""Train LoRA (simple): its settings fit two cards, it trains files of other families, and few clicks lead to it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.server import Server
from devicebridge.tests.comfy.workers import case_tests
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from safetensors.torch import load_file

pytestmark = pytest.mark.comfy
# Family -> encoders of TestTinyEncoders, whose text is as wide as the model takes it; arguments in place of its own.
_OF_48: dict[str, Any] = {"family": "flux1", "width": 48, "vae": "sd", "channels": 16}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chroma": (_OF_48, {}), "z_image": (_OF_48, {}), "qwen_image": (_OF_48 | {"vae": "wan"}, {}),
    "sd3": (_OF_48, {"adm_in_channels": 48}),
    "sdxl": ({"family": "sdxl", "vae": "sd"}, {"adm_in_channels": 6 * 256 + 32}),
}  # fmt: skip


test_case = case_tests("simple_plans_worker.py", timeout=900)


@pytest.fixture(scope="module")
def images(server: Server) -> Iterator[Path]:
    folder = save_tiny_dataset(server.base / "input" / "simple_images", num_images=2)
    (folder / "image_1.txt").unlink()
    yield folder
    shutil.rmtree(folder)


def _small(server: Server, family: str = "", file: Path = Path(), **unet_config: Any) -> None:
    inputs = {"family": family, "file": str(file), "unet_config": json.dumps(unet_config)}
    server.succeed({"1": {"class_type": "TestSmallModel", "inputs": inputs}})


def _train(server: Server, model: str, name: str, encoders: dict[str, Any] | None = None, **more: Any) -> Any:
    sockets = {"model": model, "images": "simple_images", "trigger_word": "ohwx", "quality": "normal", "name": name}
    sockets |= more
    graph: dict[str, Any] = {"train": {"class_type": "DeviceBridgeTrainLoraSimple", "inputs": sockets}}
    if encoders is not None:
        graph["encoders"] = {"class_type": "TestTinyEncoders", "inputs": {"seed": 0, **encoders}}
        sockets |= {"stock_clip": ["encoders", 0], "stock_vae": ["encoders", 1]}
    return server.run(graph)


@pytest.mark.long
@pytest.mark.parametrize("family", OTHERS)
def test_a_file_that_comfyui_builds_trains_from_the_same_node(server: Server, images: Path, family: str) -> None:
    encoders, unet_config = OTHERS[family]
    file = server.base / "models" / "diffusion_models" / f"simple_{family}.safetensors"
    file.parent.mkdir(exist_ok=True)
    _small(server, family, file, **unet_config)
    try:
        alone = _train(server, file.name, f"simple_{family}")
        assert alone.status == "error" and "stock_clip" in alone.error, "no encoder of the family is there"
        finished = _train(server, file.name, f"simple_{family}", encoders)
        assert finished.status == "success", finished.error
    finally:
        _small(server)
        file.unlink()
    lora = load_file(server.base / "output" / "devicebridge" / f"simple_{family}" / f"simple_{family}.safetensors")
    assert any(tensor.any() for name, tensor in lora.items() if "lora_B" in name or "lora_up" in name)


@pytest.mark.long
@pytest.mark.usefixtures("short_texts_there")
@pytest.mark.parametrize("family", ["wan", "flux2"])
def test_a_model_folder_trains_with_its_own_encoders(server: Server, images: Path, tmp_path: Path, family: str) -> None:
    folder = server.base / "models" / "diffusers" / f"simple_{family}"
    shutil.copytree(save_tiny_pipeline(tmp_path / family, family), folder)
    _small(server)
    planned = _train(server, folder.name, "", plan_only=True)
    assert planned.status == "error" and "no card whose memory" in planned.error, "there is no GPU, and it would plan"
    finished = _train(server, folder.name, "")
    assert finished.status == "success", finished.error
    shutil.rmtree(folder)
    assert (server.base / "output" / "devicebridge" / "ohwx").is_dir(), "the trigger word names the run"
