"""The dataset: nothing in a folder is silently lost or misread, and the order of training is exact and repeatable."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data.folders import scan_folders
from devicebridge.data.samples import (
    DROPPED,
    BatchOrder,
    Sample,
    choose_bucket,
    dataset_fingerprint,
    load_mask,
    make_buckets,
    plan_crop,
)
from devicebridge.data.video import read_frames
from devicebridge.families.spec import LatentSpec
from devicebridge.tests.clips import plain_frames, save_clip, save_image, save_video
from PIL import Image

LATENT = LatentSpec(channels=4, spatial_stride=8, size_multiple=16)
VIDEO = dataclasses.replace(LATENT, frame_stride=4, fps=16, frame_lengths=(1, 5, 9))


def _config(*folders, **options):
    return DataConfig(tuple(FolderConfig(str(folder)) for folder in folders), **{"resolutions": (64,), **options})


def _scan(*folders, **options):
    return scan_folders(_config(*folders, **options), LATENT)


def _names(samples):
    return [sample.path.replace("\\", "/").rsplit("/", 1)[-1] for sample in samples]


def test_a_folder_becomes_samples_in_order_of_name(tmp_path, caplog):
    for name in ("b.png", "a.JPG", "d.webp", "c.jpeg", "e.bmp"):
        save_image(tmp_path / name, caption=f"a picture of {name}\n")
    Image.new("L", (64, 64), 255).save(tmp_path / "b_mask.png")
    (tmp_path / "notes.md").write_text("not an image")
    (tmp_path / "._b.png").write_bytes(b"what macOS leaves behind")
    save_image(tmp_path / "inside" / "z.png")
    save_image(tmp_path / "gas_mask.png")
    samples = _scan(tmp_path)
    assert _names(samples) == ["a.JPG", "b.png", "c.jpeg", "d.webp", "e.bmp"] and "gas_mask.png" in caplog.text
    assert samples[0].caption == "a picture of a.JPG"
    assert [bool(sample.mask_path) for sample in samples] == [False, True, False, False, False]
    assert samples[1].mask_path == str(tmp_path / "b_mask.png")
    assert _scan(tmp_path) == samples


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp", "tiff", "transparent.png", "palette.png", "16 bit.png"])
@pytest.mark.parametrize("side", [16, 300])
def test_pictures_of_one_colour_are_counted(kind, side, tmp_path, caplog):
    size = (side, side)
    made = {
        "transparent.png": lambda: Image.merge("RGBA", [*_noise(size).split(), Image.new("L", size, 0)]),
        "palette.png": lambda: Image.new("RGB", size, "black").convert("P"),
        "16 bit.png": lambda: Image.new("I;16", size, 7),
    }.get(kind, lambda: Image.new("RGB", size, "black"))()
    made.save(tmp_path / f"blank.{kind}")
    _noise(size).save(tmp_path / "full.png")
    assert len(_scan(tmp_path)) == 2
    (said,) = [text for text in caplog.messages if "of one colour throughout" in text]
    assert said.startswith("1 of 2 ") and f"blank.{kind}" in said and "full" not in said


def _noise(size):
    return Image.effect_noise(size, 100).convert("RGB")


@pytest.mark.parametrize(("colour", "alpha"), [("white", 0), ("white", None), ("black", None)])
def test_masks_that_say_something_by_transparency_alone_are_counted(colour, alpha, tmp_path, caplog):
    _noise((64, 64)).save(tmp_path / "a.png")
    mask = Image.new("RGBA", (64, 64), colour)
    mask.putalpha(Image.linear_gradient("L").resize((64, 64)) if alpha is None else alpha)
    mask.save(tmp_path / "a_mask.png")
    if colour == "black":
        with pytest.raises(ValueError, match="a_mask.png: is all black"):
            _scan(tmp_path)
        return
    _scan(tmp_path)
    assert [text for text in caplog.messages if "1 masks are of one brightness throughout" in text and "a_mask" in text]
    caplog.clear()
    for harmless in (Image.new("RGBA", (64, 64), colour), Image.new("I;16", (64, 64), 9), _noise((64, 64))):
        harmless.save(tmp_path / "a_mask.png")
        _scan(tmp_path)
    assert not [text for text in caplog.messages if "brightness" in text]


@pytest.mark.parametrize(
    ("data", "caption"),
    [
        (b"\xef\xbb\xbfcaf\xc3\xa9\r\n", "café"), ("eine Katze, 猫".encode(), "eine Katze, 猫"), (b"", ""),
        (b"two\nlines ", "two\nlines"),
    ],
)  # fmt: skip
def test_captions_are_utf8_with_or_without_a_byte_order_mark(tmp_path, data, caption):
    save_image(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(data)
    assert _scan(tmp_path)[0].caption == caption


def test_missing_captions_are_one_warning_with_number_and_names(tmp_path, caplog):
    for index in range(8):
        save_image(tmp_path / f"{index}.png")
    (tmp_path / "0.txt").write_text("there")
    samples = _scan(tmp_path)
    assert [sample.caption for sample in samples] == ["there"] + [""] * 7
    (record,) = caplog.records
    assert "7 of 8" in record.getMessage() and "1.png, 2.png" in record.getMessage()


def test_all_bad_files_are_named_at_once(tmp_path):
    save_image(tmp_path / "good.png")
    (tmp_path / "good.txt").write_bytes("Ünlesbar".encode("latin-1"))
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.jpg").write_text("I am no picture")
    save_image(tmp_path / "fine.png")
    (tmp_path / "fine_mask.png").write_bytes(b"no mask")
    save_image(tmp_path / "shape.png", 64, 64)
    Image.new("L", (64, 32), 255).save(tmp_path / "shape_mask.png")
    save_image(tmp_path / "dark.png")
    Image.new("L", (64, 64), 0).save(tmp_path / "dark_mask.png")
    save_image(tmp_path / "whole.png")
    with pytest.raises(ValueError, match="6 of 7 images") as raised:
        _scan(tmp_path)
    for name in ("good.txt", "empty.png", "text.jpg", "fine_mask.png", "shape_mask.png", "dark_mask.png"):
        assert str(tmp_path / name) in str(raised.value)
    assert "whole.png" not in str(raised.value)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "tif", "tiff"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.97])
def test_a_truncated_image_is_found_before_training(tmp_path, suffix, kept):
    path = tmp_path / f"a.{suffix}"
    save_image(path, 80, 120)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ValueError, match=rf"a\.{suffix}: cannot be read as an image"):
        _scan(tmp_path)


@pytest.mark.parametrize("content", ["nothing", "only_masks", "only_deeper"])
def test_an_empty_folder_says_what_was_looked_for(tmp_path, content):
    if content == "only_masks":
        Image.new("L", (64, 64), 255).save(tmp_path / "a_mask.png")
    if content == "only_deeper":
        save_image(tmp_path / "inside" / "it" / "a.png")
    with pytest.raises(ValueError, match=r"no images.*\.png.*\.jpg.*\.webp.*\.bmp.*not in its sub-folders"):
        _scan(tmp_path)


def test_a_missing_folder_and_a_jpeg_mask_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"absent does not exist"):
        _scan(tmp_path / "absent")
    save_image(tmp_path / "a.png")
    save_image(tmp_path / "a_mask.jpg")
    with pytest.raises(ValueError, match=r"a_mask\.jpg .* PNG"):
        _scan(tmp_path)


def test_small_images_are_upscaled_with_one_warning(tmp_path, caplog):
    for name, size in (("a", 30), ("b", 64), ("c", 63)):
        save_image(tmp_path / f"{name}.png", size, size, caption="x")
    assert all(sample.bucket == (64, 64) for sample in _scan(tmp_path))
    (record,) = caplog.records
    assert "2 of 3 images" in record.getMessage() and "a.png, c.png" in record.getMessage()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_a_turned_photo_is_cut_as_it_is_looked_at(tmp_path, orientation, suffix):
    """The plan is made from the header, the pixels are read by the cache: both must turn the picture alike."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    values = np.zeros((40, 100, 3), dtype=np.uint8)
    values[:, 50:] = 255
    Image.fromarray(values).save(tmp_path / f"a.{suffix}", exif=exif)
    sample = _scan(tmp_path)[0]
    is_turned = orientation >= 5
    assert sample.bucket == ((96, 48) if is_turned else (48, 96))
    pixels = read_frames(sample.image_request())[:, 0]
    assert pixels.shape == (3, *sample.bucket)
    assert sample.resize[0] / sample.resize[1] == pytest.approx(100 / 40 if is_turned else 40 / 100, rel=0.03)
    light = (pixels[0] > 0).float()
    along = light.mean(1) if is_turned else light.mean(0)
    assert set(along.round().tolist()) == {0.0, 1.0}, "the border between dark and light runs across the long side"


