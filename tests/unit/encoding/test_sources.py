"""Stock encoders through the cache: the same claims, store, progress and stop as our own, other names."""

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from devicebridge.data.image import ImageRequest
from devicebridge.encoding.comfy_data import read_tokens, token_lists
from devicebridge.encoding.comfy_sources import ComfyLatents, ComfyTexts
from devicebridge.encoding.sources import fill
from devicebridge.encoding.store import CacheStore
from devicebridge.tests.clips import save_image
from PIL import Image

CAPTIONS = ["", "a cat", "a dog", "a cat", "a bird"]
NAME = f"comfyui 1 CLIP {'a' * 64}"


class StubClip:
    """A CLIP whose states tell the text, and which counts. pooled: width of its pooled output, 0 for none."""

    fingerprint = NAME

    def __init__(self, width=8, pooled=2):
        self.texts, self.released, self.width, self.pooled = [], 0, width, pooled

    def encode(self, text):
        assert not self.released, "used after it was released"
        self.texts.append(text)
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        states = torch.randn(1, 3 + len(text), self.width, generator=generator)
        return [[states, {"pooled_output": torch.ones(1, self.pooled) if self.pooled else None}]]

    def release(self):
        self.released += 1


class StubVae:
    fingerprint = f"comfyui 1 VAE {'b' * 64}"
    takes_clips = False

    def __init__(self):
        self.pixels, self.released = [], 0

    def encode(self, pixels):
        self.pixels.append(pixels)
        return torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 2)

    def release(self):
        self.released += 1


class StubVideoVae(StubVae):
    takes_clips = True

    def encode(self, pixels):
        return super().encode(pixels)[::4].movedim(0, 1)[None]


def _fits(shapes, num_frames=0):
    return ""


def _texts(clip, problem=_fits, name=NAME):
    return ComfyTexts(name, problem, clip)


def test_texts_are_kept_as_they_came_and_encoded_once(tmp_path):
    store, clip, done = CacheStore(tmp_path), StubClip(), []
    keys = fill(CAPTIONS, _texts(clip), store, lambda *count: done.append(count))
    assert sorted(clip.texts) == sorted(set(CAPTIONS)) and clip.released == 1
    assert done[0][:2] == (0, 4) and done[-1] == (4, 4, "captions")
    for caption, key in keys.items():
        states, options = StubClip().encode(caption)[0]
        entry = store.get(key)
        assert torch.equal(entry["cond"], states[0]) and torch.equal(entry["pooled_output"], *options["pooled_output"])
    again = StubClip()
    assert fill(CAPTIONS, _texts(again), store) == keys and not again.texts and not again.released
    edited = StubClip()
    fill([*CAPTIONS[:-1], "a blue bird"], _texts(edited), store)
    assert edited.texts == ["a blue bird"]


def test_captions_that_pull_in_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="textual inversion"):
        fill(["a cat, embedding:bad_hands"], ComfyTexts(NAME, _fits, StubClip(), weighs=True), CacheStore(tmp_path))
    assert fill(["a cat, embedding:bad_hands"], _texts(StubClip()), CacheStore(tmp_path))


@pytest.fixture
def requests(tmp_path):
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for index, path in enumerate(paths):
        save_image(path, 12, 10, seed=index)
    return [ImageRequest(str(path), (12, 10), (2, 0, 8, 8)) for path in paths]


def test_a_known_vae_finds_its_latents_and_computes_none(requests, tmp_path):
    store, vae = CacheStore(tmp_path / "cache"), StubVae()
    keys = fill(requests[:2], ComfyLatents(vae.fingerprint, _fits, vae), store)
    known = ComfyLatents(vae.fingerprint, _fits)
    assert fill(requests[:2], known, store) == keys
    with pytest.raises(ValueError, match="1 images are not in the cache, and cache.latent_source says"):
        fill(requests, known, store)
    other = ComfyLatents("another", _fits, StubVae())
    assert not set(fill(requests, other, store).values()) & set(keys.values())


