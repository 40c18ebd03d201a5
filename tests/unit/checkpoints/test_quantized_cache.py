"""The cache of quantized weights: the same bits as rounding again, and no way to make it cost a run."""

import contextlib
import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from devicebridge.checkpoints import load, quantized_cache
from devicebridge.checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from devicebridge.checkpoints.load import load_through_cache, load_transformer
from devicebridge.checkpoints.quantized_cache import QuantizedWriter, open_cached
from devicebridge.families.registry import FAMILIES
from devicebridge.quantization.quantize import SCHEMES, Quantizer, QuantizeSettings
from devicebridge.tests.quantized import plain_parts
from devicebridge.tests.toy import TINY

BF16 = torch.bfloat16
INT8 = QuantizeSettings("int8-compute", rotation=64)


def _on_cpu(_: str) -> torch.device:
    return torch.device("cpu")


def _checkpoint(folder: Path, name: str = "wan", seed: int = 0) -> CheckpointInfo:
    TINY[name].make_model(seed).to(BF16).save_pretrained(folder / "model", max_shard_size="300KB")
    return read_checkpoint(folder / "model")


def _load(folder: Path | None, info: CheckpointInfo, settings: QuantizeSettings = INT8) -> torch.nn.Module:
    quantizer = Quantizer(info.family, settings)
    model = load_through_cache(folder, info, _on_cpu, BF16, quantizer)
    quantizer.close(model)
    return model


def _assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    modules = dict(found.named_modules())
    assert {n: type(m) for n, m in expected.named_modules()} == {n: type(m) for n, m in modules.items()}
    for name, module in expected.named_modules():
        assert getattr(modules[name], "compute_dtype", None) is getattr(module, "compute_dtype", None), name
    tensors = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    others = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert tensors.keys() == others.keys()
    for name, other in others.items():
        assert (tensors[name].dtype, tensors[name].shape) == (other.dtype, other.shape), name
        assert not tensors[name].requires_grad
        for a, b in zip(plain_parts(tensors[name]), plain_parts(other), strict=True):
            assert torch.equal(a, b), name


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
def test_the_cached_model_is_the_freshly_quantized_one(name, scheme, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_cache, "_SHARD_BYTES", 50_000)
    info, folder, settings = _checkpoint(tmp_path, name), tmp_path / "cache", QuantizeSettings(scheme, rotation=64)
    expected = _load(None, info, settings)
    assert open_cached(folder, info, settings, BF16) is None
    _assert_same(_load(folder, info, settings), expected)
    (entry,) = _entries(folder)
    shards = list(entry.glob("*.safetensors"))
    assert len(shards) > 2 and {file.name for file in entry.iterdir()} == {"index.json", *(s.name for s in shards)}
    assert all(shard.stat().st_size < 100_000 for shard in shards)
    before = _state(folder)
    cached = open_cached(folder, info, settings, BF16)
    assert cached is not None
    quantizer = Quantizer(info.family, settings)
    layers = {n for n, m in expected.named_modules() if quantizer.is_wanted(n, m)}
    assert {n for n, r in cached.tensors.items() if r.file.is_relative_to(folder)} == {f"{n}.weight" for n in layers}
    blocks = {quantizer.store(expected.get_submodule(n)).rotation for n in layers}
    assert (blocks > {0} or blocks == {64} or 16 in blocks) if scheme == "int8-compute" else blocks == {0}
    _forget_weights(info, layers)
    for model in (load_transformer(cached, _on_cpu, BF16, quantizer),):
        _assert_same(model, expected)
        quantizer.close(model)
    assert _state(folder) == before


def test_without_a_quantizer_a_cached_model_is_dequantized(tmp_path: Path) -> None:
    """The rotation is undone, so the weights are those of the checkpoint up to their rounding."""
    info = _checkpoint(tmp_path)
    _load(tmp_path / "cache", info)
    cached = open_cached(tmp_path / "cache", info, INT8, BF16)
    assert cached is not None and sum(cached.quantized_types.values()) > 10
    found = load_transformer(cached, _on_cpu, torch.float32).state_dict()
    for name, exact in load_transformer(info, _on_cpu, torch.float32).state_dict().items():
        assert (found[name] - exact).norm() <= 0.012 * exact.norm(), name


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
    _assert_same(_load(folder, moved, fp8), expected)
    assert _state(folder) == before


def test_a_checkpoint_in_8_bits_is_not_copied(tmp_path, monkeypatch, caplog):
    """What the scheme takes as it is stays where it is; only layers rounded here are kept."""
    family, tiny = FAMILIES["flux2"], TINY["flux2"]
    variant = dataclasses.replace(family.variants[0], name="tiny", transformer_config=tiny.transformer_config)
    monkeypatch.setitem(FAMILIES, "flux2", dataclasses.replace(family, variants=(variant,)))
    tensors = {n: t.to(torch.float8_e4m3fn) for n, t in tiny.make_model().state_dict().items()}
    file, folder = tmp_path / "model.safetensors", tmp_path / "cache"
    safetensors.torch.save_file(tensors, file)
    info = read_checkpoint(file)
    _load(folder, info, QuantizeSettings("fp8"))
    assert _entries(folder) == [] and _warnings(caplog) == []
    expected = _load(folder, info, INT8)
    assert len(_entries(folder)) == 1
    _assert_same(_load(folder, info, INT8), expected)


