"""Pictures of whole tiny jobs: those of diffusers' pipelines, the same on any cards; the LoRA is as without."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from devicebridge import assembly
from devicebridge.config.job import JobConfig, ParallelConfig
from devicebridge.events import Event, EventLog
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs import job as job_module
from devicebridge.jobs.encode_job import cache_job
from devicebridge.jobs.job import check_job, run_job
from devicebridge.jobs.resume import TrainingResult
from devicebridge.parallel.ranks.group import Ranks
from devicebridge.parallel.ranks.watch import Watch
from devicebridge.patches.compile_blocks import CompiledBlocks
from devicebridge.sampling import draw as decode
from devicebridge.sampling.sampler import Sampler
from devicebridge.system.stopping import Requests
from devicebridge.tests.clips import save_clip
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_cards_job, save_tiny_pipeline
from devicebridge.tests.toy import TINY
from devicebridge.training.loop import Trainer
from PIL import Image

pytestmark = pytest.mark.usefixtures("one_thread", "short_texts")

_long = partial(pytest.param, marks=pytest.mark.long)
PROMPTS = ["a cat, in the rain", "picture 1"]
SEED, STEPS, GUIDANCE = 11, 3, 2.5
TRAIN = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}


def _job(tmp_path: Path, folder: str, name: str = "flux2", **sections: Any) -> JobConfig:
    """Three steps with dropout, which draws from the devices' generators; pictures of 64 x 32 pixels."""
    samples = {"prompts": PROMPTS, "every_steps": 2, "seed": SEED, "steps": STEPS, "guidance": GUIDANCE}
    samples |= {"width": 64, "height": 32} | ({"frames": 5} if name == "wan" else {})
    values = {
        "split": {"devices": ["cpu"]}, "optimizer": {"learning_rate": 0.02}, "train": TRAIN,
        "evaluation": {"folder": ""}, "parallel": {"strategy": "none"},
        "output": {"folder": str(tmp_path / folder), "save_every_steps": 0, "lora_layout": "diffusers"},
        "samples": samples | sections.pop("samples", {}),
    }  # fmt: skip
    return make_cards_job(tmp_path, folder, name, **{**values, **sections})


def _run(job: JobConfig, **arguments: Any) -> TrainingResult:
    with emulated_cards(3):
        return run_job(job, **arguments)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """Latents, by the times when pictures were drawn and prompts."""
    found: list[list[torch.Tensor]] = []
    plain = decode.Decoder.decode

    def remember(decoder: decode.Decoder, latents: Sequence[torch.Tensor]) -> Any:
        found.append(list(latents))
        return plain(decoder, latents)

    monkeypatch.setattr(decode.Decoder, "decode", remember)
    return found


