"""Pictures of one of ComfyUI's own models while it trains, as KSampler with "euler" draws them: steps, and its VAE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.header import read_header
from ....system.stopping import Stopped
from ..comfy_encoders import release_models
from ..compiler import outside
from . import files

FLOWS = ("FLOW", "FLUX", "FLOW_COSMOS", "FLOW_AV")  # kinds of prediction, as ComfyUI spells them
_HALVINGS = 40


def time_at(sampling: Any, sigma: float) -> float:
    """The time in 0..1, before the model's own shift, at which a model_sampling of ComfyUI's has this sigma."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_above = float(sampling.percent_to_sigma(1 - middle)) > sigma
        low, high = (low, middle) if is_above else (middle, high)
    return (low + high) / 2


class ComfySteps:
    """Euler steps between the noise levels of ComfyUI's model_sampling; see EulerSteps of families/spec.py."""

    def __init__(self, sampling: Any, scheduler: str, steps: int) -> None:
        import comfy.samplers

        self._sampling = sampling
        self._levels = comfy.samplers.calculate_sigmas(sampling, scheduler, steps)
        self.levels: Tensor = self._levels[:-1]

    def start(self, noise: Tensor) -> Tensor:
        first, most = float(self._levels[0]), float(self._sampling.sigma_max)
        is_all = first > most or math.isclose(first, most, rel_tol=1e-5)
        made: Tensor = self._sampling.noise_scaling(self._levels[0], noise, torch.zeros_like(noise), is_all)
        return made

    def step(self, index: int, latents: Tensor, said: Tensor, plain: Tensor | None, scale: float) -> Tensor:
        level = self._levels[index]
        denoised: Tensor = self._sampling.calculate_denoised(level, said, latents)
        if plain is not None:
            other = self._sampling.calculate_denoised(level, plain, latents)
            denoised = other + (denoised - other) * scale
        return latents + (latents - denoised) / level * (self._levels[index + 1] - level)

    def end(self, latents: Tensor) -> Tensor:
        made: Tensor = self._sampling.inverse_noise_scaling(self._levels[-1], latents)
        return made


def decoded(
    path: Path, drawn: Sequence[Tensor], place_for: Callable[[int], torch.device], form: Any, *, has_sequence: bool
) -> Iterator[Tensor]:
    """See HostModel.decode of families/spec.py. form: ComfyUI's latent format of the model that draws."""
    from comfy.model_management import InterruptProcessingException, interrupt_current_processing

    vae: Any = files.load_vae(str(path))
    try:
        shape = max((tuple(each.shape) for each in drawn), key=math.prod)
        sides = shape if has_sequence and vae.latent_dim != 2 else (*shape[:2], *shape[3:])
        place = place_for(int(vae.memory_used_decode(sides, vae.vae_dtype)) + int(vae.model_size()))
        if vae.device != place:  # its type goes by that
            import comfy.sd

            vae = comfy.sd.VAE(sd=vae.get_sd(), device=place, metadata=dict(read_header(path).metadata) or None)
        for latents in drawn:
            samples = form.process_out(latents if has_sequence else latents[:, :, 0])
            with torch.inference_mode(), outside(about="this VAE"):
                try:
                    pixels = vae.decode(samples)
                except InterruptProcessingException as error:  # from its layers; Cancel counts as heard then
                    interrupt_current_processing(True)  # but the training is to hear it
                    raise Stopped("stopped while a sample picture was decoded") from error
                pixels = pixels.reshape(-1, *pixels.shape[-3:])[..., :3].float().cpu()
            if not torch.isfinite(pixels).all():
                raise RuntimeError(f"the VAE {path} makes numbers of it that are not finite")
            yield (pixels * 255).clamp(0, 255).to(torch.uint8)  # as ComfyUI's Save Image rounds
    finally:
        del vae
        release_models()
