"""The images and clips a LoRA is trained on: which there are, how each is cut to a bucket, and in which order.

A dataset is one or more ordinary folders: name.png (or .jpg, .jpeg, .webp, .bmp) with its caption in name.txt and,
where wanted, a loss mask in name_mask.png. Models that make videos also take clips: name.mp4 (or .m4v, .mov, .mkv,
.webm), animations (name.gif, .webp, .png), and a sub-folder `name` of images that has a name.txt beside it. Other
sub-folders and hidden files are not looked at.

Batches need samples of one size and length, so a sample is resized and cropped to a bucket: a size of about resolution
squared pixels whose sides the model accepts. Of a resolution's buckets an image gets the one of the nearest aspect
ratio, is resized to cover it, and loses what overhangs in equal parts on both sides. What is taken from a clip is said
in clips.py.

Nothing random is carried along. Whatever is drawn (the order of an epoch, whether a caption is dropped) is a hash of
the seed, the epoch and the position, so where a run stands is two integers, and it continues alike with any version of
any library.

Sizes are (height, width) in pixels, after EXIF rotation; H, W are latent height and width.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from ..checkpoints.fingerprint import settings_fingerprint
from ..config.job import DataConfig, FolderConfig
from ..families.spec import LatentSpec
from ..system.listing import Looked
from ..system.stopping import Stopped, never
from .clips import ClipPlan, is_slower, make_clip_plan
from .image import IMAGE_SUFFIXES, read_size
from .open_image import opened
from .video import CLIP_SUFFIXES, ClipInfo, is_clip, media_fingerprint, probe_clip, sequence_files

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

    from ..encoding.encode import ImageRequest

_log = logging.getLogger(__name__)
_S = TypeVar("_S")
_T = TypeVar("_T")

_SUFFIXES = (*IMAGE_SUFFIXES, *CLIP_SUFFIXES)
_MASK_END = "_mask"
_MAX_CAPTION_BYTES = 1_000_000
_MAX_NAMES = 5  # file names spelt out in a warning
_MASK_SHAPE_TOLERANCE = 0.02  # mask and image may differ by this much in aspect ratio: sizes get rounded


class TrainingSample(Protocol):
    """What batches are made of: an image or clip with its caption, or a sample that arrived encoded."""

    @property
    def caption(self) -> str: ...

    @property
    def mask_path(self) -> str | None: ...

    @property
    def bucket(self) -> tuple[int, ...]:
        """Samples of one bucket and length can share a batch."""
        ...

    @property
    def num_frames(self) -> int:
        """Video frames; 1 for an image."""
        ...


@dataclass(frozen=True)
class Sample:
    """One image, or one window of a clip, as it is trained on.

    Args:
        path: image, video file, or folder of images.
        caption: "" where there is none.
        mask_path: loss mask, or None; of a clip it counts for all frames.
        resize: size of the whole image after resizing.
        crop: (top, left, height, width) in pixels, inside `resize`.
        bucket: size of what is left; samples of one bucket and length can share a batch.
        frames: of a clip, which of its frames; () for an image.
    """

    path: str
    caption: str
    mask_path: str | None
    resize: tuple[int, int]
    crop: tuple[int, int, int, int]
    bucket: tuple[int, int]
    frames: tuple[int, ...] = ()

    @property
    def num_frames(self) -> int:
        """Video frames; 1 for an image."""
        return len(self.frames) or 1

    def image_request(self) -> ImageRequest:
        """The pixels to encode; equal for samples that differ in caption or mask only."""
        from ..encoding.encode import ImageRequest

        return ImageRequest(self.path, self.resize, self.crop, self.frames)


# --- folders to samples ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Picture:
    """One image or clip as found: caption None without a caption file, size None if unreadable, and all that is wrong.

    Args:
        clip: what a clip is; None for an image. cuts: its frames of each sample.
    """

    path: Path
    mask: Path | None
    size: tuple[int, int] | None
    caption: str | None
    problems: tuple[str, ...]
    clip: ClipInfo | None = None
    cuts: tuple[tuple[int, ...], ...] = ((),)


def scan_folders(config: DataConfig, latent: LatentSpec, should_stop: Callable[[], bool] = never) -> list[Sample]:
    """Every image and clip of every folder as samples: by file name, each at each resolution, each `repeats` times.

    All images and masks are decoded once, so that a broken file is found now and not hours later; that costs some
    milliseconds per megapixel and core. Of a video all packets are read and the first frame is decoded, which finds a
    file that is cut short; damage in its middle is found when it is encoded. One warning each says how many captions
    are missing, how many are empty, how many images are smaller than their bucket and so upscaled, and how many clips
    are slower than asked for or HDR.

    Raises: Stopped when should_stop() became true; ValueError for a folder that is missing, holds no image, or far more
        files than a dataset; for files that cannot be used, naming all of
        them with the reason; for a resolution below the model's smallest side, or a clip length it does not take.
    """
    from PIL import Image

    step = bucket_step(config, latent)
    choices = [make_buckets(resolution, step, config.max_aspect_ratio) for resolution in config.resolutions]
    plan = make_clip_plan(config, latent)
    ask = _stopper(should_stop)
    found = [
        (folder, *files) for folder in config.folders for files in _list_folder(folder, config.use_masks, latent, ask)
    ]
    Image.init()  # not thread-safe: in two threads at once, one would not know the formats yet
    pictures = _in_threads(lambda entry: _inspect(entry[1], entry[2], plan, latent), found, ask)
    _refuse_problems(pictures)
    samples = []
    for (folder, _, _), picture in zip(found, pictures, strict=True):
        for buckets in choices:
            samples += _make_samples(picture, buckets) * folder.repeats
    _warn_of_missing_captions(pictures)
    _warn_of_empty_captions(pictures)
    _warn_of_shared_captions(pictures)
    _warn_of_small_images(pictures, samples)
    _warn_of_clips(pictures, plan)
    _refuse_masks_outside(samples, latent, ask)
    return samples


def _stopper(should_stop: Callable[[], bool]) -> Callable[[], None]:
    def ask() -> None:
        if should_stop():
            raise Stopped("stopped while the dataset was looked at; nothing was done yet")

    return ask


def _in_threads(work: Callable[[_S], _T], items: Sequence[_S], ask: Callable[[], None]) -> list[_T]:
    """What work makes of every item, in order; asked before each, and what has not begun is dropped at a stop."""
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            done = []
            for future in futures:
                ask()
                done.append(future.result())
            return done
        finally:
            for future in futures:
                future.cancel()


def _list_folder(
    folder: FolderConfig, use_masks: bool, latent: LatentSpec, ask: Callable[[], None]
) -> list[tuple[Path, Path | None]]:
    """The images and clips of a folder with their masks, sorted by name.

    Raises: ValueError if there is none; for a mask that is no PNG; for a folder that holds too much.
    """
    root = Path(folder.path)
    if not root.is_dir():
        raise ValueError(f"the dataset folder {root} does not exist; give a folder of images")
    looked = Looked(ask)
    entries = looked.entries(root)
    _warn_of_dangling_links(root, entries)
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in _SUFFIXES]
    taken = {file.stem for file in files}  # cat.txt is the caption of cat.png, and not of a folder cat beside it
    folders = [entry for entry in entries if entry.is_dir()]
    sequences = [entry for entry in folders if entry.name not in taken and os.path.isfile(_caption_file(entry))]
    images = sorted([*(file for file in files if not _is_mask_name(file)), *sequences], key=lambda f: f.name)
    masks = {file.stem.removesuffix(_MASK_END): file for file in files if _is_mask_name(file)}
    stems = {_stem(image) for image in images}
    for image in images:
        if _stem(image).endswith(_MASK_END) and _stem(image).removesuffix(_MASK_END) in stems:
            raise ValueError(f"{image} looks like a mask, which must be a PNG; save it as {image.stem}.png")
    if orphans := [mask.name for stem, mask in masks.items() if stem not in stems]:
        _log.warning(
            "%s: %s not used: names ending in _mask.png are masks, and there is no image for %s",
            root,
            _names(orphans),
            "it" if len(orphans) == 1 else "them",
        )
    if latent.is_video:
        _warn_of_unused_folders(root, [entry for entry in folders if entry not in sequences], looked)
    if not images:
        raise ValueError(
            f"no images in {root}; looked for names ending in {', '.join(_SUFFIXES)} (not in _mask.png, which are "
            "masks), directly in the folder and not in its sub-folders, except those of a clip, whose caption lies "
            "beside them"
        )
    return [(image, masks.get(_stem(image)) if use_masks else None) for image in images]


def _warn_of_unused_folders(root: Path, folders: Sequence[Path], looked: Looked) -> None:
    readable = [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)]
    unused = [folder.name for folder in readable if sequence_files(folder, looked)]
    if unused:
        _log.warning(
            "%s: sub-folders with images are not used: %s; if one is a clip, put its caption beside it, named like the "
            "folder with .txt",
            root,
            _names(unused),
        )


def _stem(path: Path) -> str:
    """The name without a file's ending; a folder's name has none."""
    return path.name if path.is_dir() else path.stem


def _caption_file(path: Path) -> Path:
    return path.with_name(f"{_stem(path)}.txt")


def _is_mask_name(file: Path) -> bool:
    return file.stem.endswith(_MASK_END) and file.suffix.lower() == ".png"


def _inspect(path: Path, mask: Path | None, plan: ClipPlan, latent: LatentSpec) -> _Picture:
    """Read everything about one image or clip, keeping what is wrong instead of stopping at it."""
    problems: list[str] = []

    def attempt(read: Callable[[Path], _T], file: Path) -> _T | None:
        try:
            return read(file)
        except ValueError as error:
            problems.append(str(error))
            return None

    clip = attempt(lambda file: _read_clip(file, latent), path)
    cuts = attempt(lambda file: _cut_clip(file, clip, plan), path)
    size = clip.size if clip else None if problems else attempt(read_size, path)
    caption = attempt(_read_caption, _caption_file(path))
    mask_size = attempt(_read_mask_size, mask) if mask else None
    if size and mask_size and abs(math.log(_aspect(mask_size) / _aspect(size))) > _MASK_SHAPE_TOLERANCE:
        problems.append(
            f"{mask}: is {mask_size[1]}x{mask_size[0]}, but its image is {size[1]}x{size[0]}; "
            "a mask needs the shape of its image"
        )
    return _Picture(path, mask, size, caption, tuple(problems), clip, cuts or ((),))


def _read_clip(path: Path, latent: LatentSpec) -> ClipInfo | None:
    """None for an image. For a model that makes images, an animation is its first frame, unless its name says video.

    Raises: ValueError naming a clip that cannot be used.
    """
    is_by_name = path.is_dir() or path.suffix.lower() in CLIP_SUFFIXES
    if not (is_by_name or latent.is_video) or not is_clip(path):
        return None
    if not latent.is_video:
        raise ValueError(
            f"{path}: is a clip, but this model makes images only; save the frames you want as images, or take it out "
            "of the dataset"
        )
    return probe_clip(path)


def _cut_clip(path: Path, clip: ClipInfo | None, plan: ClipPlan) -> tuple[tuple[int, ...], ...]:
    if clip is None:
        return ((),)
    try:
        return tuple(plan.cut(clip))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_caption(path: Path) -> str | None:
    """The caption without blanks around it; None if there is no such file.

    Raises: ValueError naming the file if it is not UTF-8, no ordinary file, or too long for a caption.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would keep us waiting, a device has no end
            raise ValueError(f"{path}: is no ordinary file; put a text file in its place")
        if status.st_size > _MAX_CAPTION_BYTES:
            raise ValueError(
                f"{path}: has {status.st_size} bytes, which is no caption; give a text of up to {_MAX_CAPTION_BYTES}"
            )
        return path.read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error