def _files(job: JobConfig) -> dict[str, bytes]:
    folder = Path(job.output.folder) / "samples"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class _MakersGrid(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """WanPipeline gives its scheduler no sigmas; this one begins at 1, as the makers' sampler does."""

    def set_timesteps(self, num_steps: int, device: Any = None) -> None:
        super().set_timesteps(num_steps, device=device, sigmas=np.linspace(1.0, 1 / num_steps, num_steps))


def _pipeline(job: JobConfig, name: str, lora: Path | None) -> Any:
    model = getattr(diffusers, FAMILIES[name].transformer_class).from_pretrained(Path(job.model.path) / "transformer")
    vae = getattr(diffusers, FAMILIES[name].vae_class).from_pretrained(Path(job.model.path) / "vae")
    parts = [folder for encoder in TINY[name].encoders for folder in encoder[2:]]
    usual = diffusers.FlowMatchEulerDiscreteScheduler
    scheduler = _MakersGrid(shift=5.0) if name == "wan" else usual(use_dynamic_shifting=True)
    pipeline_class = getattr(diffusers, TINY[name].pipeline_class)
    pipeline = pipeline_class(scheduler=scheduler, transformer=model, vae=vae, **dict.fromkeys(parts))
    pipeline.set_progress_bar_config(disable=True)
    if lora is not None:
        pipeline.load_lora_weights(lora)
    return pipeline


def _reference(job: JobConfig, name: str, prompt: str, shape: torch.Size, lora: Path | None) -> torch.Tensor:
    """Latents of diffusers' pipeline, as ours are shaped."""
    with EventLog(Path(job.output.folder) / "other") as events:
        data, _ = cache_job(check_job(job), events)
    text, empty = dict(data.text(prompt)), data.text("")
    _, channels, frames, height, width = shape
    pipeline = _pipeline(job, name, lora)
    scale = {"flux2": 4, "flux1": 2, "wan": 2}[name]  # pixels per cell of the tiny VAE, patches included
    if name == "wan":
        text |= {"negative_prompt_embeds": empty["prompt_embeds"], "num_frames": 1 + 2 * (frames - 1)}
    found = pipeline(
        height=height * scale, width=width * scale, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
        generator=torch.Generator("cpu").manual_seed(SEED), output_type="latent", return_dict=False, **text,
    )[0]  # fmt: skip
    if name == "flux1":
        found = pipeline._unpack_latents(found, height * scale, width * scale, 2)
    elif name == "flux2":
        found = found.transpose(1, 2)
    return found.reshape(1, channels, frames, height, width)


@pytest.mark.parametrize("name", ["flux2", "wan", _long("flux1")])
def test_pictures_are_those_of_diffusers_pipeline_with_the_same_lora(name, tmp_path, drawn):
    """Before the first step without a LoRA, after the last with the file that was written."""
    job = _job(tmp_path, "run", name, samples={"every_steps": 0, "width": 128, "height": 64})
    result = _run(job)
    before, after = drawn
    assert (after[0] - before[0]).abs().max() > 0.01 and (after[0] - after[1]).abs().max() > 0.001
    for latents, lora in ((before, None), (after, result.lora_path)):
        for prompt, ours in zip(PROMPTS, latents, strict=True):
            expected = _reference(job, name, prompt, ours.shape, lora)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


def test_a_file_is_what_the_vae_makes_of_the_latents(tmp_path: Path, drawn: list[list[torch.Tensor]]) -> None:
    """By diffusers' own processor of pictures."""
    from diffusers.image_processor import VaeImageProcessor

    job = _job(tmp_path, "run", "flux1", samples={"every_steps": 0, "before_first": False})
    events: list[Event] = []
    _run(job, on_event=events.append)
    pipeline = _pipeline(job, "flux1", None)
    told = [event for event in events if event.kind == "sample"]
    assert [(event.step, event.values["prompt"], event.values["index"]) for event in told] == [
        (3, PROMPTS[0], 0),
        (3, PROMPTS[1], 1),
    ]
    for event, latents in zip(told, drawn[0], strict=True):
        config = pipeline.vae.config
        with torch.no_grad():
            pixels = pipeline.vae.decode(latents[:, :, 0] / config.scaling_factor + config.shift_factor).sample
        expected = np.asarray(VaeImageProcessor().postprocess(pixels, output_type="pil")[0])
        found = np.asarray(Image.open(Path(job.output.folder) / event.values["file"]))
        assert found.shape == (8, 16, 3) and (found == expected).all() and found.std() > 1
        assert event.values["seed"] == SEED and event.values["path"].endswith(event.values["file"])


def test_a_clip_is_an_animated_webp_at_the_models_rate(tmp_path: Path) -> None:
    job = _job(tmp_path, "run", "wan", samples={"every_steps": 0, "before_first": False, "prompts": PROMPTS[:1]})
    _run(job)
    clip = Image.open(Path(job.output.folder) / "samples" / "000003_0.webp")
    assert clip.n_frames == 3 and clip.size == (16, 8)  # type: ignore[attr-defined]
    clip.seek(1)
    clip.load()
    assert clip.info["duration"] == round(1000 / 16)


def test_image_to_video_starts_from_the_first_frame_of_a_training_clip(tmp_path, drawn):
    save_tiny_pipeline(tmp_path / "model", "wan")
    TINY["wan"].make_video_vae().save_pretrained(tmp_path / "model" / "vae")
    for index in range(2):
        save_clip(tmp_path / "clips" / f"{index}.mp4", 9 + index, 16, size=(32, 40))
    sizes = {"width": 0, "height": 0, "frames": 0, "every_steps": 0, "before_first": False}
    data = {"folders": [{"path": str(tmp_path / "clips")}], "resolutions": [32], "frames": [9]}
    job = _job(tmp_path, "run", "wan", data=data, samples=sizes, model={"variant": "wan2.2-ti2v-5b-i2v"})
    _run(job)
    with EventLog(tmp_path / "other") as events:
        training, _ = cache_job(check_job(job), events)
    for index, latents in enumerate(drawn[0]):
        clip = training.load([index], [True]).latents
        assert latents.shape == clip.shape and torch.equal(latents[:, :, 0], clip[:, :, 0])
        assert not torch.allclose(latents[:, :, 1], clip[:, :, 1])
    with pytest.raises(ValueError, match=r"samples\.width, height and frames: .* leave them out"):
        check_job(_job(tmp_path, "run", "wan", data=data, model={"variant": "wan2.2-ti2v-5b-i2v"}))


TWO = {"devices": ["lazy:0", "lazy:1"]}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one card": {"split": {"devices": ["lazy:1"]}}, "split": {"split": TWO},
    "pipeline": {"split": TWO, "parallel": {"strategy": "pipeline"}},
    "weight offload": {"split": {**TWO, "offloaded_blocks": [1, 2]}},
    "kept activations": {"split": {**TWO, "blocks_without_checkpointing": [1, 1]}},
    "offloaded inputs": {"split": TWO, "train": {**TRAIN, "offload_activations": "on"}},
}  # fmt: skip


