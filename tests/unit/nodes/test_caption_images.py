"""Images without a caption go to whatever captioning node a graph has, and its texts come back beside them."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from devicebridge.config.job import DataConfig, EvaluationConfig, FolderConfig
from devicebridge.data import caption_files
from devicebridge.tests import comfy_stub
from PIL import Image


@pytest.fixture
def folder(host: comfy_stub.FakeHost) -> Path:
    place = host.root / "input" / "dogs"
    place.mkdir()
    for name, colour in (("a", "red"), ("b", "lime"), ("c", "blue")):
        Image.new("RGB", (200, 100), colour).save(place / f"{name}.png")
    (place / "b.txt").write_text("mine")
    return place


def _dataset(nodes: ModuleType, *folders: Path, **more: Any) -> Any:
    entries = tuple(FolderConfig(str(folder), **more) for folder in folders)
    return nodes.types.TrainingDataset(DataConfig(folders=entries), EvaluationConfig())


def test_texts_are_asked_for_only_while_one_is_missing_and_never_replace_a_caption(nodes, folder):
    dataset, node = _dataset(nodes, folder), nodes.WriteCaptions
    assert node.check_lazy_status(dataset=[dataset], caption=(None,), file=(None,)) == ["caption", "file"]
    files = [str(folder / f"{name}.png") for name in "abc"]
    output = node.execute(dataset=[dataset], caption=["red", "theirs", " "], file=files)
    assert output.args == (dataset,) and output.ui == {"text": ("1 captions were written, 1 images have none",)}
    assert {path.name: path.read_text() for path in folder.glob("*.txt")} == {"a.txt": "red\n", "b.txt": "mine"}
    node.execute(dataset=[dataset], caption=["blue"], file=files[2:])
    assert node.check_lazy_status(dataset=[dataset]) == []
    assert node.execute(dataset=[dataset], caption=[None], file=[None]).args == (dataset,)


def test_a_caption_that_a_page_saves_while_the_node_writes_stays(nodes, folder, monkeypatch):
    real = caption_files.write_caption

    def save_meanwhile(*given: Any) -> None:
        (folder / "a.txt").write_text("of the page")
        real(*given)

    monkeypatch.setattr(caption_files, "write_caption", save_meanwhile)
    files = [str(folder / f"{name}.png") for name in "abc"]
    output = nodes.WriteCaptions.execute(dataset=[_dataset(nodes, folder)], caption=["red", "", "blue"], file=files)
    captions = {path.name: path.read_text() for path in folder.glob("*.txt")}
    assert captions == {"a.txt": "of the page", "b.txt": "mine", "c.txt": "blue\n"}
    (text,) = output.ui["text"]
    assert [int(word) for word in text.split() if word.isdecimal()] == [1, 0, 1], "written, without one, kept"


def test_one_text_that_cannot_be_written_keeps_no_other_back(nodes: ModuleType, folder: Path) -> None:
    (folder / "d.png").write_bytes((folder / "a.png").read_bytes())
    files = [str(folder / f"{name}.png") for name in "acd"]
    with pytest.raises(ValueError, match=r"1 captions were written, 1 could not be:\n.*a\.png: .* 8000 ") as told:
        nodes.WriteCaptions.execute(dataset=[_dataset(nodes, folder)], caption=["x" * 8001, "blue", None], file=files)
    assert "c.png" not in str(told.value)
    assert {path.name: path.read_text() for path in folder.glob("*.txt")} == {"b.txt": "mine", "c.txt": "blue\n"}


def test_images_that_share_a_caption_file_are_captioned_once(nodes: ModuleType, folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "a.jpg")
    dataset = _dataset(nodes, folder)
    _, files = nodes.ImagesToCaption.execute(dataset=dataset, longest_side=64, at_most=9).args
    assert files == [str(folder / "a.jpg"), str(folder / "c.png")]
    assert len(nodes.ImagesToCaption.execute(dataset=dataset, longest_side=64, at_most=1).args[0]) == 1
    every = [str(folder / name) for name in ("a.jpg", "a.png", "c.png")]
    output = nodes.WriteCaptions.execute(dataset=[dataset], caption=["first", "second", "blue"], file=every)
    assert output.ui == {"text": ("2 captions were written, 0 images have none",)}
    assert (folder / "a.txt").read_text() == "first\n"


def test_where_all_have_a_caption_nothing_runs_behind_the_images(nodes: ModuleType, folder: Path) -> None:
    for name in "ac":
        (folder / f"{name}.txt").write_text("here")
    images, files = nodes.ImagesToCaption.execute(dataset=_dataset(nodes, folder), longest_side=64, at_most=9).args
    assert [type(each[0]).__name__ for each in (images, files)] == ["ExecutionBlocker"] * 2


def test_files_that_are_not_of_the_dataset_are_refused_before_any_is_written(nodes, host, folder):
    outside = host.root / "outside.png"
    Image.new("RGB", (8, 8)).save(outside)
    for name in (str(outside), "a.png", str(folder / ".." / "dogs" / "a.png"), str(folder / "a.txt")):
        with pytest.raises(ValueError, match="is none of this dataset"):
            files = [str(folder / "a.png"), name]
            nodes.WriteCaptions.execute(dataset=[_dataset(nodes, folder)], caption=["x", "y"], file=files)
    with pytest.raises(ValueError, match="1 captions came for 2 images"):
        nodes.WriteCaptions.execute(dataset=[_dataset(nodes, folder)], caption=["x"], file=["a", "b"])
    assert not (folder / "a.txt").exists() and not outside.with_suffix(".txt").exists()


def test_folders_outside_the_input_folder_are_read_only_here(nodes, host, tmp_path):
    other = tmp_path / "other_disk"
    other.mkdir()
    Image.new("RGB", (8, 8)).save(other / "a.png")
    host.allow(other)
    with pytest.raises(ValueError, match="captions are written in ComfyUI's input folder only"):
        nodes.WriteCaptions.check_lazy_status(dataset=[_dataset(nodes, other)])


def test_a_folder_with_a_caption_for_all_is_left_out(nodes: ModuleType, folder: Path) -> None:
    assert nodes.WriteCaptions.check_lazy_status(dataset=[_dataset(nodes, folder, caption="a dog")]) == []
