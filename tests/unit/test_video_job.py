"""Whole jobs over clips: images and clips mixed, and clips whose first frame is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devicebridge.caching.encode import load_vae, read_frames
from devicebridge.cli import main
from devicebridge.families.wan import WAN
from devicebridge.tests.clips import save_clip, save_video
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_tiny_job, save_tiny_dataset, save_tiny_pipeline
from devicebridge.tests.toy import TINY
from devicebridge.training.config import save_job
from devicebridge.training.data import BatchOrder
from devicebridge.training.events import EventLog
from devicebridge.training.job import cache_job, cache_store, check_job, run_job
from devicebridge.training.objective import add_noise, draw_quantiles, make_generator

pytestmark = pytest.mark.usefixtures("one_thread")
CLIPS = (("fall.mp4", 9, 16), ("run.gif", 12, 20), ("walk", 5, 16), ("jump.webm", 14, 24))


def _save_clips(folder):
    folder.mkdir(exist_ok=True, parents=True)
    for name, count, fps in CLIPS:
        clip = save_clip(folder / name, count, fps, size=(32, 40))
        clip.with_name(f"{clip.stem}.txt").write_text(f"a clip, {clip.stem}")
    return folder


def _make_job(folder, *, first_frame=False, **sections):
    """A tiny Wan whose VAE has the published strides; with first_frame it is an image-to-video model."""
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
    store = cache_store(plan.job)
    entries = map(store.get, store.keys())
    latents = [entry["latents"] for entry in entries if "latents" in entry]
    assert sorted(tensor.shape[1] for tensor in latents) == [1, 1, 1, 2, 3, 3, 3]
    assert len({round(loss, 6) for loss in whole.losses}) == 6

    job, seen = _make_job(tmp_path), []
    is_third_step_done = lambda: any(event.kind == "step" and event.step == 3 for event in seen)  # noqa: E731
    stopped = run_job(job, on_event=seen.append, should_stop=is_third_step_done)
    assert (stopped.status, stopped.step) == ("stopped", 3)
    resumed = run_job(job, resume=True)
    assert resumed.losses == whole.losses
    assert resumed.lora_path.read_bytes() == whole.lora_path.read_bytes()


def test_a_video_that_is_cut_short_is_named_before_anything_is_computed(tmp_path, capsys):
    save_job(_make_job(tmp_path), tmp_path / "job.toml")
    clip = tmp_path / "data" / "fall.mp4"
    clip.write_bytes(clip.read_bytes()[:-50])
    for command in ("check", "cache", "train"):
        assert main([command, str(tmp_path / "job.toml")]) == 2
        error = capsys.readouterr().err
        assert f"{clip}: cannot be read as a clip (it is cut off" in error and "1 of 7 images and clips" in error
    assert not list(tmp_path.glob("cache/*/*"))


def test_a_video_that_is_damaged_inside_is_named_and_all_others_are_kept(tmp_path, capsys):
    save_job(_make_job(tmp_path), tmp_path / "job.toml")
    noise = np.random.default_rng(0).integers(0, 255, (9, 32, 40, 3), dtype=np.uint8)
    clip = save_video(tmp_path / "data" / "fall.mp4", list(noise), options={"movflags": "faststart"})
    data = bytearray(clip.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    clip.write_bytes(data)
    assert main(["check", str(tmp_path / "job.toml")]) == 0
    assert "7 for training, 0 for evaluation; 4 of them of clips" in capsys.readouterr().out
    assert main(["cache", str(tmp_path / "job.toml"), "--only", "latents"]) == 2
    error = capsys.readouterr().err
    assert f"{clip}: cannot be read as a clip" in error and "all other images are encoded and kept" in error
    assert len(list(tmp_path.glob("cache/*/*.safetensors"))) == 6
    for part in ("fall.mp4", "fall.txt"):
        (tmp_path / "data" / part).unlink()
    assert main(["cache", str(tmp_path / "job.toml"), "--only", "latents", "--verify"]) == 0


def test_resume_refuses_other_frames(tmp_path):
    run_job(_make_job(tmp_path, train={"steps": 2}))
    with pytest.raises(ValueError, match=r"data\.window: 'start' -> 'centre'"):
        run_job(_make_job(tmp_path, train={"steps": 4}, data={"window": "centre"}), resume=True)


def test_the_first_frame_is_given_and_the_loss_is_that_of_a_plain_computation(tmp_path):
    """The LoRA begins as nothing, so the first loss is the base model's."""
    job = _make_job(tmp_path, first_frame=True, train={"steps": 1, "batch_size": 2})
    (loss,) = run_job(job).losses
    plan = check_job(job)
    assert plan.variant.name == "wan2.2-i2v-a14b-high"
    indices = BatchOrder(plan.samples, batch_size=2, seed=job.train.seed).next().indices
    with EventLog(tmp_path / "log") as events:
        text = cache_job(plan, events)[0].load(indices, [False] * len(indices)).text["prompt_embeds"]
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
    """On one device and split over two: every token has a timestep of its own, which crosses the border."""
    settings = {"model": {"variant": "wan2.2-ti2v-5b-i2v"}, "data": {"frames": [9]}, "train": {"steps": 1}}
    _make_job(tmp_path)
    for file in [*(tmp_path / "data").glob("image_*"), *(tmp_path / "data").glob("walk.txt")]:
        file.unlink()
    job = _make_job(tmp_path, **settings)
    (loss,) = run_job(job).losses
    plan = check_job(job)
    indices = BatchOrder(plan.samples, batch_size=2, seed=job.train.seed).next().indices
    with EventLog(tmp_path / "log") as events:
        batch = cache_job(plan, events)[0].load(indices, [False] * len(indices))
    latents = batch.latents
    assert latents.shape[2] == 3 and set(batch.conditions) == {"first_latents"}
    generator = make_generator(job.train.seed, "train", 0, 0)
    sigmas = plan.schedule.sigmas(draw_quantiles(len(indices), generator), 0)
    noise = torch.randn(latents.shape, generator=generator)
    noisy = add_noise(latents, noise, sigmas)
    noisy[:, :, 0] = latents[:, :, 0]
    timesteps = torch.stack(
        [torch.cat([torch.zeros(n := latents[0, 0, 0].numel() // 4), s.expand(2 * n)]) for s in sigmas]
    )
    model = TINY["wan"].make_model(**TINY["wan"].encoder_widths)
    with torch.no_grad():
        output = model(noisy, timesteps * 1000, batch.text["prompt_embeds"], return_dict=False)[0]
    error = (output - (noise - latents)).square()[:, :, 1:]
    assert loss == pytest.approx(error.mean().item(), rel=1e-5)
    two = _make_job(
        tmp_path,
        **settings,
        split={"devices": ["lazy:0", "lazy:1"]},
        cache={"vae_device": "cpu"},
        output={"folder": str(tmp_path / "two")},
    )
    with emulated_cards():
        assert run_job(two).losses == pytest.approx([loss], rel=1e-5)


def test_single_images_leave_nothing_to_learn_where_the_first_frame_is_given(tmp_path):
    job = _make_job(tmp_path, first_frame=True)
    save_tiny_dataset(tmp_path / "data", num_images=7)
    with pytest.raises(ValueError, match=r"in a single image nothing is left to learn.*these 7.*image_0\.png"):
        check_job(job)
    with pytest.raises(ValueError, match=r"is given the first frame"):
        check_job(_make_job(tmp_path, first_frame=True, data={"frames": [1]}))