def _read_mask_size(path: Path) -> tuple[int, int]:
    mask = _read_mask(path)
    if not mask.any():
        raise ValueError(f"{path}: is all black, so nothing of its image would be trained")
    return mask.shape[0], mask.shape[1]


def _refuse_problems(pictures: Sequence[_Picture]) -> None:
    bad = [picture for picture in pictures if picture.problems]
    if bad:
        lines = "\n".join(f"  {problem}" for picture in bad for problem in picture.problems)
        raise ValueError(
            f"{len(bad)} of {len(pictures)} {_kinds(pictures)} cannot be used; "
            f"repair them or take them out of the dataset:\n{lines}"
        )


def _kinds(pictures: Sequence[_Picture]) -> str:
    """What to call them."""
    has_clips = any(p.clip or p.path.is_dir() or p.path.suffix.lower() in CLIP_SUFFIXES for p in pictures)
    return "images and clips" if has_clips else "images"


def _warn_of_clips(pictures: Sequence[_Picture], plan: ClipPlan) -> None:
    clips = [(picture.path.name, picture.clip) for picture in pictures if picture.clip]
    if slow := [name for name, clip in clips if is_slower(clip, plan.fps)]:
        _log.warning(
            "%d of %d clips have fewer than %g frames per second, so frames come twice: %s; "
            'set data.fps to theirs, or to "source"',
            len(slow),
            len(clips),
            plan.fps,
            _names(slow),
        )
    if hdr := [name for name, clip in clips if clip.is_hdr]:
        _log.warning(
            "%d of %d clips are HDR and look washed out as they are read: %s; convert them to SDR first",
            len(hdr),
            len(clips),
            _names(hdr),
        )


