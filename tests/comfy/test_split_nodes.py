"""The split nodes in graphs that a running ComfyUI executes: ComfyUI's loaders, LoRA, sampler and cache around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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
        "devices": devices,
        "balance": "memory",
        "split_at": "",
        "memory_limit_gb": "",
        "transport": "auto",
        "overlap": True,
        "offload": True,
    }
    return _node(kind, **(defaults | inputs))


def _graph(model: list[Any], prefix: str, *, is_emulated: bool = True, **nodes: dict[str, Any]) -> dict[str, Any]:
    """A text-to-image graph around the node that gives the model."""
    graph = {
        "load": _node("UNETLoader", unet_name="tiny.safetensors", weight_dtype="default"),
        "positive": _node("TestCondition", family=FAMILY, seed=1),
        "latent": _node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "sample": _node(
            "KSampler",
            model=model,
            seed=7,
            steps=2,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["positive", 0],
            negative=["positive", 0],
            latent_image=["latent", 0],
            denoise=1.0,
        ),
        "save": _node("SaveLatent", samples=["off" if is_emulated else "sample", 0], filename_prefix=prefix),
    }
    if is_emulated:
        graph["on"] = _node("TestCardsOn", devices="lazy:0,lazy:1")
        graph["off"] = _node("TestCardsOff", samples=["sample", 0])
    return graph | nodes


def _latent(server: Server, prefix: str) -> torch.Tensor:
    files = sorted((server.base / "output").glob(f"{prefix}_*.latent"))
    assert files, f"no latent was saved for {prefix}"
    return load_file(files[-1])["latent_tensor"]


def _run(server: Server, graph: dict[str, Any]) -> torch.Tensor:
    finished = server.run(graph)
    assert finished.status == "success", finished.error
    return _latent(server, graph["save"]["inputs"]["filename_prefix"])


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


def test_the_log_says_what_each_card_gets_before_and_what_it_has_left_at_loading(
    server: Server, plain: torch.Tensor
) -> None:
    seen = len(server.log.read_text(encoding="utf-8"))
    split = _split("DeviceBridgeSplitModel", ["on", 0], model=["load", 0], split_at="1", balance="manual")
    _run(server, _graph(["split", 0], "logged", split=split))
    log = server.log.read_text(encoding="utf-8")[seen:]
    for card, blocks in (("lazy:0", 1), ("lazy:1", 5)):
        assert re.search(rf"split: {card} gets {blocks} blocks, [\d.]+ GB of weights", log)
        assert re.search(rf"split: {card} weights [\d.]+ GB, activations about [\d.]+ GB, free [\d.]+ of 25.77 GB", log)
    assert log.index("gets 5 blocks") < log.index("activations about") < log.index("Requested to load Flux")
