"""The cache of quantized weights: the same bits as rounding again, and no way to make it cost a run."""

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from devicebridge.checkpoints import load, quantized_cache, weight_file
from devicebridge.checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from devicebridge.checkpoints.load import load_through_cache, load_transformer
from devicebridge.checkpoints.quantized_cache import open_cached
from devicebridge.quantization.quantize import SCHEMES, QuantizeSettings, is_wanted
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.tests.weight_files import assert_same_model, cpu

BF16 = torch.bfloat16
INT8 = QuantizeSettings("int8-compute", rotation=64)


def _checkpoint(folder: Path, name: str = "wan", seed: int = 0) -> CheckpointInfo:
    TINY[name].make_model(seed).to(BF16).save_pretrained(folder / "model", max_shard_size="300KB")
    return read_checkpoint(folder / "model")


def _load(folder: Path | None, info: CheckpointInfo, settings: QuantizeSettings = INT8) -> torch.nn.Module:
    return load_through_cache(folder, info, cpu, BF16, settings)


def _forget_weights(info: CheckpointInfo, wanted: set[str]) -> None:
    """Overwrite the checkpoint's weights of these layers: whoever reads them afterwards is found out."""
    for name in wanted:
        record = info.tensors[f"{name}.weight"]
        header = json.loads(_header(record.file))
        start, end = header[record.key]["data_offsets"]
        with open(record.file, "r+b") as stream:
            stream.seek(8 + len(_header(record.file)) + start)
            stream.write(b"\xff" * (end - start))


def _header(file: Path) -> bytes:
    with open(file, "rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in folder.rglob("*")}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", TINY)
def test_the_cached_model_is_the_freshly_quantized_one(name, scheme, tmp_path):
    info, folder, settings = _checkpoint(tmp_path, name), tmp_path / "cache", QuantizeSettings(scheme, rotation=64)
    expected = load_transformer(info, cpu, BF16)  # a layer may lie in two of its files
    apply_quantization(expected, info.family, settings)
    assert open_cached(folder, info, settings, BF16) is None
    assert_same_model(_load(folder, info, settings), expected)
    (entry,) = _entries(folder)
    before = _state(folder)
    cached = open_cached(folder, info, settings, BF16)
    assert cached is not None
    layers = {n for n, m in expected.named_modules() if is_wanted(m, n, info.family, settings)}
    assert {n for n, r in cached.tensors.items() if r.file == entry} == {f"{n}.weight" for n in layers}
    assert safetensors.torch.load_file(entry).keys() >= {f"{n}.weight_scale" for n in layers}
    blocks = {0 if (turn := expected.get_submodule(n).rotation) is None else len(turn) for n in layers}
    assert (blocks > {0} or blocks == {64} or 16 in blocks) if scheme == "int8-compute" else blocks == {0}
    _forget_weights(info, layers)
    model = load_transformer(cached, cpu, BF16, settings)
    assert_same_model(model, expected)
    assert _state(folder) == before


