"""What is proved of each class that ComfyUI builds and we train, step by step; run by native_training_worker.py.

References are independent: ComfyUI's own trainer for the loss, differences of losses for gradients, the stock loader
and the stock MODEL's own sampling for what a trained LoRA does, one device without recomputation for every strategy.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.lora
import comfy.model_management
import comfy.sampler_helpers
import comfy.samplers
import comfy.sd
import devicebridge.patches.lora
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy.nested_tensor import NestedTensor
from comfy_extras import nodes_train
from devicebridge.config.job import JobConfig
from devicebridge.encoding.comfy_data import read_pairs, save_encoded
from devicebridge.encoding.store import CacheStore
from devicebridge.events import EventLog
from devicebridge.families.comfy.inputs import NOISE_MASK, fit_mask, read_latents, read_text, streams_of, with_silence
from devicebridge.jobs.checked_job import JobPlan
from devicebridge.jobs.encode_job import cache_job
from devicebridge.jobs.job import build_trainer, check_job, plan_job, run_job
from devicebridge.jobs.resolve import why_no_forecast, why_no_stages
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.parallel.devices import own_random_states
from devicebridge.parallel.local import token_training
from devicebridge.parallel.ranks.group import ALONE, Ranks
from devicebridge.patches.compile_blocks import apply_compile
from devicebridge.planning.cards import parse_cards
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.tests.comfy.diffusers_twins import Twin
from devicebridge.tests.comfy.tiny_checkpoints import TinyFamily, native_job, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained
from devicebridge.tests.emulated import emulated_cards, factories_on_cards, on_cpu
from devicebridge.training.batches import loss_weights
from devicebridge.training.loop import Trainer
from devicebridge.training.objective import noise_latents, predict, prediction_loss

Figures = dict[str, Any]
Grads = dict[str, torch.Tensor]
CARDS = {"devices": ["lazy:0", "lazy:1"]}
TWO = {"gradient_accumulation_steps": 2}
_PLAIN = {"train": {"gradient_checkpointing": False}}
_PERCENT = 0.4  # of the way from noise to data
_IS_LONG = bool(os.environ.get("LONG_TESTS") or os.environ.get("UPDATE_GOLDEN"))
_MORE = ("Wan 2.1 T2V, 2.2 T2V 14B", "SDXL")
_IN_EVERY_SCHEME = ("FLUX.1", *(_MORE if _IS_LONG else ()))  # of 8 bits; the others in the plainest
UNCOMPILED = () if _IS_LONG else _MORE
_READ_BEHIND = ("adaln_single", "audio_adaln_single", "time_embed", "time_embed_r")  # what the tail reads comes of them
_ROUNDED = 3e-5  # the most that shares of the rows may differ by in float32; examine has the same bound
_SMALL = 1e-6  # of the largest gradient: what is nothing but rounding


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].split('; a step takes')[0]}"


def prove(name: str, steps: Mapping[str, Callable[[Any], Figures]], bench: Any) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    for step, run in steps.items():
        at = time.process_time()
        try:
            found[step] = {"fault": "", **run(bench)}
        except Exception as error:
            logging.exception("%s: %s", name, step)
            found[step] = {"fault": one_line(error)}
        found[step]["seconds"] = round(time.process_time() - at, 2)
    return found


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


class Bench:
    """One tiny model, its data, and what steps have found of it so far. dtype: "float64" for what rounding hides in
    float32; jobs have no such type, so it is put into their plans."""

    def __init__(self, name, folder, file=None, family=None, dtype="float32") -> None:
        self.name, self.family, self.folder, self.dtype = name, family or TRAINED[name], folder, dtype
        self.is_long = _IS_LONG and name in TRAINED  # further models go by the same mechanisms
        folder.mkdir(parents=True)
        with small_sizes(self.family):
            self.path = file or save_trained(name, folder / "model.safetensors", self.family)
            self.info = read_native(self.path, dtype)
        generator = torch.Generator().manual_seed(3)
        self.samples = [_sample(self.family, generator) for _ in range(2)]
        self.conditions = [self.family.condition(seed) for seed in (1, 2)]
        pairs = read_pairs([self.family.latent_of(each) for each in self.samples], self.conditions)
        self.encoded = save_encoded(pairs, CacheStore(folder / "cache"))

    def job(self, name: str, sections: Mapping[str, Any]) -> JobConfig:
        own = {"optimizer": {"learning_rate": 0.01}, "data": {"encoded": str(self.encoded)}}
        return native_job(self.path, self.folder / name, {**own, **sections}, steps=5)

    @contextlib.contextmanager
    def ready(self, job: JobConfig) -> Iterator[JobConfig]:
        """Inside, the job can be run."""
        with small_sizes(self.family), native_training(), cards_of(job):
            yield job

    @contextlib.contextmanager
    def trainer(
        self, name: str, sections: Mapping[str, Any], ranks: Ranks = ALONE, *, is_drawn: bool = True
    ) -> Iterator[Trainer]:
        """Of a LoRA that changes something, unless is_drawn is false."""
        with self.ready(self.job(name, sections)) as job, ExitStack() as cleanup:
            plan = check_job(job, info=self.info, ranks=ranks)
            if self.dtype == "float64":
                plan = cleanup.enter_context(_in_float64(plan))
            events = cleanup.enter_context(EventLog(Path(job.output.folder)))
            trainer = build_trainer(plan, {}, cache_job(plan, events), events, cleanup, ranks)
            if is_drawn:
                drawn = {name: _drawn(name, t.shape).to(t.dtype) for name, t in trainer.lora.tensors().items()}
                put_lora(trainer, drawn)
            with own_random_states(trainer.devices, 3):
                yield trainer

    def run(self, name: str, sections: Mapping[str, Any], **more: Any) -> Any:
        with self.ready(self.job(name, sections)) as job:
            return run_job(job, info=self.info, **more)

    def stock(self) -> Any:
        with small_sizes(self.family):
            patcher = comfy.sd.load_diffusion_model(str(self.path))
        if self.family.has_bool_masks:  # ComfyUI's attention for CPUs adds them to the scores, as if they were numbers
            options = patcher.model_options["transformer_options"]
            options["optimized_attention_override"] = lambda own, *args, **more: attention_pytorch(*args, **more)
        return patcher

    @cached_property
    def in_float64(self) -> Bench:
        return Bench(self.name, self.folder / "float64", self.path, self.family, "float64")

    @cached_property
    def plain(self) -> tuple[float, Grads]:
        return self.first_step("plain", _PLAIN)

    @cached_property
    def accumulated(self) -> tuple[float, Grads]:
        return self.first_step("accumulated", {"train": TWO})

    def first_step(self, name, sections, check=None, ranks=ALONE) -> Any:
        with self.trainer(name, sections, ranks) as trainer:
            if check is not None:
                check(trainer)
            count = trainer.job.train.gradient_accumulation_steps
            loss = sum(float(on_cpu(each)) for each in trainer.accumulate(count))
            return loss, gradients(trainer)

    @cached_property
    def trained(self) -> Any:
        return self.run("trained", {})

    def loss_at(self, trainer: Trainer) -> float:
        """Mean of both samples at two noise levels, the same at every call."""
        found = []
        with torch.no_grad():
            for index in (0, 1):
                for percent in (0.3, 0.7):
                    found.append(float(self.prediction(trainer, index, percent)[0]))
        return sum(found) / len(found)

    def prediction(
        self, trainer: Trainer, index: int, percent: float, noise: torch.Tensor | None = None, guidance: Any = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Loss, what the network says, and what it was given; by the functions that the loop calls."""
        family = self.info.family
        pairs = read_pairs([self.family.latent_of(self.samples[index])], [self.conditions[index]])
        latents, text = next(iter(pairs))
        is_silent = len(latents) < len(latents := dict(with_silence(family.comfy, latents)))
        streams = streams_of([latents])
        clean = read_latents(family.comfy, latents)[None]
        if noise is None:
            noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(11 + index))
        batch = {name: each[None] for name, each in read_text(family.comfy, text).items()}
        mask = None
        if NOISE_MASK in latents:
            mask = batch[NOISE_MASK] = fit_mask(latents[NOISE_MASK], clean.shape[2:])[None]
        made = noise_latents(family, clean, noise.view(clean.shape), torch.tensor([1 - percent]), batch | streams)
        model, _ = trainer.runner.replica_for(0)
        has_input = self.info.variant.training_guidance is not None
        said = predict(family, model, made.noisy, made.sigmas, batch | streams, guidance if has_input else None)
        weight = None if mask is None else mask.clamp(0, 1)
        return prediction_loss(said, made.target, weight, loss_weights(None, streams, is_silent=is_silent)), said, made


