"""Captions beside images: what a folder has and lacks, how each image is cut, and writing one."""

import io
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data import caption_files
from devicebridge.data.caption_files import MOST_CAPTION, look_at, small_picture, without_caption, write_caption
from devicebridge.data.folders import scan_folders
from devicebridge.families.spec import LatentSpec
from PIL import Image, ImageFile


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
        ("b.png", ""), ("c.png", None), ("a.png", "a red [trigger]"), ("d.jpg", "turned"),
    ]  # fmt: skip
    assert {each.path.name: each.size for each in found} == {
        "a.png": (64, 96), "b.png": (64, 64), "c.png": (128, 64), "d.jpg": (96, 64),
    }  # fmt: skip
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


def test_a_picture_of_many_pixels_is_refused_by_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 13000, 13000, 8, 6, 0, 0, 0))
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("it is decoded"))
    with pytest.raises(ValueError, match="13000x13000"):
        small_picture(tmp_path / "a.png", 192)


def test_what_is_decoded_counts_of_a_jpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption_files, "MOST_SHOWN", 200 * 150)
    for kind in ("jpg", "png"):
        Image.new("RGB", (1600, 1200)).save(tmp_path / f"a.{kind}")
    assert Image.open(io.BytesIO(small_picture(tmp_path / "a.jpg", 16))).size == (16, 12)
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
