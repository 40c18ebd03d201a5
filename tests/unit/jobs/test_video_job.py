"""Whole jobs over clips: images and clips mixed, and clips whose first frame is given."""

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from devicebridge.data.image import SoundRequest
from devicebridge.data.samples import BatchOrder
from devicebridge.data.video import read_frames
from devicebridge.encoding.comfy_data import read_pairs, save_encoded
from devicebridge.encoding.vae import load_vae
from devicebridge.events import EventLog
from devicebridge.families.wan import WAN
from devicebridge.jobs.encode_job import ComfyEncoders, cache_job, cache_store
from devicebridge.jobs.job import check_job, run_job
from devicebridge.jobs.read_job import subject_of
from devicebridge.tests.clips import save_clip
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_tiny_job, run_steps, save_tiny_dataset, save_tiny_pipeline
from devicebridge.tests.toy import TINY
from devicebridge.training.objective import add_noise, draw_quantiles, make_generator

pytestmark = pytest.mark.usefixtures("one_thread", "short_texts")
CLIPS = (("fall.mp4", 9, 16), ("run.gif", 12, 20), ("walk", 5, 16), ("jump.webm", 14, 24))


def _save_clips(folder):
    folder.mkdir(exist_ok=True, parents=True)
    for name, count, fps in CLIPS:
        clip = save_clip(folder / name, count, fps, size=(32, 40))
        clip.with_name(f"{clip.stem}.txt").write_text(f"a clip, {clip.stem}")
    return folder


def _make_job(folder, *, first_frame=False, **sections):
    tiny = TINY["wan"]
    if not (folder / "model").exists():
        save_tiny_pipeline(folder / "model", "wan")
        tiny.make_video_vae().save_pretrained(folder / "model" / "vae")
        if first_frame:
            model = tiny.make_model(in_channels=4 + 4 + 4, **tiny.encoder_widths)
            model.save_pretrained(folder / "model" / "transformer")
        _save_clips(folder / "data")
        if not first_frame:
            save_tiny_dataset(folder / "data", num_images=3)
    data = {"frames": [1, 5, 9], **sections.pop("data", {})}
    return make_tiny_job(folder, "wan", data=data, evaluation={"folder": ""}, **sections)


def test_images_and_clips_train_together_and_a_resumed_run_is_the_same(tmp_path):
    whole = run_job(_make_job(tmp_path, output={"folder": str(tmp_path / "whole")}))
    plan = check_job(_make_job(tmp_path))
    assert sorted(sample.num_frames for sample in plan.samples) == [1, 1, 1, 5, 9, 9, 9]
    heard = tuple(replace(each, sound=SoundRequest("a.wav", 0.0, 1.0, 40)) for each in plan.samples)
    read = replace(plan, job=_make_job(tmp_path, samples={"prompts": ["a clip"]}), samples=heard)
    assert subject_of(read).picture[2] == 9, "as long as clips are, not their sound"
    store = cache_store(plan.job)
    entries = map(store.get, store.keys())
    latents = [entry["latents"] for entry in entries if "latents" in entry]
    assert sorted(tensor.shape[1] for tensor in latents) == [1, 1, 1, 2, 3, 3, 3]
    assert len({round(loss, 6) for loss in whole.losses}) == 6
    run_steps(_make_job(tmp_path), 3)
    resumed = run_job(_make_job(tmp_path), resume=True)
    assert resumed.losses == whole.losses
    assert resumed.lora_path.read_bytes() == whole.lora_path.read_bytes()


def test_the_first_frame_is_given_and_the_loss_is_that_of_a_plain_computation(tmp_path):
    """The LoRA begins as nothing, so the first loss is the base model's."""
    job = _make_job(tmp_path, first_frame=True, train={"steps": 1, "batch_size": 2})
    (loss,) = run_job(job).losses
    plan = check_job(job)
    assert plan.variant.name == "wan2.2-i2v-a14b-high"
    indices = BatchOrder(plan.samples, batch_size=2, seed=job.train.seed).next().indices
    with EventLog(tmp_path / "log") as events:
        text = cache_job(plan, events)[0].load(indices, [0] * len(indices)).text["prompt_embeds"]
    vae = load_vae(WAN, plan.variant, tmp_path / "model", torch.float32)
    pixels = torch.stack([read_frames(plan.samples[i].image_request()) for i in indices])
    with torch.no_grad():
        latents = WAN.encode_latents(vae, pixels)
        grey = WAN.encode_latents(vae, torch.cat([pixels[:, :, :1], 0 * pixels[:, :, 1:]], dim=2))
        mask = torch.zeros(len(indices), 4, *latents.shape[2:])
        mask[:, :, 0] = 1
        generator = make_generator(job.train.seed, "train", 0, 0)
        sigmas = plan.schedule.sigmas(draw_quantiles(len(indices), generator), 0)
        noise = torch.randn(latents.shape, generator=generator)
        assert (sigmas >= 0.9).all()  # the expert for high noise
        inputs = torch.cat([add_noise(latents, noise, sigmas), mask, grey], dim=1)
        model = TINY["wan"].make_model(in_channels=12, **TINY["wan"].encoder_widths)
        output = model(inputs, sigmas * 1000, text, return_dict=False)[0]
    assert loss == pytest.approx((output - (noise - latents)).square().mean().item(), rel=1e-5)


