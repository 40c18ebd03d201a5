"""Reading clips: the right frame, upright, in the right colours; and a reason with a name for what cannot be read."""

import os
from fractions import Fraction

import av
import numpy as np
import pytest
from devicebridge.data import video
from devicebridge.data.image import ImageRequest
from devicebridge.data.video import is_clip, media_fingerprint, probe_clip, read_frames, sequence_files
from devicebridge.tests.clips import (
    COLOURS,
    middle_colours,
    plain_frames,
    save_animation,
    save_clip,
    save_sequence,
    save_video,
    set_display_matrix,
)
from PIL import Image

NAMES = ("a.mp4", "a.mov", "a.m4v", "a.mkv", "a.webm", "a.gif", "a.webp", "a.png", "a")
NUM_FRAMES = 11  # more than ten, so that frame_10.png would sort before frame_2.png by its letters


def _read(path, *frames, size=(32, 48)):
    return read_frames(ImageRequest(str(path), size, (0, 0, *size), frames))


def _check_colours(pixels, frames, tolerance=4):
    expected = COLOURS[[frame % len(COLOURS) for frame in frames]].astype(int)
    assert np.abs(middle_colours(pixels) - expected).max() <= tolerance


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_frames_asked_for(tmp_path, name):
    path = save_clip(tmp_path / name, NUM_FRAMES, fps=10)
    info = probe_clip(path)
    assert is_clip(path) and info.num_frames == NUM_FRAMES and info.size == (32, 48) and not info.is_hdr
    if path.suffix:
        assert info.times_s == pytest.approx([i / 10 for i in range(NUM_FRAMES)], abs=0.001)
        assert info.end_s == pytest.approx(NUM_FRAMES / 10, abs=0.001)
    frames = (0, 2, 3, 10)
    pixels = _read(path, *frames)
    assert pixels.shape == (3, 4, 32, 48) and pixels.min() >= -1 and pixels.max() <= 1
    _check_colours(pixels, frames)
    _check_colours(_read(path, 1, 1, 2, 5, 5), (1, 1, 2, 5, 5))  # in the order asked for, and as often


def test_a_packet_that_shows_nothing_leaves_the_frame_before_on_screen(tmp_path, monkeypatch):
    path = save_clip(tmp_path / "a.mp4", 8)
    hidden = round(4 / 16 * 90000)
    decode = video._decode
    monkeypatch.setattr(video, "_decode", lambda *args: (frame for frame in decode(*args) if frame.pts != hidden))
    _check_colours(_read(path, 3, 4, 5), (3, 3, 5))


def test_frames_far_inside_are_sought_and_are_the_same(tmp_path, monkeypatch):
    path = save_video(tmp_path / "a.mp4", plain_frames(40), key_frame_every=8)
    whole = _read(path, *range(40))
    decoded = []
    decode = video._decode

    def decode_and_count(container, stream):
        for frame in decode(container, stream):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video, "_decode", decode_and_count)
    sought = _read(path, 33, 35)
    assert len(decoded) < 12  # of 40: the first one, the key frame before, and what lies between
    assert (sought == whole[:, [33, 35]]).all()
    monkeypatch.setattr(video, "_seeks_before", lambda *_: False)  # an index that cannot be trusted
    assert (_read(path, 33, 35) == sought).all()


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
def test_times_of_a_variable_rate_count_from_the_first_frame(tmp_path, name):
    times = np.array([0, 0.1, 0.3, 0.31, 0.5, 0.9, 1.0, 1.4])
    info = probe_clip(save_video(tmp_path / name, plain_frames(8), times_s=list(5 * name.endswith("mkv") + times)))
    assert info.times_s == pytest.approx(times, abs=0.002)
    _check_colours(_read(tmp_path / name, 1, 3), (1, 3))


def test_durations_of_an_animation_are_those_browsers_show(tmp_path):
    path = save_animation(tmp_path / "a.gif", plain_frames(4), [200, 0, 10, 50])
    assert probe_clip(path).times_s == pytest.approx((0, 0.2, 0.3, 0.4))
    assert probe_clip(path).end_s == pytest.approx(0.45)


