"""The pack inside a real ComfyUI: it loads quickly and quietly, and its sockets do not change by accident."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.server import ENVIRONMENT, ROOT, Server
from devicebridge.tests.comfy_host import comfy_python
from devicebridge.tests.workflows import from_folder, set_values
from PIL import Image

pytestmark = pytest.mark.comfy

GOLDEN = ROOT / "tests" / "assets" / "object_info.json"
EXAMPLES = sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))
FILES = ("folder", "images", "evaluation_folder", "text_encoders", "text_encoder_2", "vae")
EXAMPLE_API = ROOT / "tests" / "assets" / "train_a_LoRA_over_two_GPUs_api.json"


@pytest.fixture(scope="module")
def object_info(server: Server) -> dict[str, Any]:
    found = server.get("/object_info")
    return {name: info for name, info in found.items() if info["python_module"] == "custom_nodes.devicebridge"}


def _without_words(info: dict[str, Any]) -> dict[str, Any]:
    inputs = {
        group: {name: _entry_without_words(name, entry) for name, entry in entries.items()}
        for group, entries in info["input"].items()
    }
    kept = ("input_order", "output", "output_name", "output_is_list", "output_node", "display_name", "category")
    return {"input": inputs, **{key: info[key] for key in kept}}


def _entry_without_words(name: str, entry: list[Any]) -> list[Any]:
    """Nor the files that are there now."""
    kind, *rest = entry
    left_out = {"tooltip", "placeholder"} | ({"options", "default"} if name in FILES else set())
    return [kind, *({k: v for k, v in options.items() if k not in left_out} for options in rest)]


def test_sockets_are_as_released(object_info: dict[str, Any]) -> None:
    """Saved workflows hold values by position: only optional inputs and outputs at the end may be added. For a wanted
    change run with UPDATE_GOLDEN=1 and look at what git says has changed."""
    found = {name: _without_words(info) for name, info in sorted(object_info.items())}
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_the_frontend_finds_a_help_page_in_every_language(comfyui, server, object_info):
    code = "import comfyui_frontend_package as it; print(it.__path__[0], end='/static')"
    command = [str(comfy_python(comfyui)), "-c", code]
    folder = os.environ.get("COMFYUI_FRONTEND") or subprocess.check_output(command, text=True)
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in Path(folder).glob("assets/*.js"))
    asked = re.findall(r"`/extensions/\$\{\w+\}/docs/\$\{\w+\.name\}([^`]*)`", scripts)
    assert [re.sub(r"\$\{\w+\}", "LANGUAGE", place) for place in asked] == ["/LANGUAGE.md", ".md"], "in this order"
    titles = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    for name, info in object_info.items():
        for place, title in {"/zh.md": titles[name]["display_name"], ".md": info["display_name"]}.items():
            assert server.get(f"/extensions/devicebridge/docs/{name}{place}").startswith(f"# {title}\n")


def test_the_pack_loads(server: Server) -> None:
    log = server.log.read_text(encoding="utf-8")
    assert "IMPORT FAILED" not in log
    assert re.search(r"seconds: \S*custom_nodes/devicebridge", log), log[-2000:]


def test_loading_the_pack_touches_no_gpu_and_no_heavy_package(comfyui: Path) -> None:
    code = """
import asyncio, importlib.util, sys
import torch, comfy_api.latest
before = set(sys.modules)
spec = importlib.util.spec_from_file_location("bootstrap", sys.argv[1])
bootstrap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bootstrap)
pack = bootstrap.load_pack()
extension = asyncio.run(pack.comfy_entrypoint())
for node in asyncio.run(extension.get_node_list()):
    node.GET_NODE_INFO_V1()
