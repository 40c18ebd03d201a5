"""Encoding through the cache: only what is missing is computed, once, and what is done stays done."""

import dataclasses
import gc
import shutil
import weakref

import diffusers
import pytest
import torch
from devicebridge.data.image import ImageRequest
from devicebridge.data.video import read_frames
from devicebridge.encoding import sources
from devicebridge.encoding.store import CacheStore
from devicebridge.encoding.text_encoder import TextEncoder, load_text_encoder, prepare_text
from devicebridge.encoding.text_place import TextPlace
from devicebridge.encoding.vae import load_vae
from devicebridge.families.spec import LatentSpec, ModelFamily, TextEncoderSpec
from devicebridge.system.stopping import Stopped
from devicebridge.tests.clips import save_clip, save_image
from devicebridge.tests.encoding import encode_captions, encode_images, example_family
from devicebridge.tests.toy_encoders import save_tiny_text_encoder

CLIP = TextEncoderSpec("pooled", "text_encoder", "tokenizer", "pooled", 24)
T5 = TextEncoderSpec("last_hidden_state", "text_encoder_2", "tokenizer_2", "text_states", 24)
QWEN3 = TextEncoderSpec(
    "chat_hidden_states", "text_encoder_3", "tokenizer_3", "chat_states", 48, (1, 2), None, {"enable_thinking": False}
)
SPECS = (CLIP, T5, QWEN3)
CAPTIONS = [f"a picture of {number} cats" for number in range(10)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def encoders(tmp_path):
    folder = tmp_path / "encoders"
    for kind, spec in (("clip", CLIP), ("t5", T5), ("qwen3", QWEN3)):
        names = {"encoder_name": spec.folder, "tokenizer_name": spec.tokenizer_folder}
        save_tiny_text_encoder(folder, kind, 16, 2, **names, max_length=24)
    return folder


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, in order, and whether an earlier model was still alive by then."""
    loaded, models = [], []

    def remember(name, model):
        gc.collect()
        loaded.append((name, sum(reference() is not None for reference in models)))
        models.append(weakref.ref(model))

    def load_encoder_and_tell(spec, *args, **options):
        encoder = load_text_encoder(spec, *args, **options)
        remember(spec.folder, encoder.model)
        return encoder

    def load_vae_and_tell(*args):
        vae = load_vae(*args)
        remember("vae", vae)
        return vae

    monkeypatch.setattr(sources, "load_text_encoder", load_encoder_and_tell)
    monkeypatch.setattr(sources, "load_vae", load_vae_and_tell)
    return loaded


class _Counter:
    """Counts progress, and can ask to stop after some steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[tuple[int, int, str]] = []
        self.stop_after = stop_after

    def __call__(self, done: int, total: int, what: str) -> None:
        self.calls.append((done, total, what))

    def should_stop(self) -> bool:
        return self.stop_after is not None and bool(self.calls) and self.calls[-1][0] >= self.stop_after


def _encode(captions, encoders, store, specs=SPECS, dtype=torch.float32, stop_after=None):
    counter = _Counter(stop_after)
    keys = encode_captions(captions, specs, encoders, "cpu", dtype, store, counter, counter.should_stop)
    assert counter.calls[-1][:2] == (counter.calls[-1][1],) * 2  # the count ends at the total
    return keys, len(counter.calls) - len(specs)


def test_entries_hold_every_encoders_states(encoders, tmp_path):
    store = CacheStore(tmp_path / "cache")
    keys, computed = _encode(CAPTIONS, encoders, store, dtype=torch.bfloat16)
    assert computed == 30 and list(keys) == CAPTIONS and len(set(keys.values())) == 10
    for caption, own in keys.items():
        entry = {name: states for key in own for name, states in store.get(key).items()}
        shapes = {"pooled": (16,), "text_states": (24, 16), "chat_states": (48, 32)}
        assert {name: tuple(states.shape) for name, states in entry.items()} == shapes
        for spec in SPECS:
            encoder = load_text_encoder(spec, encoders, "cpu", torch.bfloat16)
            (expected,) = encoder.encode_batch([prepare_text(caption, spec)])
            assert torch.equal(entry[spec.output], expected) and entry[spec.output].dtype == torch.bfloat16


def test_a_second_run_loads_nothing_and_returns_the_same_bytes(encoders, tmp_path, loads):
    store = CacheStore(tmp_path / "cache")
    keys, _ = _encode(CAPTIONS, encoders, store)
    files = {path: path.read_bytes() for path in store.folder.rglob("*.safetensors")}
    assert loads == [(spec.folder, 0) for spec in SPECS]  # one at a time is in memory
    again, computed = _encode(CAPTIONS, encoders, store)
    assert again == keys and computed == 0 and len(loads) == 3
    assert {path: path.read_bytes() for path in store.folder.rglob("*.safetensors")} == files


def test_captions_that_are_one_text_when_cleaned_are_encoded_once(encoders, tmp_path):
    cleaned = dataclasses.replace(T5, zero_padding=True)  # "a " and "a" are one text for it
    keys, computed = _encode(["a", " a "], encoders, CacheStore(tmp_path / "cache"), specs=(cleaned,))
    assert computed == 1 and keys["a"] == keys[" a "]


def test_the_pace_is_measured_from_when_an_encoder_begins(encoders, tmp_path):
    events = []
    store, note = CacheStore(tmp_path / "cache"), lambda done, total, what: events.append(done)
    options = {"on_begin": lambda: events.append("begins")}
    encode_captions(CAPTIONS[:3], (CLIP, T5), encoders, "cpu", torch.float32, store, note, **options)
    assert events == [0, "begins", 1, 2, 3] * 2


@pytest.mark.parametrize("stop_after", [0, 4])
def test_stopping_keeps_what_is_done_and_frees_the_encoder(encoders, tmp_path, loads, stop_after):
    store = CacheStore(tmp_path / "cache")
    with pytest.raises(Stopped, match=f"stopped after {stop_after} of 10 captions; these are kept"):
        _encode(CAPTIONS, encoders, store, stop_after=stop_after)
    assert len(list(store.folder.rglob("*.safetensors"))) == stop_after
    _, computed = _encode(CAPTIONS, encoders, store)
    assert computed == 30 - stop_after
    assert all(alive == 0 for _, alive in loads)


def _encode_latents(vae, pixels):
    assert pixels.ndim == 5 and pixels.shape[:3] == (1, 3, 1)
    return vae.encode(pixels[:, :, 0]).latent_dist.mode()[:, :, None] * 2 - 1  # in the VAE's type


def _family(encode_latents=_encode_latents, version: int = 1) -> ModelFamily:
    latent = LatentSpec(4, 2, normalisation_version=version)
    return example_family("AutoencoderKL", latent=latent, encode_latents=encode_latents)


@pytest.fixture
def vae_folder(tmp_path):
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = diffusers.AutoencoderKL(block_out_channels=[4, 8], norm_num_groups=2, latent_channels=4, **blocks)
    vae.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


@pytest.fixture
def images(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(10)]
    for number, path in enumerate(paths):
        save_image(path, 20, 24, seed=number)
    return [ImageRequest(str(path), (18, 20), (1, 2, 16, 16)) for path in paths]


def _encode_images(requests, vae_folder, store, family=None, dtype=torch.float32, stop_after=None):
    family, counter = family or _family(), _Counter(stop_after)
    keys = encode_images(requests, family, family.variants[0], vae_folder, dtype, store, counter, counter.should_stop)
    assert counter.calls[-1][:2] == (counter.calls[-1][1],) * 2
    return keys, len(counter.calls) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_what_the_familys_encoder_makes(vae_folder, images, tmp_path, dtype):
    store = CacheStore(tmp_path / "cache")
    keys, computed = _encode_images(images, vae_folder, store, dtype=dtype)
    assert computed == 10
    vae = diffusers.AutoencoderKL.from_pretrained(vae_folder, torch_dtype=dtype)
    for request, key in keys.items():
        (latents,) = store.get(key).values()
        assert latents.shape == (4, 1, 8, 8) and latents.dtype == torch.float32
        with torch.no_grad():
            expected = _encode_latents(vae, read_frames(request)[None].to(dtype))[0].float()
        assert torch.equal(latents, expected)


def test_files_that_cannot_be_read_are_named_and_all_others_are_encoded(vae_folder, images, tmp_path):
    """Cut short after they were looked at, of too few frames, and gone."""

    def encode_video(vae, pixels):
        return torch.cat([_encode_latents(vae, frame) for frame in pixels.split(1, dim=2)], dim=2)

    cut = ImageRequest(str(save_clip(tmp_path / "cut.mp4", 8)), (18, 20), (1, 2, 16, 16), (0, 4, 5))
    whole = [dataclasses.replace(cut, path=str(save_clip(tmp_path / name, 8))) for name in ("whole.mkv", "folder")]
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "cut.mp4").read_bytes()[:-200])
    short = dataclasses.replace(whole[0], frames=(5, 8))
    store, family = CacheStore(tmp_path / "cache"), _family(encode_video)
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:500])
    broken = r"(?s)cut\.mp4: .*cut off.*whole\.mkv: .*before its frame 9.*3\.png: cannot be read as an image.*all other"
    with pytest.raises(ValueError, match=broken):
        _encode_images([images[0], cut, short, images[3], *whole], vae_folder, store, family=family)
    keys, computed = _encode_images([images[0], *whole], vae_folder, store, family=family)
    assert computed == 0 and len(list(store.keys())) == 3
    assert store.get(keys[whole[0]])["latents"].shape == (4, 3, 8, 8)
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "3.png").unlink()
    with pytest.raises(ValueError, match=r"(?s)3\.png cannot be read.*folder cannot be read"):
        _encode_images([*images, *whole], vae_folder, store, family=family)


