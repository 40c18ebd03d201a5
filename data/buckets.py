"""Sizes that samples are resized and cropped to, so that those of one bucket can share a batch.

A bucket is a size of about resolution squared pixels whose sides the model accepts. Of a resolution's buckets an image
gets the one of the nearest aspect ratio, is resized to cover it, and loses what overhangs in equal parts on both sides.
Sizes are (height, width) in pixels, after EXIF rotation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config.job import DataConfig
from ..families.spec import LatentSpec


def bucket_step(config: DataConfig, latent: LatentSpec) -> int:
    """What the sides of every bucket are multiples of, in pixels."""
    return math.lcm(latent.size_multiple, config.bucket_step or 1)


def make_buckets(resolution: int, step: int, max_aspect_ratio: float) -> list[tuple[int, int]]:
    """Sizes of about resolution squared pixels, sides multiples of `step`, from square to the widest, both ways round.

    Raises: ValueError if the resolution is below `step`.
    """
    if resolution < step:
        raise ValueError(f"resolution {resolution} is below {step} pixels, the smallest side a bucket can have here")
    square = step * round(resolution / step)
    buckets = {(square, square)}
    for width in range(step, int(resolution * math.sqrt(max_aspect_ratio)) + step, step):
        height = max(step, step * round(resolution**2 / width / step))
        if max(width, height) <= max_aspect_ratio * min(width, height):
            buckets |= {(height, width), (width, height)}
    return sorted(buckets)


def choose_bucket(size: tuple[int, int], buckets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The bucket whose aspect ratio is nearest, as a factor."""
    return min(buckets, key=lambda bucket: (abs(math.log(aspect(bucket) / aspect(size))), bucket))


def plan_crop(size: tuple[int, int], bucket: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """(resize, crop) for an image of this size: keep its shape, just cover the bucket, cut the middle out."""
    height, width = size
    scale = max(bucket[0] / height, bucket[1] / width)
    resize = max(bucket[0], round(height * scale)), max(bucket[1], round(width * scale))
    return resize, ((resize[0] - bucket[0]) // 2, (resize[1] - bucket[1]) // 2, *bucket)


def aspect(size: tuple[int, int]) -> float:
    """Width by height."""
    return size[1] / size[0]