@pytest.mark.parametrize("resolution", [64, 100, 256, 500, 512, 768, 1024])
@pytest.mark.parametrize("step", [16, 32, 64])
@pytest.mark.parametrize("max_aspect", [1.0, 1.5, 2.0, 4.0])
def test_buckets_are_of_the_asked_area_shape_and_step(resolution, step, max_aspect):
    buckets = make_buckets(resolution, step, max_aspect)
    assert len(set(buckets)) == len(buckets)
    assert any(height == width for height, width in buckets)
    for height, width in buckets:
        assert height % step == width % step == 0 and min(height, width) > 0
        assert max(height, width) / min(height, width) <= max_aspect
        assert (width, height) in buckets
        # rounding the longer side of one bucket by half a step changes its area by at most step / 2 * shorter side
        assert abs(height * width - resolution**2) <= step * max(height, width)


def test_buckets_of_512_by_hand():
    assert make_buckets(512, 64, 2.0) == [
        (384, 640), (384, 704), (448, 576), (512, 512), (576, 448), (640, 384), (704, 384),
    ]  # fmt: skip


def test_sides_are_multiples_of_what_the_model_and_the_user_ask(tmp_path):
    save_image(tmp_path / "a.png", 260, 200)
    assert all(side % 48 == 0 for side in _scan(tmp_path, resolutions=(192,), bucket_step=24)[0].bucket)
    assert all(side % 64 == 0 for side in _scan(tmp_path, resolutions=(192,), bucket_step=64)[0].bucket)
    with pytest.raises(ValueError, match="resolution 48 is below 64"):
        _scan(tmp_path, resolutions=(48,), bucket_step=64)