def _with(job: JobConfig, **sections: Any) -> JobConfig:
    for name, changes in sections.items():
        job = dataclasses.replace(job, **{name: dataclasses.replace(getattr(job, name), **changes)})
    return job


@pytest.mark.usefixtures("tiny_weights_leave")
@pytest.mark.parametrize("scheme", ["none", _long("int8-compute")])
def test_every_strategy_draws_the_pictures_and_writes_the_lora_of_one_card(scheme: str, tmp_path: Path) -> None:
    def run(name: str, folder: str, **sections: Any) -> tuple[bytes, dict[str, bytes]]:
        merged = {**STRATEGIES[name], "lora": {"dropout": 0.0}, **sections}
        job = _job(tmp_path, folder, model={"quantize": scheme}, **merged)
        path = _run(job).lora_path
        assert path is not None
        return path.read_bytes(), _files(job) if job.samples.prompts else {}

    names = ["one card", "pipeline", "weight offload"] if scheme == "none" else list(STRATEGIES)
    lora, pictures = run(names[0], names[0])
    assert len(pictures) == 2 * 3 and len(set(pictures.values())) == 6
    assert run(names[0], "without", samples={"prompts": []}) == (lora, {})
    for name in names[1:]:
        assert run(name, name) == (lora, pictures), name


@pytest.mark.parametrize("name", ["flux2", *map(_long, sorted(FAMILIES.keys() - {"flux2"}))])
def test_the_lora_is_the_same_bytes_with_and_without_also_when_resumed(name: str, tmp_path: Path) -> None:
    without = _run(_job(tmp_path, "without", name, samples={"prompts": []}))
    job = _job(tmp_path, "with", name)
    seen: list[Event] = []
    stopped = _run(job, on_event=seen.append, should_stop=_in_second_forward_after(seen, 2))
    assert (stopped.status, stopped.step) == ("stopped", 2)
    assert sorted(_files(job)) == [f"000000_{index}.{'webp' if name == 'wan' else 'png'}" for index in range(2)]
    resumed = _run(job, resume=True)
    assert without.lora_path and resumed.lora_path and resumed.losses == without.losses
    assert resumed.lora_path.read_bytes() == without.lora_path.read_bytes()
    straight = _job(tmp_path, "straight", name)
    _run(straight)
    assert _files(job) == _files(straight) and len(_files(job)) == 6


def _in_second_forward_after(seen: list[Event], step: int) -> Callable[[], bool]:
    """True from the second time that it is asked while pictures are drawn after this step."""
    asked: list[int] = []

    def should_stop() -> bool:
        phases = [each for each in seen if each.kind == "phase"]
        if phases and phases[-1].values["name"] == "samples" and phases[-1].step == step:
            asked.append(step)
        return len(asked) > 1

    return should_stop