@contextlib.contextmanager
def _in_float64(plan: JobPlan) -> Iterator[JobPlan]:
    """The plan with frozen weights, LoRA and computation in float64."""
    lora, job = copy.copy(plan.job.lora), copy.copy(plan.job)
    object.__setattr__(lora, "dtype", "float64")
    object.__setattr__(job, "lora", lora)
    with mock.patch.object(devicebridge.patches.lora, "TRAINABLE_DTYPES", (torch.float64,)):
        yield dataclasses.replace(plan, job=job, execution=dataclasses.replace(plan.execution, dtype=torch.float64))


def _sample(family: TinyFamily, generator: torch.Generator) -> Any:
    """The samples of a LATENT, as stock nodes make them; a video with its sound as Concat AV Latent does."""
    first = torch.randn(1, *family.latent, generator=generator)
    return NestedTensor((first, torch.randn(1, *family.sound, generator=generator))) if family.sound else first


@contextlib.contextmanager
def cards_of(job: JobConfig) -> Iterator[None]:
    if job.split.devices == ("cpu",):
        yield
        return
    with emulated_cards(max(2, len(job.split.devices))), factories_on_cards(), no_autocast_on_cards():
        yield


@contextlib.contextmanager
def no_autocast_on_cards() -> Iterator[None]:
    """Inside, torch's autocast, which knows no emulated card, does nothing there."""
    own = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "lazy" else own(device_type, *args, **kwargs)

    with mock.patch.object(torch, "autocast", autocast):
        yield


