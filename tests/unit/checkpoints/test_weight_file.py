"""Reading weights from a file that is mapped, and from one that cannot be."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import safetensors
import torch
from devicebridge.checkpoints.header import TensorRecord
from devicebridge.checkpoints.weight_file import TORCH_TYPES, open_weights, read_records, read_rows, read_tensors
from safetensors.torch import save_file


@pytest.fixture(params=["mapped", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("unable to mmap 42 bytes from file <x>: Cannot allocate memory (12)")

    if request.param == "plain":
        monkeypatch.setattr(safetensors, "safe_open", refuse)
    return request.param


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {name: (torch.randn(6, 4, 2) * 9).to(dtype) for name, dtype in TORCH_TYPES.items()}
    return found | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype is b.dtype and a.shape == b.shape
    return same and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def test_every_type_comes_back_bit_for_bit(way: str, tmp_path: Path) -> None:
    expected = _tensors()
    save_file(expected, tmp_path / "x.safetensors", metadata={"a": "b"})
    with open_weights(tmp_path / "x.safetensors") as reader:
        assert sorted(reader.keys()) == sorted(expected)
        for name, tensor in expected.items():
            assert _equal(reader.get_tensor(name), tensor), name
            assert reader.get_slice(name).get_shape() == list(tensor.shape)
        assert reader.get_slice("BF16").get_dtype() == "BF16"


def test_all_tensors_come_back_bit_for_bit_in_memory_of_their_own(tmp_path: Path) -> None:
    expected, file = _tensors(), tmp_path / "x.safetensors"
    save_file(expected, file)
    found = read_tensors(file)
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert found.keys() == expected.keys()
    assert all(_equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"12")
    with pytest.raises(ValueError, match=r"w of .*x\.safetensors has type F4, not one of F64, "):
        read_tensors(tmp_path / "x.safetensors")


def test_pieces_are_read_one_after_the_other(way: str, tmp_path: Path) -> None:
    whole, file = torch.arange(24.0).view(12, 2), tmp_path / "x.safetensors"
    save_file({"w": whole}, file)
    record = TensorRecord(file, "w", (5, 2), "F32", pieces=((7, 9), (0, 1), (3, 5)))
    wanted = whole[[7, 8, 0, 3, 4]]
    ((_, found),) = read_records({"mine": record})
    assert _equal(found, wanted)
    with open_weights(file) as reader:
        assert _equal(read_rows(reader, record, 1, 4), wanted[1:4])


@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5), slice(4, 99), slice(3, 3), slice(None, 1), slice(-2, None)])
def test_rows_are_those_of_the_whole(rows: slice, way: str, tmp_path: Path) -> None:
    expected = _tensors()
    save_file(expected, tmp_path / "x.safetensors")
    with open_weights(tmp_path / "x.safetensors") as reader:
        for name in ("F32", "BF16", "F8_E4M3", "I8"):
            assert _equal(reader.get_slice(name)[rows], expected[name][rows]), name


def test_a_file_larger_than_memory_is_read(tmp_path: Path) -> None:
    """Sparse, so that it takes no room; where the system maps it, the library reads it."""
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    columns = 1024
    shape = [size // 2 // columns, columns]
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, shape[0] * columns * 2]}}).encode()
    file = tmp_path / "large.safetensors"
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + shape[0] * columns * 2)
        stream.seek(8 + len(header) + (shape[0] - 2) * columns * 2)
        stream.write(torch.full((columns,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    with open_weights(file) as reader:
        found = reader.get_slice("w")[shape[0] - 3 : shape[0]]
    assert found[:, 0].tolist() == [0.0, 3.0, 0.0] and found.shape == (3, columns)


def test_a_file_cut_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(64), "b": torch.ones(64)}, file)

    def refuse(*args: object, **kwargs: object) -> None:
        os.truncate(file, os.path.getsize(file) - 8)
        raise RuntimeError("Cannot allocate memory")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    with open_weights(file) as reader, pytest.raises(ValueError, match="ends inside b; download it again"):
        reader.get_tensor("a"), reader.get_tensor("b")


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_weights(tmp_path / "nothing.safetensors"):
        pass