def _warn_of_missing_captions(pictures: Sequence[_Picture]) -> None:
    missing = [picture.path.name for picture in pictures if picture.caption is None]
    if missing:
        _log.warning(
            "%d of %d %s have no caption file and are trained with an empty caption: %s; "
            "write the caption of name.png into name.txt",
            len(missing),
            len(pictures),
            _kinds(pictures),
            _names(missing),
        )


def _warn_of_empty_captions(pictures: Sequence[_Picture]) -> None:
    empty = [str(_caption_file(picture.path)) for picture in pictures if picture.caption == ""]
    if empty:
        _log.warning(
            "%d of %d caption files are empty, as a full disk leaves them, and their images are trained with an empty "
            "caption: %s; write the captions anew, or delete the files if no caption is meant",
            len(empty),
            len(pictures),
            _names(empty),
        )


def _warn_of_shared_captions(pictures: Sequence[_Picture]) -> None:
    by_caption: dict[Path, list[str]] = {}
    for path in dict.fromkeys(picture.path for picture in pictures if picture.caption is not None):
        by_caption.setdefault(_caption_file(path), []).append(path.name)
    shared = [f"{caption.name} of {' and '.join(names)}" for caption, names in by_caption.items() if len(names) > 1]
    if shared:
        _log.warning(
            "%d caption files are each the caption of several: %s; give each image or clip a name of its own",
            len(shared),
            _names(shared),
        )


