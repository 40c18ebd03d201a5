"""What is trained on, how it is cut, in which order it comes, and its loss masks. An image covers the bucket of the
nearest aspect ratio; of a clip, shown anew at `fps`, windows are taken. Sizes are (height, width) in pixels, turned as
EXIF says. Draws are hashes of seed, epoch and position: a run continues alike with any version of any library."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL.ImageOps import exif_transpose

from ..checkpoints.fingerprint import settings_fingerprint
from ..checkpoints.model_files import first
from ..config.job import DataConfig
from ..families.spec import LatentSpec
from ..system.stopping import alive
from .captions import uniform
from .containers import SOUND_SUFFIXES
from .image import ImageRequest, SoundRequest, naming, opened
from .video import ClipInfo, media_fingerprint

_S = TypeVar("_S")
_T = TypeVar("_T")

# --- how samples are cut ----------------------------------------------------------------------------------------------


def bucket_step(config: DataConfig, latent: LatentSpec) -> int:
    """What the sides of every bucket are multiples of, in pixels."""
    return math.lcm(latent.size_multiple, config.bucket_step or 1)


def make_buckets(resolution: int, step: int, max_aspect_ratio: float) -> list[tuple[int, int]]:
    """About resolution squared, sides multiples of `step`, both ways round. Raises: ValueError for less than `step`."""
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
        """The frames of each sample of a clip, by its first tick. Raises: ValueError for too short a clip."""
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
    """The config's settings, else the model's. Raises: ValueError for lengths or a rate that it does not take."""
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


# --- what they are ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """The files that a sample's model is given beside caption and noise."""

    way: str  # a name of families/comfy/conditions.py
    references: tuple[str, ...] = ()  # whole images
    sizes: tuple[tuple[int, int], ...] = ()  # of them
    control: ImageRequest | None = None  # the sample's own cut of the clip that it follows
    clip: ImageRequest | None = None  # and of the image or clip itself

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all its files."""
        return (*self.references, *(each.path for each in (self.control, self.clip) if each))

    def named_by(self, content: Mapping[str, str]) -> list[Any]:
        """What decides what is made of it, with the content of each path in its place."""
        requests = (self.control, self.clip)
        cuts = [each and [content[each.path], each.resize, each.crop, each.frames] for each in requests]
        return [self.way, [content[path] for path in self.references], *cuts]


Wanted = tuple[str, Condition]  # a caption, and what is beside it


@dataclass(frozen=True)
class Sample:
    """One image, or one window of a clip. Those that share bucket, num_frames and alike can share a batch."""

    path: str  # image, video file, or folder of images
    caption: str
    mask_path: str | None  # loss mask; of a clip it counts for all frames
    resize: tuple[int, int]  # size of the whole image after resizing
    crop: tuple[int, int, int, int]  # (top, left, height, width) in pixels, inside `resize`
    bucket: tuple[int, int]  # size of what is left
    frames: tuple[int, ...] = ()  # of a clip, which of its frames; () for an image
    loss_weight: float = 1.0
    condition: Condition | None = None
    latents_key: str = ""  # cache entry of its latents; "" until the job's cache is filled
    # Cache entries of its text with each caption, of which later ones count over earlier ones; behind them those where
    # its caption is dropped, () if it never is.
    text_keys: tuple[tuple[str, ...], ...] = ()
    others: tuple[str, ...] = ()  # captions of which one is drawn each time, as often as the first
    source: str = ""  # what kind of file the captions are from, or which file of many; "" where there is none
    sound: SoundRequest | None = None  # beside a clip; or alone, and then bucket is rows and columns of latents

    @property
    def captions(self) -> tuple[str, ...]:
        """All of which one is drawn."""
        return (self.caption, *self.others)

    @property
    def alike(self) -> tuple[int, ...]:
        """The sizes of its references, and the columns of its sound beside a clip; () without."""
        sizes = tuple(side for size in (self.condition.sizes if self.condition else ()) for side in size)
        return (*sizes, self.sound.cells) if self.sound and self.frames else sizes

    @property
    def has_sound(self) -> bool:
        """Beside a clip, or alone."""
        return self.sound is not None

    @property
    def num_frames(self) -> int:
        """Video frames; 1 for an image."""
        return len(self.frames) or 1

    def image_request(self) -> ImageRequest:
        """The pixels to encode; equal for samples that differ in caption or mask only."""
        return ImageRequest(self.path, self.resize, self.crop, self.frames, self.sound)


@dataclass(frozen=True)
class EncodedSample:
    """One sample of a dataset that arrived encoded; as Sample."""

    latents_key: str
    text_keys: tuple[tuple[str, ...], ...]
    bucket: tuple[int, ...]  # latent sides and text tokens
    num_frames: int = 1  # video frames that its latents stand for
    mask_path: None = None
    loss_weight: float = 1.0
    alike: tuple[int, ...] = ()  # what else its CONDITIONING says, and how long its sound is, as a number
    has_sound: bool = False  # as a stream, or as a voice to speak with
    sound: tuple[int, ...] = ()  # shape of that stream; () without one
    has_mask: bool = False  # whether its LATENT has a noise mask
    others: tuple[str, ...] = ()


TrainingSample = Sample | EncodedSample


def dataset_fingerprint(samples: Sequence[Sample]) -> str:
    """Hash of what is trained on, in order, wherever the files lie. Raises: OSError if one has gone."""
    beside = (path for s in samples for path in (s.mask_path, *(s.condition.paths if s.condition else ())) if path)
    paths = list(dict.fromkeys([*(path for s in samples for path in s.image_request().paths), *beside]))
    content = dict(zip(paths, in_threads(media_fingerprint, paths, alive), strict=True))
    return settings_fingerprint(
        [
            [content[s.path], s.caption, s.mask_path and content[s.mask_path], s.resize, s.crop]
            + ([s.frames] if s.frames else [])  # images alone hash as they did before there were clips
            + ([{"loss_weight": s.loss_weight}] if s.loss_weight != 1 else [])
            + ([{"others": s.others}] if s.others else [])
            + ([{"condition": s.condition.named_by(content)}] if s.condition else [])
            + ([{"sound": [content[s.sound.path], s.sound.start_s, s.sound.length_s]}] if s.sound else [])
            for s in samples
        ]
    )


def in_threads(work: Callable[[_S], _T], items: Sequence[_S], ask: Callable[[], None]) -> list[_T]:
    """What work makes of every item, in order; ask is called before each, and may raise to stop."""
    pool, done = ThreadPoolExecutor(), list[_T]()
    try:
        for future in [pool.submit(work, item) for item in items]:
            ask()
            done.append(future.result())
        return done
    finally:
        pool.shutdown(cancel_futures=True)


DROPPED = -1  # in place of a caption: the empty one, whose entries are the last of a sample's text_keys


def as_evaluated(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples as they are evaluated: each once, with its first caption."""
    return tuple(dict.fromkeys(replace(each, others=()) for each in samples))


