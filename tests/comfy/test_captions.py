"""In a real ComfyUI: a captioning node fills in what captions lack, and names of files come by links."""

from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.server import Server
from PIL import Image

pytestmark = pytest.mark.comfy


def _text(value: str) -> dict[str, Any]:
    return {"class_type": "PrimitiveString", "inputs": {"value": value}}


def _captioning(server: Server, folder: str, told: Path) -> dict[str, Any]:
    """Its folder is named by a link."""
    sockets = {
        name: entry[1].get("default")
        for name, entry in server.get("/object_info")["DeviceBridgeTrainingDataset"]["input"]["required"].items()
    }
    return {
        "name": _text(folder),
        "set": {"class_type": "DeviceBridgeTrainingDataset", "inputs": {**sockets, "folder": ["name", 0]}},
        "images": {
            "class_type": "DeviceBridgeImagesToCaption",
            "inputs": {"dataset": ["set", 0], "longest_side": 64, "at_most": 9},
        },
        "caption": {"class_type": "TestCaption", "inputs": {"image": ["images", 0], "told": str(told)}},
        "write": {
            "class_type": "DeviceBridgeWriteCaptions",
            "inputs": {"dataset": ["set", 0], "caption": ["caption", 0], "file": ["images", 1]},
        },
    }


def test_a_captioning_node_is_run_for_what_lacks_a_caption_and_not_again(server: Server, tmp_path: Path) -> None:
    folder, told = server.base / "input" / "to_caption", tmp_path / "told"
    folder.mkdir()
    for name in ("red", "lime", "blue"):
        Image.new("RGB", (128, 96), name).save(folder / f"{name}.png")
    (folder / "red.txt").write_text("mine", encoding="utf-8")
    graph = _captioning(server, "to_caption", told)
    first = server.run(graph)
    assert first.status == "success", first.error
    assert first.outputs["write"]["text"] == ["2 captions were written, 0 images have none"]
    captions = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.txt")}
    assert captions == {"red": "mine", "lime": "a green picture\n", "blue": "a blue picture\n"}
    assert sorted(told.read_text().splitlines()) == ["(1, 48, 64, 3) blue", "(1, 48, 64, 3) green"]
    again = server.run(graph)
    assert again.status == "success", again.error
    assert len(told.read_text().splitlines()) == 2, "where all have a caption, nothing is asked"
    (folder / "lime.txt").write_text("", encoding="utf-8")
    assert server.run(graph).outputs["write"]["text"] == ["1 captions were written, 0 images have none"]
    assert len(told.read_text().splitlines()) == 3


@pytest.mark.parametrize("name", ["../models", "/etc", "a/../..", "nowhere", ""])
def test_a_linked_name_is_looked_at_as_a_chosen_one(server: Server, tmp_path: Path, name: str) -> None:
    finished = server.run(_captioning(server, name, tmp_path / "told"))
    assert finished.status == "error"
    assert "folder" in finished.error and not (tmp_path / "told").exists()


def test_a_model_may_be_named_by_a_link_and_other_types_are_refused_before_anything_runs(server: Server) -> None:
    def loading(value: dict[str, Any]) -> dict[str, Any]:
        inputs = {"unet_name": ["name", 0], "weight_dtype": "default", "devices": "auto", "balance": "memory"}
        rest = {"split_at": "", "memory_limit_gb": "", "transport": "auto", "overlap": True, "offload": True}
        load = {"class_type": "DeviceBridgeLoadDiffusionModelSplit", "inputs": {**inputs, **rest}}
        save = {"class_type": "ModelSave", "inputs": {"model": ["load", 0], "filename_prefix": "linked"}}
        return {"name": value, "load": load, "save": save}

    finished = server.run(loading(_text("../../secret.safetensors")))
    assert finished.status == "error" and "secret.safetensors', which is not in" in finished.error
    answer = server.post("/prompt", {"prompt": loading({"class_type": "PrimitiveInt", "inputs": {"value": 3}})})
    told = [error["details"] for node in answer["node_errors"].values() for error in node["errors"]]
    assert any("unet_name takes COMBO, and INT is linked to it" in each for each in told), answer
