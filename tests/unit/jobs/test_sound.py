"""Latents of audio, and of a video with its sound: read, kept, packed, weighed, and refused where they do not fit."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.data.image import SoundRequest
from devicebridge.data.samples import EncodedSample, Sample
from devicebridge.encoding import store as store_module
from devicebridge.encoding.comfy_data import load_encoded, read_pairs, read_samples, save_encoded
from devicebridge.encoding.store import CacheStore
from devicebridge.families.comfy.inputs import ComfyReader, stream_shapes
from devicebridge.families.spec import ComfyInputs, LatentSpec
from devicebridge.jobs import read_job
from devicebridge.jobs.read_job import read_encoded_samples, refuse_batches_with_sound
from devicebridge.planning import search
from devicebridge.planning.dry_run import SampleText, Work, step_on_meta, with_sound
from devicebridge.tests.plans import make_plan_job
from devicebridge.training.batches import CachedSamples, loss_weights
from devicebridge.training.objective import prediction_loss
from PIL import Image
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread")
READ_HEADER = store_module._read_header
VIDEO, SOUND = (4, 2, 2, 3), (8, 5, 16)


class Nested:
    """As ComfyUI's NestedTensor: no tensor, though it has a tensor's words."""

    is_nested = True

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def unbind(self) -> list[torch.Tensor]:
        return self.tensors


def _reader(dims: Any = 3, rows: int = 0, channels: int = 4, **more: Any) -> ComfyReader:
    comfy = ComfyInputs("cond", "", lambda samples: samples * 2, latent_dims=dims, reads_all=True, **more)
    latent = LatentSpec(channels, 1 if rows else 32, size_multiple=1 if rows else 32, audio_rows=rows)
    return ComfyReader(comfy, {"in_channels": channels}, latent, "a model")


LTX = _reader(sound=(8, 0, 16))


def _conditioning(count: int = 1, **options: Any) -> list[Any]:
    return [[torch.ones(1, 6, 8), dict(options)] for _ in range(count)]


def _save(folder: Path, samples: Any, conditioning: list[Any]) -> Path:
    latent = {"samples": samples, "type": "audio"}
    return save_encoded(read_pairs([latent], [conditioning]), CacheStore(folder))


def _load(folder: Path, samples: Any, reader: ComfyReader, count: int) -> Any:
    path = _save(folder, samples, _conditioning(count))
    found = read_encoded_samples(str(path), reader)
    data = CachedSamples(CacheStore(folder), found, False, 1.0, reader.comfy)
    return data.load(range(count), [0] * count)


def test_a_video_and_its_sound_are_packed_as_comfyui_packs_them(tmp_path):
    """The video's values, then the sound's, normalised together; the sides are said by tensors without numbers."""
    video, sound = torch.randn(2, *VIDEO), torch.randn(2, *SOUND)
    batch = _load(tmp_path, Nested(video, sound), LTX, 2)
    assert torch.equal(batch.latents, 2 * torch.cat([video.flatten(1), sound.flatten(1)], 1)[:, None, None, None])
    assert stream_shapes(batch.conditions) == [VIDEO, SOUND]
    assert all(each.numel() == 0 for each in batch.conditions.values())


@pytest.mark.parametrize("shape", [(4, 7), (4, 16, 7)])
def test_audio_has_the_form_of_a_picture_of_one_frame(tmp_path, shape):
    audio = torch.randn(2, *shape)
    batch = _load(tmp_path, audio, _reader(len(shape) - 1, rows=1 if len(shape) == 2 else 16), 2)
    assert batch.latents.shape == (2, 4, 1, *((1,) if len(shape) == 2 else ()), *shape[1:])
    assert torch.equal(batch.latents.flatten(), 2 * audio.flatten())
    assert not batch.conditions and batch.weights is None


def test_the_loss_of_streams_is_the_sum_of_their_means(tmp_path):
    batch = _load(tmp_path, Nested(torch.randn(2, *VIDEO), torch.randn(2, *SOUND)), LTX, 2)
    size = torch.Size(VIDEO).numel()
    said = torch.randn(batch.latents.shape, requires_grad=True)
    error = (said - batch.latents).square()
    expected = error[..., :size].mean() + error[..., size:].mean()
    loss = prediction_loss(said, batch.latents, weights=batch.weights)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (found,), (wanted,) = (torch.autograd.grad(each, said, retain_graph=True) for each in (loss, expected))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=0)


def test_weights_of_samples_and_of_streams_are_multiplied():
    given = {"stream.0": torch.empty(2, 0, 3), "stream.1": torch.empty(2, 0, 1), "cond": torch.ones(2, 5, 5)}
    assert loss_weights(None, {"cond": torch.ones(1)}) is None
    found = loss_weights(torch.tensor([1.0, 0.5]), given).flatten(1)
    assert torch.allclose(found, torch.tensor([[4 / 3, 4 / 3, 4 / 3, 4], [2 / 3, 2 / 3, 2 / 3, 2]]))


def test_a_video_that_needs_a_sound_gets_one_of_which_no_loss_is_counted(tmp_path: Path) -> None:
    """And one that has a sound keeps it; a plan reckons with the same."""
    needs = _reader(sound=(8, 0, 16), silence=lambda frames: (8, 3 * frames, 16))
    video = torch.randn(1, *VIDEO)
    (sample,) = found = read_encoded_samples(str(_save(tmp_path, video, _conditioning())), needs)
    data = CachedSamples(CacheStore(tmp_path), found, False, 1.0, needs.comfy)
    batch = data.load([0], [0])
    assert stream_shapes(batch.conditions) == [VIDEO, (8, 6, 16)]
    assert torch.equal(batch.latents[0, 0, 0, 0, : video.numel()], 2 * video.flatten())
    said = torch.randn(batch.latents.shape)
    expected = (said - batch.latents).square()[..., : video.numel()].mean()
    loss = prediction_loss(said, batch.latents, weights=batch.weights)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (heard,) = read_encoded_samples(str(_save(tmp_path, Nested(video, torch.ones(1, *SOUND)), _conditioning())), needs)
    with_sound_of_its_own = dataclasses.replace(data, samples=[heard]).load([0], [0])
    assert torch.equal(with_sound_of_its_own.weights, loss_weights(None, with_sound_of_its_own.conditions))  # type: ignore[arg-type]
    family: Any = SimpleNamespace(comfy=needs.comfy)
    work = Work((4, 3, 4, 5), 1, torch.float32, None, LoraSettings())
    assert with_sound(family, work).streams == [(4, 3, 4, 5), (8, 9, 16)] and sample.sound == ()


def test_samples_with_sounds_of_other_lengths_share_no_batch(tmp_path):
    longer = (8, 6, 16)
    found: list[EncodedSample] = []
    for sound in (SOUND, longer, None):
        samples = torch.ones(1, *VIDEO)
        nested = samples if sound is None else Nested(samples, torch.ones(1, *sound))
        found += read_encoded_samples(str(_save(tmp_path, nested, _conditioning())), LTX)
    assert len({(sample.bucket, sample.alike) for sample in found}) == 3
    refuse_batches_with_sound(found, 1)
    refuse_batches_with_sound(found[2:], 2)
    with pytest.raises(ValueError, match="noise levels are mixed.*set batch_size 1"):
        refuse_batches_with_sound(found, 2)


def test_a_voice_is_sound_and_a_noise_mask_is_none(tmp_path):
    """LTX-2's video listens to a reference of sound, too, through gates of the batch's largest noise level."""
    voice = _conditioning(ref_audio={"tokens": torch.ones(1, 3, 128)})
    spoken = read_encoded_samples(str(_save(tmp_path, torch.randn(1, *VIDEO), voice)), LTX)
    with pytest.raises(ValueError, match="noise levels are mixed"):
        refuse_batches_with_sound(spoken, 2)
    kept = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1, 1)
    pairs = read_pairs([{"samples": torch.randn(1, *VIDEO), "noise_mask": kept}], [_conditioning()])
    masked = read_encoded_samples(str(save_encoded(pairs, CacheStore(tmp_path))), LTX)
    refuse_batches_with_sound(masked, 2)


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_noise_mask_beside_a_sound_is_refused_with_what_helps(tmp_path, is_nested):
    """As LTXVImgToVideoInplace and Concat AV Latent make it, and a mask that was set on both streams."""
    kept = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1, 1)
    samples = Nested(torch.randn(1, *VIDEO), torch.randn(1, *SOUND))
    latent = {"samples": samples, "noise_mask": Nested(kept, torch.ones(1, *SOUND)) if is_nested else kept}
    with pytest.raises(ValueError, match="for pictures and videos alone, not for sound.*take out.*or train the video"):
        path = save_encoded(read_pairs([latent], [_conditioning()]), CacheStore(tmp_path))
        read_encoded_samples(str(path), LTX)


def test_a_noise_mask_of_a_video_that_will_be_given_silence_is_refused_too(tmp_path: Path) -> None:
    """Silence is added as a batch is read, where the mask has the video's sides and the latents are packed."""
    kept = torch.tensor([0.0, *[1.0] * 6]).view(1, 1, 7, 1, 1)
    latent = {"samples": torch.randn(1, 4, 7, 2, 3), "noise_mask": kept}
    path = str(save_encoded(read_pairs([latent], [_conditioning()]), CacheStore(tmp_path)))
    assert len(read_encoded_samples(path, LTX)) == 1
    with pytest.raises(ValueError, match=r"noise_mask.*MiniMaxH3AddGuide"):
        read_encoded_samples(path, _reader(sound=(8, 0, 16), silence=lambda frames: (8, 3 * frames, 16)))


