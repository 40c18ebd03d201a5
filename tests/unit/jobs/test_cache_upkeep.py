"""`devicebridge cache` on whole jobs: what is computed, read, deleted, and said where something is wrong."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
from devicebridge.cli.main import main
from devicebridge.config.job import save_job
from devicebridge.encoding.store import CacheStore
from devicebridge.encoding.text_encoder import TextEncoder
from devicebridge.tests.tiny_pipeline import make_tiny_job
from PIL import Image

NUM_TEXTS, NUM_IMAGES = 6, 7  # of the tiny job: five captions and the empty one; those held out repeat two captions


@pytest.fixture
def job(tmp_path):
    return _save_job(tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """Texts and images that went through an encoder."""
    found = {"text": [], "image": 0}
    encode_batch, encode = TextEncoder.encode_batch, diffusers.AutoencoderKLFlux2.encode

    def count_texts(encoder, texts):
        found["text"] += texts
        return encode_batch(encoder, texts)

    def count_images(vae, pixels, *args, **kwargs):
        found["image"] += len(pixels)
        return encode(vae, pixels, *args, **kwargs)

    monkeypatch.setattr(TextEncoder, "encode_batch", count_texts)
    monkeypatch.setattr(diffusers.AutoencoderKLFlux2, "encode", count_images)
    return found


def _save_job(folder, name="job", **sections):
    save_job(make_tiny_job(folder, **sections), folder / f"{name}.toml")
    return str(folder / f"{name}.toml")


def _counts(calls):
    found = len(calls["text"]), calls["image"]
    calls["text"], calls["image"] = [], 0
    return found


def _entries(folder):
    return {path.name: path.read_bytes() for path in (folder / "cache").rglob("*.safetensors")}


def _temporary_files(folder):
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".lock"))]


def test_verify_counts_and_names_what_is_missing_or_damaged_and_the_next_run_mends_it(job, tmp_path, calls, capsys):
    assert main(["cache", job, "--verify"]) == 1
    out = capsys.readouterr().out
    assert "captions: 0 entries whole, 6 missing, 0 damaged" in out and "missing: caption 'picture 3'" in out
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run").exists(), "reading writes nothing"
    assert main(["cache", job]) == 0 and main(["cache", job, "--verify"]) == 0
    assert _counts(calls) == (NUM_TEXTS, NUM_IMAGES)
    before = _entries(tmp_path)
    torn, flipped, gone = list(CacheStore(tmp_path / "cache").folder.rglob("*.safetensors"))[:3]
    torn.write_bytes(before[torn.name][:-1])
    flipped.write_bytes(before[flipped.name][:-1] + bytes([before[flipped.name][-1] ^ 1]))
    gone.unlink()
    capsys.readouterr()
    assert main(["cache", job, "--verify"]) == 1
    out = capsys.readouterr().out
    assert sum(map(int, re.findall(r"(\d+) damaged", out))) == 2 and str(torn) in out and str(flipped) in out
    assert sum(map(int, re.findall(r"(\d+) missing", out))) == 1 and "computes what is missing or damaged" in out
    assert main(["cache", job]) == 0 and sum(_counts(calls)) == 3
    assert main(["cache", job, "--verify"]) == 0 and _entries(tmp_path) == before


def test_only_one_part(job, calls, capsys):
    assert main(["cache", job, "--only", "latents"]) == 0 and _counts(calls) == (0, NUM_IMAGES)
    assert main(["cache", job, "--verify", "--only", "latents"]) == 0
    assert main(["cache", job, "--verify"]) == 1
    assert main(["cache", job, "--only", "captions"]) == 0 and _counts(calls) == (NUM_TEXTS, 0)
    assert "captions 6/6" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGINT", *(pytest.param(e, marks=pytest.mark.long) for e in ("SIGTERM", "SIGHUP"))])
def test_a_signal_to_stop_keeps_what_is_done(job, calls, capsys, monkeypatch, name):
    count_and_encode = TextEncoder.encode_batch

    def interrupt_the_third(encoder, texts):
        if len(calls["text"]) == 2:
            signal.raise_signal(getattr(signal, name))
        return count_and_encode(encoder, texts)

    monkeypatch.setattr(TextEncoder, "encode_batch", interrupt_the_third)
    assert main(["cache", job]) == 130 and _counts(calls) == (3, 0)
    assert "stopped after 3 of 6 captions; these are kept" in capsys.readouterr().out
    monkeypatch.setattr(TextEncoder, "encode_batch", count_and_encode)
    assert main(["cache", job]) == 0 and _counts(calls) == (NUM_TEXTS - 3, NUM_IMAGES)


def test_prune_deletes_what_none_of_the_jobs_needs_and_says_how_much(job, tmp_path, capsys):
    main(["cache", job])
    ours = _entries(tmp_path)
    other = _save_job(tmp_path, "other", data={"resolutions": [48]})
    main(["cache", other])
    (tmp_path / "cache" / "quantized").mkdir()
    strangers = [tmp_path / "cache" / "quantized" / "weights.safetensors", tmp_path / "cache" / "ab.txt"]
    for stranger in strangers:
        stranger.write_text("not a cache entry")
    theirs = _entries(tmp_path).keys() - ours.keys() - {"weights.safetensors"}
    theirs_bytes = sum(len(_entries(tmp_path)[name]) for name in theirs)
    store = CacheStore(tmp_path / "cache")
    killed = store.path(next(iter(ours)).removesuffix(".safetensors"))
    (killed.parent / f".{killed.name}.{'0' * 32}.tmp").write_text("what a killed process left")
    store.claims_folder.mkdir(exist_ok=True)
    (store.claims_folder / f"{killed.stem}.lock").touch()
    capsys.readouterr()
    assert main(["cache", job, other, "--prune"]) == 0
    assert "0 entries deleted, 0 bytes" in capsys.readouterr().out and not _temporary_files(tmp_path)
    assert theirs and main(["cache", job, "--prune"]) == 0
    assert f"{len(theirs)} entries deleted, {theirs_bytes} bytes (0.00 GB); 13 entries" in capsys.readouterr().out
    assert _entries(tmp_path).keys() - {"weights.safetensors"} == ours.keys()
    assert all(stranger.exists() for stranger in strangers)
    assert main(["cache", job, "--verify"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--prune", "--only", "latents"], "leave out --only"), (["--verify", "--device", "cpu"], "--device is for")],
)
def test_options_that_contradict_are_refused(job, capsys, options, message):
    assert main(["cache", job, *options]) == 2 and message in capsys.readouterr().err


def test_a_device_may_be_named_for_one_process(job, tmp_path, calls, capsys):
    assert main(["cache", job, "--device", "cuda:7"]) == 2 and "cuda:7" in capsys.readouterr().err
    assert main(["cache", job, "--device", "cpu"]) == 0 and _counts(calls) == (NUM_TEXTS, NUM_IMAGES)
    assert main(["cache", job]) == 0 and _counts(calls) == (0, 0)


def test_an_edited_caption_or_image_is_one_entry_and_a_renamed_file_none(job, tmp_path, calls):
    main(["cache", job])
    _counts(calls)
    data = tmp_path / "data"
    (data / "image_3.txt").write_text("another picture")
    assert main(["cache", job]) == 0
    assert calls["text"] == ["another picture"] and _counts(calls) == (1, 0)
    for end in ("png", "txt"):
        (data / f"image_1.{end}").rename(data / f"renamed.{end}")
    data.rename(tmp_path / "data2")
    moved = _save_job(tmp_path, "moved", data={"folders": [{"path": str(tmp_path / "data2")}], "resolutions": [32]})
    shutil.move(tmp_path / "model", tmp_path / "model2")
    text = Path(moved).read_text(encoding="utf-8").replace(str(tmp_path / "model"), str(tmp_path / "model2"))
    Path(moved).write_text(text, encoding="utf-8")
    assert main(["cache", moved]) == 0 and _counts(calls) == (0, 0)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "data2" / "renamed.png")
    assert main(["cache", moved]) == 0 and _counts(calls) == (0, 1)


def test_an_empty_caption_file_is_named_and_all_is_computed(job, tmp_path, caplog, calls):
    (tmp_path / "data" / "image_2.txt").write_bytes(b"")
    assert main(["cache", job]) == 0 and _counts(calls) == (NUM_TEXTS - 1, NUM_IMAGES)
    assert "1 of 5 caption files are empty" in caplog.text and str(tmp_path / "data" / "image_2.txt") in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no read-only folders")
def test_a_read_only_cache_is_named_where_something_is_missing_and_else_works(job, tmp_path, capsys, calls):
    main(["cache", job])
    _counts(calls)
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:  # whom permissions do not keep from writing
            mount = ["mount", "--bind", "-o", "ro", *[str(tmp_path / "cache")] * 2]
            if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
                pytest.skip("needs the right to mount a file system")
            stack.callback(subprocess.run, ["umount", mount[-1]], check=True)
        else:
            for folder in (tmp_path / "cache", *(tmp_path / "cache").glob("*/")):
                stack.callback(folder.chmod, folder.stat().st_mode)
                folder.chmod(0o555)
        assert main(["cache", job]) == 0 and main(["cache", job, "--verify"]) == 0 and _counts(calls) == (0, 0)
        (tmp_path / "data" / "image_3.txt").write_text("another picture")
        assert main(["cache", job]) == 2 and _counts(calls) == (0, 0)
        error = capsys.readouterr().err
        assert f"{tmp_path}/cache/" in error and "cannot be written" in error and "make its folder writable" in error
        assert "is kept" in error
        assert main(["cache", job, "--prune"]) == 2 and "cannot be written" in capsys.readouterr().err
    assert len(_entries(tmp_path)) == NUM_TEXTS + NUM_IMAGES