def _edit_index(**changes: Any) -> Callable[[Path], None]:
    def edit(entry: Path) -> None:
        index = json.loads((entry / "index.json").read_text()) | changes
        index["checksum"] = quantized_cache._checksum(index)
        (entry / "index.json").write_text(json.dumps(index))

    return edit


def _flip_a_rotation(entry: Path) -> None:
    """Loads and computes with 16, and is wrong by more than the weight itself."""
    index = (entry / "index.json").read_text()
    assert ": 64" in index
    (entry / "index.json").write_text(index.replace(": 64", ": 16", 1))


def _edit_shard(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(entry: Path) -> None:
        shard = sorted(entry.glob("*.safetensors"))[0]
        shard.write_bytes(change(shard.read_bytes()))

    return edit


def _spoil_scales(entry: Path) -> None:
    shard = sorted(entry.glob("*.safetensors"))[0]
    header = json.loads(_header(shard))
    start = 8 + len(_header(shard)) + header["blocks.0.ffn.net.0.proj.weight_scale"]["data_offsets"][0]
    data = shard.read_bytes()
    shard.write_bytes(data[:start] + b"\xff\xff\xff\xff" + data[start + 4 :])


def _to_a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_bytes(b"not a folder")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no index": lambda entry: (entry / "index.json").unlink(),
    "torn index": lambda entry: (entry / "index.json").write_bytes((entry / "index.json").read_bytes()[:50]),
    "index of noise": lambda entry: (entry / "index.json").write_bytes(b"\xff\xfe\x00"),
    "index of something else": lambda entry: (entry / "index.json").write_text("[1]"),
    "foreign key": _edit_index(key="0" * 64),
    "index without files": _edit_index(files=None),
    "layers that are not there": _edit_index(rotations={"blocks.9.ffn": 0}),
    "rotation flipped": _flip_a_rotation,
    "shard missing": lambda entry: sorted(entry.glob("*.safetensors"))[0].unlink(),
    "shard cut short": _edit_shard(lambda data: data[:-5]),
    "shard longer": _edit_shard(lambda data: data + b"x"),
    "header changed": _edit_shard(lambda data: data.replace(b'"I8"', b'"U8"', 1)),
    "header length": _edit_shard(lambda data: b"\xff" * 8 + data[8:]),
    "scales spoiled": _spoil_scales,
    "a file of its name": _to_a_file,
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_made_again(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    expected = _load(folder, info)
    (entry,) = _entries(folder)
    good = {f.name: f.read_bytes() for f in entry.iterdir()}
    DAMAGE[kind](entry)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        _assert_same(_load(folder, info), expected)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "cache" in r.name]
    assert len(said) == 1 and f"{entry} is damaged and its weights are rounded again" in said[0]
    assert _entries(folder) == [entry]
    assert {f.name: f.read_bytes() for f in entry.iterdir()} == good
    assert open_cached(folder, info, INT8, BF16) is not None


def test_an_entry_that_is_deleted_while_it_is_opened(tmp_path, monkeypatch, caplog):
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    expected = _load(folder, info)
    (entry,) = _entries(folder)
    find = quantized_cache.open_cached

    def open_and_lose(*args: Any) -> CheckpointInfo | None:
        found = find(*args)
        shutil.rmtree(entry)
        return found

    monkeypatch.setattr(load, "open_cached", open_and_lose)
    _assert_same(_load(folder, info), expected)
    assert "cannot be read and are rounded again" in caplog.text and _entries(folder) == [entry]


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "_SHARD_BYTES", 20_000)
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    seen: list[list[Path]] = []

    class Failing(Quantizer):
        def finish(self, fqn: str, module: torch.nn.Module) -> torch.nn.Module:
            if "blocks.2" in fqn:
                seen.append(_entries(folder))
                raise KeyboardInterrupt
            return super().finish(fqn, module)

    with pytest.raises(KeyboardInterrupt):
        load_through_cache(folder, info, _on_cpu, BF16, Failing(info.family, INT8))
    assert len(seen[0]) == 1 and seen[0][0].name.startswith(".") and _entries(folder) == []
    assert open_cached(folder, info, INT8, BF16) is None


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def limit(num_bytes: int) -> None:
        usage = type(shutil.disk_usage("/"))(10**12, 10**12 - num_bytes, num_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    return limit


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "cache" in r.name]


