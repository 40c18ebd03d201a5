"""Reading pixels: the plan is followed, and nothing a file can hold turns into a silently wrong picture."""

import os
import re
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from devicebridge.checkpoints.fingerprint import file_fingerprint
from devicebridge.data import image as image_module
from devicebridge.data.image import ImageRequest, image_fingerprint, open_image, read_size
from devicebridge.data.samples import read_mask
from devicebridge.data.video import is_clip, probe_clip, read_frames
from devicebridge.tests.clips import save_clip
from PIL import Image


def _whole(path, height, width):
    return ImageRequest(str(path), (height, width), (0, 0, height, width))


def _bytes(pixels: torch.Tensor) -> np.ndarray:
    return ((pixels + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()


@pytest.fixture
def picture(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "picture.png")
    return tmp_path / "picture.png", values


def test_the_whole_image_is_resized_and_then_cropped(picture):
    path, values = picture
    pixels = read_frames(_whole(path, 6, 9))[:, 0]
    assert pixels.dtype == torch.float32 and np.array_equal(_bytes(pixels), values)
    resized = np.asarray(Image.fromarray(values).resize((30, 20), Image.Resampling.LANCZOS))
    pixels = read_frames(ImageRequest(str(path), (20, 30), (3, 5, 16, 24)))[:, 0]
    assert np.array_equal(_bytes(pixels), resized[3:19, 5:29])


def test_a_long_strip_is_cut_before_it_is_resized_to_the_same_pixels(tmp_path, monkeypatch):
    """An image of 1 x 20,000 pixels that covers 512 x 512 would have 5,000 million."""
    values = np.random.default_rng(1).integers(0, 256, (5, 90, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "strip.png")
    request = ImageRequest(str(tmp_path / "strip.png"), (16, 288), (0, 136, 16, 16))
    whole = _bytes(read_frames(request)[:, 0]).astype(int)
    sizes, resize = [], Image.Image.resize

    def note(image, size, *args, **more):
        sizes.append(size)
        return resize(image, size, *args, **more)

    monkeypatch.setattr(Image.Image, "resize", note)
    monkeypatch.setattr("devicebridge.data.image.MAX_PIXELS", 16 * 288 - 1)
    assert np.abs(_bytes(read_frames(request)[:, 0]).astype(int) - whole).max() <= 1
    assert sizes == [(16, 16)]


def test_a_transparent_colour_of_a_palette_is_white(tmp_path):
    palette = Image.fromarray(np.array([[0, 1]], dtype=np.uint8), "P")
    palette.putpalette([9, 9, 9, 200, 100, 50])
    palette.save(tmp_path / "palette.png", transparency=0)
    expected = [[[255, 255, 255], [200, 100, 50]]]
    assert _bytes(read_frames(_whole(tmp_path / "palette.png", 1, 2))[:, 0]).tolist() == expected


def _on_white(values: np.ndarray) -> np.ndarray:
    alpha = values[..., 3:] / 255
    return values[..., :3] * alpha + 255 * (1 - alpha)


def _kinds_of_pixels() -> dict[str, tuple[Image.Image, np.ndarray]]:
    """An image of each mode, as wide as high nowhere, and by numpy alone its RGB."""
    size = np.random.default_rng(3)
    grey = size.integers(0, 256, (6, 9), dtype=np.uint8)
    deep = size.integers(0, 65536, (6, 9), dtype=np.uint16)
    rgba = size.integers(0, 256, (6, 9, 4), dtype=np.uint8)
    colours = size.integers(0, 256, (256, 3), dtype=np.uint8)
    palette = Image.fromarray(grey, "P")
    palette.putpalette(colours.tobytes())
    ink, of_deep = 255 - rgba.astype(float), (deep // 257)[..., None].repeat(3, 2)
    return {
        "L": (Image.fromarray(grey), grey[..., None].repeat(3, 2)),
        "LA": (Image.fromarray(rgba[..., 2:], "LA"), _on_white(rgba[..., [2, 2, 2, 3]])),
        "P": (palette, colours[grey]),
        "RGB": (Image.fromarray(rgba[..., :3]), rgba[..., :3]),
        "RGBA": (Image.fromarray(rgba), _on_white(rgba)),
        "CMYK": (Image.frombytes("CMYK", (9, 6), rgba.tobytes()), ink[..., :3] * ink[..., 3:] / 255),
        "I;16": (Image.fromarray(deep), of_deep),
        "I;16B": (Image.frombytes("I;16B", (9, 6), deep.astype(">u2").tobytes()), of_deep),
        "1": (Image.fromarray(grey > 99), np.where(grey > 99, 255, 0)[..., None].repeat(3, 2)),
    }


PIXELS = _kinds_of_pixels()
_SHOWN = {  # by the number in EXIF, how stored pixels are to be shown
    1: lambda stored: stored, 2: np.fliplr, 3: lambda stored: np.rot90(stored, 2), 4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1), 6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1), 8: np.rot90,
}  # fmt: skip


@pytest.mark.parametrize("turn", _SHOWN)
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "packbits"])
@pytest.mark.parametrize("mode", PIXELS)
def test_a_tiff_is_shown_as_it_says_in_every_mode(tmp_path: Path, mode: str, compression: str, turn: int) -> None:
    image, stored = PIXELS[mode]
    path = tmp_path / "a.tif"
    image.save(path, compression=compression, tiffinfo={0x0112: turn})
    shown = _SHOWN[turn](stored)
    assert np.abs(np.asarray(open_image(path)) - shown).max() <= 1
    assert {read_size(path), read_size(path, is_decoded=False)} == {shown.shape[:2]}
    mask = read_mask(path).numpy() * 255  # which does not look at transparency
    assert mask.shape == shown.shape[:2]
    assert mode in ("RGBA", "LA", "RGB", "P", "CMYK") or np.abs(mask - shown[..., 0]).max() <= 1