@pytest.mark.parametrize("size", [(7, 1000), (100, 100), (333, 500), (501, 499), (1080, 1920), (3000, 2)])
def test_a_crop_covers_its_bucket_in_the_middle_of_the_image(size):
    buckets = make_buckets(128, 16, 2.0)
    bucket = choose_bucket(size, buckets)
    distances = {b: abs(math.log(b[0] / b[1]) - math.log(size[0] / size[1])) for b in buckets}
    assert distances[bucket] == min(distances.values())
    resize, (top, left, height, width) = plan_crop(size, bucket)
    assert (height, width) == bucket
    assert height == resize[0] or width == resize[1], "no more is cut off than needed"
    assert abs(2 * top + height - resize[0]) <= 1 and abs(2 * left + width - resize[1]) <= 1
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    assert abs(resize[0] - size[0] * scale) <= 0.5 and abs(resize[1] - size[1] * scale) <= 0.5


def _scan_clips(*folders, **options):
    return scan_folders(_config(*folders, **options), VIDEO)


def _mixed(folder):
    """An image, a video, an animation and a folder of images with a dot in its name, each with its caption."""
    folder.mkdir()
    save_image(folder / "a.png")
    for name, count in (("b.mp4", 9), ("c.webp", 6), ("d", 5)):
        save_clip(folder / name, count, size=(64, 64))
    (folder / "d").rename(folder / "d.e")
    for name in ("a", "b", "c", "d.e"):
        (folder / f"{name}.txt").write_text(f"caption of {name}")
    return folder


