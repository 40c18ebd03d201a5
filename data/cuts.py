"""How samples are cut.

A bucket is a size of about resolution squared pixels whose sides the model accepts: samples of one bucket can share a
batch. Of a resolution's buckets an image gets the one of the nearest aspect ratio, is resized to cover it, and loses
what overhangs in equal parts on both sides. Sizes are (height, width) in pixels, after EXIF rotation.

A clip is shown anew at `fps`: frame k is the one on screen k / fps seconds after the first, so variable rates come out
even, a faster source loses frames, and a slower one shows some of them twice. Of these frames a window of a length from
`lengths` is taken. Nothing is drawn and nothing is padded: the frame numbers are part of the sample.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..checkpoints.model_files import first
from ..config.job import DataConfig
from ..families.spec import LatentSpec
from .video import ClipInfo


def bucket_step(config: DataConfig, latent: LatentSpec) -> int:
    """What the sides of every bucket are multiples of, in pixels."""
    return math.lcm(latent.size_multiple, config.bucket_step or 1)


def make_buckets(resolution: int, step: int, max_aspect_ratio: float) -> list[tuple[int, int]]:
    """Sizes of about resolution squared pixels, sides multiples of `step`, from square to the widest, both ways round.
    Raises: ValueError if the resolution is below `step`."""
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


def is_other_shape(size: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether their aspect ratios differ by more than the rounding of sizes."""
    return abs(math.log(aspect(size) / aspect(other))) > _SHAPE_TOLERANCE


_SHAPE_TOLERANCE = 0.02
_TOLERANCE_S = 0.0015  # containers round times, WebM to milliseconds


@dataclass(frozen=True)
class ClipPlan:
    """How clips become samples."""

    lengths: tuple[int, ...]  # in frames, rising; never empty
    fps: float | None  # None takes every frame
    window: Literal["start", "centre", "uniform"]
    num_windows: int
    seconds: float = 0.0  # of the parts of a sound; 0 takes all of it

    def cut(self, info: ClipInfo) -> dict[int, tuple[int, ...]]:
        """The clip's frames of every sample made of it, by the tick of its rate at which the sample begins. Raises:
        ValueError for a clip that is shorter than every length; says what would work."""
        shown = show_at(info, self.fps)
        length = max((length for length in self.lengths if length <= len(shown)), default=0)
        if not length:
            rate = f"{len(shown)} at {self.fps:g} per second" if info.times_s and self.fps else "all of them"
            raise ValueError(
                f"its {info.num_frames} frames ({rate}) are fewer than {self.lengths[0]}, the shortest clip requested; "
                "add a length to data.frames, or take it out of the dataset (with data.frames = [1] one frame is used)"
            )
        spare, last = len(shown) - length, self.num_windows - 1
        starts = [0] if self.window == "start" else [spare // 2]
        if self.window == "uniform":
            starts = [(2 * index * spare + last) // (2 * last) for index in range(self.num_windows)]
        return {start: tuple(shown[start : start + length]) for start in starts}


def show_at(info: ClipInfo, fps: float | None) -> list[int]:
    """The number of the frame that is on screen at every tick of this rate; all frames for None or without times."""
    if fps is None or not info.times_s:
        return list(range(info.num_frames))
    num_ticks = max(1, math.ceil((info.end_s - _TOLERANCE_S) * fps))
    return [bisect.bisect_right(info.times_s, tick / fps + _TOLERANCE_S) - 1 for tick in range(num_ticks)]


def is_slower(info: ClipInfo, fps: float | None) -> bool:
    """Whether the clip has clearly fewer frames than are taken from it."""
    return bool(fps and info.times_s) and info.num_frames < 0.9 * info.end_s * (fps or 0)


def make_clip_plan(config: DataConfig, latent: LatentSpec) -> ClipPlan:
    """The config's settings, else the model's. Raises: ValueError for lengths that the model does not take; names the
    nearest. For another rate than sound has."""
    frames = sorted(set(config.frames or latent.frame_lengths))
    if not latent.is_video and frames != [1]:
        raise ValueError(f"data.frames is {frames}, but this model makes images only; leave it out")
    wrong = [length for length in frames if not latent.is_length(length)]
    if wrong:
        shorter = {latent.nearest_length(length) for length in wrong}
        nearest = sorted(shorter | {latent.nearest_length(n + latent.frame_stride) for n in wrong})
        raise ValueError(
            f"data.frames has {first(map(str, wrong), most=6)}, but this model takes {latent.clip_rule} frames; "
            f"nearest are {first(map(str, nearest), most=6)}"
        )
    if latent.is_video and latent.sound_rate and config.fps not in (0, latent.fps):
        raise ValueError(
            f"data.fps is {config.fps!r}, but beside sound this model takes {latent.fps:g} frames per second; leave it "
            "out, or cache.stock_audio_vae"
        )
    lengths = tuple(length for length in frames if length > 1) or (1,)
    fps = None if config.fps == "source" else float(config.fps) or latent.fps
    return ClipPlan(lengths, fps, config.window, config.num_windows, config.seconds)