def test_a_plan_looks_for_a_noise_mask_in_the_list_and_reads_one_entry_at_most(tmp_path, monkeypatch):
    plain, kept = torch.randn(3, *VIDEO), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1, 1)
    pairs = list(read_pairs([{"samples": plain}], [_conditioning(3)]))
    found = read_encoded_samples(str(save_encoded(pairs, CacheStore(tmp_path))), LTX)
    pairs += read_pairs([{"samples": plain[:2], "noise_mask": kept}], [_conditioning(2)])
    masked = read_encoded_samples(str(save_encoded(pairs, CacheStore(tmp_path))), LTX)
    opened = []
    monkeypatch.setattr(store_module, "_read_header", lambda path: opened.append(path) or READ_HEADER(path))
    latents = {CacheStore(tmp_path).path(each.latents_key) for each in masked}
    assert "noise_mask" not in _longest_text(found, tmp_path, monkeypatch) and not latents & set(opened)
    assert torch.equal(_longest_text(masked, tmp_path, monkeypatch)["noise_mask"], kept[0])
    assert len(latents & set(opened)) == 1


def test_a_plan_computes_with_the_longest_sound_beside_the_largest_video(tmp_path, monkeypatch):
    """As a batch has them: packed, and said by tensors without numbers."""
    found: list[EncodedSample] = []
    for length in (5, 9, 7):
        nested = Nested(torch.ones(1, *VIDEO), torch.ones(1, 8, length, 16))
        found += read_encoded_samples(str(_save(tmp_path, nested, _conditioning())), LTX)
    plain = read_encoded_samples(str(_save(tmp_path, torch.ones(1, *VIDEO), _conditioning())), LTX)
    assert not stream_shapes(_longest_text(plain, tmp_path, monkeypatch))
    text, shape = SampleText(_longest_text((*found, *plain), tmp_path, monkeypatch)), (4, 3, 4, 5)
    work = Work(shape, 2, torch.float32, None, LoraSettings(), text=text)
    host = _Host()
    info: Any = SimpleNamespace(family=SimpleNamespace(host=host))
    latents = torch.randn(work.batch_shape)
    step_on_meta(nn.Linear(1, 1), info, SimpleNamespace(training_guidance=None), work, latents)  # type: ignore[arg-type]
    assert host.noisy.shape == (2, 1, 1, 1, 4 * 3 * 4 * 5 + 8 * 9 * 16)
    assert stream_shapes(host.given) == [shape, (8, 9, 16)]
    assert host.given["stream.0"].shape == (2, 0, *shape) and host.given["stream.1"].shape == (2, 0, 8, 9, 16)
    picture = dataclasses.replace(work, text=text.without_streams)
    assert picture.batch_shape == (2, *shape) and picture.streams == []