def test_another_model_scheme_rotation_dtype_or_pattern_misses(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    info = _checkpoint(tmp_path)
    _load(folder, info)
    assert open_cached(folder, info, INT8, BF16) is not None
    assert open_cached(folder, _checkpoint(tmp_path / "other", seed=1), INT8, BF16) is None
    assert open_cached(folder, info, QuantizeSettings("int8-compute", 16), BF16) is None
    assert open_cached(folder, info, QuantizeSettings("int8"), BF16) is None
    assert open_cached(folder, info, INT8, torch.float16) is None
    kept = dataclasses.replace(info.family, keep_full_precision=(*info.family.keep_full_precision, "*.ffn.*"))
    assert open_cached(folder, dataclasses.replace(info, family=kept), INT8, BF16) is None
    swapped = dict(info.tensors)
    name = "blocks.0.ffn.net.0.proj.weight"
    swapped[name] = swapped[name].swapped()  # our own table of names changed
    assert open_cached(folder, dataclasses.replace(info, tensors=swapped), INT8, BF16) is None


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8-compute"])
def test_what_torchao_has_rounded_is_rounded_again(scheme: Any, tmp_path: Path) -> None:
    info, settings, own = _checkpoint(tmp_path), QuantizeSettings(scheme), quantized_cache.settings_fingerprint
    with pytest.MonkeyPatch.context() as patched:  # as entries were while torchao rounded fp8 and int8
        patched.setattr(quantized_cache, "settings_fingerprint", lambda values: own({**values, "version": 1}))
        _load(tmp_path / "cache", info, settings)
    found = open_cached(tmp_path / "cache", info, settings, BF16)
    assert (found is None) == (scheme in ("fp8", "int8"))


def test_a_moved_checkpoint_and_a_rotation_that_does_nothing_hit(tmp_path: Path) -> None:
    folder, fp8 = tmp_path / "cache", QuantizeSettings("fp8-compute", rotation=64)
    info = _checkpoint(tmp_path)
    expected = _load(folder, info, fp8)
    assert open_cached(folder, info, QuantizeSettings("fp8-compute", rotation=0), BF16) is not None
    (tmp_path / "model").rename(tmp_path / "moved")
    moved = read_checkpoint(tmp_path / "moved")
    before = _state(folder)
    assert_same_model(_load(folder, moved, fp8), expected)
    assert _state(folder) == before


def test_a_checkpoint_in_8_bits_is_not_copied(tiny_variants, tmp_path, caplog):
    """What the scheme takes as it is stays where it is; only layers rounded here are kept."""
    tensors = {n: t.to(torch.float8_e4m3fn) for n, t in TINY["flux2"].make_model().state_dict().items()}
    file, folder = tmp_path / "model.safetensors", tmp_path / "cache"
    safetensors.torch.save_file(tensors, file)
    info = read_checkpoint(file)
    _load(folder, info, QuantizeSettings("fp8"))
    assert _entries(folder) == [] and _warnings(caplog) == []
    expected = _load(folder, info, INT8)
    assert len(_entries(folder)) == 1
    assert_same_model(_load(folder, info, INT8), expected)


def _edit(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda entry: entry.write_bytes(change(entry.read_bytes()))


def _spoil_scales(entry: Path) -> None:
    header = json.loads(_header(entry))
    start = 8 + len(_header(entry)) + header["blocks.0.ffn.net.0.proj.weight_scale"]["data_offsets"][0]
    _edit(lambda data: data[:start] + b"\xff\xff\xff\xff" + data[start + 4 :])(entry)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "foreign key": _edit(lambda data: data.replace(b'"key":"', b'"key":"0')),
    "layers that are not there": _edit(lambda data: data.replace(b'"blocks.0.ffn', b'"blocks.9.ffn')),
    "no scale": _edit(lambda data: data.replace(b"to_q.weight_scale", b"to_q.weight_scalf", 1)),
    "cut short": _edit(lambda data: data[:-5]),
    "longer": _edit(lambda data: data + b"x"),
    "header changed": _edit(lambda data: data.replace(b'"I8"', b'"U8"', 1)),
    "shape changed": _edit(lambda data: re.sub(rb'("shape":)\[(\d+),(?!\2\])(\d\d+)\]', rb"\1[\3,\2]", data, count=1)),
    "header length": _edit(lambda data: b"\xff" * 8 + data[8:]),
    "scales spoiled": _spoil_scales,
    "empty": _edit(lambda data: b""),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_made_again(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    expected = _load(folder, info)
    (entry,) = _entries(folder)
    good = entry.read_bytes()
    DAMAGE[kind](entry)
    assert entry.read_bytes() != good
    assert_same_model(_load(folder, info), expected)
    (said,) = _warnings(caplog)
    assert f"{entry} is damaged and its weights are rounded again" in said
    assert _entries(folder) == [entry] and entry.read_bytes() == good


def test_an_entry_that_is_deleted_while_it_is_opened(tmp_path, monkeypatch, caplog):
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    expected = _load(folder, info)
    (entry,) = _entries(folder)
    find = quantized_cache.open_cached

    def open_and_lose(*args: Any) -> CheckpointInfo | None:
        found = find(*args)
        entry.unlink()
        return found

    monkeypatch.setattr(load, "open_cached", open_and_lose)
    assert_same_model(_load(folder, info), expected)
    assert "cannot be read and are rounded again" in caplog.text and _entries(folder) == [entry]


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed runs have left is removed, that of runs which may live is not, nor what somebody else has there."""
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    seen: list[Path] = []

    def interrupt() -> None:
        seen.extend(_entries(folder))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(weight_file, "alive", interrupt)
        _load(folder, info)
    assert len(seen) == 1 and seen[0].name.startswith(".") and _entries(folder) == []
    other, earlier = folder / ".notes.tmp", folder / seen[0].name.replace(".safetensors", "")  # of an earlier version
    for age, left in ((0, {seen[0], other, earlier}), (7200, {other})):
        earlier.mkdir(exist_ok=True)
        for path in (seen[0], other, earlier / "weights-00001.safetensors", earlier):
            assert path.is_dir() or path.write_bytes(b"half") == 4
            os.utime(path, (time.time() - age,) * 2)
        _load(folder, info)
        (entry,) = {*_entries(folder)} - left
        entry.unlink()


def test_an_entry_of_several_files_as_earlier_versions_kept_it_makes_room(tmp_path, monkeypatch):
    """Before it is asked how much there is: two may not fit."""
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    _load(folder, info)
    (entry,) = _entries(folder)
    entry.unlink()
    entry.with_suffix("").mkdir()
    (entry.with_suffix("") / "index.json").write_text("{}")
    seen, measured = [], shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: seen.append(_entries(folder)) or measured(path))
    _load(folder, info)
    assert seen == [[]] and _entries(folder) == [entry]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "cache" in r.name]


@pytest.mark.parametrize("failing", ["room", "write", "replace", "folder"])
def test_a_disk_that_refuses_costs_one_line(failing, tmp_path, caplog, monkeypatch):
    info, folder, calls = _checkpoint(tmp_path), tmp_path / "cache", []
    expected = _load(None, info)

    def fail(*args: Any) -> None:
        calls.append(args)
        if failing == "replace" or len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    said = "No space left on device"
    if failing == "room":  # known before anything is written
        usage = type(shutil.disk_usage("/"))
        layers: list[Any] = [m for n, m in expected.named_modules() if is_wanted(m, n, info.family, INT8)]
        room = sum(each.weight.nbytes + each.scale.nbytes for each in layers) - 1000
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - room, room))
        monkeypatch.setattr(weight_file, "alive", fail)
        said = f"{folder} has 1000 bytes"
    elif failing == "folder":
        folder.write_bytes(b"a file")
        folder, said = folder / "below", "not kept"
    else:
        monkeypatch.setattr(*((weight_file, "alive") if failing == "write" else (os, "replace")), fail)
    assert_same_model(_load(folder, info), expected)
    assert _entries(folder) == [] and len(calls) == {"write": 3, "replace": 1}.get(failing, 0)
    (warning,) = _warnings(caplog)
    assert said in warning and str(folder) in warning


def test_two_runs_that_write_the_same_leave_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    others = iter([lambda: _load(folder, info)])  # a second run, while the first one writes
    monkeypatch.setattr(weight_file, "alive", lambda: next(others, lambda: None)())
    _load(folder, info)
    assert open_cached(folder, info, INT8, BF16) is not None
    assert len(_entries(folder)) == 1
