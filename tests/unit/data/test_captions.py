"""Captions from files of other trainers, several of an image, and tags in changing order: each against the other
trainer's published reader or formula, written anew here."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devicebridge.config.job import DataConfig, FolderConfig
from devicebridge.data import captions
from devicebridge.data.caption_files import look_at, without_caption
from devicebridge.data.captions import make_captions, vary_tags
from devicebridge.data.folders import scan_folders
from devicebridge.data.samples import DROPPED, BatchOrder, Sample, as_evaluated, dataset_fingerprint, describe_samples
from devicebridge.families.spec import LatentSpec
from devicebridge.tests.clips import plain_frames, save_image, save_sequence
from PIL import Image

LATENT = LatentSpec(channels=4, spatial_stride=8, size_multiple=16)
VIDEO = LatentSpec(channels=4, spatial_stride=8, size_multiple=16, frame_stride=4, fps=16, frame_lengths=(1, 5))


def _save(*paths: Path) -> None:
    for path in paths:
        save_image(path)


def _scan(folder: Path, latent: LatentSpec = LATENT, of_folder: dict[str, Any] | None = None, **options: Any):
    config = DataConfig((FolderConfig(str(folder), **(of_folder or {})),), resolutions=(64,), **options)
    return scan_folders(config, latent)


def _captions(samples: list[Sample], root: Path) -> dict[str, tuple[str, ...]]:
    return {Path(each.path).relative_to(root).as_posix(): each.captions for each in samples}


# ---- files of other trainers, with the captions that their own code reads


def _lines(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


FORMS: dict[str, tuple[str, Any, tuple[Any, Any]]] = {  # trainer -> file, rows, captions of a.png and b.png
    "Hugging Face datasets": (
        "metadata.jsonl", lambda root: [{"file_name": f"{n}.png", "text": f"{n}\u2028é"} for n in "ab"],
        ("a\u2028é", "b\u2028é"),
    ),
    "musubi": (
        "images.jsonl", lambda root: [{"image_path": str(root / f"{n}.png"), "caption": f"the {n}"} for n in "ba"],
        ("the a", "the b"),
    ),
    "kohya": (  # sd-scripts, FineTuningDataset: names without an ending; the caption, a separator, then the tags
        "meta_lat.json",
        lambda root: {
            "a": {"caption": "a photo", "tags": "1girl, solo", "train_resolution": [64, 64]}, "b": {"tags": "1boy"},
        },
        ("a photo,1girl, solo", "1boy"),
    ),
    "AI Toolkit": (
        "dataset.json", lambda root: {str(root / f"{n}.png"): {"caption": n * 2, "caption_short": n} for n in "ab"},
        ("aa", "bb"),
    ),
    "diffusion-pipe": (
        "captions.json", lambda root: {"a.png": ["one", "two", "three"], "b.png": ["four"]},
        (["one", "two", "three"], "four"),
    ),
    "LTX": ("dataset.json", lambda root: [{"caption": n, "media_path": f"{n}.png"} for n in "ab"], ("a", "b")),
}  # fmt: skip


@pytest.mark.parametrize("trainer", FORMS)
def test_each_trainers_file_gives_the_captions_that_it_reads(trainer: str, tmp_path: Path, caplog) -> None:
    _save(tmp_path / "a.png", tmp_path / "b.png")
    name, make, captions_of = FORMS[trainer]
    rows = make(tmp_path)
    (tmp_path / name).write_text(_lines(*rows) if name.endswith("l") else json.dumps(rows), encoding="utf-8")
    samples = _scan(tmp_path)
    for sample, expected in zip(samples, captions_of, strict=True):
        expected = [expected] if isinstance(expected, str) else expected
        assert [re.sub(r",\s*", ",", each) for each in sample.captions] == [re.sub(r",\s*", ",", e) for e in expected]
    assert f"2 from {name}" in describe_samples(samples) and not caplog.messages


def test_a_caption_file_counts_over_json_and_all_is_counted(tmp_path: Path, caplog) -> None:
    _save(*(tmp_path / f"{name}.png" for name in "abcde"))
    (tmp_path / "a.txt").write_text("of txt")
    (tmp_path / "b.caption").write_text("of caption")
    (tmp_path / "c.json").write_text('{"caption": "of its own json", "width": 64}')
    rows = [{"file_name": f"{name}.png", "text": f"of jsonl, {name}"} for name in ("a", "d", "gone")]
    (tmp_path / "metadata.jsonl").write_text(_lines(*rows))
    (tmp_path / "settings.json").write_text('{"lr": 1e-4, "name": "a"}')
    samples = _scan(tmp_path)
    texts = ("of txt", "of caption", "of its own json", "of jsonl, d", "")
    assert _captions(samples, tmp_path) == {f"{name}.png": (text,) for name, text in zip("abcde", texts, strict=True)}
    sources = re.findall(r"1 from ([\w. ]+)", describe_samples(samples))
    assert sources == [".txt", ".caption", ".json", "metadata.jsonl", "no file"]
    said = [text for text in caplog.messages if text[0] == "1"]
    assert [any(name in text for text in said) for name in ("'gone.png'", ": a.png", ": e.png")] == [True] * 3
    assert any("are not read: 1 of .json (settings.json)" in text for text in caplog.messages)


def test_json_beside_caption_files_alone_is_not_looked_at(tmp_path: Path, caplog) -> None:
    _save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "metadata.jsonl").write_text("{broken")
    assert _scan(tmp_path)[0].caption == "words" and "1 of .jsonl (metadata.jsonl)" in caplog.text


WRONG = {  # name -> file, content, the line that is wrong, and what else is named
    "no JSON": ("m.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": \n', 2, ""),
    "no JSON in an object": ("m.json", '{"a.png": "x",\n "b.png": }', 2, ""),
    "no file": ("m.jsonl", '{"file_name": "a.png", "text": "x"}\n\n{"text": "y"}', 3, "file_name"),
    "out by dots": ("m.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": "../b.png", "text": ""}', 2, "../b"),
    "out by a root": ("m.json", '{"a.png": "x",\n"/etc/passwd": "y"}', 2, "/etc/passwd"),
    "out by backslashes": ("m.json", '{"a.png": "x",\n\n"..\\\\b.png": "y"}', 3, "b.png"),
    "twice": ("m.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": "./a.png", "text": "y"}', 2, "line 1"),
    "twice in an object": ("m.json", '{"a.png": "x",\n"a.png": "y"}', 0, "a.png"),
    "a number": ("m.json", '{"a.png": "x",\n"b.png": 3}', 2, "a number"),
    "a number among several": ("m.json", '{"a.png": ["x"],\n"b.png": ["y", null]}', 2, "null"),
    "two that differ": ("m.jsonl", '{"file_name": "a.png", "text": "x", "caption": "y"}', 1, "caption"),
    "tags of another kind": ("m.json", '{"a":\n {"tags": {"1girl": 0.9}}}', 1, "an object"),
    "half a character": ("m.json", '{"a.png":\n "\\ud83d"}', 1, "surrogate"),
    "too many": ("m.json", json.dumps({"a.png": ["x"] * 101}), 1, "100"),
    "two images": ("m.json", '{"b.png": "x",\n "b": "y"}', 2, "b.webp"),
    "deep": ("m.json", "[" * 100_000, 0, ""),
    "too large": ("m.json", '{"a.png": "' + "x" * 5000 + '"}', 0, "5013 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_is_named_with_its_line(case: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(captions, "_MOST_TABLE_BYTES", 5000 if case == "too large" else 1_000_000)
    name, content, line, also = WRONG[case]
    _save(tmp_path / "in" / "a.png", tmp_path / "in" / "b.png", tmp_path / "b.png")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "in" / "b.webp")
    (tmp_path / "in" / name).write_text(content)
    with pytest.raises(ValueError) as raised:
        _scan(tmp_path / "in")
    assert name in str(raised.value) and also in str(raised.value)
    assert not line or f"line {line}" in str(raised.value)


def test_two_files_that_name_one_image_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "a.png")
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text('{"a": "x"}')
    with pytest.raises(ValueError, match=r"two\.json, line 1.*one\.json, line 1"):
        _scan(tmp_path)


def test_clips_and_folders_of_frames_have_captions_in_json_too(tmp_path: Path) -> None:
    save_sequence(tmp_path / "walk", plain_frames(5, (64, 64)))
    (tmp_path / "walk.txt").write_text("walking")
    _save(tmp_path / "still.png")
    (tmp_path / "captions.json").write_text('{"still.png": ["a still", "not moving"]}')
    found = _captions(_scan(tmp_path, VIDEO), tmp_path)
    assert found == {"still.png": ("a still", "not moving"), "walk": ("walking",)}


# ---- several captions, lines, tags


def test_one_caption_is_drawn_per_epoch_and_each_as_often() -> None:
    cut = (None, (64, 64), (0, 0, 64, 64), (64, 64))
    samples = [Sample(f"{n}.png", "t0", *cut, others=tuple(f"t{k}" for k in range(1, 1 + n % 4))) for n in range(40)]

    order = BatchOrder(samples, batch_size=3, seed=5, caption_dropout=0.25)
    counts: dict[int, Counter[int]] = {size: Counter() for size in range(1, 5)}
    for epoch in range(200):
        batches = order.batches_of(epoch)
        for batch in batches:
            for index, caption in zip(batch.indices, batch.captions, strict=True):
                counts[1 + index % 4][caption] += 1
    for size, found in counts.items():
        assert found.keys() == {DROPPED, *range(size)}
        shares = np.array([found[each] / 2000 for each in (DROPPED, *range(size))])
        assert np.abs(shares - [0.25, *[0.75 / size] * size]).max() < 6 * np.sqrt(0.25 / 2000)


def _kohya_splits(text: str, keep_tokens: int) -> tuple[list[str], list[str], list[str]]:
    """sd-scripts, process_caption: what is fixed, what is shuffled and dropped, and what is fixed behind it."""
    if "|||" in text:
        fixed, flex = text.split("|||", 1)
        flex, _, suffix = flex.partition("|||")
        return tuple([t.strip() for t in part.split(",") if t.strip()] for part in (fixed, flex, suffix))
    tokens = [t.strip() for t in text.strip().split(",")]
    return tokens[:keep_tokens], tokens[keep_tokens:], []


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("text", ["a, b, c,d , e", "a, b ||| c, d, e ||| y, z", "head ||| p, q, r", "only"])
@pytest.mark.parametrize(("shuffle", "dropout"), [(True, 0.0), (False, 0.3), (True, 0.3)])
def test_tags_are_shuffled_and_dropped_as_kohya_does(keep: int, text: str, shuffle: bool, dropout: float) -> None:
    config = DataConfig((FolderConfig("-"),), shuffle_tags=shuffle, keep_tags=keep, tag_dropout=dropout)
    head, flex, tail = _kohya_splits(text, keep)
    orders: Counter[tuple[str, ...]] = Counter()
    kept = Counter()
    for draw in range(1500):
        tags = vary_tags(text, config, draw).split(", ")
        middle = tags[len(head) : len(tags) - len(tail)] if tags != [""] else []
        assert tags[: len(head)] == head and tags[len(tags) - len(tail) :] == tail
        assert len(set(middle)) == len(middle) and set(middle) <= set(flex)
        assert shuffle or middle == [tag for tag in flex if tag in middle]
        orders[tuple(middle)] += 1
        kept.update(middle)
    for tag in flex:
        assert abs(kept[tag] / 1500 - (1 - dropout)) < 6 * np.sqrt(0.25 / 1500)
    if shuffle and not dropout and len(flex) <= 3:
        expected = [*itertools.permutations(flex)]
        assert orders.keys() == set(expected)
        assert max(abs(orders[each] / 1500 - 1 / len(expected)) for each in expected) < 6 * np.sqrt(0.25 / 1500)


def test_variants_of_each_caption_are_as_many_and_the_trigger_word_stays(tmp_path: Path) -> None:
    _save(tmp_path / "a.png", tmp_path / "b.png")
    (tmp_path / "captions.json").write_text('{"a": ["x, y, z", "prose"], "b": "p, [trigger], q"}')
    options = {"trigger_word": "ohwx", "shuffle_tags": True, "tag_dropout": 0.5, "tag_variants": 6}
    samples = _scan(tmp_path, **options)
    first, second = samples
    assert [len(each.captions) for each in samples] == [12, 6]
    assert all("ohwx" in text for each in samples for text in each.captions)
    assert sum("prose" in text or text == "ohwx" for text in first.captions[6:]) == 6 and len(set(first.captions)) > 4
    texts = len({*first.captions, *second.captions})
    assert f"{texts} different texts, up to 12 of an image" in describe_samples(samples)
    assert _scan(tmp_path, **options) == samples
    assert dataset_fingerprint(samples) != dataset_fingerprint(as_evaluated(samples))
    assert [each.captions for each in as_evaluated(_scan(tmp_path))] == [("x, y, z",), ("p, , q",)]


@pytest.mark.parametrize("is_split", [False, True])
def test_lines_are_captions_where_that_is_asked(is_split: bool) -> None:
    config = DataConfig((FolderConfig("-"),), caption_lines=is_split)
    found = make_captions(["one\n\n  two \r\nthree", ""], config, config.folders[0])
    assert found == (("one", "two", "three") if is_split else ("one\n\n  two \r\nthree", ""))


@pytest.mark.parametrize(
    ("name", "text"), [("m.json", "[0, 0, 0]"), ("m.json", '{"a":0,"b":0,"c":0}'), ("m.jsonl", "0\n0\n0\n")]
)
def test_a_file_of_more_entries_than_a_dataset_has_files_is_refused(tmp_path: Path, monkeypatch, name, text) -> None:
    _save(tmp_path / "1.png")
    (tmp_path / name).write_text(text)
    assert len(_scan(tmp_path)) == 1
    monkeypatch.setattr(captions, "MAX_ENTRIES", 2)
    with pytest.raises(ValueError, match=f"{name}.* 2 files"):
        _scan(tmp_path)


def test_long_captions_of_others_keep_nobody_waiting(tmp_path: Path, monkeypatch) -> None:
    _save(tmp_path / "1.png")
    (tmp_path / "1.txt").write_text("a\n" * 101)
    with pytest.raises(ValueError, match=r"1\.png.* 101 .* 100 "):
        _scan(tmp_path, caption_lines=True)
    hashed: list[str] = []
    monkeypatch.setattr(captions, "uniform", lambda text: float(len(hashed.append(text) or "")))
    vary_tags("a," * 500, DataConfig((FolderConfig("-"),), shuffle_tags=True, tag_dropout=0.1), 0)
    assert len(hashed) == 1000 and max(map(len, hashed)) < 100


# ---- sub-folders


def test_sub_folders_are_concepts_and_their_numbers_repeats(tmp_path: Path, caplog) -> None:
    for name in ("10_ohwx dog/1.png", "10_ohwx dog/2.png", "cat/1.png", "2024_fox/1.png", "__MACOSX/1.png"):
        _save(tmp_path / name)
    (tmp_path / "cat" / "1.txt").write_text("a cat")
    (tmp_path / "metadata.jsonl").write_text(_lines({"file_name": "10_ohwx dog/2.png", "text": "a dog"}))
    samples = _scan(tmp_path, of_folder={"repeats": 2, "loss_weight": 0.5})
    assert Counter(Path(each.path).relative_to(tmp_path).as_posix() for each in samples) == {
        "10_ohwx dog/1.png": 20,  # sd-scripts: the number before "_", times; what stands behind it where no caption is
        "10_ohwx dog/2.png": 20,
        "2024_fox/1.png": 2,
        "cat/1.png": 2,
    }
    assert [each.caption for each in samples[::20]] == ["ohwx dog", "a dog", ""] and samples[-1].caption == "a cat"
    assert {each.loss_weight for each in samples} == {0.5} and len(as_evaluated(samples)) == 4
    assert "10_ohwx dog (2, 40 per epoch), 2024_fox (1, 2 per epoch)" in describe_samples(samples)
    alike = [replace(samples[0], path=str(tmp_path / name)) for name in ("a/x/1.png", "a/x/2.png", "b/x/1.png")]
    named = f"{tmp_path / 'a' / 'x'} (2, 2 per epoch), {tmp_path / 'b' / 'x'} (1, 1 per epoch)"
    assert named in describe_samples(alike)


@pytest.mark.parametrize(
    ("name", "options"),
    [("masks", {}), ("Control", {}), ("0_cat", {}), ("999_cat", {"repeats": 11}), ("cat", {"references": ("-",)})],
)
def test_sub_folders_that_may_be_no_concepts_are_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    _save(tmp_path / "images" / "1.png", tmp_path / name / "1.png")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        _scan(tmp_path, of_folder=options, condition="reference" if "references" in options else "")


def test_captioning_sees_json_and_sub_folders(tmp_path: Path) -> None:
    _save(tmp_path / "cat" / "1.png", tmp_path / "cat" / "2.png", tmp_path / "dog" / "1.png")
    (tmp_path / "metadata.jsonl").write_text(_lines({"file_name": "cat/1.png", "text": "a cat"}))
    config = DataConfig((FolderConfig(str(tmp_path)),), resolutions=(64,))
    assert without_caption(config) == [tmp_path / "cat" / "2.png", tmp_path / "dog" / "1.png"]
    (tmp_path / "cat" / "captions.json").write_text('{"2": ["two", "deux"]}')
    (found,) = [each for each in look_at(DataConfig((FolderConfig(str(tmp_path / "cat")),), resolutions=(64,)))][1:]
    assert (found.caption, found.trained_as) == ("two", "two\ndeux")
    with pytest.raises(ValueError, match="cat, dog"):
        list(look_at(config))
