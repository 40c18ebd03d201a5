"""One training image: from its file to pixels.

The order is fixed, because each step changes what the next one sees: rotate as EXIF says, make RGB, resize with Lanczos
to `resize`, cut `crop` out. Where a file holds more than RGB: transparency is laid on white (as web pages and most
viewers show it; the colours under full transparency are arbitrary), 16-bit grey is scaled to 8 bit, colour profiles are
not applied, and of an animation the first frame is taken.

Video will come with its own request and reader; encode_images already hands [1, 3, F, H, W] on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage


@dataclass(frozen=True)
class ImageRequest:
    """An image file and the pixels wanted of it.

    Args:
        path: image file.
        resize: (height, width) in pixels of the whole image, after EXIF rotation.
        crop: (top, left, height, width) in pixels, inside `resize`.
    """

    path: str
    resize: tuple[int, int]
    crop: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        top, left, height, width = self.crop
        fits = top + height <= self.resize[0] and left + width <= self.resize[1]
        if min(*self.resize, height, width) < 1 or min(top, left) < 0 or not fits:
            raise ValueError(
                f"{self.path}: crop (top, left, height, width) {self.crop} is not inside (height, width) {self.resize}"
            )


def read_pixels(request: ImageRequest) -> torch.Tensor:
    """The requested pixels, float32 in -1..1. [3, crop height, crop width]

    Raises: ValueError naming the file if it cannot be read as an image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(request.path) as file:
            image = _to_rgb(ImageOps.exif_transpose(file))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG chunk
        raise ValueError(
            f"{request.path} cannot be read as an image ({error}); repair it or take it out of the dataset"
        ) from error
    height, width = request.resize
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    top, left, height, width = request.crop
    pixels = np.asarray(image)[top : top + height, left : left + width]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0


def _to_rgb(image: PilImage) -> Any:
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its values are floats without a known range")
    if image.mode.startswith("I"):  # 16 bit; PIL would clip at 255 and leave nearly white
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray((values.clip(0, 65535) // 257).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
