"""Reading weights from a file, mapped or into memory."""

import errno
import mmap
import os
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from devicebridge.checkpoints import weight_file
from devicebridge.checkpoints.header import TORCH_TYPES, FileHeader, TensorRecord, read_file_header
from devicebridge.checkpoints.weight_file import load_tensors, open_weights, read_records, read_rows
from devicebridge.tests.weight_files import are_equal, write_raw
from safetensors.torch import save_file

MMAP = mmap.mmap


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {name: (torch.randn(6, 4, 2) * 9).to(dtype) for name, dtype in TORCH_TYPES.items()}
    return found | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}


def test_every_type_comes_back_bit_for_bit_and_in_memory_of_its_own(tmp_path: Path) -> None:
    expected, file = _tensors(), tmp_path / "x.safetensors"
    save_file(expected, file, metadata={"a": "b"})
    with open_weights(file) as reader:
        assert are_equal({name: reader.get_tensor(name) for name in reader.header.tensors}, expected)
    found = load_tensors(file)
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert are_equal(found, expected)


def test_pieces_are_read_one_after_the_other(tmp_path: Path) -> None:
    whole, file = torch.arange(24.0).view(12, 2), tmp_path / "x.safetensors"
    save_file({"w": whole}, file)
    record = TensorRecord(file, "w", (5, 2), "F32", pieces=((7, 9), (0, 1), (3, 5)))
    wanted = whole[[7, 8, 0, 3, 4]]
    ((_, found),) = read_records({"mine": record})
    assert torch.equal(found, wanted)
    with open_weights(file) as reader:
        assert torch.equal(read_rows(reader, record, 1, 4), wanted[1:4])


@pytest.mark.skipif(os.name == "nt", reason="a file has holes only where its program asks for them")
def test_a_file_larger_than_memory_is_read(tmp_path: Path) -> None:
    """Sparse, so that it takes no room."""
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    columns = 1024
    shape = [size // 2 // columns, columns]
    header = {"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, shape[0] * columns * 2]}}
    file = write_raw(tmp_path / "large.safetensors", header, shape[0] * columns * 2)
    with open(file, "r+b") as stream:
        stream.seek(-2 * columns * 2, os.SEEK_END)
        stream.write(torch.full((columns,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    with open_weights(file) as reader:
        found = reader.get_tensor("w")[shape[0] - 3 : shape[0]]
    assert found[:, 0].tolist() == [0.0, 3.0, 0.0] and found.shape == (3, columns)


def test_a_file_is_read_where_no_memory_can_be_promised_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under vm.overcommit_memory 2, with a file larger than what is left."""
    expected, refused = _tensors(), []
    save_file(expected, tmp_path / "x.safetensors")

    def refuse(*args: Any, access: int = mmap.ACCESS_DEFAULT, **kwargs: Any) -> mmap.mmap:
        if access != mmap.ACCESS_READ:
            refused.append(args)
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return MMAP(*args, access=access, **kwargs)

    monkeypatch.setattr(weight_file.mmap, "mmap", refuse)
    with open_weights(tmp_path / "x.safetensors") as reader:
        found = reader.all_tensors()
    assert len(refused) == 1 and are_equal(found, expected)
    for tensor in found.values():
        tensor.zero_()


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(64), "b": torch.ones(2**20)}, file)  # more than one buffer

    def cut(stream: IO[bytes], remedy: str) -> FileHeader:
        found = read_file_header(stream, remedy)
        os.truncate(file, os.path.getsize(file) - 8)
        return found

    monkeypatch.setattr(weight_file, "read_file_header", cut)
    with pytest.raises(ValueError, match="ends inside b; download it again"):
        load_tensors(file)


def test_tensors_may_lie_at_any_byte(tmp_path: Path) -> None:
    """As other writers than the library leave them."""
    content, file = torch.arange(4.0), tmp_path / "x.safetensors"
    entries = {"a": ("U8", [3], 0, 3), "b": ("F32", [4], 3, 19)}
    header = {n: {"dtype": d, "shape": s, "data_offsets": [start, end]} for n, (d, s, start, end) in entries.items()}
    write_raw(file, header, data=b"abc" + content.numpy().tobytes())
    with open_weights(file) as reader:
        assert torch.equal(reader.get_tensor("b"), content) and torch.equal(load_tensors(file)["b"], content)


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_weights(tmp_path / "nothing.safetensors"):
        pass
