"""Datasets that arrive encoded: kept by content, listed last, read back as they came."""

from __future__ import annotations

import pytest
import torch
from devicebridge.encoding.comfy_data import load_encoded, save_encoded, store_of_encoded
from devicebridge.encoding.store import CacheStore


def _pairs(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    text = {"cond": torch.randn(5, 8, generator=generator), "pooled_output": torch.randn(4, generator=generator)}
    return [({"samples": torch.randn(4, 2, 3, generator=generator)}, text) for _ in range(count)]


def test_what_was_saved_is_read_back(tmp_path):
    store, told = CacheStore(tmp_path / "cache"), []
    path = save_encoded(_pairs(), store, told.append)
    assert told == [1, 2, 3] and store_of_encoded(path).folder == store.folder
    assert len(list(store.keys())) == 4, "the text they share is kept once"
    for saved, (latents, text) in zip(load_encoded(path), _pairs(), strict=True):
        assert torch.equal(store.get(saved.latents)["samples"], latents["samples"])
        assert all(torch.equal(store.get(saved.text)[name], text[name]) for name in text)
        assert dict(saved.latents_shapes) == {"samples": (4, 2, 3)}
        assert dict(saved.text_shapes) == {"cond": (5, 8), "pooled_output": (4,)}


def test_the_same_samples_are_the_same_list_and_others_another(tmp_path):
    store = CacheStore(tmp_path)
    path = save_encoded(_pairs(), store)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    assert save_encoded(_pairs(), store) == path
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")} == before
    assert save_encoded(_pairs(2), store) != path != save_encoded(_pairs()[::-1], store)
    views = [({"samples": latents["samples"].double().float()}, text) for latents, text in _pairs()]
    assert save_encoded(views, store) == path, "content decides, not the object"


def test_what_a_batch_must_share_is_named_and_older_lists_name_nothing(tmp_path):
    def pair(method, width):
        text = {"cond": torch.ones(2, 3), "words.method": torch.tensor(list(method), dtype=torch.uint8)}
        return {"samples": torch.ones(4, 2, 3)}, {**text, "option.width": torch.tensor(width)}

    path = save_encoded([pair(b"a", 1), pair(b"a", 1), pair(b"b", 1), pair(b"a", 2)], CacheStore(tmp_path))
    first, second, *others = [each.same for each in load_encoded(path)]
    assert first and first == second and len({first, *others}) == 3
    assert not any(each.same for each in load_encoded(save_encoded(_pairs(), CacheStore(tmp_path))))


def test_who_is_interrupted_leaves_entries_but_no_list(tmp_path):
    store = CacheStore(tmp_path)

    def stop(count):
        if count == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_encoded(_pairs(), store, stop)
    assert len(list(store.keys())) == 3 and not (tmp_path / "datasets").exists()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    save_encoded(_pairs(), store)
    now = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.safetensors")}
    assert kept.items() <= now.items() and len(now) == 4


def test_no_samples_and_no_list_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no samples"):
        save_encoded([], CacheStore(tmp_path))
    path = save_encoded(_pairs(), CacheStore(tmp_path))
    for text in ("{", "[]", '{"version": 2, "samples": []}', '{"version": 1, "samples": [{"latents": 1}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"data\.encoded: .* is no list of encoded samples"):
            load_encoded(path)
    with pytest.raises(ValueError, match="no list of encoded samples"):
        load_encoded(tmp_path / "missing.json")
