"""The split nodes in graphs that a running ComfyUI executes: ComfyUI's loaders, LoRA, sampler and cache around them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.tests.comfy.browser import open_page
from devicebridge.tests.comfy.server import Server
from devicebridge.tests.comfy.workers import run_script
from safetensors.torch import load_file

pytestmark = pytest.mark.comfy

FAMILY = "flux1"


@pytest.fixture(scope="module")
def tiny_files(server: Server, comfyui: Path) -> Iterator[None]:
    """A tiny checkpoint among the server's models; the emulation is off again at the end."""
    (server.base / "models" / "diffusion_models").mkdir(parents=True, exist_ok=True)
    file = server.base / "models" / "diffusion_models" / "tiny.safetensors"
    done = run_script("native_job_worker.py", comfyui, server.base, "save", FAMILY, file)
    assert done.returncode == 0, done.stderr[-3000:]
    yield
    assert server.run({"1": _node("TestCardsOff")}).status == "success"


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def _split(kind: str, devices: Any, **inputs: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "devices": devices, "balance": "memory", "split_at": "", "memory_limit_gb": "", "transport": "auto",
        "overlap": True, "offload": True,
    }  # fmt: skip
    return _node(kind, **(defaults | inputs))


def _graph(model: list[Any], prefix: str, *, is_emulated: bool = True, **nodes: dict[str, Any]) -> dict[str, Any]:
    """A text-to-image graph around the node that gives the model."""
    graph = {
        "load": _node("UNETLoader", unet_name="tiny.safetensors", weight_dtype="default"),
        "positive": _node("TestCondition", family=FAMILY, seed=1),
        "latent": _node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "sample": _node(
            "KSampler", model=model, seed=7, steps=2, cfg=1.0, sampler_name="euler", scheduler="simple",
            positive=["positive", 0], negative=["positive", 0], latent_image=["latent", 0], denoise=1.0,
        ),
        "save": _node("SaveLatent", samples=["off" if is_emulated else "sample", 0], filename_prefix=prefix),
    }  # fmt: skip
    if is_emulated:
        graph["on"] = _node("TestCardsOn", devices="lazy:0,lazy:1")
        graph["off"] = _node("TestCardsOff", samples=["sample", 0])
    return graph | nodes


def _run(server: Server, graph: dict[str, Any]) -> torch.Tensor:
    server.succeed(graph)
    prefix = graph["save"]["inputs"]["filename_prefix"]
    files = sorted((server.base / "output").glob(f"{prefix}_*.latent"))
    assert files, f"no latent was saved for {prefix}"
    return load_file(files[-1])["latent_tensor"]


@pytest.fixture(scope="module")
def plain(server: Server, tiny_files: None) -> torch.Tensor:
    return _run(server, _graph(["load", 0], "plain", is_emulated=False))


def test_a_split_model_makes_the_same_latents(server: Server, plain: torch.Tensor) -> None:
    split = _split("DeviceBridgeSplitModel", ["on", 0], model=["load", 0])
    graph = _graph(["split", 0], "split", split=split)
    assert torch.equal(_run(server, graph), plain)
    graph["save"]["inputs"]["filename_prefix"] = "split_again"
    assert torch.equal(_run(server, graph), plain)  # run again, parts of it from the host's cache


def test_a_model_loaded_across_cards_makes_the_same_latents(server: Server, plain: torch.Tensor) -> None:
    load = _split(
        "DeviceBridgeLoadDiffusionModelSplit", ["on", 0], unet_name="tiny.safetensors", weight_dtype="default"
    )
    assert torch.equal(_run(server, _graph(["load_split", 0], "loaded", load_split=load)), plain)


def test_without_a_second_device_the_model_stays_whole(server: Server, plain: torch.Tensor) -> None:
    split = _split("DeviceBridgeSplitModel", "auto", model=["load", 0])
    assert torch.equal(_run(server, _graph(["split", 0], "whole", is_emulated=False, split=split)), plain)


