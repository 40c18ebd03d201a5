"""Batches of cached samples: captions of one length are stacked, noise masks weigh the loss, files are read ahead."""

from pathlib import Path

import pytest
import torch
from devicebridge.data.samples import Batch, BatchOrder, EncodedSample, Sample
from devicebridge.encoding.store import CacheStore
from devicebridge.families.spec import ComfyInputs
from devicebridge.training.batches import CachedSamples, join_texts
from devicebridge.training.objective import prediction_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def _states(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [{"states": torch.randn(length, 4) + 9, "pooled": torch.randn(8)} for length in lengths]


def test_states_and_pooled_states_of_one_length_are_stacked() -> None:
    entries = _states(2, 2)
    joined = join_texts(entries)
    assert joined.keys() == {"states", "pooled"}
    for name, states in joined.items():
        assert torch.equal(states, torch.stack([entry[name] for entry in entries]))
    with pytest.raises(RuntimeError, match=r"states of one batch have lengths \[2, 3\].*--verify"):
        join_texts(_states(3, 2))


def _cached(folder, latents, texts):
    """Of one of ComfyUI's own models; each sample has a caption of its own."""
    store = CacheStore(folder)
    for kind, entries in (("a", latents), ("b", texts)):
        for index, entry in enumerate(entries):
            store.put(f"{kind}{index:03x}", entry)
    samples = [EncodedSample(f"a{index:03x}", ((f"b{index:03x}",), ()), ()) for index in range(len(texts))]
    comfy = ComfyInputs("cond", "", lambda each: each, latent_dims=3, reads_all=True)
    return CachedSamples(store, samples, False, 0.25, comfy)


def test_a_noise_mask_is_given_in_the_size_of_the_latents_and_weighs_the_loss(tmp_path: Path) -> None:
    video, text = torch.randn(4, 3, 2, 2), {"cond": torch.randn(5, 8)}
    mask = torch.tensor([0.0, 0.5, -1.0]).view(1, 3, 1, 1)
    of_latents = {"samples": video, "noise_mask": mask}
    of_condition = {**text, "noise_mask": torch.tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)}
    cached = _cached(tmp_path, [of_latents, {"samples": video}, {"samples": video}], [text, of_condition, text])
    batch = cached.load([0, 1, 2], [0] * 3)
    found = batch.conditions["noise_mask"]
    assert found.shape == (3, 1, 3, 2, 2) and batch.text.keys() == {"cond"}
    assert [each.tolist() for each in found[:, 0, :, 1, 0]] == [[0.0, 0.5, -1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert batch.mask is not None and torch.equal(batch.mask, found.clamp(0, 1))
    error = torch.arange(3.0).view(1, 1, 3, 1, 1).expand(3, 4, 3, 2, 2)
    expected = ((0.5 * 1) + (1 + 4) + (0 + 1 + 4)) / (0.5 + 2 + 3)
    assert float(prediction_loss(error, torch.zeros_like(error), batch.mask)) == pytest.approx(expected)
    plain = _cached(tmp_path / "plain", [{"samples": video}], [text]).load([0], [0])
    assert plain.mask is None and not plain.conditions


class _Counted(CacheStore):
    """A cache that notes which entries were read from the disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[str] = []

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        self.reads.append(key)
        return super().get(key)


def _pictures(folder: Path, count: int = 3) -> tuple[CachedSamples, _Counted, BatchOrder]:
    store = _Counted(folder)
    latents, texts = ([f"{kind}{index}" * 4 for index in range(count)] for kind in "ab")
    for index in range(count):
        store.put(latents[index], {"latents": torch.full((4, 1, 8, 8), float(index))})
        store.put(texts[index], {"states": torch.full((2, 4), 10.0 + index)})
    cut = ((64, 64), (0, 0, 64, 64), (64, 64))
    keys = [{"latents_key": own, "text_keys": ((text,), ())} for own, text in zip(latents, texts, strict=True)]
    samples = [Sample(f"{i}.png", "", None, *cut, **each) for i, each in enumerate(keys)]
    cached = CachedSamples(store, samples, use_masks=False, tokens_per_cell=1)
    return cached, store, BatchOrder(samples, batch_size=1, seed=0)


def test_what_was_read_ahead_is_what_would_be_read_and_is_read_once(tmp_path: Path) -> None:
    cached, store, order = _pictures(tmp_path)
    for _ in range(6):
        batch = order.next()
        loaded = cached.load(batch.indices, batch.captions)
        assert loaded.latents.unique().tolist() == [float(batch.indices[0])]
        assert loaded.text["states"].unique().tolist() == [10.0 + batch.indices[0]]
        cached.read_ahead(order.ahead(0))
    assert len(store.reads) == 2 * 7, "six batches, and one that nobody has asked for yet"
    store.reads.clear()
    batch = order.next()
    cached.load(batch.indices, batch.captions)
    assert not store.reads and not cached.read


def test_another_batch_than_the_one_read_ahead_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    cached, _, _ = _pictures(tmp_path)
    for asked, guessed in ((0, 1), (2, 0), (0, 0), (0, 2)):
        assert cached.load((asked,), (0,)).latents.unique().tolist() == [float(asked)]
        cached.read_ahead(Batch((guessed,), (0,)))
        assert len(cached.read) == 2, "of one batch"


def test_an_entry_that_cannot_be_read_ahead_is_met_when_it_is_needed(tmp_path: Path) -> None:
    cached, store, _ = _pictures(tmp_path)
    store.path(cached.samples[1].latents_key).unlink()
    cached.read_ahead(Batch((1,), (0,)))
    assert cached.load((0,), (0,)).latents.unique().tolist() == [0.0]
    with pytest.raises(RuntimeError, match=r"1\.png was deleted or damaged since this run began"):
        cached.load((1,), (0,))
