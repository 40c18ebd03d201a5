"""Captions beside images: what a folder has and lacks, how each image is cut, and writing one."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data import caption_files
from devicebridge.data.caption_files import MOST_CAPTION, look_at, small_picture, without_caption, write_caption
from PIL import Image, ImageFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images, of which one is captioned, one empty and one without."""
    place = tmp_path / "images"
    place.mkdir()
    for name, size in (("a", (96, 64)), ("b", (64, 64)), ("c", (64, 128))):
        Image.new("RGB", size, "red").save(place / f"{name}.png")
    (place / "a.txt").write_text(" a red [trigger]\n")
    (place / "b.txt").write_text("")
    return place


def _config(folder: Path, **more: object) -> DataConfig:
    return DataConfig(folders=(FolderConfig(str(folder)),), **{"resolutions": (64,), "trigger_word": "ohwx", **more})


def test_a_broken_file_is_said_beside_it_and_hides_no_other(folder: Path) -> None:
    (folder / "e.png").write_bytes(b"no image")
    (folder / "f.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "f.txt").write_bytes(b"\xff\xfe")
    found = {each.path.name: each for each in look_at(_config(folder))}
    assert "no image of a format" in found["e.png"].problem and found["e.png"].size is None
    assert "not UTF-8" in found["f.png"].problem and found["f.png"].size == (64, 96)
    assert found["a.png"].problem == "" and len(found) == 5
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


def test_what_is_decoded_counts_of_a_jpeg_and_the_header_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(caption_files, "MOST_SHOWN", 200 * 150)
    for kind in ("jpg", "png"):
        Image.new("RGB", (1600, 1200)).save(tmp_path / f"a.{kind}")
    assert Image.open(io.BytesIO(small_picture(tmp_path / "a.jpg", 16))).size == (16, 12)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("it is decoded"))
    with pytest.raises(ValueError, match="1600x1200"):
        small_picture(tmp_path / "a.png", 16)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(mode, "png") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")]
    + [("RGB", "jpg"), ("L", "jpg"), ("CMYK", "jpg"), ("RGB", "webp"), ("P", "gif"), ("RGBA", "tif"), ("RGB", "bmp")],
)
def test_a_small_picture_of_any_kind_shows_what_the_image_does(tmp_path: Path, mode: str, kind: str) -> None:
    image = Image.new("L", (1024, 512))
    image.paste(255, (512, 0, 1024, 512))
    deep = Image.fromarray(np.asarray(image).astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
    turned = Image.Exif()
    turned[0x0112] = 6
    deep.save(tmp_path / f"a.{kind}", **({"exif": turned} if kind == "jpg" else {}))
    small = Image.open(io.BytesIO(small_picture(tmp_path / f"a.{kind}", 16))).convert("L")
    size, dark, light = ((8, 16), (4, 2), (4, 13)) if kind == "jpg" else ((16, 8), (2, 4), (13, 4))
    assert small.size == size
    assert small.getpixel(dark) < 16 and small.getpixel(light) > 239


def test_of_animations_and_folders_of_images_headers_tell_the_size(folder, monkeypatch):
    frames = [Image.new("RGB", (48, 32), colour) for colour in ("red", "blue", "lime")]
    for name in ("e.gif", "f.webp", "g.png"):
        frames[0].save(folder / name, save_all=True, append_images=frames[1:])
    (folder / "h").mkdir()
    (folder / "h.txt").write_text("a clip")
    for number, frame in enumerate(frames):
        frame.save(folder / "h" / f"{number}.png")
    shutil.copytree(folder / "h", folder / "i")
    shutil.copy(folder / "h.txt", folder / "i.txt")
    frames[0].resize((40, 32)).save(folder / "i" / "1.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # a frame may be large
    found = {each.path.name: each for each in look_at(_config(folder)) if each.is_clip}
    assert "1.png is 40x32" in found.pop("i").problem
    assert {name: (each.size, each.problem) for name, each in found.items()} == {
        name: ((32, 48), "") for name in ("e.gif", "f.webp", "g.png", "h")
    }
