"""Drop-downs of what a machine has, and what older or foreign workflows say in their place."""

import os
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.config.job import ModelConfig, SplitConfig
from devicebridge.parallel import devices
from devicebridge.tests import comfy_stub
from devicebridge.tests.clips import save_image
from devicebridge.tests.tiny_pipeline import save_tiny_pipeline

CARDS = (torch.device("cuda", 0), torch.device("cuda", 1))


@pytest.fixture
def two_cards(host: comfy_stub.FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one has brackets and commas in its name."""
    names = {0: "NVIDIA GeForce RTX 4090", 1: "Card(TM) (Pro), 2nd"}
    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(name=names[device.index]),
        mem_get_info=lambda device: (20 * 2**30, 24 * 2**30), memory_reserved=lambda device: 0,
        memory_allocated=lambda device: 0, device_count=lambda: 2,
    )  # fmt: skip
    host.gpus = CARDS
    monkeypatch.setattr(devices, "device_module", lambda device: module)
    monkeypatch.setattr(devices, "available_devices", lambda: list(CARDS))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


def _input(nodes: ModuleType, node: str, socket: str) -> Any:
    schema = getattr(nodes, node).define_schema()
    return next(each for each in schema.inputs if each.id == socket)


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize("node", ["LoadModelForTraining", "SplitModel", "LoadDiffusionModelSplit"])
def test_devices_are_chosen_by_their_cards_names(nodes: ModuleType, node: str) -> None:
    socket = _input(nodes, node, "devices")
    first, second = "cuda:0 (NVIDIA GeForce RTX 4090, 24 GB)", "cuda:1 (Card Pro 2nd, 24 GB)"
    expected = ["auto", first, second, f"{first}, {second}", f"{second}, {first}"]
    assert socket.options["options"] == expected + ["cpu"] * (node == "LoadModelForTraining")
    assert socket.options["default"] == "auto"
    read = nodes.choices.read_devices
    assert [read(each) for each in expected] == [
        (), ("cuda:0",), ("cuda:1",), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"),
    ]  # fmt: skip


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize("text", ["cuda:0,cuda:1", "0,1", "gpu:0, gpu:1", " 0 ,gpu:1"])
def test_devices_that_were_typed_or_are_cores_are_understood(nodes: ModuleType, text: str) -> None:
    assert nodes.choices.read_devices(text) == ("cuda:0", "cuda:1")
    others = {"balance": "memory", "split_at": "", "memory_limit_gb": "", "transport": "auto"}
    assert nodes.split._read_request({"devices": text, **others}).devices == CARDS
    assert nodes.SplitModel.validate_inputs(devices=text) is True


@pytest.mark.usefixtures("two_cards")
def test_places_of_the_encoders_are_chosen_by_name(nodes: ModuleType) -> None:
    options = _input(nodes, "CacheCaptionsAndLatents", "text_device").options["options"]
    assert options[:3] == ["auto", "cpu", "stream"] and options[4] == "cuda:1 (Card Pro 2nd, 24 GB)"
    (socket,) = (each for each in nodes.captions._inputs() if each.id == "text_device")
    read = {text: socket.read({"text_device": text}) for text in (*options, "", "stream:cuda:1")}
    assert read[options[4]] == "cuda:1" and read["auto"] == "auto" and read["stream:cuda:1"] == "stream:cuda:1"
    assert read[""] == "cpu", "a workflow of before there was auto"


def test_the_old_word_for_balance_means_the_same(nodes: ModuleType) -> None:
    assert _input(nodes, "LoadModelForTraining", "balance").options["options"] == ["memory", "time", "manual"]
    (socket,) = (each for each in nodes.load._inputs() if each.id == "balance")
    assert socket.read({"balance": "bytes"}) == "memory"
    assert nodes.LoadModelForTraining.validate_inputs(balance="bytes") is True


def test_folders_with_files_are_listed_by_one_look_at_each(nodes, host, tmp_path, monkeypatch):
    other = tmp_path / "other_disk"
    (host.root / "input" / "empty").mkdir()
    for folder in (*(host.root / "input" / name for name in ("dogs", "sets/cats", ".hidden")), other / "birds"):
        save_image(folder / "a.png")
    host.allow(other)
    stat, asked = os.stat, list[str]()
    monkeypatch.setattr(os, "stat", lambda path, **how: asked.append(str(path)) or stat(path, **how))
    found = _input(nodes, "TrainingDatasetNode", "folder").options
    assert not any(each.endswith(".png") for each in asked), "a dataset may have 100,000 of them"
    assert found["options"] == ["dogs", "sets", "sets/cats", str(other), str(other / "birds")]
    assert found["default"] == "dogs"
    held_out = _input(nodes, "TrainingDatasetNode", "evaluation_folder").options
    assert held_out["options"] == ["[none]", *found["options"]] and held_out["default"] == "[none]"


def test_a_folder_is_empty_where_nothing_can_be_chosen(nodes: ModuleType) -> None:
    assert _input(nodes, "TrainingDatasetNode", "folder").options["options"] == [""]


@pytest.fixture
def model(nodes: ModuleType, tmp_path: Path) -> Any:
    def make(family: str) -> Any:
        folder = save_tiny_pipeline(tmp_path / family, family)
        return nodes.load.TrainingModel(ModelConfig(path=str(folder / "transformer")), SplitConfig(devices=("cpu",)))

    return make


@pytest.mark.parametrize(
    ("family", "names", "kind"),
    [("flux2", ["mistral"], "flux2"), ("wan", ["umt5"], "wan"), ("flux1", ["clip_l", "t5xxl"], "flux")],
)
def test_text_encoders_of_comfyuis_folder_are_loaded_by_comfyui(nodes, host, model, monkeypatch, family, names, kind):
    for name in ("mistral", "umt5", "clip_l", "t5xxl"):
        (host.root / "models/text_encoders" / f"{name}.safetensors").touch()
    assert "umt5.safetensors" in _input(nodes, "CacheCaptionsAndLatents", "text_encoders").options["options"]
    loaded = []
    load = lambda files, kind, path: loaded.append((files, kind, path)) or "clip"  # noqa: E731
    monkeypatch.setattr("devicebridge.nodes.host.native.files.load_clip_files", load)
    monkeypatch.setattr(nodes.captions, "HostClip", lambda clip, weighs: SimpleNamespace(fingerprint=f"name of {clip}"))
    files = [f"{name}.safetensors" for name in names]
    sockets = {"text_encoders": files[0], "vae": "[model folder]"}
    sockets |= {"text_encoder_2": files[1]} if len(files) > 1 else {}
    encoders, own = nodes.captions.find_encoders(model(family), sockets)
    assert loaded == [([str(host.root / "models/text_encoders" / file) for file in files], kind, "")]
    assert own == {"text_encoders": "", "text_quantize": "none", "vae": ""}
    assert encoders.clip.fingerprint == "name of clip"


def test_a_diffusers_folder_of_text_encoders_stays_the_models_own(nodes, host, model):
    folder = host.root / "models/text_encoders/flux2"
    (folder / "text_encoder").mkdir(parents=True)
    assert "flux2" in _input(nodes, "CacheCaptionsAndLatents", "text_encoders").options["options"]
    sockets = {"text_encoders": "flux2", "vae": ""}
    encoders, own = nodes.captions.find_encoders(model("flux2"), sockets)
    assert encoders.clip is None and own["text_encoders"] == str(folder)


def test_the_cache_node_runs_again_only_where_something_is_gone_or_changed(nodes, host):
    node, kept = nodes.CacheCaptionsAndLatents, nodes.captions.KEPT
    vae = host.root / "models/vae/ae.safetensors"
    vae.write_bytes(b"1")

    def fingerprint() -> Any:
        return node.fingerprint_inputs(cache_folder="devicebridge/cache", text_encoders="[model folder]", vae=vae.name)

    entry = host.root / "output/devicebridge/cache/aa.safetensors"
    before = fingerprint()
    assert before == fingerprint(), "equal to itself, which NaN is not"
    entry.parent.mkdir(parents=True)
    entry.touch()
    kept[str(entry.parent)].add(entry)
    assert fingerprint() == before, "what the node itself has made does not make it run again"
    entry.unlink()
    gone = fingerprint()
    assert gone != before and fingerprint() == gone
    vae.write_bytes(b"12")
    assert fingerprint() != gone


@pytest.mark.parametrize(
    ("node", "socket"),
    [
        ("LoadModelForTraining", "model"), ("LoadModelForTraining", "devices"), ("TrainingDatasetNode", "folder"),
        ("CacheCaptionsAndLatents", "vae"), ("SplitModel", "devices"), ("LoadDiffusionModelSplit", "unet_name"),
    ],
)  # fmt: skip
def test_a_text_may_be_linked_to_a_list_of_files_and_nothing_else(nodes: ModuleType, node: str, socket: str) -> None:
    check = getattr(nodes, node).validate_inputs
    for kind in ("STRING", "COMBO", "*", "INT,STRING", ["a", "b"], "COMFY_MATCHTYPE_V3"):
        assert check(input_types={socket: kind}) is True, kind
    for kind in ("INT", "MODEL", "IMAGE,MASK"):
        assert check(input_types={socket: kind}) == f"{socket} takes COMBO, and {kind} is linked to it"


def test_links_of_other_inputs_are_checked_as_comfyui_does(nodes: ModuleType) -> None:
    check = nodes.CacheCaptionsAndLatents.validate_inputs
    assert check(input_types={"dataset": "DEVICEBRIDGE_DATASET", "stock_clip": "CLIP"}) is True
    assert "dataset takes DEVICEBRIDGE_DATASET" in check(input_types={"dataset": "STRING"})
    assert "dtype takes COMBO, and STRING" in check(input_types={"dtype": "STRING"})


def test_the_page_and_the_nodes_name_the_same_lists(nodes: ModuleType) -> None:
    page = (Path(__file__).resolve().parents[3] / "web/js/nodes.js").read_text(encoding="utf-8")
    (named,) = re.findall(r"const TEXT_LINKS = \[(.*?)\]", page)
    assert set(re.findall(r"'(\w+)'", named)) == nodes.choices.TEXT_LINKS
    lists = {
        each.id
        for node in nodes.NODES
        for each in node.define_schema().inputs
        if each.io_type == "COMBO" and (each.id in ("model", "unet_name") or each.options.get("extra_dict"))
    }
    assert lists == nodes.choices.TEXT_LINKS


def test_a_node_whose_file_is_linked_runs_every_time(nodes: ModuleType) -> None:
    for found in (
        nodes.TrainingDatasetNode.fingerprint_inputs(evaluation_folder="[none]"),
        nodes.CacheCaptionsAndLatents.fingerprint_inputs(cache_folder="devicebridge/cache", vae="[model folder]"),
    ):
        assert found != found, "as NaN"