def _warn_of_dangling_links(root: Path, entries: Sequence[Path]) -> None:
    dangling = [entry.name for entry in entries if entry.is_symlink() and not entry.exists()]
    if dangling:
        _log.warning(
            "%s: %d links lead to nothing and are not used: %s; mend or remove them",
            root,
            len(dangling),
            _names(dangling),
        )


def _refuse_masks_outside(samples: Sequence[Sample], latent: LatentSpec, ask: Callable[[], None]) -> None:
    masked = list({(sample.mask_path, sample.crop): sample for sample in samples if sample.mask_path}.values())
    stride = latent.spatial_stride

    def is_empty(sample: Sample) -> bool:
        return not load_mask(sample, (sample.bucket[0] // stride, sample.bucket[1] // stride)).any()

    empty = [sample for sample, found in zip(masked, _in_threads(is_empty, masked, ask), strict=True) if found]
    if empty:
        raise ValueError(
            f"{_names([str(s.mask_path) for s in empty])}: nothing white is left after cropping the image to its "
            "bucket, so nothing of it would be trained; change the mask, or raise data.max_aspect_ratio"
        )


def _warn_of_small_images(pictures: Sequence[_Picture], samples: Sequence[Sample]) -> None:
    sizes = {str(picture.path): picture.size for picture in pictures}
    small = dict.fromkeys(sample.path for sample in samples if _is_smaller(sizes[sample.path], sample.resize))
    if small:
        _log.warning(
            "%d of %d images are smaller than the size they are trained at and are upscaled: %s; "
            "lower data.resolutions or use larger images",
            len(small),
            len(sizes),
            _names([Path(path).name for path in small]),
        )


def _is_smaller(size: tuple[int, int] | None, resize: tuple[int, int]) -> bool:
    return size is not None and (size[0] < resize[0] or size[1] < resize[1])


def _names(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


# --- buckets ---------------------------------------------------------------------------------------------------------


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
    return min(buckets, key=lambda bucket: (abs(math.log(_aspect(bucket) / _aspect(size))), bucket))


def plan_crop(size: tuple[int, int], bucket: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """(resize, crop) for an image of this size: keep its shape, just cover the bucket, cut the middle out."""
    height, width = size
    scale = max(bucket[0] / height, bucket[1] / width)
    resize = max(bucket[0], round(height * scale)), max(bucket[1], round(width * scale))
    return resize, ((resize[0] - bucket[0]) // 2, (resize[1] - bucket[1]) // 2, *bucket)


def _make_samples(picture: _Picture, buckets: Sequence[tuple[int, int]]) -> list[Sample]:
    """One, or one per window of a clip."""
    assert picture.size is not None
    bucket = choose_bucket(picture.size, buckets)
    resize, crop = plan_crop(picture.size, bucket)
    mask = str(picture.mask) if picture.mask else None
    caption = picture.caption or ""
    return [Sample(str(picture.path), caption, mask, resize, crop, bucket, frames) for frames in picture.cuts]


def _aspect(size: tuple[int, int]) -> float:
    return size[1] / size[0]


# --- masks -----------------------------------------------------------------------------------------------------------


def load_mask(sample: Sample, latent_hw: tuple[int, int]) -> torch.Tensor:
    """The sample's mask on its latent grid, float32 in 0..1. [1, 1, H, W]

    Every cell is the exact mean of the mask over the area the cell covers in the image, so the mask may have another
    resolution than its image.
    """
    assert sample.mask_path is not None
    mask = _read_mask(Path(sample.mask_path)).double()
    top, left, height, width = sample.crop
    rows = _cell_weights(mask.shape[0], sample.resize[0], top, height, latent_hw[0])
    columns = _cell_weights(mask.shape[1], sample.resize[1], left, width, latent_hw[1])
    return (rows @ mask @ columns.T).clamp(0, 1).float()[None, None]


def _cell_weights(num_source: int, resized: int, start: int, length: int, num_cells: int) -> torch.Tensor:
    """How much each of num_source pixels counts in each cell, when they are stretched to `resized` pixels of which
    [start, start + length) is cut into num_cells. Rows add up to 1. [num_cells, num_source], float64"""
    cells = torch.arange(num_cells + 1, dtype=torch.float64) / num_cells
    edges = (start + length * cells) * num_source / resized
    pixels = torch.arange(num_source, dtype=torch.float64)
    overlap = torch.minimum(edges[1:, None], pixels + 1) - torch.maximum(edges[:-1, None], pixels)
    return overlap.clamp_min(0) * resized * num_cells / (length * num_source)


def _read_mask(path: Path) -> torch.Tensor:
    """Brightness of the mask's pixels, 0 black to 1 white; transparency and colour profiles are not looked at. [h, w]

    Raises: ValueError naming the file if it is broken.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with opened(path) as file:
            image: PilImage = ImageOps.exif_transpose(file)
            is_16_bit = image.mode.startswith("I")
            values = np.asarray(image if is_16_bit else image.convert("L"), dtype=np.float32)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: cannot be read as a mask ({error})") from error
    return torch.from_numpy(values / (65535 if is_16_bit else 255))


# --- order -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Indices into the samples, all of one bucket and length, and which are trained with the empty caption. [B] each"""

    indices: tuple[int, ...]
    captions_dropped: tuple[bool, ...]


class BatchOrder:
    """An endless order of batches: every sample once per epoch, shuffled anew for every epoch.

    A batch is of one bucket and length.

    Where a bucket's samples do not divide by the batch size, its last batch of the epoch is smaller; filling it up
    would train some samples more often than others.

    Args:
        samples: what the indices count. batch_size: samples of a full batch.
        seed: another seed is another order.
        caption_dropout: probability, per sample and epoch, that its caption is dropped.
    """

    def __init__(
        self, samples: Sequence[TrainingSample], *, batch_size: int, seed: int, caption_dropout: float = 0.0
    ) -> None:
        if not samples:
            raise ValueError("there are no samples to train on; give a dataset with at least one image")
        self._buckets = [(*sample.bucket, sample.num_frames) for sample in samples]
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

    def batches_of(self, epoch: int) -> list[Batch]:
        """All batches of an epoch, in order."""
        shuffled = sorted(range(len(self._buckets)), key=lambda i: self._draw("sample", epoch, i))
        by_bucket: dict[tuple[int, ...], list[int]] = {}
        for index in shuffled:
            by_bucket.setdefault(self._buckets[index], []).append(index)
        size = self._batch_size
        groups = [members[i : i + size] for members in by_bucket.values() for i in range(0, len(members), size)]
        groups.sort(key=lambda group: self._draw("batch", epoch, group[0]))
        return [Batch(tuple(group), tuple(self._is_dropped(epoch, i) for i in group)) for group in groups]

    def state_dict(self) -> dict[str, int]:
        """Where the order stands: the epoch, and how many of its batches are done."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue behind the batches that were done.

        Raises: ValueError for a position that this order does not have.
        """
        epoch, index = int(state["epoch"]), int(state["index"])
        batches = self.batches_of(epoch)
        if epoch < 0 or not 0 <= index <= len(batches):
            raise ValueError(
                f"cannot continue at batch {index} of epoch {epoch}: an epoch has {len(batches)} batches here; "
                "the state is of another dataset or batch size"
            )
        self._epoch, self._index, self._batches = epoch, index, batches

    def _is_dropped(self, epoch: int, index: int) -> bool:
        return self._draw("caption", epoch, index) < self._caption_dropout

    def _draw(self, what: str, epoch: int, index: int) -> float:
        """A number in [0, 1) that depends on the arguments and the seed only, and looks uniform over them."""
        digest = hashlib.sha256(f"{self._seed} {what} {epoch} {index}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48


def dataset_fingerprint(samples: Sequence[Sample]) -> str:
    """Hash of what is trained on, in order: image and mask bytes, captions, crops, frames; not where the files lie.

    Raises: OSError if a file has gone.
    """
    paths = dict.fromkeys(path for sample in samples for path in (sample.path, sample.mask_path) if path)
    with ThreadPoolExecutor() as pool:
        content = dict(zip(paths, pool.map(media_fingerprint, paths), strict=True))
    return settings_fingerprint(
        [
            [content[s.path], s.caption, s.mask_path and content[s.mask_path], s.resize, s.crop]
            + ([s.frames] if s.frames else [])  # images alone hash as they did before there were clips
            for s in samples
        ]
    )