def test_images_and_clips_are_mixed(tmp_path):
    samples = _scan_clips(_mixed(tmp_path / "data"))
    assert _names(samples) == ["a.png", "b.mp4", "c.webp", "d.e"]
    assert [sample.caption for sample in samples] == [f"caption of {name}" for name in ("a", "b", "c", "d.e")]
    assert [sample.frames for sample in samples] == [(), tuple(range(9)), tuple(range(5)), tuple(range(5))]
    assert [sample.num_frames for sample in samples] == [1, 9, 5, 5]
    assert [sample.image_request().frames for sample in samples] == [sample.frames for sample in samples]
    samples = _scan_clips(tmp_path / "data", window="uniform", num_windows=2)
    batches = BatchOrder(samples, batch_size=8, seed=0).batches_of(0)
    lengths = sorted(tuple(samples[i].num_frames for i in batch.indices) for batch in batches)
    assert lengths == [(1,), (5, 5, 5), (9,)]  # c has two windows


def test_a_mask_of_a_clip_lies_beside_it(tmp_path):
    folder = _mixed(tmp_path / "data")
    for name in ("b", "d.e"):
        Image.new("L", (64, 64), 200).save(folder / f"{name}_mask.png")
    assert [bool(sample.mask_path) for sample in _scan_clips(folder)] == [False, True, False, True]
    Image.new("L", (64, 32), 200).save(folder / "b_mask.png")
    with pytest.raises(ValueError, match=r"b_mask\.png: is 64x32, but its image is 64x64"):
        _scan_clips(folder)


def test_models_of_images_refuse_clips_and_take_the_first_frame_of_an_image_that_moves(tmp_path):
    folder = _mixed(tmp_path / "data")
    with pytest.raises(ValueError, match="makes images only; save the frames") as caught:
        _scan(folder)
    assert "2 of 4 images and clips" in str(caught.value)
    assert "b.mp4: is a clip" in str(caught.value) and "d.e: is a clip" in str(caught.value)
    (folder / "b.mp4").unlink()
    (folder / "d.e.txt").unlink()
    found = [(sample.path, sample.frames) for sample in _scan(folder)]
    assert found == [(str(folder / name), ()) for name in ("a.png", "c.webp")]
    with pytest.raises(ValueError, match="this model makes images only; leave it out"):
        _scan(folder, frames=(1, 5))


def test_clips_that_cannot_be_used_are_named_all_at_once(tmp_path):
    folder = _mixed(tmp_path / "data")
    save_clip(folder / "short.mp4", 4)
    whole = save_clip(folder / "cut.mkv", 9).read_bytes()
    (folder / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.webm").touch()
    (folder / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="4 of 7 images and clips cannot be used") as caught:
        _scan_clips(folder)
    lines = str(caught.value).splitlines()[1:]
    expected = {"b.txt": "is not UTF-8", "cut.mkv": "cut off", "empty.webm": "is empty", "short.mp4": "its 4 frames"}
    for line, (name, reason) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"  {folder / name}: ") and reason in line


def test_folders_without_a_caption_beside_them_are_said_and_not_used(tmp_path, caplog):
    folder = _mixed(tmp_path / "data")
    save_clip(folder / "extra", 9)
    save_clip(folder / "a", 9)  # a.txt is the caption of a.png
    (folder / "notes").mkdir()
    assert len(_scan_clips(folder)) == 4
    (message,) = [record.getMessage() for record in caplog.records]
    assert "18 images, clips or sounds in 2 sub-folders are not read: a (9), extra (9);" in message


