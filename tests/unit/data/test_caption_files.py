"""Captions beside images: what a folder has and lacks, how each image is cut, and writing one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data.caption_files import MOST_CAPTION, look_at, small_picture, without_caption, write_caption
from devicebridge.data.folders import scan_folders
from devicebridge.families.spec import LatentSpec
from PIL import Image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images, of which one is captioned, one empty and one without; and one that is turned by its EXIF."""
    place = tmp_path / "images"
    place.mkdir()
    for name, size in (("a", (96, 64)), ("b", (64, 64)), ("c", (64, 128))):
        Image.new("RGB", size, "red").save(place / f"{name}.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (96, 64)).save(place / "d.jpg", exif=turned)
    (place / "a.txt").write_text(" a red [trigger]\n")
    (place / "b.txt").write_text("")
    (place / "d.txt").write_text("turned")
    return place


def _config(folder: Path, **more: object) -> DataConfig:
    return DataConfig(folders=(FolderConfig(str(folder)),), **{"resolutions": (64,), "trigger_word": "ohwx", **more})


def test_what_lacks_a_caption_comes_first_and_is_trained_as_training_says(folder: Path) -> None:
    config = _config(folder)
    found = list(look_at(config))
    assert [(each.path.name, each.caption) for each in found] == [
        ("b.png", ""),
        ("c.png", None),
        ("a.png", "a red [trigger]"),
        ("d.jpg", "turned"),
    ]
    assert {each.path.name: each.size for each in found} == {
        "a.png": (64, 96),
        "b.png": (64, 64),
        "c.png": (128, 64),
        "d.jpg": (96, 64),
    }
    samples = {Path(each.path).name: each for each in scan_folders(config, LatentSpec(channels=16, spatial_stride=16))}
    for each in found:
        sample = samples[each.path.name]
        assert (each.trained_as, each.buckets) == (sample.caption, (sample.bucket,)), each.path
    assert [path.name for path in without_caption(config)] == ["b.png", "c.png"]


def test_a_broken_file_is_said_beside_it_and_hides_no_other(folder: Path) -> None:
    (folder / "e.png").write_bytes(b"no image")
    (folder / "f.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "f.txt").write_bytes(b"\xff\xfe")
    found = {each.path.name: each for each in look_at(_config(folder))}
    assert "no image of a format" in found["e.png"].problem and found["e.png"].size is None
    assert "not UTF-8" in found["f.png"].problem and found["f.png"].size == (64, 96)
    assert found["a.png"].problem == "" and len(found) == 6
    assert "f.png" not in [path.name for path in without_caption(_config(folder))], "nobody writes over it"


def test_links_are_neither_shown_nor_written_through(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (64, 64)).save(outside / "x.png")
    (outside / "x.txt").write_text("theirs")
    (folder / "x.png").symlink_to(outside / "x.png")
    (folder / "c.txt").symlink_to(outside / "x.txt")
    found = {each.path.name: each for each in look_at(_config(folder))}
    assert "x.png" not in found
    assert found["c.png"].caption is None and "is a link" in found["c.png"].problem
    with pytest.raises(ValueError, match="is a link"):
        write_caption(folder / "c.png", "mine", {None})
    assert (outside / "x.txt").read_text() == "theirs"


def test_a_caption_is_written_beside_its_image_and_what_is_none_is_refused(folder: Path) -> None:
    write_caption(folder / "c.png", "  a tall ünicode image\n", {None})
    assert (folder / "c.txt").read_bytes() == "a tall ünicode image\n".encode()
    write_caption(folder / "c.png", " ", {"a tall ünicode image"})
    assert (folder / "c.txt").read_bytes() == b""
    for text in ("a\0b", "x" * (MOST_CAPTION + 1)):
        with pytest.raises(ValueError, match="a caption has up to"):
            write_caption(folder / "c.png", text, {""})


def test_a_small_picture_is_a_jpeg_of_the_whole_image_upright(folder: Path) -> None:
    with Image.open(io.BytesIO(small_picture(folder / "d.jpg", 48))) as picture:
        assert (picture.format, picture.size) == ("JPEG", (32, 48))