def test_one_frame_is_no_clip(tmp_path):
    for name in ("a.gif", "a.webp", "a.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
        assert not is_clip(tmp_path / name)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    assert not is_clip(tmp_path / "a.jpg")


def test_a_frame_is_cut_like_an_image(tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    save_sequence(tmp_path / "a", [values, values[::-1]])
    cut = ((20, 30), (2, 3, 8, 10))
    for index in range(2):  # frame by frame, and an image as one
        clip = read_frames(ImageRequest(str(tmp_path / "a"), *cut, (index,)))
        image = ImageRequest(str(tmp_path / "a" / f"frame_{index}.png"), *cut)
        assert (clip == read_frames(image)).all()


def test_the_images_of_a_folder_are_sorted_by_their_numbers(tmp_path):
    for name in ("10.png", "9.png", "b2.jpg", "b10.jpg", "01.png", "notes.txt", ".hidden.png"):
        (tmp_path / name).touch()
    assert [file.name for file in sequence_files(tmp_path)] == ["01.png", "9.png", "10.png", "b2.jpg", "b10.jpg"]


def test_a_folder_is_known_by_its_images_in_their_order_and_not_by_their_names(tmp_path):
    frames = plain_frames(3)
    first = media_fingerprint(save_sequence(tmp_path / "a", frames))
    for index in range(3):
        (tmp_path / "a" / f"frame_{index}.png").rename(tmp_path / "a" / f"shot {index}.png")
    (tmp_path / "a" / "notes.txt").write_text("not a frame")
    assert media_fingerprint(tmp_path / "a") == first
    assert media_fingerprint(save_sequence(tmp_path / "b", frames[::-1])) != first


CORNERS = np.zeros((32, 48, 3), dtype=np.uint8)
CORNERS[:16, :24], CORNERS[:16, 24:], CORNERS[16:, :24], CORNERS[16:, 24:] = COLOURS[:4]
MATRICES = {  # matrix -> numbers of the colours at top left, top right, bottom left, bottom right
    (1, 0, 0, 1): (0, 1, 2, 3), (0, 1, -1, 0): (2, 0, 3, 1),  # a telephone held upright: shown turned clockwise
    (-1, 0, 0, -1): (3, 2, 1, 0), (0, -1, 1, 0): (1, 3, 0, 2), (-1, 0, 0, 1): (1, 0, 3, 2),  # a mirror
    (1, 0, 0, -1): (2, 3, 0, 1), (0, 1, 1, 0): (0, 2, 1, 3), (0, -1, -1, 0): (3, 1, 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("matrix", MATRICES)
def test_frames_are_turned_and_mirrored_as_the_file_says(tmp_path, matrix):
    path = save_video(tmp_path / "a.mp4", [CORNERS] * 2)
    set_display_matrix(path, *matrix)
    size = (32, 48) if matrix[0] else (48, 32)
    assert probe_clip(path).size == size
    pixels = _read(path, 1, size=size)
    height, width = size
    found = [pixels[:, :, y : y + 1, x : x + 1] for y in (4, height - 5) for x in (4, width - 5)]
    for corner, colour in zip(found, MATRICES[matrix], strict=True):
        _check_colours(corner, [colour])


def test_a_slanted_picture_is_refused(tmp_path):
    path = save_video(tmp_path / "a.mp4", [CORNERS] * 2)
    for matrix in ((0.7071, 0.7071, -0.7071, 0.7071), (0.98, 0.17, -0.17, 0.98)):
        set_display_matrix(path, *matrix)
        with pytest.raises(ValueError, match=r"a\.mp4.*only quarter turns"):
            probe_clip(path)


@pytest.mark.parametrize(
    ("name", "size", "aspect", "shown"),
    [
        ("a.mp4", (33, 47), None, (33, 47)),
        ("a.webm", (33, 47), None, (33, 47)),
        ("a.mp4", (32, 48), Fraction(4, 3), (32, 64)),
    ],
)
def test_odd_sizes_and_pixels_that_are_not_square(tmp_path, name, size, aspect, shown):
    path = save_video(tmp_path / name, plain_frames(3, size), pixel_aspect=aspect)
    assert probe_clip(path).size == shown
    _check_colours(_read(path, 0, 2, size=shown), (0, 2))


@pytest.mark.parametrize("full_range", (False, True))
@pytest.mark.parametrize("matrix", (1, 5, 9))  # BT.709, BT.601, BT.2020
@pytest.mark.parametrize("name", ("a.mp4", "a.webm"))  # H.264 says full range by the pixel format, VP9 beside it
def test_the_named_yuv_matrix_and_range_are_used(tmp_path, name, matrix, full_range):
    if matrix != 1:
        pytest.importorskip("av", "18", reason="older PyAV writes such files in other colours; it reads them right")
    path = save_video(tmp_path / name, plain_frames(4), colours=matrix, full_range=full_range)
    _check_colours(_read(path, *range(4)), range(4))
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    # By the definition: R = Y + 2 (1 - Kr) V, with Kr of the matrix.
    y, _, v = (float(bytes(plane)[0]) for plane in frame.planes)
    y, v = (y / 255, (v - 128) / 255) if full_range else ((y - 16) / 219, (v - 128) / 224)
    red = y + 2 * (1 - {1: 0.2126, 5: 0.299, 9: 0.2627}[matrix]) * v
    assert red == pytest.approx(1, abs=0.02)  # the file is what it says


def test_transparency_is_laid_on_white(tmp_path):
    frames = [np.full((32, 48, 4), (255, 0, 0, alpha), dtype=np.uint8) for alpha in (255, 0, 128)]
    expected = np.array([(255, 0, 0), (255, 255, 255), (255, 127, 127)])
    webm = save_video(tmp_path / "a.webm", frames, pixel_format="yuva420p")
    for path in (webm, save_animation(tmp_path / "a.webp", frames, [50] * 3)):
        assert np.abs(middle_colours(_read(path, 0, 1, 2)) - expected).max() <= 4, path


def _cut(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    return path


def _noise(count, size=(32, 48)):
    return list(np.random.default_rng(1).integers(0, 255, (count, *size, 3), dtype=np.uint8))


def _audio_only(path):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.sample_rate = 44100
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _foreign_codec(path):
    save_clip(path, 3)
    path.write_bytes(path.read_bytes().replace(b"avc1", b"xyz1"))


def _sequence_of_two_sizes(path):
    save_sequence(path, [*plain_frames(2), *plain_frames(1, (16, 16))])


FAST = {"movflags": "faststart"}
BROKEN = {
    "empty": ("a.mp4", lambda p: p.touch(), "the file is empty"),
    "text": ("a.mp4", lambda p: p.write_text("#EXTM3U\nhttp://localhost/a.ts\n"), "neither MP4, MOV, MKV, WebM"),
    "mp4": ("a.mp4", lambda p: _cut(save_video(p, _noise(20)), 0.5), "cut off"),
    "mp4 with its index first": ("a.mp4", lambda p: _cut(save_video(p, _noise(20), options=FAST), 0.7), "cut off"),
    "mkv": ("a.mkv", lambda p: _cut(save_video(p, _noise(20)), 0.8), "cut off"),
    "webm": ("a.webm", lambda p: _cut(save_video(p, _noise(20)), 0.9), "cut off"),
    "gif": ("a.gif", lambda p: _cut(save_animation(p, _noise(6), [50] * 6), 0.6), "cut off"),
    "webp": ("a.webp", lambda p: _cut(save_animation(p, _noise(6), [50] * 6), 0.6), "cannot be read"),
    "apng": ("a.png", lambda p: _cut(save_animation(p, _noise(6), [50] * 6), 0.6), "cannot be read"),
    "sound": ("a.mp4", _audio_only, "no video in it"),
    "codec": ("a.mp4", _foreign_codec, "no decoder for its codec"),
    "sizes": ("a", _sequence_of_two_sizes, "the frames of a clip have one size"),
    "no images": ("a", lambda p: p.mkdir(), "no image in it.*take it out"),
    "a broken image": ("a", lambda p: (save_sequence(p, plain_frames(3)) / "frame_1.png").write_bytes(b"-"), "read as"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_is_named_with_the_reason(tmp_path, kind):
    name, make, reason = BROKEN[kind]
    path = tmp_path / name
    make(path)
    with pytest.raises(ValueError, match=reason) as caught:
        probe_clip(path)
    named = path / "frame_1.png" if kind == "a broken image" else path
    assert str(caught.value).startswith(str(named)) and "\n" not in str(caught.value)


def test_damage_in_the_middle_is_found_when_it_is_decoded(tmp_path):
    path = save_video(tmp_path / "a.mp4", _noise(20), options=FAST)
    assert probe_clip(path).num_frames == 20
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 2000] = bytes(2000)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.mp4: cannot be read as a clip"):
        _read(path, *range(20))


def test_what_the_decoder_conceals_is_refused(tmp_path):
    """H.264 decoders paint over what they cannot read, and say so in a flag of the frame."""
    path = save_video(tmp_path / "a.mp4", _noise(12, (64, 96)), options=FAST)
    whole, messages = path.read_bytes(), []
    for part in range(4, 10):
        data = bytearray(whole)
        data[len(data) * part // 10] ^= 16
        path.write_bytes(data)
        try:
            _read(path, *range(12), size=(64, 96))
        except ValueError as error:
            messages.append(str(error))
    assert any("s is damaged" in message for message in messages)


def test_a_clip_that_ends_before_its_frame_is_not_continued_with_the_last_one(tmp_path):
    for name in ("a.mp4", "b.gif", "c"):
        with pytest.raises(ValueError, match="ends before its frame 6"):
            _read(save_clip(tmp_path / name, 5), 4, 5)


def test_a_decoder_that_stops_early_is_noticed(tmp_path, monkeypatch):
    path, decode = save_clip(tmp_path / "a.mp4", 8), video._decode
    monkeypatch.setattr(video, "_decode", lambda *args: (frame for frame in decode(*args) if frame.pts < 28000))
    with pytest.raises(ValueError, match="ends before its frame 6"):
        _read(path, 4, 5)


def test_missing_pyav_is_said(tmp_path, monkeypatch):
    path = save_clip(tmp_path / "a.mp4", 2)
    monkeypatch.setitem(os.sys.modules, "av", None)
    with pytest.raises(RuntimeError, match="pip install av"):
        probe_clip(path)
