"""Steps by ComfyUI's rules against diffusers' scheduler; tests/comfy/test_native_pictures.py asks a real KSampler."""

import importlib
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.jobs.checked_job import ReadJob
from devicebridge.sampling.draw import ScheduledSteps
from devicebridge.system.stopping import Stopped

STEPS, SHIFT = 5, 3.0


@pytest.fixture
def drawing(host: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With the levels of diffusers' scheduler in the place of ComfyUI's."""
    levels = torch.cat([ScheduledSteps(STEPS, SHIFT).levels, torch.zeros(1)])
    samplers: Any = ModuleType("comfy.samplers")
    samplers.calculate_sigmas = lambda sampling, scheduler, steps: levels
    monkeypatch.setitem(sys.modules, "comfy.samplers", samplers)
    monkeypatch.setattr(sys.modules["comfy"], "samplers", samplers, raising=False)
    return importlib.import_module("devicebridge.nodes.host.native.drawing")


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_steps_of_a_flow_model_are_those_of_diffusers_scheduler(drawing: ModuleType, scale: float) -> None:
    """With and without classifier-free guidance, which is on data here and on velocity there."""
    flow = SimpleNamespace(
        sigma_max=torch.ones(()), noise_scaling=lambda level, noise, clean, is_all: noise,
        calculate_denoised=lambda level, said, latents: latents - said * level,
        inverse_noise_scaling=lambda level, latents: latents / (1 - level),
    )  # fmt: skip
    found = []
    for steps in (drawing.ComfySteps(flow, "simple", STEPS), ScheduledSteps(STEPS, SHIFT)):
        latents = steps.start(torch.randn(1, 4, 1, 3, 3, generator=torch.Generator().manual_seed(1)))
        for index, level in enumerate(steps.levels):
            said, plain = (torch.sin(latents * text + level) for text in (2.0, 0.5))
            latents = steps.step(index, latents, said, plain if scale > 1 else None, scale)
        found.append(steps.end(latents))
    assert len(steps.levels) == STEPS and torch.allclose(found[0], found[1], atol=1e-5) and found[0].std() > 0.1


@pytest.mark.parametrize(("largest", "is_all"), [(1.0, True), (1.000001, True), (0.9, True), (1.1, False)])
def test_the_start_says_whether_it_is_all_noise(drawing: ModuleType, largest: float, is_all: bool) -> None:
    sampling: Any = mock.Mock(sigma_max=torch.tensor(largest))
    drawing.ComfySteps(sampling, "simple", STEPS).start(torch.ones(1, 1, 1, 2, 2))
    assert sampling.noise_scaling.call_args.args[3] == is_all


def test_cancel_while_a_vae_decodes_is_left_for_the_training_to_hear(drawing, monkeypatch, tmp_path):
    management: Any = sys.modules["comfy.model_management"]
    interrupted = mock.Mock(side_effect=management.InterruptProcessingException)
    home = torch.device("cpu")
    vae = mock.Mock(device=home, decode=interrupted, memory_used_decode=lambda *_: 1, model_size=lambda: 2)
    monkeypatch.setattr(drawing.files, "load_vae", lambda path: vae)
    monkeypatch.setattr(drawing, "outside", lambda about: nullcontext())
    with pytest.raises(Stopped):
        list(drawing.decoded(tmp_path, [torch.zeros(1, 4, 1, 2, 2)], {3: home}.get, mock.Mock(), has_sequence=True))
    assert management.processing_interrupted()


def test_pictures_of_a_model_of_comfyuis_are_refused_where_no_vae_is_named() -> None:
    named = SimpleNamespace(samples=SimpleNamespace(vae=""), cache=SimpleNamespace(stock_vae="vae.safetensors"))
    plan: Any = SimpleNamespace(job=named, family=SimpleNamespace(host=object()))
    assert ReadJob.samples_vae.fget(plan) == Path("vae.safetensors")
    named.cache.stock_vae = ""
    with pytest.raises(ValueError, match=r"cache\.stock_vae or samples\.vae"):
        ReadJob.samples_vae.fget(plan)