def _drawn(name: str, shape: torch.Size) -> torch.Tensor:
    seed = sum(name.encode()) * 1009 + len(name)
    return 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def put_lora(trainer: Trainer, tensors: Mapping[str, torch.Tensor]) -> None:
    trainer.lora.load_tensors(dict(tensors))
    trainer.runner.sync()


def without_lora(trainer: Trainer) -> None:
    put_lora(trainer, {name: torch.zeros_like(each) for name, each in trainer.lora.tensors().items()})


def gradients(trainer: Trainer) -> Grads:
    return {n: on_cpu(p.grad).cpu().clone() for n, p in trainer.lora.parameters().items() if p.grad is not None}


def difference(found: Grads, expected: Grads) -> float:
    """Largest of any gradient, relative to the largest value of its tensor."""
    assert found.keys() == expected.keys(), f"{len(found)} gradients in the place of {len(expected)}"
    largest = max(float(each.abs().max()) for each in expected.values())
    return max(
        float((found[name] - each).abs().max() / each.abs().max().clamp_min(_SMALL * largest))
        for name, each in expected.items()
    )


def expect(found: float, limit: float, what: str) -> float:
    assert found <= limit, f"{what} is {found:.2g}, more than {limit:g}"
    return float(f"{found:.2g}")


# ------------------------------------------------------------------------------------------------ against ComfyUI's own
def _core_step(bench: Bench) -> list[Any]:
    """Sigma, noise and loss of the first step of ComfyUI's Train LoRA, whose LoRA changes nothing yet."""
    found: list[Any] = []
    own = nodes_train.TrainSampler.fwd_bwd

    def step(self: Any, wrap: Any, sigmas: Any, noise: Any, *rest: Any, **more: Any) -> Any:
        found[:] = sigmas.detach().clone(), noise.clone()
        found.append(own(self, wrap, sigmas, noise, *rest, **{**more, "bwd": False}))
        return found[-1]

    def sigmas(self: Any, wrap: Any, size: int, device: Any) -> torch.Tensor:
        return torch.tensor([wrap.inner_model.model_sampling.percent_to_sigma(_PERCENT)] * size, device=device)

    options = {
        **{"batch_size": 1, "grad_accumulation_steps": 1, "steps": 1, "learning_rate": 0.0, "rank": 2, "seed": 0},
        **{"optimizer": "SGD", "loss_function": "MSE", "training_dtype": "fp32", "lora_dtype": "fp32"},
        **{"quantized_backward": False, "algorithm": "LoRA", "gradient_checkpointing": False, "checkpoint_depth": 1},
        **{"offloading": False, "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": False},
    }
    torch.manual_seed(0)
    with (
        mock.patch.object(nodes_train.TrainSampler, "fwd_bwd", step),
        mock.patch.object(nodes_train.TrainSampler, "_generate_batch_sigmas", sigmas),
        small_sizes(bench.family),
    ):
        nodes_train.TrainLoraNode.execute(
            model=[bench.stock()], latents=[{"samples": bench.samples[0]}], positive=[bench.conditions[0]],
            **{name: [value] for name, value in options.items()},
        )  # fmt: skip
    return found


def _factor(kind: str, sigma: float) -> float:
    """Core's loss is that of the data, ours that of what the network says: by the prediction types' own formulas."""
    if kind == "FLOW_COSMOS":
        return (sigma / (sigma + 1)) ** 2
    if kind == "EDM":  # Cosmos 1, with a sigma_data of 0.5
        return sigma**2 * 0.25 / (sigma**2 + 0.25)
    if kind.startswith("V_PREDICTION"):
        return sigma**2 / (sigma**2 + 1)
    return sigma**2


def loss_is_cores(bench: Bench) -> Figures:
    """Where Train LoRA fails, or knows nothing of a noise mask, the stock MODEL's own sampling says the loss."""
    if bench.family.noise_mask is not None:
        return _loss_is_masked_samplings(bench)
    if bench.info.family.prediction_target == "FLOW_AV":
        return _loss_is_samplings(bench) | _loss_is_two_velocities(bench)
    try:
        sigma, noise, theirs = _core_step(bench)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        return {"core": one_line(error), **_loss_is_samplings(bench)}
    loss, made = _loss_at_first(bench, noise)
    assert torch.allclose(made.sigmas, sigma, rtol=1e-6), f"sigma {made.sigmas} in the place of {sigma}"
    expected = float(loss) * _factor(bench.info.family.prediction_target, float(sigma[0]))
    return {"difference": expect(abs(float(theirs) / expected - 1), 1e-5, "the difference from Train LoRA's loss")}


