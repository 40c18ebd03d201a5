"""Sounds beside clips and alone: decoded, cut, placed in time, captioned, and refused by name."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data.folders import scan_folders
from devicebridge.data.image import SoundRequest
from devicebridge.data.samples import Sample, dataset_fingerprint, describe_samples
from devicebridge.data.sounds import read_sound
from devicebridge.families.comfy.inputs import read_song
from devicebridge.families.spec import LatentSpec
from devicebridge.tests.clips import plain_frames
from devicebridge.tests.sounds import save_sound, wave
from PIL import Image

RATE = 8000
SONGS = LatentSpec(64, 1, size_multiple=1, audio_rows=1, sound_rate=25)
CLIPS = LatentSpec(128, 32, frame_stride=8, size_multiple=32, fps=25, frame_lengths=(1, 9), sound_rate=25)


def _scan(folder: Path, latent: LatentSpec = SONGS, **options) -> list[Sample]:
    return scan_folders(DataConfig((FolderConfig(str(folder)),), resolutions=(64,), **options), latent)


def _as_floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.T.astype(np.float32) / 2**15)


def test_the_wanted_part_of_a_sound_is_its_samples_and_what_is_behind_its_end_is_refused_or_silent(tmp_path: Path):
    values = wave(0.5, RATE)
    path = str(save_sound(tmp_path / "a.wav", values, RATE))
    part, rate = read_sound(SoundRequest(path, 0.1, 0.3, 1), is_alone=True)
    assert rate == RATE and torch.equal(part, _as_floats(values[800:3200]))
    longer = SoundRequest(path, 0.25, 0.5, 1)
    padded, _ = read_sound(longer)
    assert torch.equal(padded, torch.cat([_as_floats(values[2000:]), torch.zeros(2, 2000)], dim=1))
    with pytest.raises(ValueError, match="a.wav"):
        read_sound(longer, is_alone=True)
    values = wave(16347 / RATE, RATE)  # the last part of columns that are no whole samples long ends behind the file
    path = save_sound(tmp_path / "b.wav", values, RATE)
    column_s = 4096 / 44100
    part, _ = read_sound(SoundRequest(str(path), 17 * column_s, 5 * column_s, 5), is_alone=True)
    assert torch.equal(part, torch.cat([_as_floats(values[12632:]), torch.zeros(2, 1)], dim=1))


def test_a_damaged_number_of_channels_reads_no_memory_of_others(tmp_path: Path):
    content = bytearray(save_sound(tmp_path / "a.wav", wave(0.5, RATE), RATE).read_bytes())
    content[22] = 21
    (tmp_path / "a.wav").write_bytes(content)
    part, _ = read_sound(SoundRequest(str(tmp_path / "a.wav"), 0.0, 0.1, 1))
    assert part.shape == (2, 800) and part.abs().max() <= 1


@pytest.mark.parametrize("late_s", [0.0, 0.125])
def test_a_clips_own_track_is_read_at_the_time_of_its_pictures(late_s: float, tmp_path: Path):
    values = wave(0.4, RATE)
    path = save_sound(tmp_path / "a.mkv", values, RATE, num_frames=9, late_s=late_s)
    part, _ = read_sound(SoundRequest(str(path), 0.1, 0.2, 1), is_track=True)
    on_screen = torch.cat([torch.zeros(2, round(late_s * RATE)), _as_floats(values)], dim=1)
    assert torch.equal(part, on_screen[:, 800:2400])


def test_a_track_keeps_step_with_a_clip_that_begins_late_holds_a_frame_and_has_a_hole(tmp_path: Path):
    values, path = wave(1.6, RATE), tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        options = {"x264-params": "keyint=10:scenecut=0:bframes=0"}
        video = container.add_stream("libx264", rate=25, width=64, height=64, pix_fmt="yuv420p", options=options)
        audio = container.add_stream("pcm_s16le", rate=RATE, layout="stereo")
        pictures = [av.VideoFrame.from_ndarray(each, format="rgb24") for each in plain_frames(30, (64, 64))]
        coded = [packet for each in [*pictures, None] for packet in video.encode(each)]
        shown = [each for each in coded[5:] if not 13 <= each.pts * each.time_base * 25 < 20]  # frame 12 is held
        container.mux(shown)  # of which five come before the first key frame
        for start in [*range(0, 5600, 800), *range(7200, 12800, 800)]:
            part = av.AudioFrame.from_ndarray(values[start : start + 800].reshape(1, -1), format="s16", layout="stereo")
            part.sample_rate, part.time_base, part.pts = RATE, Fraction(1, RATE), start
            container.mux(audio.encode(part))
    values[5600:7200] = 0
    found = [each.sound for each in _scan(tmp_path, CLIPS, window="centre")]
    assert found[0] and len(found) == 1
    part, _ = read_sound(found[0], is_track=True)
    begin = round((10 + 5) / 25 * RATE)  # the 6th tick of 20, behind the first frame shown
    assert torch.equal(part, _as_floats(values[begin : begin + 2880]))


def test_a_sound_beside_a_clip_takes_the_place_of_its_track(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in ("own", "replaced"):
        save_sound(tmp_path / f"{name}.mkv", wave(0.8, RATE), RATE, num_frames=20)
    save_sound(tmp_path / "replaced.wav", wave(0.5, RATE), RATE)
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames.txt").write_text("silent")
    for number in range(9):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / "frames" / f"{number}.png")
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "still.png")
    save_sound(tmp_path / "still.flac", wave(0.5, RATE), RATE)
    samples = {Path(each.path).stem: each for each in _scan(tmp_path, CLIPS, window="uniform", num_windows=2)}
    assert {name: each.sound and Path(each.sound.path).name for name, each in samples.items()} == {
        "own": "own.mkv", "replaced": "replaced.wav", "frames": None, "still": None,
    }  # fmt: skip
    sound = samples["own"].sound
    assert sound and (sound.start_s, sound.length_s, sound.cells) == (0.44, 0.36, 9)
    assert samples["own"].alike == (9,) and samples["frames"].alike == ()
    assert "1 of .flac (still.flac)" in caplog.text and "replaced.wav" not in caplog.text
    told = describe_samples(list(samples.values()))
    assert "1 files, 1 tracks of clips; 2 parts of 0.7 s" in told
    with pytest.raises(ValueError, match="fps"):
        _scan(tmp_path, CLIPS, fps=12.0)
    silent = _scan(tmp_path, replace(CLIPS, sound_rate=0.0))
    assert not any(each.sound for each in silent)
    save_sound(tmp_path / "replaced.wav", wave(0.4, RATE), RATE)
    with pytest.raises(ValueError, match=r"replaced.wav.* 0.44"):
        _scan(tmp_path, CLIPS, window="uniform", num_windows=2)


def test_songs_are_cut_and_have_what_is_said_of_them(tmp_path: Path):
    save_sound(tmp_path / "a.wav", wave(1.03, RATE), RATE)
    save_sound(tmp_path / "b.mp3", wave(0.3, 44100), 44100)
    (tmp_path / "a.caption.txt").write_text("one, two")
    song = {"bpm": "120", "timesignature": "3/4", "language": "ja", "lyrics": "x"}
    (tmp_path / "a.json").write_text(json.dumps(song))
    (tmp_path / "a.lyrics").write_text("la\nla\n")
    (tmp_path / "b.json").write_text(json.dumps({"caption": "three", "keyscale": "D major", "bpm": None}))
    whole = _scan(tmp_path, trigger_word="ohwx")
    said = [read_song(each.caption) for each in whole]
    a = {"bpm": 120, "timesignature": 3, "language": "ja", "lyrics": "la\nla", "duration": 1.0}
    assert said[0] == ("ohwx, one, two", a) and said[1][0] == "ohwx, three" and said[1][1]["keyscale"] == "D major"
    assert [each.bucket for each in whole] == [(1, 25), (1, whole[1].bucket[1])]
    parts = _scan(tmp_path, seconds=0.4, window="uniform", num_windows=2)
    found = [(each.sound.start_s, each.sound.cells) for each in parts if each.sound and each.path.endswith("a.wav")]
    assert found == [(0.0, 10), (0.6, 10)]
    assert len({dataset_fingerprint(each) for each in (whole, parts, parts[1:])}) == 3


def _write(name: str, content: bytes | str) -> Callable[[Path], object]:
    def write(folder: Path) -> object:
        save_sound(folder / "a.wav", wave(0.3, RATE), RATE)
        return (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def _song(**said: object) -> Callable[[Path], object]:
    return _write("a.json", json.dumps({"caption": "x", **said}))


def _spoilt(name: str, kept: int, hole: int = 0) -> Callable[[Path], object]:
    def write(folder: Path) -> object:
        whole = bytearray(save_sound(folder / name, wave(0.6, RATE), RATE).read_bytes())
        whole[kept : kept + hole if hole else None] = bytes(hole)
        return (folder / name).write_bytes(whole)

    return write


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (_write("b.mp3", "#EXTM3U\nfile:///etc/passwd\n"), "b.mp3"), (_write("b.wav", b""), "b.wav"),
        (_spoilt("b.wav", -500), "b.wav"), (_spoilt("b.flac", -3000), "b.flac"),
        (_spoilt("b.flac", 12_000, 400), "b.flac"),
        (_song(bpm=5), "a.json.* bpm"), (_song(bpm=[1]), "a.json.* bpm"),
        (_song(timesignature="5"), "a.json.* timesignature"), (_song(lyrics="x" * 60_000), "a.json.* lyrics"),
        (_write("a.lyrics.txt", b"\xff"), "a.lyrics.txt"), (_write("a.lyrics.txt", "x" * 60_000), "a.lyrics.txt"),
        (lambda folder: save_sound(folder / "b.wav", wave(0.02, RATE), RATE), "b.wav.* 0.04"),
        (lambda folder: save_sound(folder / "b.mp4", wave(0.2, RATE), RATE, num_frames=3), "no sounds"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sound_is_refused_by_its_file(make: Callable[[Path], object], named: str, tmp_path: Path):
    make(tmp_path)
    with pytest.raises(ValueError, match=named):
        _scan(tmp_path)


def test_a_clip_with_two_sounds_is_refused_and_pictures_beside_songs_are_named(tmp_path, caplog):
    save_sound(tmp_path / "a.mkv", wave(0.4, RATE), RATE, num_frames=9)
    for ending in (".wav", ".flac"):
        save_sound(tmp_path / f"a{ending}", wave(0.4, RATE), RATE)
    with pytest.raises(ValueError, match=r"a.flac and a.wav"):
        _scan(tmp_path, CLIPS)
    with caplog.at_level(logging.WARNING):
        assert len(_scan(tmp_path)) == 2
    assert "1 of .mkv (a.mkv)" in caplog.text
