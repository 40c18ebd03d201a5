"""Batches of cached samples: captions of one length are stacked, others are refused; noise masks weigh the loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from devicebridge.encoding.store import CacheStore
from devicebridge.families.comfy.inputs import read_latents, read_text
from devicebridge.families.spec import ComfyInputs
from devicebridge.jobs.comfy_entries import EncodedSample
from devicebridge.training.batches import CachedSamples, join_texts
from devicebridge.training.objective import prediction_loss

pytestmark = pytest.mark.usefixtures("one_thread")


def _states(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [{"states": torch.randn(length, 4) + 9, "pooled": torch.randn(8)} for length in lengths]


def test_states_and_pooled_states_are_stacked() -> None:
    entries = _states(2, 2)
    joined = join_texts(entries)
    assert joined.keys() == {"states", "pooled"}
    for name, states in joined.items():
        assert torch.equal(states, torch.stack([entry[name] for entry in entries]))


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"states of one batch have lengths \[2, 3\].*--verify"):
        join_texts(_states(3, 2))


def _cached(
    folder: Path, latents: list[dict[str, torch.Tensor]], texts: list[dict[str, torch.Tensor]]
) -> CachedSamples:
    """Of one of ComfyUI's own models; each sample has a caption of its own."""
    store = CacheStore(folder)
    for kind, entries in (("a", latents), ("b", texts)):
        for index, entry in enumerate(entries):
            store.put(f"{kind}{index:03x}", entry)
    captions = {str(index): f"b{index:03x}" for index in range(len(texts))}
    samples = [EncodedSample(f"a{index:03x}", str(index), ()) for index in range(len(texts))]
    comfy = ComfyInputs("cond", "", lambda each: each, latent_dims=3, reads_all=True)
    readers = {"read_latents": partial(read_latents, comfy), "read_text": partial(read_text, comfy)}
    return CachedSamples(store, samples, [each.latents for each in samples], captions, False, 0.25, **readers)


def test_a_noise_mask_is_given_in_the_size_of_the_latents_and_weighs_the_loss(tmp_path: Path) -> None:
    video, text = torch.randn(4, 3, 2, 2), {"cond": torch.randn(5, 8)}
    mask = torch.tensor([0.0, 0.5, -1.0]).view(1, 3, 1, 1)
    of_latents = {"samples": video, "noise_mask": mask}
    of_condition = {**text, "noise_mask": torch.tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)}
    cached = _cached(tmp_path, [of_latents, {"samples": video}, {"samples": video}], [text, of_condition, text])
    batch = cached.load([0, 1, 2], [False] * 3)
    found = batch.conditions["noise_mask"]
    assert found.shape == (3, 1, 3, 2, 2) and batch.text.keys() == {"cond"}
    assert [each.tolist() for each in found[:, 0, :, 1, 0]] == [[0.0, 0.5, -1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert batch.mask is not None and torch.equal(batch.mask, found.clamp(0, 1))
    error = torch.arange(3.0).view(1, 1, 3, 1, 1).expand(3, 4, 3, 2, 2)
    expected = ((0.5 * 1) + (1 + 4) + (0 + 1 + 4)) / (0.5 + 2 + 3)
    assert float(prediction_loss(error, torch.zeros_like(error), batch.mask)) == pytest.approx(expected)


def test_without_a_noise_mask_nothing_is_given_and_nothing_weighed(tmp_path: Path) -> None:
    cached = _cached(tmp_path, [{"samples": torch.randn(4, 3, 2, 2)}], [{"cond": torch.randn(5, 8)}])
    batch = cached.load([0], [False])
    assert batch.mask is None and not batch.conditions
