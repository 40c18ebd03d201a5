"""Files and sub-folders beside images: read where their meaning is plain, else named once, with counts."""

import errno
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data import left_out
from devicebridge.data.caption_files import write_caption
from devicebridge.data.folders import is_media, scan_folders
from devicebridge.data.image import ImageRequest, image_suffixes
from devicebridge.data.samples import Sample
from devicebridge.data.video import probe_clip, read_frames
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import LatentSpec
from devicebridge.system import files
from devicebridge.tests.clips import COLOURS, middle_colours, plain_frames, save_image, save_sequence
from PIL import Image

IMAGES, CLIPS = FAMILIES["flux2"].latent, FAMILIES["wan"].latent


def _scan(*folders: Path, latent=IMAGES, others: tuple[str, ...] = (), **options) -> list[Sample]:
    config = DataConfig(tuple(FolderConfig(str(each), **options) for each in folders), resolutions=(64,))
    return scan_folders(config, latent, others=others)


def _counts(caplog: pytest.LogCaptureFixture) -> list[tuple[int, dict[str, int]]]:
    """Of each line: all that are not read, and so many of each ending or sub-folder."""
    found = []
    for text in (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING):
        total = re.search(r": (?:at least )?(\d+) .*are not read: ", text)
        if total:
            files = {name: int(number) for number, name in re.findall(r"(\d+) of (\.\w+)", text)}
            folders = {name: int(number) for name, number in re.findall(r"([\w-]+) \((\d+)\)", text)}
            found.append((int(total[1]), files or folders))
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jfif", "JPEG"), ("a.jpe", "JPEG"), ("a.avif", "AVIF"), ("a.apng", "PNG"), ("a.jp2", "JPEG2000")],
)
def test_whatever_pillow_reads_safely_is_trained(tmp_path: Path, name: str, kind: str) -> None:
    if Path(name).suffix not in image_suffixes():
        pytest.skip(f"Pillow has no {kind} here")
    save_image(tmp_path / name, caption="words", format=kind)
    for latent in (IMAGES, CLIPS):
        assert [(Path(each.path).name, each.caption) for each in _scan(tmp_path, latent=latent)] == [(name, "words")]


def test_no_ending_of_a_format_that_starts_programs_is_looked_for() -> None:
    assert not {".eps", ".ps", ".wmf", ".emf", ".pdf", ".h5"} & {*image_suffixes()}


_CONTAINERS = {  # name -> format, codec
    "a.avi": ("avi", "mpeg4"), "b.avi": ("avi", "libx264"), "a.ts": ("mpegts", "libx264"),
    "a.m2ts": ("mpegts", "libx264"), "a.mpg": ("mpeg", "mpeg2video"), "a.flv": ("flv", "flv"),
    "a.3gp": ("3gp", "libx264"),
}  # fmt: skip


@pytest.mark.parametrize("name", _CONTAINERS)
def test_the_older_containers_are_clips(tmp_path: Path, name: str) -> None:
    form, codec = _CONTAINERS[name]
    options = {"mpegts_m2ts_mode": "1"} if name == "a.m2ts" else {}
    with av.open(str(tmp_path / name), "w", format=form, options=options) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 64, "yuv420p", 4_000_000
        stream.codec_context.max_b_frames = 2 * (codec != "flv")  # which come in another order than they are shown
        ordered = {"x264-params": "scenecut=0:b-adapt=0:bframes=3:keyint=12"} if codec == "libx264" else {}
        stream.options = {"threads": "1", "sc_threshold": "0"} | ordered
        for values in plain_frames(30, (64, 64)):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        file.mux(stream.encode(None))
    info = probe_clip(tmp_path / name)
    assert (info.num_frames, info.size, round(info.end_s, 2)) == (30, (64, 64), 1.2)
    pixels = read_frames(ImageRequest(str(tmp_path / name), (64, 64), (0, 0, 64, 64), (2, 9, 17)))
    assert np.abs(middle_colours(pixels) - COLOURS[[2, 9, 17 % len(COLOURS)]]).max() <= 4
    assert [len(each.frames) for each in _scan(tmp_path, latent=CLIPS)] == [17]
    if form == "avi":
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) * 9 // 10])
        with pytest.raises(ValueError, match="cut off"):
            probe_clip(tmp_path / name)


def test_what_is_not_read_is_named_with_counts_by_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "a.png", caption="words")
    for name in ("b.psd", "c.psd", "b.txt", "metadata.jsonl", "a.json", "a.npz", "LICENSE", "d.caption"):
        (tmp_path / name).write_bytes(b"x")
    for name in (".DS_Store", "._a.png", "Thumbs.db", "desktop.ini"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "@eaDir").mkdir()
    save_image(tmp_path / "@eaDir" / "small.jpg")
    _scan(tmp_path)
    endings = {".psd": 2, ".txt": 1, ".jsonl": 1, ".json": 1, ".npz": 1, ".caption": 1}
    assert _counts(caplog) == [(8, endings)]
    for name in ("b.psd", "metadata.jsonl", "LICENSE"):
        assert name in caplog.text


def test_a_missing_plugin_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "a.png", caption="words")
    for suffix, package in ((".heic", "pillow-heif"), (".jxl", "pillow-jxl-plugin")):
        if suffix not in image_suffixes():
            caplog.clear()
            (tmp_path / f"b{suffix}").write_bytes(b"x")
            _scan(tmp_path)
            assert f"pip install {package}" in caplog.text