def test_a_vae_of_another_model_is_refused_at_its_first_image(requests, tmp_path):
    store, vae = CacheStore(tmp_path / "cache"), StubVae()
    with pytest.raises(ValueError, match=r"the stock VAE does not fit: of .*0\.png, no"):
        fill(requests, ComfyLatents(vae.fingerprint, lambda shapes, num_frames: "no", vae), store)
    assert len(vae.pixels) == 1 and not list(store.keys()) and vae.released == 1


@pytest.fixture
def clips(requests):
    folder = Path(requests[0].path).parent / "clip"
    for index in range(10):
        save_image(folder / f"{index}.png", 12, 10, seed=10 + index)
    size = ((12, 10), (2, 0, 8, 8))
    return [ImageRequest(str(folder), *size, tuple(range(9))), ImageRequest(str(folder), *size, (0, 2, 4, 6, 8))]


def test_images_and_clips_reach_the_vae_as_frames_and_other_frames_are_another_entry(requests, clips, tmp_path):
    """As core's nodes hand them to VAEEncode: [F, height, width, 3]."""
    store, vae, asked = CacheStore(tmp_path / "cache"), StubVideoVae(), []

    def problem(shapes, num_frames):
        asked.append((shapes["samples"], num_frames))
        return ""

    source = ComfyLatents(vae.fingerprint, problem, vae)
    keys = fill([requests[0], *clips], source, store)
    assert len(set(keys.values())) == 3
    assert asked == [((3, 1, 4, 4), 1), ((3, 3, 4, 4), 9), ((3, 2, 4, 4), 5)]
    for clip, pixels in zip([requests[0], *clips], vae.pixels, strict=True):  # float32 bytes / 255, bit for bit
        files = [f"{clip.path}/{index}.png" for index in clip.frames] or [clip.path]
        loaded = np.stack([np.array(Image.open(file)).astype(np.float32) / 255.0 for file in files])
        assert torch.equal(pixels, torch.from_numpy(loaded)[:, 2:10, :8])
        assert torch.equal(store.get(keys[clip])["samples"], StubVideoVae().encode(pixels)[0])


def test_a_vae_of_single_images_is_refused_before_a_clip_is_encoded(requests, clips, tmp_path):
    store, vae = CacheStore(tmp_path / "cache"), StubVae()
    with pytest.raises(ValueError, match="encodes every frame for itself, but 2 clips are to be .*, such as .*clip"):
        fill([requests[0], *clips], ComfyLatents(vae.fingerprint, _fits, vae), store)
    assert not vae.pixels and not list(store.keys())
    vae.takes_clips = True  # which it claims wrongly
    with pytest.raises(ValueError, match="it made 9 samples, not one"):
        fill(clips, ComfyLatents(vae.fingerprint, _fits, vae), store)
    assert not list(store.keys())


def test_where_encoders_train_their_tokens_are_kept_in_the_place_of_states(tmp_path):
    """Under another key, and the encoder is not asked to compute."""
    parts = [[(49406, 1.0), (7, 1.3), (49407, 1.0)]] * 2
    clip = StubClip()
    clip.tokens = lambda text: {"l": parts, "g": [[(9, 1.0), (0, 0.1)]]}
    problem = {"problem": lambda shapes: "", "clip": clip}
    states, tokens = ComfyTexts(NAME, **problem), ComfyTexts(NAME, **problem, of_tokens=True)
    store = CacheStore(tmp_path)
    keys = fill(["a cat"], tokens, store)
    assert keys["a cat"] != states.key("a cat", {}) and not clip.texts
    entry = store.get(keys["a cat"])
    batch = {name: torch.stack([tensor, tensor]) for name, tensor in entry.items()}
    assert token_lists(batch) == [{"l": parts, "g": [[(9, 1.0), (0, 0.1)]]}] * 2
    with pytest.raises(ValueError, match="embedding:"):
        replace(tokens, weighs=True).key("embedding:mine", {})


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({}, "tokens by text encoder"),
        ({"l": [[(1, 1.0)], [(1, 1.0), (2, 1.0)]]}, "parts of several lengths"),
        ({"l": [[(torch.zeros(8), 1.0)]]}, "holds an embedding"),
    ],
)
def test_tokens_that_cannot_be_kept_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        read_tokens(tokens, "the caption 'a cat'")