def test_only_what_was_misread_is_encoded_anew(tmp_path: Path) -> None:
    """Earlier versions cut the rows of these wrongly, and their entries must not be found."""
    anew = set()
    for mode, (image, _) in PIXELS.items():
        for compression in ("raw", "tiff_lzw"):
            for turn in (1, 3, 6):
                image.save(tmp_path / "a.tif", compression=compression, tiffinfo={0x0112: turn})
                if image_fingerprint(tmp_path / "a.tif") != file_fingerprint(tmp_path / "a.tif"):
                    anew.add((mode, compression, turn))
    assert anew == {(mode, "raw", 6) for mode in ("L", "P", "RGBA", "CMYK", "I;16", "I;16B")}


_TIFFS_WITHOUT_MEANING = {  # bits, photometric interpretation, sample format
    "white is zero": (16, 0, 1), "12 bits": (12, 1, 1), "signed 16 bits": (16, 1, 2), "signed 8 bits": (8, 1, 2),
    "32 bits": (32, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", _TIFFS_WITHOUT_MEANING)
def test_tiffs_that_would_come_out_dark_or_negative_are_refused(tmp_path: Path, kind: str) -> None:
    bits, photometric, sample_format = _TIFFS_WITHOUT_MEANING[kind]
    tags = {
        256: 8, 257: 1, 258: bits, 259: 1, 262: photometric, 273: 134, 277: 1, 278: 1, 279: bits, 339: sample_format,
    }  # fmt: skip
    entries = [struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags.items()]
    head = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(entries)
    (tmp_path / "a.tif").write_bytes(head.ljust(134, b"\0") + bytes(range(bits)))
    for read in (open_image, read_size, read_mask):
        with pytest.raises(ValueError, match=r"a\.tif.*without a known range"):
            read(tmp_path / "a.tif")


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
        with pytest.raises(ValueError, match=f"{name}: cannot be read as an image"):
            read_frames(_whole(tmp_path / name, 2, 2))


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "MPO"])
def test_the_named_formats_are_read_whatever_the_file_is_called(tmp_path: Path, kind: str) -> None:
    """MPO is what telephones write as .jpg: a JPEG with a second one behind it."""
    more = {"save_all": True, "append_images": [Image.new("RGB", (40, 24))]} if kind == "MPO" else {}
    Image.new("RGB", (40, 24), (255, 255, 255)).save(tmp_path / "a.png", format=kind, **more)
    assert read_size(tmp_path / "a.png") == (24, 40)
    assert np.asarray(open_image(tmp_path / "a.png")).min() > 250