def test_the_first_latents_are_given_and_left_out_of_the_loss(tmp_path):
    """Every token has a timestep of its own."""
    settings = {"model": {"variant": "wan2.2-ti2v-5b-i2v"}, "data": {"frames": [9]}, "train": {"steps": 1}}
    _make_job(tmp_path)
    for file in [*(tmp_path / "data").glob("image_*"), *(tmp_path / "data").glob("walk.txt")]:
        file.unlink()
    job = _make_job(tmp_path, **settings)
    (loss,) = run_job(job).losses
    plan = check_job(job)
    indices = BatchOrder(plan.samples, batch_size=2, seed=job.train.seed).next().indices
    with EventLog(tmp_path / "log") as events:
        batch = cache_job(plan, events)[0].load(indices, [0] * len(indices))
    latents = batch.latents
    assert latents.shape[2] == 3 and set(batch.conditions) == {"first_latents"}
    generator = make_generator(job.train.seed, "train", 0, 0)
    sigmas = plan.schedule.sigmas(draw_quantiles(len(indices), generator), 0)
    noise = torch.randn(latents.shape, generator=generator)
    noisy = add_noise(latents, noise, sigmas)
    noisy[:, :, 0] = latents[:, :, 0]
    count = latents[0, 0, 0].numel() // 4
    timesteps = torch.stack([torch.cat([torch.zeros(count), s.expand(2 * count)]) for s in sigmas])
    model = TINY["wan"].make_model(**TINY["wan"].encoder_widths)
    with torch.no_grad():
        output = model(noisy, timesteps * 1000, batch.text["prompt_embeds"], return_dict=False)[0]
    error = (output - (noise - latents)).square()[:, :, 1:]
    assert loss == pytest.approx(error.mean().item(), rel=1e-5)


def test_single_images_leave_nothing_to_learn_where_the_first_frame_is_given(tmp_path):
    job = _make_job(tmp_path, first_frame=True)
    save_tiny_dataset(tmp_path / "data", num_images=7)
    with pytest.raises(ValueError, match=r"in a single image nothing is left to learn.*these 7.*image_0\.png"):
        check_job(job)
    with pytest.raises(ValueError, match=r"is given the first frame"):
        check_job(_make_job(tmp_path, first_frame=True, data={"frames": [1]}))


@pytest.mark.parametrize("first_frame", [True, False])
def test_what_is_given_reaches_the_pipeline_whose_loss_is_on_the_last_device(tmp_path, first_frame):
    """image_condition, or first_latents with a mask, against one batch at a time."""
    variant = {} if first_frame else {"variant": "wan2.2-ti2v-5b-i2v"}
    _make_job(tmp_path, first_frame=first_frame)
    for file in (tmp_path / "data").glob("image_*"):
        file.unlink()
    settings = {"data": {"frames": [5, 9]}, "train": {"steps": 2, "gradient_accumulation_steps": 3}, "model": variant}

    def job(name, devices, strategy):
        split, parallel, cache = {"devices": devices}, {"strategy": strategy}, {"vae_device": "cpu"}
        sections = {"split": split, "parallel": parallel, "cache": cache, "output": {"folder": str(tmp_path / name)}}
        return _make_job(tmp_path, first_frame=first_frame, **settings, **sections)

    one = run_job(job("one", ["cpu"], "none"))
    with emulated_cards():
        two = job("two", ["lazy:0", "lazy:1"], "pipeline")
        plan = check_job(two)
        assert plan.execution.ahead == 1 and plan.placement.tail
        found = run_job(two)
        plain = run_job(job("plain", ["lazy:0", "lazy:1"], "none"))
    assert found.losses == pytest.approx(one.losses, rel=1e-5) and len(set(found.losses)) == 2
    assert found.losses == plain.losses
    assert all(torch.equal(found.lora[name], tensor) for name, tensor in plain.lora.items())


class HostLike:
    """A diffusers VAE in the clothes of ComfyUI's: [F, height, width, 3] in 0..1 -> plain samples [1, C, F', H, W]."""

    fingerprint = f"comfyui 1 VAE {'b' * 64}"
    takes_clips = True

    def __init__(self, vae):
        self.vae, self.num_encoded = vae, 0

    @torch.no_grad()
    def encode(self, pixels):
        self.num_encoded += 1
        return self.vae.encode(pixels.movedim(-1, 0)[None] * 2 - 1).latent_dist.mode()

    def release(self):
        pass