def test_a_disk_too_small_is_known_before_anything_is_written(tmp_path, little_room, caplog, monkeypatch):
    monkeypatch.setattr(quantized_cache, "_SHARD_BYTES", 20_000)
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    expected = _load(None, info)
    quantizer = Quantizer(info.family, INT8)
    stored = [quantizer.store(m) for n, m in expected.named_modules() if quantizer.is_wanted(n, m)]
    num_bytes = sum(each.weight.nbytes + each.scale.nbytes for each in stored)
    little_room(num_bytes - 1000)
    written: list[Any] = []
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *args: written.append(args))
    _assert_same(_load(folder, info), expected)
    assert written == [] and _entries(folder) == []
    assert len(_warnings(caplog)) == 1 and f"{folder} has 1000 bytes" in _warnings(caplog)[0]


@pytest.mark.parametrize("failure", ["fills up", "error", "the library's own error"])
def test_a_disk_that_fills_up_on_the_way(failure, tmp_path, little_room, caplog, monkeypatch):
    monkeypatch.setattr(quantized_cache, "_SHARD_BYTES", 20_000)
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    expected = _load(None, info)
    real, num_calls = safetensors.torch.save_file, 0

    def save_file(*args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2 and failure == "error":
            raise OSError(errno.ENOSPC, "No space left on device", str(args[1]))
        if num_calls == 2 and failure != "fills up":
            raise safetensors.SafetensorError("No space left on device")
        real(*args)
        little_room(100)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    if failure != "fills up":
        little_room = lambda _: None  # noqa: E731
    _assert_same(_load(folder, info), expected)
    assert _entries(folder) == []
    (said,) = _warnings(caplog)
    assert ("too little room" if failure == "fills up" else "No space left on device") in said
    assert str(folder) in said or failure == "the library's own error"  # which names no file


# A fork shares what has been imported, which a process of its own would take a quarter of a minute for.
needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork a process")


@contextlib.contextmanager
def _forked(run: Callable[[], None]) -> Iterator[Any]:
    """A process that runs this with the caller's data; killed when the block ends."""
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(60)


@needs_fork
def test_what_a_killed_run_left_is_removed_and_a_new_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_cache, "_SHARD_BYTES", 20_000)
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    other = folder / ".notes.tmp"
    other.mkdir(parents=True)
    is_written = multiprocessing.get_context("fork").Event()

    class Stuck(Quantizer):
        def finish(self, fqn: str, module: torch.nn.Module) -> torch.nn.Module:
            if "blocks.2" in fqn:
                is_written.set()
                time.sleep(600)
            return super().finish(fqn, module)

    with _forked(lambda: load_through_cache(folder, info, _on_cpu, BF16, Stuck(info.family, INT8)) and None):
        assert is_written.wait(60)
        (unfinished,) = [path for path in _entries(folder) if path != other]
        QuantizedWriter(folder, info, INT8, BF16)
        assert list(unfinished.glob("*.safetensors"))  # its process may live
    os.utime(unfinished, (time.time() - 7200,) * 2)
    os.utime(other, (time.time() - 7200,) * 2)
    expected = _load(None, info)
    _assert_same(_load(folder, info), expected)
    (entry,) = [path for path in _entries(folder) if path != other]
    assert not entry.name.startswith(".") and other.exists()


def test_the_second_of_two_runs_keeps_what_the_first_has_written(tmp_path: Path) -> None:
    info, folder = _checkpoint(tmp_path), tmp_path / "cache"
    writers = [QuantizedWriter(folder, info, INT8, BF16) for _ in range(2)]
    for writer in writers:
        load_transformer(info, _on_cpu, BF16, Quantizer(info.family, INT8), writer)
    writers[0].__exit__(None, None, None)
    before = _state(folder)
    writers[1].__exit__(None, None, None)
    assert {name for name, _ in before.items()} == set(_state(folder)) and len(_entries(folder)) == 1
    assert all(_state(folder)[name] == seen for name, seen in before.items() if name.endswith("safetensors"))


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    info = _checkpoint(tmp_path)
    (tmp_path / "cache").write_bytes(b"a file")
    _assert_same(_load(tmp_path / "cache" / "below", info), _load(None, info))
    assert len(_warnings(caplog)) == 1 and "not kept" in _warnings(caplog)[0]


def test_the_host_holds_one_shard_and_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_cache, "_SHARD_BYTES", 30_000)
    info = _checkpoint(tmp_path)
    held: list[int] = []

    class Watched(QuantizedWriter):
        def add(self, fqn: str, stored: Any) -> None:
            super().add(fqn, stored)
            held.append(sum(tensor.nbytes for tensor in self._waiting.values()) - stored.weight.nbytes)

    with Watched(tmp_path / "cache", info, INT8, BF16) as writer:
        load_transformer(info, _on_cpu, BF16, Quantizer(info.family, INT8), writer)
    assert len(held) > 20 and 10_000 < max(held) <= 30_000