def _loss_at_first(bench: Bench, noise: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
    """Of a LoRA that changes nothing; and what the network was given."""
    with bench.trainer("loss", _PLAIN) as trainer, torch.no_grad():
        without_lora(trainer)
        loss, _, made = bench.prediction(trainer, 0, _PERCENT, noise, guidance=None)
    return loss, made


def _loss_is_samplings(bench: Bench) -> Figures:
    loss, made = _loss_at_first(bench)
    said = _said(bench, bench.stock(), made)
    errors = (said.view(made.target.shape) - made.target).square().flatten()
    sizes = [math.prod(sides) for sides in (bench.family.latent, bench.family.sound) if sides]
    expected = float(sum(each.mean() for each in errors.split(sizes)))
    return {"difference": expect(abs(float(loss) / expected - 1), 1e-5, "the difference from sampling's loss")}


def _loss_is_masked_samplings(bench: Bench) -> Figures:
    """A step of a KSampler with this noise mask says what the model is given, and what it says: the loss is the mean
    square of that less (noise - data), weighed by the mask. All types are flow."""
    noise = torch.randn(1, *bench.family.latent, generator=torch.Generator().manual_seed(5))
    loss, made = _loss_at_first(bench, noise)
    seen = _sampled_once(bench, noise, made.sigmas)
    x, sampling = seen["x"], bench.stock().model.model_sampling
    mask = _prepared_mask(bench.family.noise_mask, x)
    assert mask is not None
    at = [sampling.calculate_denoised(made.sigmas[:1], torch.full_like(x, value), x) for value in (0.0, 1.0)]
    said = (seen["denoised"] - at[0]) / (at[1] - at[0])
    weight, is_there = mask.clamp(0, 1), mask >= 0
    expected = float((weight * (said - (noise - seen["data"])).square()).sum() / weight.sum())
    apart = (made.noisy - x)[is_there].abs().max()
    return {
        "input": expect(float(apart), 1e-5, "the difference of what the model is given"),
        "difference": expect(abs(float(loss) / expected - 1), 1e-5, "the difference from sampling's loss"),
    }


def _loss_is_two_velocities(bench: Bench) -> Figures:
    """A step of a stock sampler carries the sound of MiniMax H3 on the video's levels. What it makes of both streams is
    told apart by the published shifts: each stream's own noise level, and the velocity from its data to its noise."""
    video, sound = bench.samples[0].unbind()
    size = video.numel()
    noise = torch.randn(1, size + sound.numel(), generator=torch.Generator().manual_seed(6))
    loss, made = _loss_at_first(bench, noise)
    noises = noise[0, :size].view(video.shape), noise[0, size:].view(sound.shape)
    level = float(made.sigmas[0])
    base = level / (12 - 11 * level)
    of_sound = 3 * base / (1 + 2 * base)
    denoised = _sampled_once(bench, NestedTensor(noises), made.sigmas)["denoised"]
    found = denoised[0, 0, :size].view(video.shape), denoised[0, 0, size:].view(sound.shape) / 4
    expected = 0.0
    for data, its_noise, its_data, its_level in zip((video, sound), noises, found, (level, of_sound), strict=True):
        noisy = (1 - its_level) * data + its_level * its_noise
        expected += float(((noisy - its_data) / its_level - (its_noise - data)).square().mean())
    return {"of both streams": expect(abs(float(loss) / expected - 1), 1e-4, "the difference from a sampler's loss")}


def _sampled_once(bench: Bench, noise: Any, sigmas: torch.Tensor) -> dict[str, torch.Tensor]:
    """One step of the stock MODEL's sampler from this noise level: "x" that its model is given, "denoised" that it
    makes, and "data" that the sampler computes with."""
    seen: dict[str, torch.Tensor] = {}

    def watch(apply: Any, given: Any) -> torch.Tensor:
        seen["x"], seen["denoised"] = given["input"], apply(given["input"], given["timestep"], **given["c"])
        return seen["denoised"]

    def step(model: Any, x: torch.Tensor, levels: torch.Tensor, extra_args: Any, **more: Any) -> torch.Tensor:
        seen["data"] = model.latent_image
        return model(x, levels[:1], **extra_args)

    patcher, latent = bench.stock(), bench.family.latent_of(bench.samples[0])
    patcher.set_model_unet_function_wrapper(watch)
    with small_sizes(bench.family):
        comfy.samplers.sample(
            *(patcher, noise, bench.conditions[0], [], 1.0, torch.device("cpu"), comfy.samplers.KSAMPLER(step)),
            *(torch.tensor([float(sigmas[0]), 0.0]), patcher.model_options), latent_image=latent["samples"],
            denoise_mask=latent.get("noise_mask"), seed=0,
        )  # fmt: skip
    return seen


def stock_loader(bench: Bench) -> Figures:
    """Every key is mapped, and the stock MODEL with the LoRA says what the trained one does."""
    lora = dict(bench.trained.lora)
    patcher = bench.stock()
    found = comfy.lora.load_lora(dict(lora), comfy.lora.model_lora_keys_unet(patcher.model, {}))
    written = sum(name.endswith("lora_A.weight") for name in lora)
    assert len(found) == written > 0, f"{len(found)} of {written} keys are mapped"
    tensors = {n.removeprefix("diffusion_model."): t for n, t in lora.items() if not n.endswith(".alpha")}
    with bench.trainer("stock", _PLAIN) as trainer, torch.no_grad():
        put_lora(trainer, tensors)
        _, ours, made = bench.prediction(trainer, 0, _PERCENT, guidance=None)
        without_lora(trainer)
        _, before, _ = bench.prediction(trainer, 0, _PERCENT, guidance=None)
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0)
    said = _said(bench, patched, made)
    moved = float((ours - before).norm() / before.norm())
    assert moved > 1e-3, f"the LoRA moves the picture by {moved:.2g} only"
    error = float((said.view(ours.shape) - ours).norm() / (ours - before).norm())
    return {"keys": written, "moved": float(f"{moved:.2g}"), "error": expect(error, 2e-3, "the error of its move")}