def test_a_dry_run_takes_a_voice_for_as_much_more_sound():
    """It has no numbers, by which LTX-2 places a voice; what the blocks compute with is as long."""
    voice = {"cond": torch.ones(6, 8), "option.ref_audio.tokens": torch.ones(3, 128)}
    family: Any = SimpleNamespace(comfy=LTX.comfy)

    def streams(tensors: dict[str, torch.Tensor], family: Any = family) -> list[Any]:
        work = Work((4, 3, 4, 5), 1, torch.float32, None, LoraSettings(), text=SampleText(tensors))
        return with_sound(family, work).streams

    assert streams(voice) == [(4, 3, 4, 5), (8, 3, 16)]
    assert streams({**voice, "stream.1": torch.empty(0, 8, 5, 16)})[1] == (8, 8, 16)
    assert streams({"cond": torch.ones(6, 8)}) == streams(voice, SimpleNamespace(comfy=_reader().comfy)) == []


class _Host:
    """As ComfyUI's models are called; remembers with what."""

    def example(self, batch: int, device: torch.device, text: Any) -> dict[str, torch.Tensor]:
        return {name: torch.stack([each] * batch) for name, each in text.items()}

    def predict(self, model: Any, noisy: torch.Tensor, sigmas: torch.Tensor, given: Any, guidance: Any) -> torch.Tensor:
        self.noisy, self.given = noisy, given
        return model(noisy[..., None])[..., 0]