def test_slow_clips_hdr_and_missing_captions_are_warned_of(tmp_path, caplog):
    pytest.importorskip("av", "17", reason="older PyAV cannot write HDR files")
    folder = _mixed(tmp_path / "data")
    save_clip(folder / "slow.gif", 9, fps=10, size=(64, 64))
    save_video(folder / "b.mp4", plain_frames(9, (64, 64)), transfer=16)
    samples = _scan_clips(folder)
    assert samples[-1].frames == (0, 0, 1, 1, 2, 3, 3, 4, 5)  # 16 a second of 10 a second
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "1 of 4 clips are HDR and look washed out as they are read: b.mp4;" in third
    assert "1 of 5 images and clips have no caption file" in first and "slow.gif" in first
    assert "1 of 4 clips have fewer than 16 frames per second, so frames come twice: slow.gif" in second


def _mask_sample(path, resize, crop):
    return Sample("", "", str(path), resize, crop, crop[2:])


def test_a_mask_is_the_mean_over_what_each_cell_covers(tmp_path):
    """Against numpy: stretch every mask pixel to a block of the common multiple, cut, and average blocks."""
    values = np.random.default_rng(0).integers(0, 256, (30, 20), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "mask.png")
    resize, crop, cells = (45, 40), (5, 8, 32, 24), (8, 6)
    stretched = values.repeat(3, axis=0).repeat(4, axis=1).astype(np.float64) / 255  # 90 x 80: twice `resize`
    cut = stretched[10 : 10 + 64, 16 : 16 + 48]
    expected = cut.reshape(8, 8, 6, 8).mean(axis=(1, 3))
    mask = load_mask(_mask_sample(tmp_path / "mask.png", resize, crop), cells)
    assert mask.shape == (1, 1, 8, 6) and mask.dtype == torch.float32
    np.testing.assert_allclose(mask[0, 0].numpy(), expected, atol=1e-6)


def test_a_mask_of_which_the_crop_leaves_nothing_white_is_refused(tmp_path):
    """White at one end of a long image, of which the middle is trained."""
    save_image(tmp_path / "a.png", height=64, width=256)
    mask = np.zeros((64, 256), dtype=np.uint8)
    mask[:, :16] = 255
    Image.fromarray(mask).save(tmp_path / "a_mask.png")
    with pytest.raises(ValueError, match=r"a_mask\.png: nothing white is left after cropping .*data\.max_aspect_ratio"):
        _scan(tmp_path, max_aspect_ratio=1.0)
    mask[:, 120:136] = 1
    Image.fromarray(mask).save(tmp_path / "a_mask.png")
    assert [bool(sample.mask_path) for sample in _scan(tmp_path, max_aspect_ratio=1.0)] == [True]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "I;16"])
