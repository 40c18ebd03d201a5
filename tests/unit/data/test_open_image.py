"""Image files: only the formats we name are opened, whatever a file is called."""

from __future__ import annotations

import os
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data import image
from devicebridge.data.folders import scan_folders
from devicebridge.data.image import open_image as read_image
from devicebridge.data.image import read_size
from devicebridge.data.video import is_clip, probe_clip
from devicebridge.families.registry import FAMILIES
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a stand-in for Ghostscript that is first on PATH."""
    log, folder = tmp_path / "started", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit 0\n')
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    return log


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
@pytest.mark.parametrize("name", ["z.png", "z.jpg", "z.webp", "z.gif", "z_mask.png"])
def test_a_postscript_file_in_a_dataset_starts_no_ghostscript(tmp_path: Path, started: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / ("z.bmp" if name == "z_mask.png" else "a.png"))
    (folder / name).write_bytes(POSTSCRIPT)
    config = DataConfig(folders=(FolderConfig(str(folder)),), resolutions=(64,))
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder / name))}.*PNG, JPEG, WEBP, BMP, GIF or TIFF"):
        scan_folders(config, FAMILIES["wan"].latent)
    assert not started.exists()


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_the_stand_in_is_what_pillow_would_start(tmp_path: Path, started: Path) -> None:
    (tmp_path / "z.png").write_bytes(POSTSCRIPT)
    with pytest.raises(OSError), Image.open(tmp_path / "z.png") as file:
        file.load()
    assert started.exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "MPO"])
def test_the_named_formats_are_read_whatever_the_file_is_called(tmp_path: Path, kind: str) -> None:
    """MPO is what telephones write as .jpg: a JPEG with a second one behind it."""
    more = {"save_all": True, "append_images": [Image.new("RGB", (40, 24))]} if kind == "MPO" else {}
    Image.new("RGB", (40, 24), (255, 255, 255)).save(tmp_path / "a.png", format=kind, **more)
    assert read_size(tmp_path / "a.png") == (24, 40)
    assert np.asarray(read_image(tmp_path / "a.png")).min() > 250


@pytest.mark.parametrize("kind", ["PPM", "TGA", "PCX", "ICO", "EPS"])
def test_other_formats_are_refused_with_those_that_work(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png", format=kind)
    for read in (read_size, read_image):
        with pytest.raises(ValueError, match=r"a\.png.*save it as PNG, JPEG"):
            read(tmp_path / "a.png")
    assert not is_clip(tmp_path / "a.png")


@pytest.mark.skipif(os.name == "nt", reason="there are no named pipes in folders")
def test_a_pipe_called_an_image_is_named_and_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    os.mkfifo(tmp_path / "clip" / "1.png")
    for read in (read_image, read_size):
        with pytest.raises(ValueError, match=r"1\.png.*no ordinary file; put an image in its place"):
            read(tmp_path / "clip" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png.*no ordinary file"):
        probe_clip(tmp_path / "clip")


def test_an_image_that_unfolds_to_too_many_pixels_is_refused_where_pillows_limit_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(image, "MAX_PIXELS", 40 * 24 - 1)
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png.*40x24 pixels, more than 959 in all; scale it down"):
        read_size(tmp_path / "a.png")


def test_a_video_whose_frames_are_too_large_is_refused_before_one_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from devicebridge.tests.clips import save_clip

    path = save_clip(tmp_path / "a.mp4", 3)
    monkeypatch.setattr(image, "MAX_PIXELS", 100)
    with pytest.raises(ValueError, match=r"a\.mp4.*more than 100 in all"):
        probe_clip(path)


def test_images_that_are_open_at_once_hold_no_more_pixels_than_one_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (40, 24)).save(tmp_path / "a.png")
    monkeypatch.setattr(image, "MAX_PIXELS", 40 * 24 * 3 - 1)
    sizes: list[int] = []

    def meet(number: int) -> bool:
        """Whether so many have it open at once."""
        with image.opened(tmp_path / "a.png"):
            sizes.append(number)
            try:
                together[number].wait(timeout=0.3)
            except threading.BrokenBarrierError:
                return False
            return True

    together = {number: threading.Barrier(number) for number in (2, 3)}
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(meet, [2, 2])) == [True, True]
        assert list(threads.map(meet, [3, 3, 3])) == [False] * 3
    assert sizes == [2, 2, 3, 3, 3]


def test_a_tile_that_is_larger_than_its_image_is_counted(tmp_path: Path) -> None:
    """Of a TIFF, whose tiles are decoded whole."""
    numbers = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: 16384, 323: 16384, 324: 200, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in numbers.items())
    header = b"II*\0" + struct.pack("<IH", 8, len(numbers)) + entries
    (tmp_path / "a.tif").write_bytes(header.ljust(208, b"\0"))
    for read in (read_size, read_image):
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
    from devicebridge.tests.clips import save_clip

    other = save_clip(tmp_path / "other.mp4", 3)
    path = tmp_path / f"a{suffix}"
    path.write_text(PLAYLISTS[kind].format(other=other))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        probe_clip(path)


def test_one_module_asks_pillow_to_open_files() -> None:
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in ("tests", ".venv")]
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in folder.rglob("*.py"))]
    opening = re.compile(r"\bImage\.open\(|from PIL\.Image import .*\bopen\b|imread\(")
    assert [f.name for f in files if opening.search(f.read_text(encoding="utf-8"))] == ["image.py"]