def _longest_text(
    encoded: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, samples: Any = (), comfy: Any = None
) -> dict[str, torch.Tensor]:
    """Of a job of ComfyUI's own model with these samples and this cache."""
    monkeypatch.setattr(read_job, "cache_store", lambda job: CacheStore(folder))
    job: Any = SimpleNamespace(lora=SimpleNamespace(text_encoder=False), cache=SimpleNamespace(text_source=""))
    info: Any = SimpleNamespace(family=SimpleNamespace(host=object(), comfy=comfy))
    nothing: Any = None
    return read_job._longest_text(read_job.ReadJob(job, info, nothing, nothing, (), samples, encoded)).tensors


def test_a_plan_has_the_longest_sound_of_clips_before_anything_is_encoded(tmp_path, monkeypatch):
    sides = (2, 3)
    plain = Sample("a.mp4", "", None, sides, (0, 0, *sides), sides, (0, 1))
    clips = [dataclasses.replace(plain, sound=SoundRequest("a.wav", 0.0, 1.0, cells)) for cells in (7, 9)]
    found = _longest_text((), tmp_path, monkeypatch, (plain, *clips), LTX.comfy)
    assert {name: tensor.shape for name, tensor in found.items()} == {"stream.1": (0, 8, 9, 16)}
    refuse_batches_with_sound([plain], 2)
    with pytest.raises(ValueError, match="batch_size"):
        refuse_batches_with_sound(clips, 2)