def describe_samples(samples: Sequence[Sample]) -> str:
    """Which files the captions are from, and how many texts there are; and the folders, where there are several."""
    by_path = {each.path: each for each in samples}
    sources = Counter(each.source or "no file" for each in by_path.values())
    said = "captions: " + ", ".join(f"{number} from {name}" for name, number in sources.most_common())
    most = max((len(each.captions) for each in samples), default=1)
    if most > 1:
        texts = len({text for each in samples for text in each.captions})
        said += f"; {texts} different texts, up to {most} of an image, of which each step draws one"
    if parts := {each.sound for each in samples if each.sound}:
        own = len({each.path for each in parts if Path(each.path).suffix.lower() in SOUND_SUFFIXES})
        tracks = len({each.path for each in parts}) - own
        seconds = sum(each.length_s for each in parts)
        said += f"\nsounds: {own} files, {tracks} tracks of clips; {len(parts)} parts of {seconds:.1f} s in all"
    folders, images = (Counter(Path(path).parent for path in paths) for paths in ([s.path for s in samples], by_path))
    if len(folders) > 1:
        names = Counter(each.name for each in folders)
        named = {each: each.name if names[each.name] == 1 else each for each in folders}
        said += "\nfolders: " + ", ".join(f"{named[f]} ({images[f]}, {folders[f]} per epoch)" for f in folders)
    return said


@dataclass(frozen=True)
class Batch:
    """Indices into the samples, all of one bucket and length, and into the captions of each, or DROPPED. [B] each"""

    indices: tuple[int, ...]
    captions: tuple[int, ...]


