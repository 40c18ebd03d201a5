"""What conditions a sample beside its caption: asked for with the files' own pixels, kept once, read with the text."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from devicebridge.data.image import ImageRequest
from devicebridge.data.samples import Condition, Sample
from devicebridge.encoding.comfy_sources import ComfyConditions
from devicebridge.encoding.sources import fill
from devicebridge.encoding.store import CacheStore
from devicebridge.tests.clips import COLOURS, save_clip
from devicebridge.training.batches import CachedSamples
from PIL import Image

ENCODERS = ("comfyui 0 CLIP a", "comfyui 0 VAE b")


class Conditioner:
    """Gives back what it was asked for."""

    def __init__(self):
        self.asked, self.released = [], 0

    def make(self, parts):
        self.asked.append(parts)
        latents = [each.movedim(-1, 1) for each in parts.references]
        shown = parts.control if parts.control is not None else parts.first
        options = {"reference_latents": latents} if latents else {"concat_latent_image": shown.movedim(-1, 0)[None]}
        return [[torch.full((1, 2, 3), float(len(parts.caption))), {**options, "pooled_output": torch.ones(1, 4)}]]

    def release(self):
        self.released += 1


def _source(way="reference", conditioner=None, **changes):
    source = ComfyConditions(way, ENCODERS, lambda shapes: "", conditioner=conditioner)
    return dataclasses.replace(source, **changes)


@pytest.fixture
def picture(tmp_path):
    values = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "before.png")
    return str(tmp_path / "before.png"), torch.from_numpy(values)


def _condition(picture, way="reference"):
    return Condition(way, (picture[0],), ((5, 7),))


def test_a_reference_is_given_whole_as_comfyuis_loader_gives_it(picture, tmp_path):
    conditioner = Conditioner()
    source, store = _source(conditioner=conditioner), CacheStore(tmp_path / "cache")
    wanted = [("a cat", _condition(picture)), ("a dog", _condition(picture))]
    keys = fill(wanted, source, store)
    (asked,) = conditioner.asked
    assert torch.equal(asked.references[0], picture[1][None].float() / 255) and asked.size == ()
    assert conditioner.released == 1 and len(set(keys.values())) == 1, "captions have no say in it"
    entry = store.get(keys[wanted[0]])
    assert entry.keys() == {"option.reference_latents.0"}
    assert torch.equal(entry["option.reference_latents.0"], (picture[1].float() / 255).movedim(-1, 0))


def test_a_text_encoder_that_sees_the_reference_makes_each_captions_own_states(picture, tmp_path):
    source, store = _source("qwen-image-edit", Conditioner()), CacheStore(tmp_path / "cache")
    wanted = [(caption, _condition(picture, "qwen-image-edit")) for caption in ("", "a cat")]
    keys = fill(wanted, source, store)
    entries = [store.get(keys[each]) for each in wanted]
    assert [float(entry["cond"][0, 0]) for entry in entries] == [0.0, 5.0]
    assert all("option.reference_latents.0" in entry and "pooled_output" in entry for entry in entries)


def test_clips_are_given_in_the_samples_own_cut(tmp_path):
    path = tmp_path / "clip.mp4"
    save_clip(path, 6, size=(32, 48))
    request = ImageRequest(str(path), (32, 48), (0, 8, 32, 32), (1, 3, 5))
    conditioner, store = Conditioner(), CacheStore(tmp_path / "cache")
    fill([("", Condition("vace", control=request))], _source("vace", conditioner), store)
    fill([("", Condition("first-frame", clip=request))], _source("first-frame", conditioner), store)
    control, first = conditioner.asked
    assert control.control.shape == (3, 32, 32, 3) and control.first is None and control.size == (32, 32, 3)
    assert first.first.shape == (1, 32, 32, 3) and first.control is None and first.size == (32, 32, 3)
    for found in (control.control[0], first.first[0]):
        assert torch.allclose(found[4, 4] * 255, torch.tensor(COLOURS[1]).float(), atol=3)


def test_a_key_holds_what_decides_the_entry_and_nothing_else(picture, tmp_path):
    def key(source=None, caption="a cat", way="reference", path=picture[0]):
        condition = Condition(way, (path,), ((5, 7),))
        (found,) = (source or _source(way)).keys_of([(caption, condition)]).values()
        return found

    moved = tmp_path / "moved.png"
    shutil.copy(picture[0], moved)
    assert key() == key(path=str(moved)) == key(caption="a dog")
    qwen = key(way="qwen-image-edit")
    assert qwen != key(way="qwen-image-edit", caption="a dog")
    Image.new("RGB", (7, 5)).save(moved)
    others = [
        key(path=str(moved)), key(_source(megapixels=0.5)), key(_source(encoders=("another",))), key(way="kontext"),
        qwen,
    ]  # fmt: skip
    assert len({key(), *others}) == 6
    assert key(way="kontext") == key(_source("kontext", megapixels=0.5), way="kontext")


def test_what_nobody_can_make_and_what_does_not_fit_is_refused(picture, tmp_path):
    store, wanted = CacheStore(tmp_path / "cache"), [("", _condition(picture))]
    with pytest.raises(ValueError, match="what conditions 1 samples is not in the cache, and only ComfyUI can make it"):
        fill(wanted, _source(), store)
    refusing = _source(conditioner=Conditioner(), problem=lambda shapes: "it is too small")
    with pytest.raises(ValueError, match=r"before\.png does not fit: it is too small"):
        fill(wanted, refusing, store)
    assert not list(store.keys())


def test_a_batch_has_text_and_condition_together(picture, tmp_path):
    store = CacheStore(tmp_path / "cache")
    source = _source(conditioner=Conditioner())
    condition = _condition(picture)
    keys = fill([("a cat", condition), ("", condition)], source, store)
    latents, cat, empty = (digit * 64 for digit in "abc")
    store.put(latents, {"latents": torch.ones(2, 1, 4, 4)})
    for key, value in ((cat, 2.0), (empty, 3.0)):
        store.put(key, {"cond": torch.full((2, 4), value)})
    texts = [(own, keys[caption, condition]) for own, caption in ((cat, "a cat"), (empty, ""))]
    cut = ((8, 8), (0, 0, 8, 8), (8, 8))
    sample = Sample("x.png", "a cat", None, *cut, condition=condition, latents_key=latents, text_keys=tuple(texts))
    data = CachedSamples(store, [sample] * 2, False, 1.0)
    batch = data.load([0, 1], [0, -1])
    assert batch.text["option.reference_latents.0"].shape == (2, 3, 5, 7)
    assert [float(each.max()) for each in batch.text["cond"]] == [2.0, 3.0]
    assert not data.not_finite(0, False, torch.float16)