def test_a_vae_that_leaves_frames_out_is_refused(vae_folder, tmp_path):
    clip = ImageRequest(str(save_clip(tmp_path / "a.mp4", 8)), (18, 20), (1, 2, 16, 16), (0, 4, 5))
    family = _family(lambda vae, pixels: _encode_latents(vae, pixels[:, :, :1]))
    with pytest.raises(RuntimeError, match=r"the VAE made 1 latent frames of 3 frames of .*a\.mp4; small needs 3"):
        _encode_images([clip], vae_folder, CacheStore(tmp_path / "cache"), family=family)


def test_captions_that_give_no_finite_states_are_named_and_others_of_their_pass_kept(encoders, tmp_path, monkeypatch):
    """A streamed pass of five, two of them bad."""
    bad, store = CAPTIONS[1:3], CacheStore(tmp_path / "cache")
    together = TextEncoder.encode_batch

    def spoil(self, texts):
        found = together(self, texts)
        return [states * float("inf") if text in bad else states for states, text in zip(found, texts, strict=True)]

    monkeypatch.setattr(TextEncoder, "encode_batch", spoil)
    place = TextPlace(torch.device("cpu"), "for this test", 5)
    monkeypatch.setattr(sources, "plan_text_place", lambda *args: place)
    with pytest.raises(RuntimeError, match=r"(?s)'a picture of 1.*not finite in.*'a picture of 2.*are kept"):
        encode_captions(CAPTIONS[:5], [T5], encoders, "cpu", torch.float32, store)
    assert len(list(store.keys())) == 3
    monkeypatch.setattr(TextEncoder, "encode_batch", together)
    keys = encode_captions(CAPTIONS[:5], [T5], encoders, "cpu", torch.float32, store)
    assert all(torch.isfinite(store.get(key)[T5.output]).all() for key in keys.values())


def test_latents_that_are_not_finite_are_refused(vae_folder, images, tmp_path):
    family = _family(lambda vae, pixels: _encode_latents(vae, pixels) / 0)
    store = CacheStore(tmp_path / "cache")
    with pytest.raises(RuntimeError, match=r"latents of .*0\.png are not finite.*bfloat16"):
        _encode_images(images, vae_folder, store, family=family)
    assert not list(store.keys())


def test_the_vae_its_type_and_the_version_of_latents_are_in_their_keys(vae_folder, images):
    def key(version: int = 1, dtype: torch.dtype = torch.float32) -> str:
        family = _family(version=version)
        source = sources.FolderLatents(family, family.variants[0], vae_folder, "cpu", dtype)
        return source.keys_of(images[:1])[images[0]]

    found = {key(), key(version=2), key(dtype=torch.bfloat16)}
    file = vae_folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert len(found | {key()}) == 4