class BatchOrder:
    """An endless order of batches, each of one bucket and length: every sample once per epoch, shuffled anew. A
    bucket's last batch may be smaller. caption_dropout: probability, per sample and epoch."""

    def __init__(
        self, samples: Sequence[TrainingSample], *, batch_size: int, seed: int, caption_dropout: float = 0.0
    ) -> None:
        if not samples:
            raise ValueError("there are no samples to train on; give a dataset with at least one image")
        self._num_captions = [1 + len(sample.others) for sample in samples]
        self._buckets = [(*sample.bucket, sample.num_frames, *sample.alike) for sample in samples]
        self._batch_size = batch_size
        self._seed = seed
        self._caption_dropout = caption_dropout
        self._epoch = 0
        self._index = 0
        self._batches = self.batches_of(0)

    def next(self) -> Batch:
        """The next batch; begins a new epoch where one ends."""
        if self._index == len(self._batches):
            self._epoch, self._index = self._epoch + 1, 0
            self._batches = self.batches_of(self._epoch)
        self._index += 1
        return self._batches[self._index - 1]

    def ahead(self, count: int) -> Batch:
        """The batch that `next` will give after so many others; the position stays."""
        epoch, index, batches = self._epoch, self._index + count, self._batches
        while index >= len(batches):
            index -= len(batches)
            epoch += 1
            batches = self.batches_of(epoch)
        return batches[index]

    def batches_of(self, epoch: int) -> list[Batch]:
        """All batches of an epoch, in order."""
        shuffled = sorted(range(len(self._buckets)), key=lambda i: uniform(f"{self._seed} sample {epoch} {i}"))
        by_bucket: dict[tuple[int, ...], list[int]] = {}
        for index in shuffled:
            by_bucket.setdefault(self._buckets[index], []).append(index)
        size = self._batch_size
        groups = [members[i : i + size] for members in by_bucket.values() for i in range(0, len(members), size)]
        groups.sort(key=lambda group: uniform(f"{self._seed} batch {epoch} {group[0]}"))
        return [Batch(tuple(group), tuple(self._caption(epoch, index) for index in group)) for group in groups]

    def _caption(self, epoch: int, index: int) -> int:
        """Which caption a sample has in an epoch."""
        if uniform(f"{self._seed} caption {epoch} {index}") < self._caption_dropout:
            return DROPPED
        count = self._num_captions[index]
        return int(uniform(f"{self._seed} text {epoch} {index}") * count) if count > 1 else 0

    def state_dict(self) -> dict[str, int]:
        """Where the order stands: the epoch, and how many of its batches are done."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue behind what was done. Raises: ValueError for a position that this order does not have."""
        epoch, index = int(state["epoch"]), int(state["index"])
        batches = self.batches_of(epoch)
        if epoch < 0 or not 0 <= index <= len(batches):
            raise ValueError(
                f"cannot continue at batch {index} of epoch {epoch}: an epoch has {len(batches)} batches here; "
                "the state is of another dataset or batch size"
            )
        self._epoch, self._index, self._batches = epoch, index, batches


def load_mask(sample: Sample, latent_hw: tuple[int, int]) -> torch.Tensor:
    """The sample's mask on its latent grid, float32 in 0..1: each cell is the exact mean over the area that it covers,
    whatever the mask's resolution. [1, 1, H, W]"""
    assert sample.mask_path is not None
    mask = read_mask(Path(sample.mask_path)).double()
    top, left, height, width = sample.crop
    rows = _cell_weights(mask.shape[0], sample.resize[0], top, height, latent_hw[0])
    columns = _cell_weights(mask.shape[1], sample.resize[1], left, width, latent_hw[1])
    return (rows @ mask @ columns.T).clamp(0, 1).float()[None, None]


def _cell_weights(num_source: int, resized: int, start: int, length: int, num_cells: int) -> torch.Tensor:
    """How much each of num_source pixels, stretched to `resized` of which [start, start + length) is cut into cells,
    counts in each; rows add up to 1. [num_cells, num_source], float64"""
    cells = torch.arange(num_cells + 1, dtype=torch.float64) / num_cells
    edges = (start + length * cells) * num_source / resized
    pixels = torch.arange(num_source, dtype=torch.float64)
    overlap = torch.minimum(edges[1:, None], pixels + 1) - torch.maximum(edges[:-1, None], pixels)
    return overlap.clamp_min(0) * resized * num_cells / (length * num_source)


def is_in_alpha(path: Path) -> bool:
    """Whether a mask says something by its transparency alone, which is not looked at."""
    with opened(path) as file:
        if file.mode.startswith("I") or not file.has_transparency_data:
            return False
        brightness, transparency = (band.getextrema() for band in exif_transpose(file).convert("LA").split())
        return brightness[0] == brightness[1] and transparency != (255, 255)


def read_mask(path: Path) -> torch.Tensor:
    """Brightness of the mask's pixels, 0 black to 1 white. [h, w] Raises: ValueError naming it."""
    with naming(path, "a mask"), opened(path) as file:
        image = exif_transpose(file)
        is_16_bit = image.mode.startswith("I")
        values = np.asarray(image if is_16_bit else image.convert("L"), dtype=np.float32)
    return torch.from_numpy(values / (65535 if is_16_bit else 255))