def test_nothing_is_said_of_a_folder_that_is_read_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "a.png", caption="words")
    save_image(tmp_path / "a_mask.png")
    save_sequence(tmp_path / "clip", plain_frames(17, (64, 64)))
    (tmp_path / "clip.txt").write_text("moving")
    _scan(tmp_path, tmp_path, latent=CLIPS)
    assert _counts(caplog) == []


@pytest.mark.parametrize(("latent", "sounds"), [(IMAGES, 0), (CLIPS, 0), (replace(CLIPS, sound_rate=25.0), 1)])
def test_sub_folders_are_named_with_what_they_hold(tmp_path: Path, caplog, latent: LatentSpec, sounds: int) -> None:
    save_image(tmp_path / "cover.png", caption="words")
    for index in range(3):
        save_image(tmp_path / "10_cat" / f"{index}.jpg", caption="a cat")
    (tmp_path / "10_cat" / "purr.wav").write_bytes(b"")
    save_image(tmp_path / "more" / "deep" / "er" / "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "more" / "round").symlink_to(tmp_path)
    _scan(tmp_path, latent=latent)
    assert _counts(caplog) == [(4 + sounds, {"10_cat": 3 + sounds, "more": 1})]
    assert ("put its caption beside it" in caplog.text) == latent.is_video


def test_sub_folders_of_their_own_are_not_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "a.png", caption="words")
    for name in ("trained", "held_out"):
        save_image(tmp_path / name / "a.png", caption="words")
    _scan(tmp_path, tmp_path / "trained", others=(str(tmp_path / "held_out"),))
    assert _counts(caplog) == []
    _scan(tmp_path, tmp_path / "trained")
    assert _counts(caplog) == [(1, {"held_out": 1})]


def test_a_folder_of_deeper_folders_alone_is_refused_with_their_names(tmp_path: Path) -> None:
    save_image(tmp_path / "10_cat" / "fold" / "a.jpg", caption="a cat")
    (tmp_path / "note.md").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no images in.*1 of \.md.*10_cat \(1\)"):
        _scan(tmp_path)


def test_what_is_no_frame_of_a_sequence_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_sequence(tmp_path / "clip", plain_frames(17, (64, 64)))
    (tmp_path / "clip" / "frame_4b.psd").write_bytes(b"x")
    (tmp_path / "clip.txt").write_text("moving")
    _scan(tmp_path, latent=CLIPS)
    assert _counts(caplog) == [(1, {".psd": 1})] and "clip/frame_4b.psd" in caplog.text


def test_a_look_for_what_is_left_out_refuses_nothing(tmp_path, caplog, monkeypatch):
    """Sub-folders that are large, or may not be read, as those of a system at the root of a disk."""
    monkeypatch.setattr(files, "MAX_ENTRIES", 30)
    monkeypatch.setattr(left_out, "_MOST_LOOKED_AT", 5, raising=False)
    for name in ("first", "second"):
        save_sequence(tmp_path / name, plain_frames(17, (64, 64)))
        (tmp_path / f"{name}.txt").write_text("moving")
    for folder in ("a", "b", "closed"):
        save_image(tmp_path / "large" / folder / "a.png", caption="words")
    scandir = os.scandir

    def refusing(path: Path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert len(_scan(tmp_path, latent=CLIPS)) == 2
    assert _counts(caplog) == [(1, {"large": 1})] and "at least 1 images" in caplog.text


def test_what_is_no_reference_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "after" / "a.png", caption="words")
    save_image(tmp_path / "before" / "a.png", caption="ignored")
    (tmp_path / "before" / "a_1.psd").write_bytes(b"x")
    folder = FolderConfig(str(tmp_path / "after"), references=(str(tmp_path / "before"),))
    scan_folders(DataConfig((folder,), resolutions=(64,), condition="reference"), IMAGES)
    assert _counts(caplog) == [(1, {".psd": 1})]


def test_captions_of_another_ending_are_read_where_no_txt_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        save_image(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.caption").write_text(f"caption of {name}\n")
    (tmp_path / "b.txt").write_text("text of b")
    assert [sample.caption for sample in _scan(tmp_path)] == ["caption of a", "text of b"]
    assert _counts(caplog) == [(1, {".caption": 1})] and "b.caption" in caplog.text
    write_caption(tmp_path / "a.png", "edited", ["caption of a"])
    assert [sample.caption for sample in _scan(tmp_path)] == ["edited", "text of b"]


def test_masks_of_another_trainer_are_masks(tmp_path: Path) -> None:
    save_image(tmp_path / "a.png", caption="words")
    Image.new("L", (64, 64), 255).save(tmp_path / "a-masklabel.png")
    (sample,) = _scan(tmp_path)
    assert sample.mask_path == str(tmp_path / "a-masklabel.png")
    Image.new("L", (64, 64), 255).save(tmp_path / "a_mask.png")
    with pytest.raises(ValueError, match=r"a-masklabel\.png and a_mask\.png are both the mask of a"):
        _scan(tmp_path)


def test_conditions_of_another_trainer_are_no_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_image(tmp_path / "a.png", caption="words")
    save_image(tmp_path / "a-condlabel.png")
    assert [Path(sample.path).name for sample in _scan(tmp_path)] == ["a.png"]
    assert [text for text in caplog.messages if "1 images are conditions" in text and "a-condlabel.png" in text]
    assert not is_media(tmp_path / "a-condlabel.png")