heavy = {"diffusers", "peft", "torchao", "transformers", "accelerate", "tomlkit", "av"} & (set(sys.modules) - before)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
print("quiet")
"""
    command = [str(comfy_python(comfyui)), "-c", code, str(ROOT / "bootstrap.py")]
    environment = {**os.environ, "PYTHONPATH": str(comfyui)}
    done = subprocess.run(command, cwd=comfyui, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip().endswith("quiet"), done.stderr


def test_the_nodes_load_and_a_split_runs_with_comfyuis_own_packages(comfyui: Path, tmp_path: Path) -> None:
    """What the pack's requirements ask beside ComfyUI's is not there; "packaging" comes with torch."""
    asked, there = (
        set(re.findall(r"(?m)^[\w-]+", (folder / "requirements.txt").read_text(encoding="utf-8")))
        for folder in (ROOT, comfyui)
    )
    absent = sorted(asked - there - {"packaging"})
    assert {"diffusers", "peft", "torchao", "tomlkit"} <= set(absent)
    worker = Path(__file__).with_name("own_packages_worker.py")
    command = [str(comfy_python(comfyui)), str(worker), str(comfyui), str(tmp_path), *absent, "accelerate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"same": True, "loaded": []}


@pytest.fixture(scope="module", autouse=True)
def _images(server: Server) -> None:
    folder = server.base / "input" / "my_images"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "one.png")
    (folder / "one.txt").write_text("one", encoding="utf-8")


def _example_graph(**values: Any) -> dict[str, Any]:
    """The example in API form; values by "<type without prefix>.<input>" as "Type__input"."""
    folder = {f"DeviceBridge{key}": value for key, value in from_folder(Path("/nowhere/model")).items()}
    graph = set_values(json.loads(EXAMPLE_API.read_text(encoding="utf-8")), folder)
    for name, value in values.items():
        kind, _, key = name.partition("__")
        (node,) = (node for node in graph.values() if node["class_type"] == f"DeviceBridge{kind}")
        assert key in node["inputs"]
        node["inputs"][key] = value
    return graph


def test_a_model_that_is_not_in_the_list_is_refused_before_anything_runs(server: Server) -> None:
    answer = server.post("/prompt", {"prompt": _example_graph(LoadModelForTraining__model="elsewhere.safetensors")})
    errors = [error for node in answer["node_errors"].values() for error in node["errors"]]
    assert any(error["type"] == "value_not_in_list" for error in errors)


def test_a_strategy_that_is_gone_is_accepted_and_another_is_not(server: Server) -> None:
    old = _example_graph(TrainLora__strategy="tensor", LoadModelForTraining__path="/nowhere/model")
    assert "'/nowhere/model' does not exist" in server.run(old).error
    answer = server.post("/prompt", {"prompt": _example_graph(TrainLora__strategy="elsewhere")})
    errors = [error for node in answer["node_errors"].values() for error in node["errors"]]
    assert [error["extra_info"]["input_name"] for error in errors] == ["strategy"]


@pytest.mark.parametrize("scheme", ["fp8", "none"])
def test_a_prompt_from_before_the_later_sockets_is_accepted(server: Server, scheme: str) -> None:
    """It names no rotation and no cache; the node runs, and what is refused is the model that is not there."""
    graph = _example_graph(Quantize__quantize=scheme, LoadModelForTraining__path="/nowhere/model")
    (quantize,) = (node for node in graph.values() if node["class_type"] == "DeviceBridgeQuantize")
    del quantize["inputs"]["rotation"], quantize["inputs"]["cache"]
    assert server.run(graph).error.strip() == "model '/nowhere/model' does not exist"


def test_the_examples_are_in_the_template_browser(server: Server) -> None:
    assert EXAMPLES and set(EXAMPLES) == set(server.get("/api/workflow_templates")["devicebridge"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_means_its_api_twin(server: Server, name: str) -> None:
    """comfy-cli turns the saved form into the API form as the browser does, from this server's sockets."""
    if shutil.which("comfy") is None:
        pytest.skip("needs comfy-cli: pip install comfy-cli")
    workflow = ROOT / "example_workflows" / f"{name}.json"
    command = ["comfy", "--skip-prompt", "run", "--print-prompt", "--json", "--workflow", str(workflow)]
    command += ["--host", "127.0.0.1", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (prompt,) = (event["prompt"] for event in events if event["type"] == "prompt_preview")
    if os.environ.get("UPDATE_GOLDEN"):
        nodes = {key: {"class_type": kind, "inputs": given} for key, (kind, given) in _plain(prompt).items()}
        text = json.dumps(nodes, indent=1)
        _twin_file(name).write_text(text + "\n", encoding="utf-8")
    assert _plain(prompt) == _plain(_api_twin(name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_wants_nothing_but_its_model_files(server: Server, name: str) -> None:
    """ComfyUI's own check of every link, input and choice; the models themselves are not here."""
    answer = server.post("/prompt", {"prompt": _api_twin(name)})
    found = {
        (error["extra_info"]["input_name"], error["type"])
        for node in answer["node_errors"].values()
        for error in node["errors"]
    }
    names = {
        key
        for node in _api_twin(name).values()
        if node["class_type"] != "DeviceBridgeTrainLoraSimple"  # it says by itself what is not there
        for key in node["inputs"].keys() & {"model", "unet_name", "clip_name", "vae_name", "lora_name"}
        if isinstance(node["inputs"][key], str)
    }
    assert found == {(each, "value_not_in_list") for each in names}


def _api_twin(name: str) -> dict[str, Any]:
    return json.loads(_twin_file(name).read_text(encoding="utf-8"))


def _twin_file(name: str) -> Path:
    return ROOT / "tests" / "assets" / f"{name}_api.json"


def _plain(graph: dict[str, Any]) -> dict[str, Any]:
    return {key: (node["class_type"], node["inputs"]) for key, node in graph.items()}
