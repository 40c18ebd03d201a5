"""From a prompt to latents, in Euler steps of the model that trains.

Where the steps are and what each does is told by EulerSteps (families/spec.py). Of our own families diffusers'
scheduler makes them, on noise levels that the makers of the model shift (families/). Of ComfyUI's own classes its
sampler's rules do (nodes/host/native/drawing.py). What is drawn is kept on the CPU in float32, so a split changes
nothing of it. The noise has a generator of its own, and its numbers are those that diffusers' pipelines and ComfyUI
draw from the same seed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config.training import SamplesConfig
from ..families.spec import EulerSteps, ModelFamily, Variant
from ..system.stopping import Stopped

Text = Mapping[str, torch.Tensor]
# (latents [1, C, F, H, W], noise level [1], text and conditions of one sample), float32 on the CPU -> what the model
# says, shaped as latents, likewise
Predict = Callable[[torch.Tensor, torch.Tensor, Text], torch.Tensor]


@dataclass(frozen=True)
class Drawing:
    """How every picture of a job is drawn.

    Args:
        guidance: what the model's guidance input gets; None for a model without one.
        cfg_scale: of classifier-free guidance; 1 computes a step once.
        begin: the steps of a picture, by its image tokens.
    """

    seed: int
    guidance: float | None
    cfg_scale: float
    begin: Callable[[int], EulerSteps]


def make_drawing(settings: SamplesConfig, family: ModelFamily, variant: Variant) -> Drawing:
    """The job's settings, else what is usual for the model.

    Raises: ValueError for a family that nobody has said how to draw with.
    """
    usual = variant.sampling or family.sampling
    if usual is None:
        raise ValueError(f"samples.prompts: how {family.title} draws pictures is not described; remove them")
    guidance = usual.guidance if settings.guidance is None else settings.guidance
    has_input, host, steps = variant.training_guidance is not None, family.host, settings.steps or usual.steps

    def begin(num_tokens: int) -> EulerSteps:
        return ScheduledSteps(steps, usual.shift(num_tokens, steps)) if host is None else host.euler_steps(steps)

    return Drawing(settings.seed, guidance if has_input else None, 1.0 if has_input else guidance, begin)


class ScheduledSteps:
    """diffusers' scheduler for models of velocity; see EulerSteps. Levels evenly from 1 to 1 / steps, shifted, then 0.

    Args:
        shift: s of families/spec.py's ShiftRule.
    """

    def __init__(self, steps: int, shift: float) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(sigmas=[1 - index / steps for index in range(steps)])
        scheduler.set_begin_index(0)
        self._scheduler = scheduler
        self.levels: torch.Tensor = scheduler.sigmas[:-1]

    def start(self, noise: torch.Tensor) -> torch.Tensor:
        return noise

    def step(
        self, index: int, latents: torch.Tensor, said: torch.Tensor, plain: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        velocity = said if plain is None else plain + scale * (said - plain)
        time = self._scheduler.timesteps[index]
        stepped: torch.Tensor = self._scheduler.step(velocity, time, latents, return_dict=False)[0]
        return stepped

    def end(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


def draw_latents(
    predict: Predict,
    drawing: Drawing,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    text: Text,
    empty: Text,
    should_stop: Callable[[], bool],
    tell: Callable[[int, int], None],
) -> torch.Tensor:
    """Normalised latents of one picture, float32 on the CPU. [1, C, F, H, W]

    Args:
        shape: of them, without the batch.
        num_tokens: image tokens of the picture.
        text, empty: what the model reads of the prompt and of the empty one; the latter for classifier-free guidance.
        tell: called with the steps done and their number.
    Raises: Stopped between two steps, when should_stop() is true.
    """
    steps = drawing.begin(num_tokens)
    latents = steps.start(torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(drawing.seed)))
    for index, level in enumerate(steps.levels):
        if should_stop():
            raise Stopped("stopped while a sample picture was drawn")
        said = predict(latents, level.view(1), text)
        plain = predict(latents, level.view(1), empty) if drawing.cfg_scale > 1 else None
        latents = steps.step(index, latents, said, plain, drawing.cfg_scale)
        tell(index + 1, len(steps.levels))
    latents = steps.end(latents)
    first = text.get("first_latents")
    return latents if first is None else torch.cat([first.to(latents), latents[:, :, 1:]], dim=2)


def picture_size(
    settings: SamplesConfig, family: ModelFamily, variant: Variant, side: int, frames: int
) -> tuple[int, int, int]:
    """Height and width in pixels and frames of every picture.

    Args:
        side: in pixels along a square, where the job names no size. frames: where it names no length.
    Raises: ValueError naming the setting that the model does not take.
    """
    latent = family.latent_of(variant)
    width = settings.width or side
    height = settings.height or width
    num_frames = settings.frames or (frames if latent.is_video else 1)
    for name, value in (("width", width), ("height", height)):
        if value % latent.size_multiple:
            near = max(1, round(value / latent.size_multiple)) * latent.size_multiple
            raise ValueError(
                f"samples.{name} = {value} was set, and sides of {variant.name} are multiples of "
                f"{latent.size_multiple}; {near} works"
            )
    if num_frames > 1 and not latent.is_video:
        raise ValueError(f"samples.frames = {num_frames} was set, and {variant.name} makes pictures; leave it out")
    if not latent.is_length(num_frames):
        raise ValueError(
            f"samples.frames = {num_frames} was set, and clips of {variant.name} have {latent.clip_rule} frames; "
            f"{latent.nearest_length(num_frames)} works"
        )
    return height, width, num_frames