def _prepared_mask(made: Callable[[], torch.Tensor] | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if made is None else comfy.sampler_helpers.prepare_mask(made(), like.shape, like.device)


def _said(bench: Bench, patcher: Any, made: Any) -> torch.Tensor:
    family = bench.family
    return said_by_sampling(patcher, made, bench.conditions[0], family.latent, family.sound, family.noise_mask)


@torch.inference_mode()
def said_by_sampling(patcher, made, condition, latent, sound=(), noise_mask=None) -> torch.Tensor:
    """What a stock MODEL's network says, by the way that ComfyUI samples; of several streams packed."""
    shapes = [(1, *sides) for sides in (latent, sound) if sides]
    noisy, sigma = made.noisy.view((1, 1, -1) if sound else shapes[0]), made.sigmas
    comfy.model_management.load_models_gpu([patcher])
    patcher.pre_run()
    base = patcher.model
    conds = {"positive": comfy.sampler_helpers.convert_cond(condition)}
    like = torch.zeros_like(noisy)
    mask = _prepared_mask(noise_mask, like)
    conds = comfy.samplers.process_conds(base, like, conds, noisy.device, like, mask, seed=0, latent_shapes=shapes)
    (denoised,) = comfy.samplers.calc_cond_batch(base, [conds["positive"]], noisy, sigma, patcher.model_options)
    sampling = base.model_sampling
    at = [sampling.calculate_denoised(sigma, torch.full_like(noisy, value), noisy) for value in (0.0, 1.0)]
    return (denoised - at[0]) / (at[1] - at[0])


# ------------------------------------------------------------------------------------------------------------- numbers
def slopes_of(trainer: Trainer) -> Callable[[Grads, float], float]:
    """The slope of a microbatch's loss along a direction, by central differences of this size."""
    (batch,) = trainer.microbatches(1)
    prepared = batch.prepare()
    start = {name: p.detach().clone() for name, p in trainer.lora.parameters().items()}

    @torch.no_grad()
    def slope(direction: Grads, size: float) -> float:
        found = []
        for sign in (1, -1):
            for name, parameter in trainer.lora.parameters().items():
                parameter.copy_(start[name] + sign * size * direction.get(name, torch.zeros_like(parameter)))
            found.append(float(batch.forward(prepared)))
        return (found[0] - found[1]) / (2 * size)

    return slope


def central_differences(bench: Bench) -> Figures:
    """The slope of the loss along the gradient, and along a direction to which every tensor contributes alike."""
    _, grads = bench.plain
    assert all(each.isfinite().all() for each in grads.values())
    norms = {name: float(each.double().norm()) for name, each in grads.items()}
    alive = [name for name, norm in norms.items() if norm > 1e-4 * max(norms.values())]
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    figures: Figures = {"tensors": len(grads), "without gradient": sum(norm == 0 for norm in norms.values())}
    with bench.trainer("differences", _PLAIN) as trainer:
        slope = slopes_of(trainer)
        along = {name: each / whole for name, each in grads.items()}
        alike = {name: grads[name] / norms[name] / len(alive) ** 0.5 for name in alive}
        expected = sum(norms[name] for name in alive) / len(alive) ** 0.5
        sizes = (1e-2, 3e-3)
        for what, direction, wanted in (("along", along, whole), ("alike", alike, expected)):
            error = min(abs(slope(direction, size) / wanted - 1) for size in sizes)
            figures[what] = expect(error, 2e-3, f"the difference from the slope of the loss ({what})")
    return figures


def _same(name: str, sections: Mapping[str, Any], limit: float = 1e-4) -> Callable[[Bench], Figures]:
    """A step that computes what one device does."""

    def step(bench: Bench) -> Figures:
        is_many = sections.get("train", {}).get("gradient_accumulation_steps", 1) > 1
        wanted_loss, wanted = bench.accumulated if is_many else bench.plain
        loss, found = bench.first_step(name, sections, lambda trainer: _refuse_other(trainer, sections))
        expect(abs(loss / wanted_loss - 1), 1e-5, "the difference of the loss")
        return {"difference": expect(difference(found, wanted), limit, "the difference of the gradients")}

    return step


def in_stages(bench: Bench) -> Figures:
    """Cards at different microbatches; where the tail reads what was made at home, every linear has a LoRA as well."""
    sections = {"split": CARDS, "train": TWO, "parallel": {"strategy": "pipeline"}}
    figures = _same("pipeline", sections)(bench)
    row = bench.info.family.native
    if row is not None and (row.read_by_tail or row.trained_inputs):
        every = {"lora": {"rank": 2, "alpha": 2.0, "targets": ["*"]}}
        wanted_loss, wanted = bench.first_step("every linear", {"train": TWO} | every)
        loss, found = bench.first_step("in stages", sections | every, lambda trainer: _refuse_other(trainer, sections))
        expect(abs(loss / wanted_loss - 1), 1e-5, "the difference of the loss of every linear")
        front = [name for name in wanted if any(f"{part}." in name for part in _READ_BEHIND)]
        assert row.trained_inputs or any(wanted[name].any() for name in front), "no linear makes what the tail reads"
        figures["every linear"] = expect(difference(found, wanted), 1e-4, "the difference of the gradients")
        figures["of them at the front"] = len(front)
    return figures


def steps_of(name: str) -> dict[str, Callable[[Bench], Figures]]:
    """Compiling takes longest; in a short run one model of those that always run is compiled."""
    return {step: run for step, run in STEPS.items() if step != "compiled" or name not in UNCOMPILED}


def compiled(bench: Bench) -> Figures:
    """Blocks as torch's compiler traces and differentiates them, for sizes of one kind and of any; its kernels are
    compared with uncompiled blocks before every run (training/compile_check.py)."""
    family = bench.info.family
    figures = {}
    for title, is_dynamic in (("one size", False), *([("any size", True)] if bench.is_long else [])):
        torch._dynamo.reset()
        with bench.trainer(title, {}) as trainer, ExitStack() as cleanup:
            handle = apply_compile(trainer.runner.replica_for(0)[0], family, is_dynamic=is_dynamic, backend="aot_eager")
            cleanup.callback(handle.remove)
            loss = float(next(iter(trainer.accumulate(1))))
            found = {name: each for name, each in gradients(trainer).items() if name in bench.plain[1] or each.any()}
            num_graphs = handle.num_graphs
            list(trainer.accumulate(1))
            assert handle.num_graphs == num_graphs, f"{handle.num_graphs - num_graphs} graphs more in the second step"
        expect(abs(loss / bench.plain[0] - 1), 1e-5, "the difference of the loss")
        figures[title] = expect(difference(found, bench.plain[1]), 1e-4, "the difference of the gradients")
    return figures


def _refuse_other(trainer: Trainer, sections: Mapping[str, Any]) -> None:
    wanted = sections.get("parallel", {}).get("strategy", "none")
    names = {"none": "Runner", "pipeline": "Pipeline", "data": "DataParallel", "tokens": "TokenTraining"}
    reason = why_no_stages(trainer.objective.family.native, trainer.runner.replica_for(0)[0])
    assert type(trainer.runner).__name__ == names[wanted], reason or f"{type(trainer.runner).__name__} trained it"
    if "devices" in sections.get("split", {}):
        devices = {parameter.device for parameter in trainer.lora.parameters().values()}
        count = len(sections["split"]["devices"])
        assert wanted != "none" or len(devices) == count, f"its LoRA is on {devices}"


def by_tokens(bench: Bench) -> Figures:
    """The rows of a sample on three cards, in long runs on two and four as well, and as it is usual."""
    every = {"lora": {"rank": 2, "alpha": 2.0, "targets": ["*"]}}  # also before and behind the blocks
    if bench.name in _LONGER_THAN_PROMPT:
        larger = dataclasses.replace(bench.family, latent=_LONGER_THAN_PROMPT[bench.name])
        bench = Bench(bench.name, bench.folder / "larger", family=larger)
    alone = bench.first_step("by tokens on 1", {"split": {"devices": ["lazy:0"]}, **every})
    figures, is_shared = Figures(), False  # of fewer frames than cards each card computes all
    for count in (4, 3, 2):
        if bench.is_long or (count < 4 and not is_shared):
            with mock.patch.object(token_training, "_log") as log:
                figures[f"{count} cards"] = _shared_among(bench, count, alone, every)
            is_shared = not log.warning.called
    assert is_shared, "two cards computed the sample whole"
    for what, more in _BESIDE.items():
        if bench.is_long or (what in ("weight offload", "LoHa", "DoKr", "OFT") and bench.name == "FLUX.1"):
            wanted = bench.first_step(f"{what} on 1", _one_card() | {**more, "split": _one_card()["split"]})
            figures[what] = _shared_among(bench, 2, wanted, more)
    if bench.is_long:
        if not why_no_forecast(bench.info.family.native):
            # A plan in which two cards compute each microbatch together, as was asked.
            with small_sizes(bench.family), native_training():
                asked = bench.job("plan tokens", {"split": {}, "parallel": {"strategy": "tokens"}})
                plan = plan_job(asked, parse_cards("2x24GB"), info=bench.info)
            assert plan.setting.strategy == "tokens" and len(plan.devices) == 2, plan
        whole = bench.run("tokens whole", _tokens_on(2))
        losses = bench.run("tokens alone", _one_card()).losses
        apart = max(abs(a / b - 1) for a, b in zip(whole.losses, losses, strict=True))
        figures["losses of 5 steps"] = expect(apart, 1e-3, "the difference of the losses of 5 steps")
        assert whole.lora.keys() == bench.trained.lora.keys(), "the file has other keys"
        _resumed(bench, "by tokens", _tokens_on(2), whole)
    return figures


_LONGER_THAN_PROMPT = {"HiDream-O1": (3, 128, 160), "HiDream-O1 with a reference": (3, 512, 512)}
_BESIDE: dict[str, dict[str, Any]] = {
    "int8": {"model": {"quantize": "int8"}},
    "LoHa": {"lora": {"kind": "loha", "rank": 2}},
    "DoKr": {"lora": {"kind": "lokr", "rank": 2, "dora": True}},
    "OFT": {"lora": {"kind": "oft", "rank": 4}},
    "activation offload": {"train": {"offload_activations": "on"}},
    "weight offload": {"split": {**CARDS, "offloaded_blocks": [2, 2]}},
}


def _one_card() -> dict[str, Any]:
    return {"split": {"devices": ["lazy:0"]}, **_PLAIN}


def _tokens_on(count: int) -> dict[str, Any]:
    return {"split": {"devices": [f"lazy:{index}" for index in range(count)]}, "parallel": {"strategy": "tokens"}}


def _shared_among(bench: Bench, count: int, alone: tuple[float, Grads], sections: Mapping[str, Any]) -> Any:
    """How far gradients are from those on one card. Where one card's own float32 is so far from float64 that two such
    roundings add up to more than is allowed, float32 tells nothing: then both are compared in float64, and what several
    cards compute may be twice as far from it in float32 as what one does."""
    asked = {**_tokens_on(count), **sections}
    name = f"tokens on {count}"
    loss, found = bench.first_step(name, asked, lambda trainer: _refuse_other(trainer, asked))
    expect(abs(loss / alone[0] - 1), 1e-5, "the difference of the loss")
    apart = _apart(found, alone[1])
    if apart <= _ROUNDED or "model" in sections:
        return expect(apart, _ROUNDED, "the difference of the gradients")
    wide = bench.in_float64
    wide_loss, exact = wide.first_step("on 1", {**_one_card(), **sections})
    rounding = _apart(alone[1], exact)
    assert 2 * rounding > _ROUNDED, f"gradients differ by {apart:.2g}, but one card rounds by {rounding:.2g}"
    loss, wide_found = wide.first_step(name, asked, lambda trainer: _refuse_other(trainer, asked))
    expect(abs(loss / wide_loss - 1), 1e-12, "the difference of the loss in float64")
    return {
        "float32": float(f"{apart:.2g}"), "one card from float64": float(f"{rounding:.2g}"),
        "from float64": expect(_apart(found, exact), 2 * rounding, "the difference from the gradients in float64"),
        "in float64": expect(_apart(wide_found, exact), 1e-9, "the difference of the gradients in float64"),
    }  # fmt: skip


def _apart(found: Grads, wanted: Grads) -> float:
    """The largest difference of a gradient, as a share of its length; where that is under a thousandth of the longest
    one's, so much cancels that its last bits are noise: as a share of that thousandth."""
    assert found.keys() == wanted.keys(), f"{len(found)} gradients in the place of {len(wanted)}"
    least = max(float(each.norm()) for each in wanted.values()) / 1000
    return max(float((found[name] - each).norm() / each.norm().clamp_min(least)) for name, each in wanted.items())


def eight_bits(bench: Bench) -> Figures:
    """The base is rounded, the LoRA is not; what is computed stays close, and two steps are finite."""
    schemes = ("int8", "fp8", "int8-compute", "fp8-compute") if bench.name in _IN_EVERY_SCHEME else ("int8",)
    return {scheme: _rounded(bench, scheme) for scheme in schemes}


def _rounded(bench: Bench, scheme: str) -> Figures:
    def check(trainer: Trainer) -> None:
        model, _ = trainer.runner.replica_for(0)
        rounded = sum(isinstance(module, FrozenLinear8) for module in model.modules())
        assert rounded, "no linear is in 8 bits"
        figures["linears"] = rounded
        assert {p.dtype for p in trainer.lora.parameters().values()} == {torch.float32}

    figures: Figures = {}
    sections = {"model": {"quantize": scheme}}
    loss, found = bench.first_step(scheme, sections, check)
    wanted_loss, wanted = bench.plain
    a, b = (torch.cat([each[name].flatten() for name in wanted]) for each in (found, wanted))
    figures["cosine"] = round(float(torch.cosine_similarity(a, b, dim=0)), 4)
    assert figures["cosine"] > (0.98 if scheme.startswith("fp8") else 0.99), (
        f"the gradient's cosine with full precision is {figures['cosine']}"
    )
    expect(abs(loss / wanted_loss - 1), 0.05, "the difference of the loss")
    losses = bench.run(f"{scheme}_steps", {**sections, "train": {"steps": 2}}).losses
    assert len(losses) == 2 and all(map(math.isfinite, losses)), losses
    return figures


def five_steps(bench: Bench) -> Figures:
    losses = bench.trained.losses
    assert len(losses) == 5 and all(map(math.isfinite, losses)), losses
    tensors = {n.removeprefix("diffusion_model."): t for n, t in bench.trained.lora.items() if not n.endswith(".alpha")}
    with bench.trainer("after", _PLAIN) as trainer:
        put_lora(trainer, tensors)
        after = bench.loss_at(trainer)
        without_lora(trainer)
        before = bench.loss_at(trainer)
    assert after < before, f"the loss went from {before:.4f} to {after:.4f}"
    return {"before": round(before, 4), "after": round(after, 4)}


def resumed(bench: Bench) -> Figures:
    _resumed(bench, "stopped", {}, bench.trained)
    return {}


def _resumed(bench: Bench, name: str, sections: Mapping[str, Any], whole: Any) -> None:
    """Stopped after two steps of five and continued: the same losses and the same LoRA, bit for bit."""
    seen: list[Any] = []
    bench.run(name, sections, on_event=seen.append, should_stop=lambda: sum(e.kind == "step" for e in seen) >= 2)
    result = bench.run(name, sections, resume=True)
    assert result.losses == whole.losses, (result.losses, whole.losses)
    differing = [name for name, each in whole.lora.items() if not torch.equal(each, result.lora[name])]
    assert not differing, f"{len(differing)} tensors differ, {differing[0]}"


# What diffusers has, too, and we train there; families/ has a file of each.
_TWINS = {"FLUX.1": "flux1", "FLUX.2": "flux2", "Wan 2.1 T2V, 2.2 T2V 14B": "wan"}


def diffusers_agrees(bench: Bench) -> Figures:
    """Diffusers' class, from the same weights, noise and text, has the same loss and LoRA gradients."""
    if bench.name not in _TWINS:
        raise ValueError("diffusers' class of it is no family of ours")
    twin = Twin(_TWINS[bench.name], bench.folder)
    native = Bench(bench.name, bench.folder / "native", twin.native_file)
    # FLUX.2 has rows of zeros in front of shorter texts, and a norm's backward makes a thousand of each rounding there.
    condition = native.family.condition(1, tokens=512 if bench.name == "FLUX.2" else None)
    native.conditions[0] = condition
    with native.trainer("twin", _PLAIN) as trainer:
        twin.take(trainer.lora.tensors())
        noise = torch.randn(native.samples[0].shape, generator=torch.Generator().manual_seed(8))
        loss, _, made = native.prediction(trainer, 0, _PERCENT, noise)
        loss.backward()
        wanted = gradients(trainer)
    found = twin.loss(native.samples[0], condition, noise, made.sigmas)
    found.backward()
    expect(abs(float(found) / float(loss) - 1), 1e-5, "the difference of the loss")
    return {"difference": expect(difference(twin.gradients(), wanted), 1e-4, "the difference of the gradients")}


def forecast(bench: Bench) -> Figures:
    with small_sizes(bench.family), native_training():
        plan = plan_job(bench.job("forecast", {"split": {}}), parse_cards("2x24GB"), info=bench.info)
    return {"devices": len(plan.devices)}


STEPS: dict[str, Callable[[Bench], Figures]] = {
    "loss": loss_is_cores, "gradients": central_differences,
    "recompute": _same("recompute", {}), "split": _same("split", {"split": CARDS}), "pipeline": in_stages,
    "data": _same("data", {"split": CARDS, "train": TWO, "parallel": {"strategy": "data"}}), "tokens": by_tokens,
    "weight offload": _same("weights", {"split": {"devices": ["lazy:0"], "offloaded_blocks": [2]}}),
    "activation offload": _same("activations", {"split": CARDS, "train": {"offload_activations": "on"}}),
    "8 bits": eight_bits, "compiled": compiled, "5 steps": five_steps, "resume": resumed,
    "stock LoRA": stock_loader, "diffusers": diffusers_agrees, "forecast": forecast,
}  # fmt: skip
