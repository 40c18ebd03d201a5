"""What ranks compare before they train: each must have the same samples in the same order."""

from __future__ import annotations

import dataclasses

import pytest
from devicebridge.data.samples import Sample
from devicebridge.encoding.store import CacheStore
from devicebridge.jobs.shared_cache import order_of
from devicebridge.training.batches import CachedSamples


@pytest.fixture
def samples(tmp_path):
    """Three images, two of them with one caption."""
    captions = ("a cat", "a dog", "a dog")
    images = [Sample(f"{number}.png", text, None, (8, 8), (0, 0, 8, 8), (8, 8)) for number, text in enumerate(captions)]
    texts = {"a cat": "t1", "a dog": "t2", "": "t0"}
    return CachedSamples(CacheStore(tmp_path), images, ["k0", "k1", "k2"], texts, use_masks=False, tokens_per_cell=1)


def _other_caption(found):
    images = [dataclasses.replace(found.samples[0], caption="a dog"), *found.samples[1:]]
    return dataclasses.replace(found, samples=images)


OTHERS = {
    "an image fewer": lambda found: dataclasses.replace(found, samples=found.samples[:2], latent_keys=["k0", "k1"]),
    "another order": lambda found: dataclasses.replace(found, latent_keys=["k1", "k0", "k2"]),
    "another caption": _other_caption,
    "another text encoder": lambda found: dataclasses.replace(found, text_keys={**found.text_keys, "a cat": "t9"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_with_other_samples_are_told_apart(what, samples):
    assert order_of((OTHERS[what](samples), None)) != order_of((samples, None))
    assert order_of((samples, OTHERS[what](samples))) != order_of((samples, samples))  # those held out as well


def test_where_images_lie_is_no_difference(samples):
    moved = [dataclasses.replace(each, path=f"/elsewhere/{each.path}") for each in samples.samples]
    assert order_of((dataclasses.replace(samples, samples=moved), None)) == order_of((samples, None))