def test_white_is_one_and_black_is_zero_in_every_kind_of_png(tmp_path, mode):
    values = np.zeros((16, 16), dtype=np.uint8)
    values[:, 8:] = 255
    image = Image.fromarray(values.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(values).convert(mode)
    image.save(tmp_path / "mask.png")
    mask = load_mask(_mask_sample(tmp_path / "mask.png", (16, 16), (0, 0, 16, 16)), (2, 2))
    assert mask[0, 0].tolist() == [[0, 1], [0, 1]]


def _samples(counts):
    """counts: bucket side -> number of samples."""
    return [
        Sample(f"{side}-{i}", "", None, (side, side), (0, 0, side, side), (side, side))
        for side, count in counts.items()
        for i in range(count)
    ]


COUNTS = {64: 7, 128: 5, 192: 1}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("seed", [0, 7])
def test_every_sample_comes_once_per_epoch_in_batches_of_one_bucket(batch_size, seed):
    samples = _samples(COUNTS)
    order = BatchOrder(samples, batch_size=batch_size, seed=seed)
    per_epoch = sum(math.ceil(count / batch_size) for count in COUNTS.values())
    for epoch in range(4):
        batches = [order.next() for _ in range(per_epoch)]
        assert sorted(i for batch in batches for i in batch.indices) == list(range(len(samples)))
        assert all(len({samples[i].bucket for i in batch.indices}) == 1 for batch in batches)
        assert batches == order.batches_of(epoch)
        short = [len(batch.indices) for batch in batches if len(batch.indices) < batch_size]
        assert sorted(short) == sorted(count % batch_size for count in COUNTS.values() if count % batch_size)


def test_batches_ahead_are_those_to_come_in_this_epoch_and_later_ones():
    order, other = (BatchOrder(_samples({64: 3, 128: 2}), batch_size=2, seed=1, caption_dropout=0.5) for _ in range(2))
    for _ in range(2):
        order.next()
        other.next()
    ahead = [order.ahead(count) for count in range(12)]
    assert ahead == [other.next() for _ in range(12)] and order.next() == ahead[0]


def test_this_seed_gives_this_order_on_every_machine():
    """A changed order would break the resuming of runs made by earlier versions."""
    order = BatchOrder(_samples({64: 3, 128: 2}), batch_size=2, seed=1, caption_dropout=0.5)
    batches = [order.next() for _ in range(6)]
    assert [batch.indices for batch in batches] == [(3, 4), (2,), (0, 1), (1, 0), (2,), (3, 4)]
    both = (DROPPED, DROPPED)
    assert [batch.captions for batch in batches] == [(DROPPED, 0), (0,), both, both, (0,), both]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_resuming_anywhere_continues_the_same_order(batch_size):
    samples = _samples(COUNTS)

    def make():
        return BatchOrder(samples, batch_size=batch_size, seed=5, caption_dropout=0.4)

    whole, states = make(), []
    expected = []
    for _ in range(40):
        states.append(json.loads(json.dumps(whole.state_dict())))
        expected.append(whole.next())
    for position, state in enumerate(states):
        assert all(type(value) is int for value in state.values())
        resumed = make()
        resumed.next()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [resumed.next() for _ in range(40 - position)] == expected[position:]


def test_a_position_of_another_dataset_is_refused():
    order = BatchOrder(_samples({64: 4}), batch_size=2, seed=0)
    for state in ({"epoch": 0, "index": 3}, {"epoch": 0, "index": -1}, {"epoch": -1, "index": 0}):
        with pytest.raises(ValueError, match="an epoch has 2 batches"):
            order.load_state_dict(state)
    with pytest.raises(ValueError, match="no samples"):
        BatchOrder([], batch_size=2, seed=0)


def _fill(folder):
    for index in range(3):
        save_image(folder / f"{index}.png", seed=index, caption=f"caption {index}")
    Image.new("L", (64, 64), 200).save(folder / "1_mask.png")
    return folder


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    folder = _fill(tmp_path / "here")
    original = dataset_fingerprint(_scan(folder))
    assert dataset_fingerprint(_scan(_fill(tmp_path / "elsewhere"))) == original

    def changed(edit):
        copy = _fill(tmp_path / f"copy{len(list(tmp_path.iterdir()))}")
        edit(copy)
        return dataset_fingerprint(_scan(copy))

    found = [
        changed(lambda f: save_image(f / "0.png", seed=9)), changed(lambda f: (f / "0.txt").write_text("another")),
        changed(lambda f: Image.new("L", (64, 64), 100).save(f / "1_mask.png")),
        changed(lambda f: (f / "1_mask.png").unlink()), changed(lambda f: (f / "1_mask.png").rename(f / "2_mask.png")),
        changed(lambda f: (f / "2.png").unlink()), dataset_fingerprint(_scan(folder, resolutions=(128,))),
        dataset_fingerprint(_scan(folder)[::-1]), dataset_fingerprint(_scan(folder) * 2),
    ]  # fmt: skip
    assert len({original, *found}) == len(found) + 1
    without_mask = changed(lambda f: (f / "1_mask.png").unlink())
    assert dataset_fingerprint(_scan(folder, use_masks=False)) == without_mask


def test_the_fingerprint_follows_the_frames_that_are_used(tmp_path):
    folder = _mixed(tmp_path / "data")
    found = [
        dataset_fingerprint(_scan_clips(folder, **settings))
        for settings in ({}, {"frames": (5,)}, {"fps": 8, "frames": (1,)}, {"frames": (5,), "window": "centre"})
    ]
    assert len(set(found)) == len(found)
    assert dataset_fingerprint(_scan_clips(folder, fps="source")) == found[0]  # these clips have the model's rate
    files = sorted((folder / "d.e").iterdir())
    files[0].write_bytes(files[1].read_bytes())
    assert dataset_fingerprint(_scan_clips(folder)) != found[0]


def _captions(root, text, folder=None, **options):
    save_image(root / "a.png")
    if text is not None:
        (root / "a.txt").write_text(text)
    folder = FolderConfig(str(root), **(folder or {}))
    return scan_folders(DataConfig((folder,), resolutions=(64,), **options), LATENT)[0].caption


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a dog", {}, "a dog"), ("a dog", {"trigger_word": "ohwx"}, "ohwx, a dog"),
        ("a OHWX dog", {"trigger_word": "ohwx"}, "a OHWX dog"),
        ("a [trigger] dog", {"trigger_word": "ohwx"}, "a ohwx dog"), ("", {"trigger_word": "ohwx"}, "ohwx"),
        (None, {"trigger_word": "ohwx"}, "ohwx"),
        ("a dog", {"trigger_word": "ohwx", "caption_template": "art of {trigger}, {caption}"}, "art of ohwx, a dog"),
        ("", {"trigger_word": "ohwx", "caption_template": "photo of {trigger}, {caption}"}, "photo of ohwx"),
        ("a {trigger}", {"trigger_word": "ohwx", "caption_template": "{caption} {trigger}"}, "a {trigger} ohwx"),
        ("a dog", {"trigger_word": "ohwx", "folder": {"regularisation": True}}, "a dog"),
        ("a [trigger] dog", {"trigger_word": "ohwx", "folder": {"regularisation": True}}, "a  dog"),
        (None, {"folder": {"caption": "a photo of a dog"}}, "a photo of a dog"),
        ("mine", {"folder": {"caption": "a photo of a dog"}}, "mine"),
        ("a dog", {"caption_template": "x {caption}", "folder": {"caption_template": "y {caption}"}}, "y a dog"),
    ],
)  # fmt: skip
def test_captions_are_made_as_dataset_and_folder_say(tmp_path, caplog, text, options, expected):
    assert _captions(tmp_path, text, **options) == expected
    assert ("no caption file" in caplog.text) == (text is None and "caption" not in options.get("folder", {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"caption_template": "{trigger}"}, "there is no trigger_word"),
        ({"caption_template": "{captoin}"}, "no other braces"),
        ({"trigger_word": "a", "folder": {"regularisation": True, "caption_template": "{trigger}"}}, "do not get"),
    ],
)
def test_templates_that_would_stay_as_they_are_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        _captions(tmp_path, "a dog", **options)


def test_a_folder_has_its_own_sizes_repeats_and_weight(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        save_image(folder / "a.png", 200, 200)
    save_image(one / "b.png", 200, 200)
    own = FolderConfig(str(two), resolutions=(128, 96), loss_weight=0.5, repeats=3)
    config = DataConfig((FolderConfig(str(one)), own), resolutions=(64, 80))
    found = [(each.bucket[0], each.loss_weight) for each in scan_folders(config, LATENT)]
    assert found == [(64, 1.0), (80, 1.0)] * 2 + [(128, 0.5)] * 3 + [(96, 0.5)] * 3
    assert config.largest_resolution == 128
    lighter = dataclasses.replace(config, folders=(config.folders[0], FolderConfig(str(two), resolutions=(128, 96))))
    assert lighter.largest_resolution == 128
    weights = [scan_folders(each, LATENT) for each in (config, lighter)]
    assert dataset_fingerprint(weights[0]) != dataset_fingerprint(weights[1])
