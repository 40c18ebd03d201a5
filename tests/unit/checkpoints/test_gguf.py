"""GGUF files: what is read, bit for bit, and what is refused before a weight is read."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from devicebridge.checkpoints.fingerprint import file_fingerprint
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.quantized_files import dequantize, pair_scales
from devicebridge.checkpoints.weight_file import load_tensors, open_weights, read_records, read_rows
from devicebridge.quantization import stored
from devicebridge.tests.gguf_files import KINDS, meaning, random_blocks, setting, text, write_gguf

SHAPES = {32: (6, 96), 256: (4, 768)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_has_the_bits_of_the_published_format(kind, tmp_path, monkeypatch):
    shape = SHAPES[KINDS[kind].values]
    data = random_blocks(kind, shape)
    expected = meaning(kind, data, shape)
    assert 0.001 < expected.std() < 1
    file = write_gguf(tmp_path / "model.gguf", {"x.weight": (kind, shape, data), "x.bias": torch.ones(3)})
    records = read_header(file, is_model=True).records()
    assert records["x.weight"].packing == kind and records["x.weight"].shape == shape
    tensors = dict(read_records(records))
    assert torch.equal(tensors["x.bias"], torch.ones(3))
    monkeypatch.setattr(stored, "_PIECE", shape[1])  # a row at a time
    found = dequantize(tensors["x.weight"], None, records["x.weight"], torch.float32)
    assert torch.equal(found, expected)
    half = records["x.weight"].cut(2, 4)
    ((_, rows),) = read_records({"x": half})
    assert torch.equal(dequantize(rows, None, half, torch.float32), expected[2:4])
    with open_weights(file, is_model=True) as reader:
        rows = read_rows(reader, records["x.weight"].swapped(), 1, 3)
    found = dequantize(rows, None, records["x.weight"], torch.float32)
    assert torch.equal(found, expected.chunk(2)[1][1:3] if shape[0] == 6 else torch.cat([expected[3:], expected[:1]]))


def test_sides_that_gguf_has_no_room_for_and_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    """A convolution with five sides; a linear whose 320 columns were stored as 256, as converters do."""
    conv, rows = random_blocks("Q8_0", (4, 64)), random_blocks("Q4_K", (5, 256), 1)
    sides = {"conv.weight": (4, 4, 2, 2, 4), "odd.weight": (4, 320)}
    tensors = {"conv.weight": ("Q8_0", (4, 64), conv), "odd.weight": ("Q4_K", (5, 256), rows)}
    settings = {f"comfy.gguf.orig_shape.{name}": each for name, each in sides.items()}
    records = read_header(write_gguf(tmp_path / "model.gguf", tensors, settings), is_model=True).records()
    assert {name: each.shape for name, each in records.items()} == sides
    assert records["odd.weight"].dtype == "F32" and not records["odd.weight"].is_quantized
    found = dict(read_records(records))
    assert torch.equal(found["odd.weight"], meaning("Q4_K", rows, (4, 320)))
    plain = dequantize(found["conv.weight"], None, records["conv.weight"], torch.float32)
    assert torch.equal(plain, meaning("Q8_0", conv, sides["conv.weight"]))
    assert torch.equal(dict(read_records({"x": records["odd.weight"].cut(1, 3)}))["x"], found["odd.weight"][1:3])


def _header(count: int = 0, settings: bytes = b"", num_settings: int = 0, tensors: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, num_settings) + settings + tensors


def _one(kind: int, sides: tuple[int, ...] = (32,), start: int = 0, name: str = "x.weight") -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, start)


def _whole(tensors: bytes, count: int = 1, data: int = 128, settings: bytes = b"") -> bytes:
    start = _header(count, settings, bool(settings), tensors)
    return start + bytes(-len(start) % 32) + bytes(data)


REFUSED: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "Q2_K": (lambda: _whole(_one(10, (256,))), ("x.weight", "Q2_K", "Q4_K")),
    "a type of later years": (lambda: _whole(_one(99)), ("x.weight", "type 99")),
    "other versions": (lambda: b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ("version 1",)),
    "one of several": (lambda: _whole(_one(0), settings=setting("split.count", 2)), ("one of 2 files",)),
    "settings without end": (lambda: _header(0, b"", 2**60), (str(2**60), "settings")),
    "tensors without end": (lambda: _header(2**60), (str(2**60), "tensors")),
    "a text without end": (lambda: _header(0, struct.pack("<Q", 2**62), 1), ("text",)),
    "a list without end": (lambda: _header(0, text("a") + struct.pack("<IIQ", 9, 4, 2**61), 1), ("past the end",)),
    "texts without end": (lambda: _header(0, text("a") + struct.pack("<IIQ", 9, 8, 2**61), 1), ("past the end",)),
    "a list of lists": (lambda: _header(0, text("a") + struct.pack("<IIQ", 9, 9, 3), 1), ("setting of type 9",)),
    "a setting of no type": (lambda: _header(0, text("a") + struct.pack("<I", 77), 1), ("setting of type 77",)),
    "an odd alignment": (lambda: _header(0, setting("general.alignment", 48), 1), ("alignment", "48")),
    "a name twice": (lambda: _whole(_one(0) + _one(0, start=128), 2), ("x.weight", "twice")),
    "five sides": (lambda: _whole(_one(0, (1, 1, 1, 1, 32))), ("x.weight", "5 sides")),
    "no side": (lambda: _whole(_one(0, (0, 32))), ("x.weight",)),
    "a side without end": (lambda: _whole(_one(0, (2**40, 2**40))), ("x.weight",)),
    "half a block": (lambda: _whole(_one(8, (48,))), ("x.weight", "32")),
    "a gap": (lambda: _whole(_one(0, start=32)), ("x.weight", "byte 32")),
    "one over another": (lambda: _whole(_one(0) + _one(0, start=64, name="y"), 2, 256), ("y", "byte 64")),
    "weights cut short": (lambda: _whole(_one(0), data=100), ("128", "100")),
    "more than it says": (lambda: _whole(_one(0), data=4096), ("128", "4096")),
    "no weights": (lambda: _header(), ("promises 0",)),
    "a header cut short": (lambda: _header(3, tensors=_one(0)), ("past the end",)),
    "another shape": (
        lambda: _whole(_one(0), settings=setting("comfy.gguf.orig_shape.x.weight", (7, 5))),
        ("x.weight", "[7, 5]"),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_damaged_or_not_read_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    make, named = REFUSED[what]
    (file := tmp_path / "model.gguf").write_bytes(make())
    with pytest.raises(ValueError, match=r"model\.gguf") as found:
        read_header(file, is_model=True)
    assert all(each in str(found.value) for each in named), found.value


def test_a_gguf_file_is_that_by_its_first_bytes_and_nothing_but_a_model(tmp_path: Path) -> None:
    tensors = {"x.weight": ("Q8_0", (2, 32), random_blocks("Q8_0", (2, 32)))}
    file = write_gguf(tmp_path / "model.safetensors", tensors)
    assert read_header(file, is_model=True).tensors.keys() == {"x.weight"}
    for read in (read_header, load_tensors):  # of encoders, VAEs and LoRAs
        with pytest.raises(ValueError, match="GGUF"):
            read(file)
    with pytest.raises(ValueError, match="GGUF"), open_weights(file):
        pass
    (other := tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" + bytes(99))
    with pytest.raises(ValueError, match="other.gguf"):
        read_header(other, is_model=True)


def test_a_scale_beside_packed_weights_is_refused(tmp_path: Path) -> None:
    tensors = {"x.weight": ("Q8_0", (2, 32), random_blocks("Q8_0", (2, 32))), "x.scale_weight": torch.ones(1)}
    file = write_gguf(tmp_path / "model.gguf", tensors)
    records = read_header(file, is_model=True).records()
    with pytest.raises(ValueError, match="x.scale_weight"):
        pair_scales(file, records, [])


def test_a_large_file_is_known_by_samples_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [random_blocks("Q8_0", (64, 4096), seed) for seed in (0, 1)]
    monkeypatch.setattr("devicebridge.checkpoints.fingerprint._WHOLE_FILE_BYTES", 1000)
    files = [
        write_gguf(tmp_path / f"{number}.gguf", {"x.weight": ("Q8_0", (64, 4096), data)})
        for number, data in enumerate((*blocks, blocks[0]))
    ]
    prints = [file_fingerprint(file) for file in files]
    assert prints[0] == prints[2] != prints[1]