@pytest.mark.usefixtures("tiny_weights_leave")
@pytest.mark.parametrize("strategy", [*map(_long, ("split", "pipeline")), "weight offload"])
def test_an_error_in_a_picture_is_a_warning_and_training_goes_on(strategy, tmp_path, monkeypatch, caplog):
    """It breaks in the middle of the model, at the second forward of the second time."""
    sections = STRATEGIES[strategy]
    plain = _run(_job(tmp_path, "plain", **sections, samples={"prompts": []}))
    plain_predict, calls = Sampler._predict, []

    def breaking(self: Sampler, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) != 2 * STEPS + 2:
            return plain_predict(self, *arguments)
        block = self.trainer.runner.replica_for(0)[0].get_submodule("single_transformer_blocks.0")
        handle = block.register_forward_hook(_break)
        try:
            return plain_predict(self, *arguments)
        finally:
            handle.remove()

    monkeypatch.setattr(Sampler, "_predict", breaking)
    job = _job(tmp_path, "broken", **sections)
    with caplog.at_level(logging.WARNING):
        result = _run(job)
    assert result.status == "finished"
    assert "no sample pictures after step 2, and training goes on: no room" in caplog.text
    assert plain.lora_path and result.lora_path
    assert result.lora_path.read_bytes() == plain.lora_path.read_bytes()
    assert sorted(_files(job)) == ["000000_0.png", "000000_1.png", "000003_0.png", "000003_1.png"]


def _break(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("no room\nand more for developers")


def test_a_picture_that_is_not_finite_is_said_and_not_written(tmp_path, monkeypatch, caplog):
    plain = Sampler._latents
    spoilt = {1: float("nan")}
    monkeypatch.setattr(
        Sampler, "_latents", lambda self, index, should_stop: plain(self, index, should_stop) * spoilt.get(index, 1)
    )
    job = _job(tmp_path, "run", samples={"every_steps": 0, "before_first": False})
    with caplog.at_level(logging.WARNING):
        assert _run(job).status == "finished"
    assert list(_files(job)) == ["000003_0.png"]
    assert f"the sample picture of {PROMPTS[1]!r} after step 3 is not finite" in caplog.text


def test_a_vae_that_is_gone_is_a_warning_too(tmp_path, monkeypatch, caplog):
    job = _job(tmp_path, "run", samples={"every_steps": 0, "before_first": False})

    def remove(event: Event) -> None:
        if event.kind == "step":
            (Path(job.model.path) / "vae" / "config.json").unlink(missing_ok=True)

    with caplog.at_level(logging.WARNING):
        assert _run(job, on_event=remove).status == "finished"
    assert "no sample pictures after step 3" in caplog.text and "is no VAE" in caplog.text


def test_decoding_may_take_half_an_hour_and_drawing_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now: list[float] = [0]
    found: dict[str, float] = {}
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda limit_s, **options: now.append(limit_s))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: now.append(0))
    drawn = Sampler._latents

    def draw(*args: Any) -> torch.Tensor:
        found["drawing"] = now[-1]
        return drawn(*args)

    def decode_slowly(decoder: Any, latents: Sequence[torch.Tensor]) -> Any:
        for _ in latents:
            found["decoding"] = now[-1]
            yield torch.zeros(3, 1, 8, 8)

    monkeypatch.setattr(Sampler, "_latents", draw)
    monkeypatch.setattr(decode.Decoder, "decode", decode_slowly)
    watch = Watch(60.0)
    _run(_job(tmp_path, "run", train={**TRAIN, "steps": 2}), ranks=Ranks(watch=watch))
    watch.close()
    assert found == {"drawing": 60, "decoding": 1800}


