"""Pictures of what a model has learned, drawn as samples of a training are, and a sheet of them with a line of text
over each row."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from devicebridge.families.spec import ModelFamily
from devicebridge.sampling.draw import ScheduledSteps
from devicebridge.system.files import write_atomically
from devicebridge.training.objective import make_generator
from torch import nn

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

_GAP = 6  # pixels between the images of a sheet
_LABEL_HEIGHT = 26


@torch.no_grad()
def sample_images(
    model: nn.Module,
    family: ModelFamily,
    text: Mapping[str, torch.Tensor],
    latent_shape: Sequence[int],
    *,
    num_images: int,
    steps: int,
    shift_factor: float,
    seed: int,
    guidance: float | None,
    home: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Latents of new images, normalised as the family's are: decode them with family.decode_latents.

    The noise of an image depends on seed and its number alone, so the same seed shows the same picture before and
    after training, on any device and however many images there are.

    Args:
        model: split or not. Runs in eval mode and is put back into the mode it had.
        text: what the text encoders left, by name; of one caption for all images or of one per image. [1 or num, S, D]
        latent_shape: [C, F, H, W]
        steps: forwards per image.
        shift_factor: ShiftRule.factor for this size.
        guidance: embedded guidance, None where the model has no such input.
        home: device of the model's embedders.
        dtype: type the model computes in; the integration is float32.
    Returns: float32 on the CPU. [num_images, C, F, H, W]
    """
    noise = [torch.randn(*latent_shape, generator=make_generator(seed, "preview", i)) for i in range(num_images)]
    latents = torch.stack(noise).to(home)
    states = {name: t.to(home, dtype).expand(num_images, *t.shape[1:]) for name, t in text.items()}
    scheduled = ScheduledSteps(steps, shift_factor)
    with _in_eval_mode(model):
        for index, sigma in enumerate(scheduled.levels):
            timesteps = sigma.expand(num_images).to(home)
            inputs = family.make_inputs(latents.to(dtype), timesteps, states, guidance)
            output = model(**inputs, return_dict=False)[0].to(home)  # the tail may be on another card
            velocity = family.read_prediction(output, latents).float()
            latents = scheduled.step(index, latents, velocity, None, 1.0)
    return latents.cpu()


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def to_images(pixels: torch.Tensor) -> list[PilImage]:
    """The first frame of each as 8-bit RGB; values outside -1..1 are clipped. [B, 3, F, height, width]"""
    from PIL import Image

    values = ((pixels[:, :, 0].float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(image.permute(1, 2, 0).cpu().numpy()) for image in values]


def save_image_grid(path: Path, rows: Sequence[tuple[str, Sequence[PilImage]]], *, side: int = 128) -> None:
    """Write a PNG with one row of images per entry, left to right, under the entry's text.

    Args:
        rows: (text, images); rows may differ in length.
        side: pixels of an image's longer side on the sheet.
    """
    from PIL import Image, ImageDraw, ImageFont

    width = _GAP + max(len(images) for _, images in rows) * (side + _GAP)
    sheet = Image.new("RGB", (width, len(rows) * (_LABEL_HEIGHT + side + _GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (text, images) in enumerate(rows):
        top = number * (_LABEL_HEIGHT + side + _GAP)
        draw.text((_GAP, top + _GAP), text, fill="black", font=ImageFont.load_default(15))
        for column, image in enumerate(images):
            scale = side / max(image.size)
            resized = image.resize([max(1, round(length * scale)) for length in image.size], Image.Resampling.BICUBIC)
            sheet.paste(resized, (_GAP + column * (side + _GAP), top + _LABEL_HEIGHT))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    write_atomically(Path(path), buffer.getvalue())