@pytest.mark.parametrize("kind", ["PPM", "TGA", "PCX", "ICO", "EPS"])
def test_other_formats_are_refused_with_those_that_work(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png", format=kind)
    for read in (read_size, open_image):
        with pytest.raises(ValueError, match=r"a\.png.*save it as PNG, JPEG"):
            read(tmp_path / "a.png")
    assert not is_clip(tmp_path / "a.png")


@pytest.mark.skipif(os.name == "nt", reason="there are no named pipes in folders")
def test_a_pipe_called_an_image_is_named_and_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    os.mkfifo(tmp_path / "clip" / "1.png")
    for read in (open_image, read_size):
        with pytest.raises(ValueError, match=r"1\.png.*no ordinary file; put an image in its place"):
            read(tmp_path / "clip" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png.*no ordinary file"):
        probe_clip(tmp_path / "clip")


def test_an_image_that_unfolds_to_too_many_pixels_is_refused_where_pillows_limit_is_off(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(image_module, "MAX_PIXELS", 40 * 24 - 1)
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png.*40x24 pixels, more than 959 in all; scale it down"):
        read_size(tmp_path / "a.png")


def test_a_video_whose_frames_are_too_large_is_refused_before_one_is_decoded(tmp_path, monkeypatch):
    path = save_clip(tmp_path / "a.mp4", 3)
    monkeypatch.setattr(image_module, "MAX_PIXELS", 100)
    with pytest.raises(ValueError, match=r"a\.mp4.*more than 100 in all"):
        probe_clip(path)


def test_images_that_are_open_at_once_hold_no_more_pixels_than_one_may_have(tmp_path, monkeypatch):
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    monkeypatch.setattr(image_module, "MAX_PIXELS", 40 * 24 * 3 - 1)
    together = {number: threading.Barrier(number) for number in (2, 3)}

    def meet(number: int) -> bool:
        """Whether so many have it open at once."""
        with image_module.opened(tmp_path / "a.png"), suppress(threading.BrokenBarrierError):
            together[number].wait(timeout=30 if number == 2 else 0.3)
            return True
        return False

    with ThreadPoolExecutor(3) as threads:
        assert [list(threads.map(meet, [number] * number)) for number in together] == [[True] * 2, [False] * 3]


def test_a_tile_that_is_larger_than_its_image_is_counted(tmp_path: Path) -> None:
    """Of a TIFF, whose tiles are decoded whole."""
    numbers = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: 16384, 323: 16384, 324: 200, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in numbers.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(numbers)) + entries
    (tmp_path / "a.tif").write_bytes(header.ljust(208, b"\0"))
    for read in (read_size, open_image):
        with pytest.raises(ValueError, match="16384x16384"):
            read(tmp_path / "a.tif")


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{other}'\n",
    "dash": '<?xml version="1.0"?>\n<MPD><BaseURL>{other}</BaseURL></MPD>\n',
    "sdp": "v=0\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".gif"])
@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_called_a_video_opens_no_other_file(tmp_path: Path, kind: str, suffix: str) -> None:
    other = save_clip(tmp_path / "other.mp4", 3)
    path = tmp_path / f"a{suffix}"
    path.write_text(PLAYLISTS[kind].format(other=other))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        probe_clip(path)


def test_one_module_asks_pillow_to_open_files() -> None:
    others = ("tests", "scripts", ".venv")
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in others]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    opening = re.compile(r"\bImage\.open\(|from PIL\.Image import .*\bopen\b|imread\(")
    assert [f.name for f in files if opening.search(f.read_text(encoding="utf-8"))] == ["image.py"]