def _stock_job(folder, **sections):
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True],
        scale_factor_spatial=4, scale_factor_temporal=4,
    ).eval()  # fmt: skip
    if not (folder / "model").exists():
        _make_job(folder)
        vae.save_pretrained(folder / "model" / "vae")
        model = TINY["wan"].make_model(in_channels=16, out_channels=16, **TINY["wan"].encoder_widths)
        model.save_pretrained(folder / "model" / "transformer")
    vae = diffusers.AutoencoderKLWan.from_pretrained(folder / "model" / "vae")
    return _make_job(folder, **sections), ComfyEncoders(vae=HostLike(vae))


def _cached(job, encoders):
    with EventLog(Path(job.output.folder)) as events:
        return cache_job(check_job(job), events, encoders=encoders)[0]


@pytest.mark.parametrize("variant", ["wan2.1-t2v-14b", "wan2.2-ti2v-5b-i2v"])
def test_clips_of_a_stock_vae_are_trained_on_as_those_of_the_models_own(tmp_path, variant):
    settings = {"model": {"variant": variant}, "train": {"steps": 1, "batch_size": 1}}
    is_given, _ = variant.endswith("i2v"), _stock_job(tmp_path)
    for file in (tmp_path / "data").glob("image_*") if is_given else ():
        file.unlink()
    own_job, encoders = _stock_job(tmp_path, **settings)
    sections = {"cache": {"latent_source": HostLike.fingerprint}, "output": {"folder": str(tmp_path / "stock")}}
    stock_job, _ = _stock_job(tmp_path, **settings, **sections)
    stock, own = _cached(stock_job, encoders), _cached(own_job, ComfyEncoders())
    assert encoders.vae.num_encoded == len(stock.samples) == len(own.samples) >= 3
    for index in range(len(own.samples)):
        found, expected = stock.load([index], [0]), own.load([index], [0])
        torch.testing.assert_close(found.latents, expected.latents, rtol=1e-4, atol=1e-4)
        assert found.conditions.keys() == expected.conditions.keys()
        if is_given:
            assert torch.equal(found.conditions["first_latents"], found.latents[:, :, :1])
            assert torch.equal(found.mask, expected.mask)
    assert run_job(stock_job).losses == pytest.approx(run_job(own_job).losses, rel=1e-3)


def test_lists_of_latents_train_what_their_clips_train(tmp_path):
    """With the first latents given too; a single image is refused there."""
    settings = {"model": {"variant": "wan2.2-ti2v-5b-i2v"}, "train": {"steps": 1, "batch_size": 1}}
    _stock_job(tmp_path)
    for file in [*(tmp_path / "data").glob("image_*"), *(tmp_path / "data").glob("walk.txt")]:
        file.unlink()
    job, encoders = _stock_job(tmp_path, **settings, cache={"latent_source": HostLike.fingerprint})
    data = _cached(job, encoders)
    samples = [data.store.get(each.latents_key)["samples"][None] for each in data.samples]
    states = [data.store.get(sample.text_keys[0][0])["prompt_embeds"] for sample in data.samples]

    def listed(latents):
        conditioning = [[[text[None], {}]] for text in states]
        path = save_encoded(read_pairs([{"samples": sample} for sample in latents], conditioning), data.store)
        lists = {"folders": [], "encoded": str(path), "frames": []}
        return _make_job(tmp_path, **settings, data=lists, output={"folder": str(tmp_path / "lists")})

    assert [sample.num_frames for sample in check_job(listed(samples)).encoded] == [9, 9, 9]
    assert run_job(listed(samples)).losses == run_job(job).losses
    with pytest.raises(ValueError, match=r"nothing is left to learn; take out these 1, .*: sample 2"):
        check_job(listed([samples[0], samples[1][:, :, :1], samples[2]]))


def test_a_stock_vae_for_a_variant_that_encodes_its_condition_is_refused_first(tmp_path):
    job = _make_job(tmp_path, first_frame=True, cache={"latent_source": HostLike.fingerprint})
    with pytest.raises(ValueError, match=r"wan2\.2-i2v-a14b-high is also given the first frame.*stock_vae"):
        check_job(job)
    lists = {"folders": [], "encoded": str(tmp_path / "none.json")}
    with pytest.raises(ValueError, match="give clips, no latents"):
        check_job(_make_job(tmp_path, first_frame=True, data=lists))


def test_entries_of_other_lengths_are_refused(tmp_path):
    """A VAE that leaves frames out, at the first clip; and what such a one left in the cache."""
    job, encoders = _stock_job(tmp_path, cache={"latent_source": HostLike.fingerprint})
    for file in (tmp_path / "data").glob("image_*"):
        file.unlink()
    whole = encoders.vae.encode
    encoders.vae.encode = lambda pixels: whole(pixels)[:, :, :1]
    with pytest.raises(ValueError, match="it has 1 latent frames of 9 frames, but wan2.1-t2v-14b takes 3"):
        _cached(job, encoders)
    encoders.vae.encode = whole
    data = _cached(job, encoders)
    key = data.samples[0].latents_key
    data.store.put(key, {"samples": data.store.get(key)["samples"][:, :1].contiguous()})
    with pytest.raises(ValueError, match="it has 1 latent frames of 9 frames"):
        _cached(job, encoders)
