"""Reading pixels: the plan is followed, and nothing a file can hold turns into a silently wrong picture."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from devicebridge.data.image import ImageRequest, read_pixels
from PIL import Image


def _whole(path, height, width):
    return ImageRequest(str(path), (height, width), (0, 0, height, width))


def _bytes(pixels: torch.Tensor) -> np.ndarray:
    """[3, H, W] in -1..1 -> [H, W, 3] uint8."""
    return ((pixels + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()


@pytest.fixture
def picture(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "picture.png")
    return tmp_path / "picture.png", values


def test_without_a_resize_every_pixel_comes_through(picture):
    path, values = picture
    pixels = read_pixels(_whole(path, 6, 9))
    assert pixels.dtype == torch.float32 and pixels.shape == (3, 6, 9)
    assert pixels.min() >= -1 and pixels.max() <= 1
    assert np.array_equal(_bytes(pixels), values)


def test_black_and_white_are_the_ends_of_the_range(tmp_path):
    Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).save(tmp_path / "ends.png")
    assert read_pixels(_whole(tmp_path / "ends.png", 1, 2))[0].tolist() == [[-1.0, 1.0]]


def test_the_whole_image_is_resized_and_then_cropped(picture):
    path, values = picture
    resized = np.asarray(Image.fromarray(values).resize((30, 20), Image.Resampling.LANCZOS))
    pixels = read_pixels(ImageRequest(str(path), (20, 30), (3, 5, 16, 24)))
    assert np.array_equal(_bytes(pixels), resized[3:19, 5:29])


def test_exif_rotation_is_applied_before_the_plan(tmp_path, picture):
    _, values = picture
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned a quarter clockwise
    Image.fromarray(values).save(tmp_path / "turned.png", exif=exif)
    pixels = read_pixels(_whole(tmp_path / "turned.png", 9, 6))
    assert np.array_equal(_bytes(pixels), np.rot90(values, -1))


def test_transparency_is_laid_on_white(tmp_path):
    values = np.array([[[10, 20, 30, 255], [10, 20, 30, 0], [0, 0, 0, 51]]], dtype=np.uint8)
    Image.fromarray(values, "RGBA").save(tmp_path / "clear.png")
    assert _bytes(read_pixels(_whole(tmp_path / "clear.png", 1, 3))).tolist() == [
        [[10, 20, 30], [255, 255, 255], [204, 204, 204]]
    ]
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([9, 9, 9, 200, 100, 50])
    palette.save(tmp_path / "palette.png", transparency=0)
    expected = [[[255, 255, 255], [200, 100, 50]]]
    assert _bytes(read_pixels(_whole(tmp_path / "palette.png", 1, 2))).tolist() == expected


def test_sixteen_bit_grey_is_scaled_and_not_clipped(tmp_path):
    values = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    pixels = _bytes(read_pixels(_whole(tmp_path / "deep.png", 1, 3)))
    assert pixels.tolist() == [[[0] * 3, [100] * 3, [255] * 3]]


@pytest.mark.parametrize("mode", ["L", "CMYK", "1", "YCbCr", "LA"])
def test_other_modes_become_rgb(tmp_path, mode):
    if mode == "YCbCr":
        pytest.importorskip("PIL", "13", reason="older Pillow cannot read the YCbCr TIFF it has written")
    Image.new(mode, (2, 2)).save(tmp_path / "x.tiff")
    assert read_pixels(_whole(tmp_path / "x.tiff", 2, 2)).shape == (3, 2, 2)


def _png_with_broken_chunk(path):
    def chunk(name, data, crc=None):
        crc = zlib.crc32(name + data) if crc is None else crc
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0), crc=1)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header)


def test_what_cannot_be_read_is_named(tmp_path, picture):
    path, _ = picture
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(path.read_bytes()[:60])
    _png_with_broken_chunk(tmp_path / "chunk.png")
    Image.new("F", (2, 2)).save(tmp_path / "float.tiff")
    for name in ("missing.png", "text.png", "cut.png", "chunk.png", "float.tiff"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as an image"):
            read_pixels(_whole(tmp_path / name, 2, 2))


def test_crops_outside_the_image_are_refused():
    for crop in ((0, 0, 9, 8), (1, 0, 8, 8), (0, -1, 8, 8), (0, 0, 0, 8)):
        with pytest.raises(ValueError, match="is not inside"):
            ImageRequest("x.png", (8, 8), crop)
