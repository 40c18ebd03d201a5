"""Section of a job: pictures drawn while it trains."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from .ranges import STRICT, PathText, Range, Seed, StepCount
from .setting import setting

_Prompt = Annotated[str, Field(min_length=1, max_length=10_000)]
_Side = Annotated[int, Range(16, 8192, or_zero=True)]


@dataclass(frozen=True, config=STRICT)
class SamplesConfig:
    """Pictures while training: prompts drawn with the LoRA as it is. They change nothing of the LoRA.

    Args:
        prompts: Texts to draw, one picture each, or one clip for video. They are encoded with the captions. Left out:
            no pictures.
        every_steps: Draw every so many steps, and after the last one; 0 only before the first and after the last. A
            picture takes as long as its steps take forwards.
        before_first: Also draw before the first step, what the model makes without the LoRA.
        seed: Start of each picture's noise, the same for every prompt and every time.
        steps: Steps per picture. Left out: what is usual for the model.
        guidance: Guidance of the pictures. Left out: the model's usual value. FLUX.1-dev and FLUX.2-dev take it as an
            input. Other models compute each step twice where it is above 1, once with the empty prompt. Set 1 for a
            distilled model.
        width: Width in pixels. Left out: the largest resolution of the dataset, as a square. More than that may take
            more memory than training, which the plan counts.
        height: Height in pixels. Left out: as width.
        frames: Length of a clip in frames; 1 is a picture. Left out: that of the longest training sample. For video
            models.
        vae: VAE folder or file that makes pictures of latents. Left out: the one that encodes the images. Needed where
            ComfyUI's VAE encodes them for a model that is not ComfyUI's own. With family comfyui: a name in models/vae,
            or a full path.
        use_ema: Whether the average of the LoRA draws them where train.ema_decay keeps one.
    """

    prompts: Annotated[tuple[_Prompt, ...], Field(max_length=100)] = setting((), is_free=True)
    every_steps: StepCount = setting(250, is_free=True)
    before_first: bool = setting(True, is_free=True)
    seed: Seed = setting(0, is_free=True)
    steps: Annotated[int, Range(1, 1000, or_zero=True)] = setting(0, is_free=True)
    guidance: Annotated[float, Range(0.0, 100.0)] | None = setting(None, is_free=True)
    width: _Side = setting(0, is_free=True)
    height: _Side = setting(0, is_free=True)
    frames: Annotated[int, Range(1, 10_000, or_zero=True)] = setting(0, is_free=True)
    vae: PathText = setting("", is_free=True)
    use_ema: bool = setting(True, is_free=True)

    def __post_init__(self) -> None:
        blank = [number for number, prompt in enumerate(self.prompts, start=1) if not prompt.strip()]
        if blank:
            raise ValueError(f"prompt {blank[0]} is blank; write what to draw, or take it out of the list")
        if self.height and not self.width:
            raise ValueError(f"height = {self.height} belongs to a width; give both, or neither")