@pytest.mark.parametrize(("rate", "advised"), [(10, (120, 60, 30, 15)), (0.0, ())])
def test_shorter_sounds_are_advised_where_memory_lacks(rate, advised):
    """Of a model whose rate nobody has written, no length in seconds is known."""
    latent = LatentSpec(8, 1, size_multiple=1, audio_rows=16, sound_rate=rate)
    family = SimpleNamespace(latent_of=lambda variant: latent)
    model = SimpleNamespace(variant=SimpleNamespace(condition="none"), family=family)
    job = make_plan_job(lora={"rank": 2})
    question: Any = SimpleNamespace(job=job, model=model, bucket=(140, 140), frames=1)  # 122.5 s
    changes = {str(change): change.others["bucket"] for change in search._sizes(question)[0]}
    assert changes == {f"data.seconds = {n}": (round((160 * n) ** 0.5),) * 2 for n in advised}


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_mask_beside_sound_weighs_the_picture_alone(is_silent: bool, tmp_path: Path) -> None:
    """Packed latents have no rows and columns of their own."""
    Image.fromarray(np.array([[255, 0, 0]] * 2, dtype=np.uint8)).save(tmp_path / "mask.png")
    store, video = CacheStore(tmp_path), torch.ones(VIDEO)
    entry = {"samples": video} if is_silent else {"samples": video, "samples.1": torch.ones(SOUND)}
    store.put("a" * 64, entry)
    store.put("b" * 64, {"cond": torch.ones(2, 8)})
    sides = (2, 3)
    sample = Sample("a.mp4", "", str(tmp_path / "mask.png"), sides, (0, 0, *sides), sides, (0, 1), latents_key="a" * 64)
    sample = dataclasses.replace(sample, text_keys=(("b" * 64,), ()))
    comfy = dataclasses.replace(LTX.comfy, silence=lambda frames: SOUND)
    batch = CachedSamples(store, [sample], True, 1.0, comfy).load([0], [0])
    error = torch.rand(batch.latents.shape)
    found = prediction_loss(error.sqrt(), torch.zeros(error.shape), batch.mask, batch.weights)
    picture, sound = error.flatten().split([math.prod(VIDEO), math.prod(SOUND)])
    wanted = picture.view(VIDEO)[..., 0].mean() + (0 if is_silent else sound.mean())
    torch.testing.assert_close(found, wanted)
    assert batch.outside is not None and batch.outside.sum() == math.prod(VIDEO) * 2 / 3


def test_the_size_of_audio_is_counted_in_its_cells(tmp_path):
    path = _save(tmp_path, torch.ones(1, 4, 900), _conditioning())
    reader = _reader(1, rows=1)
    assert load_encoded(path)[0].latents_shapes == {"samples": (4, 900)}
    info = SimpleNamespace(family=SimpleNamespace(latent_of=lambda variant: reader.latent))
    assert read_job.ReadJob(None, info, None, None, (), (), read_encoded_samples(path, reader)).resolution == 30


@pytest.mark.parametrize(
    ("shapes", "reader", "words"),
    [
        ((VIDEO, SOUND), _reader(), "it has 2 streams, but a model takes one"),
        ((VIDEO, (8, 5, 12)), LTX, r"it has \[8, 5, 12\], but a model takes one stream of sound, \[8, 'time', 16\]"),
        ((VIDEO, (5, 16)), LTX, "takes one stream of sound"), ((VIDEO, SOUND, SOUND), LTX, "takes one stream of sound"),
        ((SOUND,), LTX, r"its shape is \[8, 5, 16\], but a model's VAE makes that of a video"),
        (((4, 6, 6),), _reader(1, rows=1), "makes that of audio, .channels, time"),
        (((4, 12, 6),), _reader(2, rows=16), "it is 12 high, but a model's VAE makes 16 rows of audio"),
        (((8, 7),), _reader(1, rows=1), "it has 8 channels"),
    ],
)  # fmt: skip
def test_streams_that_a_model_does_not_take_are_refused(tmp_path, shapes, reader, words):
    tensors = [torch.ones(1, *shape) for shape in shapes]
    path = _save(tmp_path, tensors[0] if len(tensors) == 1 else Nested(*tensors), _conditioning())
    with pytest.raises(ValueError, match=words):
        read_encoded_samples(str(path), reader)


def test_options_that_would_mislead_a_model_are_refused(tmp_path):
    path = _save(tmp_path, torch.ones(1, 4, 7), _conditioning(audio_codes=[[1, 2, 3]]))
    read_encoded_samples(str(path), _reader(1, rows=1))
    with pytest.raises(ValueError, match="its CONDITIONING has audio_codes, made up; turn it off"):
        read_encoded_samples(str(path), _reader(1, rows=1, refused={"audio_codes": "made up; turn it off"}))


def test_a_sound_is_wanted_for_every_video():
    with pytest.raises(ValueError, match=r"it: its LATENT has streams of \[2, 1\] samples"):
        read_samples(Nested(torch.ones(2, *VIDEO), torch.ones(1, *SOUND)), "it")