def test_a_device_that_is_not_there_is_named_with_what_is(server: Server, tiny_files: None) -> None:
    split = _split("DeviceBridgeSplitModel", "cuda:0,cuda:1", model=["load", 0])
    finished = server.run(_graph(["split", 0], "never", is_emulated=False, split=split))
    assert finished.status == "error"
    assert "device 'cuda:0' does not exist on this machine; found here: cpu" in finished.error


def test_the_log_says_what_each_card_gets_before_and_what_it_has_left_at_loading(server, plain):
    seen = len(server.log.read_text(encoding="utf-8"))
    split = _split("DeviceBridgeSplitModel", ["on", 0], model=["load", 0], split_at="1", balance="manual")
    _run(server, _graph(["split", 0], "logged", split=split))
    log = server.log.read_text(encoding="utf-8")[seen:]
    for card, blocks in (("lazy:0", 1), ("lazy:1", 5)):
        assert re.search(rf"split: {card} gets {blocks} blocks, [\d.]+ GB of weights", log)
        assert re.search(rf"split: {card} weights [\d.]+ GB, activations about [\d.]+ GB, free [\d.]+ of 25.77 GB", log)
    assert log.index("gets 5 blocks") < log.index("activations about") < log.index("Requested to load Flux")


_DISTORCH = {"virtual_vram_gb": 4.0, "donor_device": "cpu", "expert_mode_allocations": "", "eject_models": True}
OLD_WORKFLOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "second card": ("UNETLoaderMultiGPU", {"device": "lazy:1"}),
    "bytes": ("UNETLoaderDisTorch2MultiGPU", _DISTORCH | {"expert_mode_allocations": "lazy:0,1mb;lazy:1,*"}),
    "lent by the host": ("UNETLoaderDisTorch2MultiGPU", _DISTORCH),
    "first card": ("UNETLoaderMultiGPU", {"device": "lazy:0"}), "processor": ("UNETLoaderMultiGPU", {"device": "cpu"}),
    "lent by a card": ("UNETLoaderDisTorch2MultiGPU", _DISTORCH | {"virtual_vram_gb": 1.0, "donor_device": "lazy:1"}),
    "ratio": ("UNETLoaderDisTorch2MultiGPU", _DISTORCH | {"expert_mode_allocations": "lazy:1,25%;lazy:0,75%"}),
    "fractions": ("UNETLoaderDisTorch2MultiGPU", _DISTORCH | {"expert_mode_allocations": "lazy:0,0.0001;lazy:1,0.5"}),
    "rest in the host": (
        "UNETLoaderDisTorch2MultiGPU", _DISTORCH | {"expert_mode_allocations": "lazy:0,1mb;lazy:1,500kb;cpu,*"},
    ),
    "low precision": ("UNetLoaderLP", {}),
}  # fmt: skip
_ALWAYS = ("second card", "bytes")