def test_a_request_draws_once_after_the_step_in_hand(tmp_path: Path) -> None:
    job = _job(tmp_path, "run", samples={"every_steps": 0, "before_first": False, "prompts": ["a cat"]})

    def ask(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            Requests(Path(job.output.folder)).ask("sample")

    events: list[Event] = []
    _run(job, on_event=lambda event: (events.append(event), ask(event))[0])
    assert [event.step for event in events if event.kind == "sample"] == [1, 3]
    assert sorted(_files(job)) == ["000001_0.png", "000003_0.png"]
    told = [each for each in events if each.kind == "progress" and each.values["what"] == "picture 1 of 1, step"]
    assert [(each.step, each.total) for each in told] == [(step, STEPS) for step in range(1, STEPS + 1)] * 2


def test_jobs_whose_pictures_cannot_be_drawn_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refused(message: str, name: str = "flux2", **samples: Any) -> None:
        with pytest.raises(ValueError, match=message):
            check_job(_job(tmp_path / name, "run", name, samples=samples))

    refused(r"samples\.width = 50 was set, and sides of flux2-dev are multiples of 16; 48 works", width=50)
    refused(r"samples\.frames = 5 was set, and flux2-dev makes pictures", frames=5)
    refused(r"samples\.frames = 6 .* have 4n \+ 1 frames; 5 works", "wan", frames=6)
    refused("is no VAE", vae=str(tmp_path / "flux2" / "data"))
    refused("prompt 2 is blank", prompts=["a cat", "  "])
    refused("height of 32 belongs to a width", width=0)
    with pytest.raises(ValueError, match=r"a job on data\.encoded has no encoders"):
        _job(tmp_path, "run", data={"folders": [], "encoded": "x.json"})
    job = _job(tmp_path / "wan", "run", "wan", model={"variant": "wan2.2-t2v-a14b-high"})
    with caplog.at_level(logging.WARNING):
        check_job(_with(job, parallel={"strategy": ParallelConfig().strategy}))
    assert "drawn by wan2.2-t2v-a14b-high alone" in caplog.text


def test_blocks_draw_uncompiled_and_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if blocks were compiled: who calls a block's compiled forward is written down."""
    called: list[bool] = []

    def compile_all(model: Any, family: Any, *rest: Any) -> CompiledBlocks:
        blocks = [block for each in family.block_lists for block in model.get_submodule(each.name).children()]
        handle = CompiledBlocks(ExitStack())
        for block in blocks:
            handle.compile(block, lambda forward: _counting(forward, called))
        return handle

    monkeypatch.setattr(assembly, "compile_if_possible", compile_all)
    job = _job(tmp_path, "run", samples={"every_steps": 1}, train={**TRAIN, "compile": "auto"})
    during: list[int] = []
    plain = Sampler.draw

    def draw(self: Sampler, *arguments: Any) -> None:
        before = len(called)
        plain(self, *arguments)
        during.append(len(called) - before)

    monkeypatch.setattr(Sampler, "draw", draw)
    monkeypatch.setattr(job_module, "check_compiled", lambda trainer: None)
    _run(job)
    assert during == [0, 0, 0, 0] and len(called) == 3 * 2 * 4 * 2  # steps, micro-batches, blocks, and once recomputed
    assert len(_files(job)) == 8


def _counting(forward: Callable[..., Any], called: list[bool]) -> Callable[..., Any]:
    def compiled(*args: Any, **kwargs: Any) -> Any:
        called.append(torch.is_grad_enabled())
        return forward(*args, **kwargs)

    return compiled


def test_random_numbers_that_drawing_takes_are_put_back_and_the_training_goes(tmp_path, monkeypatch, request):
    """As a library does that fills a fresh VAE with random weights before it reads the file's. The optimizer's state,
    say, is let go without a look for garbage."""
    request.addfinalizer(gc.enable)
    split = {"split": TWO}
    without = _run(_job(tmp_path, "without", **split, samples={"prompts": []}))
    plain = decode.load_vae

    def drawing(*arguments: Any) -> Any:
        for device in ("cpu", "lazy:0", "lazy:1"):
            torch.empty(3, device=device).uniform_()
        gc.disable()
        return plain(*arguments)

    monkeypatch.setattr(decode, "load_vae", drawing)
    result = _run(_job(tmp_path, "with", **split, samples={"every_steps": 1}))
    assert not any(isinstance(each, Trainer) for each in gc.get_objects())
    assert result.lora_path and without.lora_path and result.losses == without.losses
    assert result.lora_path.read_bytes() == without.lora_path.read_bytes()
