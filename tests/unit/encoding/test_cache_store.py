"""The store: an entry comes back bitwise, and nothing that is not whole is ever used."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from devicebridge.checkpoints import weight_file
from devicebridge.encoding import store as store_module
from devicebridge.encoding.store import CacheStore
from devicebridge.system import files
from devicebridge.tests.weight_files import are_equal
from safetensors.torch import load_file, save_file

KEY = "ab" * 32
OTHER = "cd" * 32


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "states": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "pooled": torch.randn(3, generator=generator), "count": torch.tensor(4), "empty": torch.zeros(0, 2),
    }  # fmt: skip


def test_an_entry_comes_back_bitwise(tmp_path):
    store = CacheStore(tmp_path)
    assert KEY not in store and store.get(KEY) is None
    store.put(KEY, _tensors())
    assert KEY in store and are_equal(store.get(KEY), _tensors())
    assert store.path(KEY) == tmp_path / "ab" / f"{KEY}.safetensors"
    assert are_equal(CacheStore(tmp_path).get(KEY), load_file(store.path(KEY)))  # an ordinary safetensors file
    found = store.get(KEY)
    store.path(KEY).write_bytes(b"")
    assert are_equal(found, _tensors())


def test_a_slice_of_a_batch_and_a_transposed_tensor_are_stored_by_value(tmp_path):
    store, batch = CacheStore(tmp_path), torch.arange(24.0).reshape(2, 3, 4)
    store.put(KEY, {"row": batch[1], "turned": batch[0].T})
    assert are_equal(store.get(KEY), {"row": batch[1].clone(), "turned": batch[0].T.contiguous()})


def test_no_flipped_bit_passes(tmp_path):
    store = CacheStore(tmp_path)
    store.put(KEY, {"states": torch.arange(6, dtype=torch.float32)})
    path = store.path(KEY)
    whole = path.read_bytes()
    for position in range(8 * len(whole)):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        path.write_bytes(data)
        assert store.get(KEY) is None, f"bit {position}"


def test_entries_from_before_their_key_was_in_them_are_read(tmp_path):
    store = CacheStore(tmp_path)
    old = store_module._checksum(_tensors())
    files.write_atomically(store.path(KEY), weight_file.tensors_in_pieces(_tensors(), {"checksum": old}))
    assert are_equal(store.get(KEY), _tensors())


def test_bytes_after_the_end_foreign_files_and_changed_names_are_misses(tmp_path):
    store = CacheStore(tmp_path)
    store.put(KEY, _tensors())
    with open(store.path(KEY), "ab") as file:
        file.write(b"x")
    assert KEY not in store
    store.put(OTHER, _tensors())
    save_file({"states": torch.zeros(2)}, tmp_path / "foreign")
    for other in (tmp_path / "foreign", store.path(OTHER)):  # or an entry under another's name
        store.path(KEY).write_bytes(other.read_bytes())
        assert KEY not in store and store.get(KEY) is None


def test_keys_cannot_leave_the_folder(tmp_path):
    for key in ("../../etc/passwd", "AB" * 32, "ab/cd", "", "ab"):
        with pytest.raises(ValueError, match="hexadecimal"):
            CacheStore(tmp_path).path(key)
    with pytest.raises(ValueError, match="no tensors"):
        CacheStore(tmp_path).put(KEY, {})


def test_writers_of_one_key_do_not_disturb_each_other_or_readers(tmp_path):
    store, broken = CacheStore(tmp_path), []
    store.put(KEY, _tensors())

    def write():
        for _ in range(20):
            store.put(KEY, _tensors())

    def read():
        for _ in range(60):
            found = store.get(KEY)
            if found is None or not are_equal(found, _tensors()):
                broken.append(found)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(lambda work: work(), (write, write, write, read, read)))
    assert not broken
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{KEY}.safetensors"]


def test_a_failed_write_leaves_the_old_entry_and_no_temporary_file(tmp_path, monkeypatch):
    store = CacheStore(tmp_path)
    store.put(KEY, _tensors())

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        store.put(KEY, _tensors(seed=1))
    assert are_equal(store.get(KEY), _tensors())
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_content_is_flushed_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        order.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")
        real_fsync(descriptor)

    def replace(source, target):
        order.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.write_atomically(tmp_path / "file", b"x")
    expected = ["fsync file", "rename", "fsync folder"] if sys.platform == "linux" else ["fsync file", "rename"]
    assert [step for step in order if sys.platform == "linux" or step != "fsync folder"] == expected


def test_check_tells_whole_missing_and_damaged_and_a_damaged_entry_is_a_miss_afterwards(tmp_path):
    store = CacheStore(tmp_path)
    assert store.check(KEY) == "missing"
    store.put(KEY, _tensors())
    assert store.check(KEY) == "whole"
    whole = store.path(KEY).read_bytes()
    store.path(KEY).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert store.check(KEY) == "damaged" and KEY not in store and store.check(KEY) == "missing"
    store.path(KEY).write_bytes(whole[:-1])
    assert store.check(KEY) == "damaged"


def test_keys_are_those_of_entries_and_removing_one_tells_its_bytes(tmp_path):
    store = CacheStore(tmp_path / "cache")
    assert not list(store.keys())
    store.put(KEY, _tensors())
    store.put(OTHER, _tensors(1))
    own = f"{KEY}.safetensors"
    for name in ("ab/note.txt", f"ab/.{own}.0.tmp", f"cd/{own}", f"quantized/{own}"):
        (store.folder / name).parent.mkdir(exist_ok=True)
        (store.folder / name).write_text("not an entry")
    assert sorted(store.keys()) == [KEY, OTHER]
    size = store.path(KEY).stat().st_size
    assert store.remove(KEY) == size and store.remove(KEY) == 0 and list(store.keys()) == [OTHER]


def test_a_refused_write_names_the_file_and_what_would_help(tmp_path):
    store = CacheStore(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(OSError, match=rf"{KEY}\.safetensors cannot be written .*set cache\.folder.*is kept"):
        store.put(KEY, _tensors())


def test_an_entry_that_is_written_anew_while_it_is_read_is_neither_damaged_nor_removed(tmp_path, monkeypatch):
    """A repair on another device gives other last bits, between reading the header and reading the tensors."""
    store = CacheStore(tmp_path)
    store.put(KEY, {"x": torch.zeros(3)})
    real = weight_file.load_tensors

    def write_first(path):
        monkeypatch.setattr(weight_file, "load_tensors", real)
        store.put(KEY, {"x": torch.ones(3)})
        return real(path)

    for read in (lambda: store.get(KEY)["x"].tolist() == [1, 1, 1], lambda: store.check(KEY) == "whole"):
        store.put(KEY, {"x": torch.zeros(3)})
        monkeypatch.setattr(weight_file, "load_tensors", write_first)
        assert read() and KEY in store