def _old(kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """A node as ComfyUI exports it; for ours the file's name comes when the cards are on."""
    if kind == "UNetLoaderLP":
        return _node(kind, unet_name="tiny.safetensors", **inputs) | {"_meta": {"title": kind}}
    computing = {"compute_device": "lazy:0"} if "DisTorch" in kind else {}
    return _node(kind, unet_name=["named", 0], weight_dtype="default", **computing, **inputs) | {
        "_meta": {"title": kind}
    }


@pytest.mark.parametrize(
    "name", [name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in OLD_WORKFLOWS]
)
def test_an_old_workflow_of_multigpu_makes_the_same_latents(server: Server, plain: torch.Tensor, name: str) -> None:
    named = _node("TestText", text="tiny.safetensors", after=["on", 0])
    is_ours = name != "low precision"  # ComfyUI's own loader does not wait for cards
    graph = _graph(["old", 0], f"old_{name}", is_emulated=is_ours, old=_old(*OLD_WORKFLOWS[name]))
    graph |= {"named": named} if is_ours else {}
    start = len(server.log.read_text(encoding="utf-8"))
    assert torch.equal(_run(server, graph), plain)
    said = server.log.read_text(encoding="utf-8")[start:]
    assert ("lazy:1 gets" in said) == ("DisTorch2" in OLD_WORKFLOWS[name][0]), said[-2000:]


def test_stand_ins_have_every_input_of_their_nodes(server: Server) -> None:
    """Where ComfyUI has the node: the others are ComfyUI-GGUF's."""
    known, checked = server.get("/object_info"), set()
    for old, (found, *more) in server.get("/node_replacements").items():
        if not old.endswith(("MultiGPU", "LP")) or found["new_node_id"] not in known:
            continue
        checked.add(old)
        wanted, outputs = known[found["new_node_id"]]["input"], known[found["new_node_id"]]["output"]
        given = {each["new_id"]: each.get("old_id") for each in found["input_mapping"]}
        assert not more and set(given) >= set(wanted["required"]), old
        assert set(given) <= {*wanted["required"], *wanted.get("optional", {})}, old
        links = {name for name, (kind, *_) in wanted["required"].items() if kind == "MODEL"}
        assert set(filter(None, given.values())) - links <= set(found["old_widget_ids"]), old
        assert len(found["output_mapping"]) >= len(outputs), old
    assert len(checked) == 4 + 2 + 3 * 10


def test_an_installed_pack_keeps_its_own_nodes(server: Server) -> None:
    """One of the tests' packs has a node by that name."""
    assert "UnetLoaderGGUFMultiGPU" in server.get("/node_replacements")
    old = _node("UnetLoaderGGUFMultiGPU", text="theirs") | {"_meta": {"title": ""}}
    assert server.run({"1": old}).outputs["1"]["text"] == ["theirs"]


@pytest.mark.long
def test_the_page_replaces_the_nodes_of_an_old_workflow(server: Server, chromium: str, tmp_path: Path) -> None:
    """Opened as a file, with the values by place; the button is ComfyUI's."""
    values = ["flux.safetensors", "fp8_e5m2", "cuda:1", 4, "cpu", "cuda:0,10gb;cuda:1,*", True]
    slots = {"name": "MODEL", "type": "MODEL"}
    place = {"pos": [0, 0], "size": [300, 200], "flags": {}, "mode": 0, "properties": {}}
    old = {"id": 1, "type": "UNETLoaderDisTorch2MultiGPU", "order": 0, "inputs": [], "widgets_values": values, **place}
    behind = {"id": 2, "type": "ModelSamplingDiscrete", "order": 1, "widgets_values": ["eps", False], **place}
    behind |= {"inputs": [{"name": "model", "type": "MODEL", "link": 1}], "outputs": [{**slots, "links": []}]}
    workflow = {
        "last_node_id": 2, "last_link_id": 1, "nodes": [old | {"outputs": [{**slots, "links": [1]}]}, behind],
        "links": [[1, 1, 0, 2, 0, "MODEL"]], "version": 0.4,
    }  # fmt: skip
    server.post("/api/settings/Comfy.TutorialCompleted", True)  # else templates lie over everything
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(workflow) => window.app.loadGraphData(workflow)", workflow)
        page.get_by_role("button", name="View details").first.click()
        page.get_by_role("button", name="Replace Node").first.click()
        is_there = "() => window.app.graph.nodes.some((n) => n.type === 'DeviceBridgeLoadDiffusionModelSplit')"
        page.wait_for_function(is_there)
        prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    expected = {"unet_name": values[0], "weight_dtype": values[1], "balance": values[5], "devices": "auto"}
    assert prompt["1"]["inputs"].items() >= (expected | {"way": "blocks", "overlap": False}).items()
    assert prompt["2"]["inputs"]["model"] == ["1", 0]
