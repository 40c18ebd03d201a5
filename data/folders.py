"""From folders to samples: which images and clips there are, and what is wrong with them.

A dataset is one or more ordinary folders: name.png (or another ending of image.py) with its caption in name.txt,
or name.caption, and, where wanted, a loss mask in name_mask.png, or name-masklabel.png. Models that make videos also
take clips: name.mp4 (or another ending of video.py), animations (name.gif, .webp, .png), and a sub-folder `name` of
images that has a caption beside it. What else lies there is named by left_out.py. cuts.py says what is taken
from a clip, and how all is cut.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import lt
from pathlib import Path
from typing import TypeVar

from ..checkpoints.model_files import first
from ..config.job import DataConfig, FolderConfig
from ..families.comfy.conditions import WAYS
from ..families.spec import LatentSpec
from ..system.files import Looked, read_ordinary
from ..system.stopping import Stopped, alive, never
from .cuts import (
    ClipPlan,
    aspect,
    bucket_step,
    choose_bucket,
    is_slower,
    make_buckets,
    make_caption,
    make_clip_plan,
    plan_crop,
)
from .image import ImageRequest, look_at
from .left_out import LeftOut
from .pairs import Pair, Partners, find_pair, find_partners, refuse_other_shape
from .samples import Condition, Sample, is_in_alpha, load_mask, read_mask
from .video import CLIP_SUFFIXES, ClipInfo, is_clip, media_suffixes, probe_clip

_log = logging.getLogger(__name__)
_S = TypeVar("_S")
_T = TypeVar("_T")
_Cuts = tuple[tuple[int, ...], ...]

_MASK_ENDS = ("_mask", "-masklabel")  # the second is another trainer's
_CONDITION_END = "-condlabel"  # another trainer's, too: what an image is made of
_MAX_CAPTION_BYTES = 1_000_000
_names = partial(first, most=5)  # of files, for a warning
_MASK_SHAPE_TOLERANCE = 0.02  # mask and image may differ by this much in aspect ratio: sizes get rounded


@dataclass(frozen=True)
class _Picture:
    """One image or clip as found, and all that is wrong with it."""

    path: Path
    mask: Path | None
    size: tuple[int, int] | None  # None if unreadable
    caption: str | None  # None without a caption file
    problems: tuple[str, ...]
    clip: ClipInfo | None = None
    cuts: _Cuts = ((),)  # the frames of each sample that is made of a clip
    pair: Pair = Pair()
    is_blank: bool = False
    is_mask_idle: bool = False

    def samples(
        self, buckets: Sequence[tuple[int, int]], caption: str, loss_weight: float, condition: str = ""
    ) -> list[Sample]:
        """One, or one per window of a clip."""
        assert self.size is not None
        bucket = choose_bucket(self.size, buckets)
        resize, crop = plan_crop(self.size, bucket)
        mask, pair, made = str(self.mask) if self.mask else None, self.pair, []
        for frames in self.cuts:
            beside = None
            if condition:
                own, references = ImageRequest(str(self.path), resize, crop, frames), tuple(map(str, pair.references))
                control = replace(own, path=str(pair.control)) if pair.control else None
                way = WAYS[condition]
                clip = own if way.takes_first_frame or way.takes_control and way.sees else None  # which sees its start
                beside = Condition(condition, references, pair.sizes, control, clip)
            made.append(Sample(str(self.path), caption, mask, resize, crop, bucket, frames, loss_weight, beside))
        return made


def scan_folders(
    config: DataConfig, latent: LatentSpec, should_stop: Callable[[], bool] = never, *, others: Sequence[str] = ()
) -> list[Sample]:
    """Every image and clip of every folder as samples: by file name, each at each resolution, each `repeats` times.

    All images and masks are decoded once, so that a broken file is found now and not hours later; that costs some
    milliseconds per megapixel and core. Of a video all packets are read and the first frame is decoded, which finds a
    file that is cut short; damage in its middle is found when it is encoded. What may not be meant is a warning each,
    and so is all that is left out.

    Args:
        others: folders that are read for something else.
    Raises: Stopped when should_stop() became true; ValueError for a folder that is missing, holds no image, or far more
        files than a dataset; for files that cannot be used, naming all of them with the reason; for a resolution below
        the model's smallest side, or a clip length it does not take.
    """
    step = bucket_step(config, latent)
    sizes = [each for folder in config.folders for each in folder.resolutions or config.resolutions]
    buckets = {each: make_buckets(each, step, config.max_aspect_ratio) for each in sizes}
    plan = make_clip_plan(config, latent)

    def ask() -> None:
        alive()
        if should_stop():
            raise Stopped("stopped while the dataset was looked at; nothing was done yet")

    found = [
        (folder, files) for folder in config.folders for files in list_files(folder, config.use_masks, latent, ask)
    ]
    partners: dict[FolderConfig, Partners] = {}
    for folder in config.folders if config.condition else ():
        stems = [_stem(path) for each, (path, _) in found if each == folder]
        partners[folder] = find_partners(folder, WAYS[config.condition], stems, ask)
    pictures = _in_threads(lambda entry: _inspect(*entry[1], plan, latent, partners.get(entry[0])), found, ask)
    bad = [picture for picture in pictures if picture.problems]
    if bad:
        lines = "\n".join(f"  {problem}" for picture in bad for problem in picture.problems)
        raise ValueError(
            f"{len(bad)} of {len(pictures)} {_kinds(pictures)} cannot be used; "
            f"repair them or take them out of the dataset:\n{lines}"
        )
    pictures = [
        replace(each, caption=folder.caption) if each.caption is None and folder.caption else each
        for (folder, _), each in zip(found, pictures, strict=True)
    ]
    samples = []
    for (folder, _), picture in zip(found, pictures, strict=True):
        caption = make_caption(picture.caption or "", config, folder)
        for each in folder.resolutions or config.resolutions:
            samples += picture.samples(buckets[each], caption, folder.loss_weight, config.condition) * folder.repeats
    for names, message in _doubts(pictures, samples, plan):
        if names:
            _log.warning("%d %s", len(names), message)
    _refuse_masks_outside(samples, latent, ask)
    for line in _left_out(config, found, latent, others, ask):
        _log.warning("%s", line)
    return samples


def _left_out(
    config: DataConfig,
    found: Sequence[tuple[FolderConfig, tuple[Path, Path | None]]],
    latent: LatentSpec,
    others: Sequence[str],
    ask: Callable[[], None],
) -> Iterator[str]:
    """A line for each folder with files or sub-folders that are not read."""
    beside = [folder for each in config.folders for folder in (*each.references, each.control) if folder]
    roots = dict.fromkeys(folder.path for folder in config.folders)
    read = LeftOut({Path(each).resolve() for each in (*others, *beside, *roots)}, ask)
    for root in roots:
        paths = [path for folder, (path, _) in found if folder.path == root]
        yield from read.of_dataset(Path(root), paths, {caption_file(path) for path in paths}, latent.is_video)
    for root in dict.fromkeys(beside):
        yield from read.of_partners(Path(root))


def _in_threads(work: Callable[[_S], _T], items: Sequence[_S], ask: Callable[[], None]) -> list[_T]:
    """What work makes of every item, in order; called before each, and what has not begun is dropped at a stop."""
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


# --- listing ---------------------------------------------------------------------------------------------------------


def list_files(
    folder: FolderConfig, use_masks: bool, latent: LatentSpec, ask: Callable[[], None]
) -> list[tuple[Path, Path | None]]:
    """The images and clips of a folder with their masks, sorted by name.

    Raises: ValueError if there is none; for a mask that is no PNG, or one of two; for a folder that holds too much.
    """
    root = Path(folder.path)
    if not root.is_dir():
        raise ValueError(f"the dataset folder {root} does not exist; give a folder of images")
    looked = Looked(ask)
    entries = looked.entries(root)
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in media_suffixes()]
    taken = {file.stem for file in files}  # cat.txt is the caption of cat.png, and not of a folder cat beside it
    folders = [entry for entry in entries if entry.is_dir()]
    sequences = [entry for entry in folders if entry.name not in taken and os.path.isfile(caption_file(entry))]
    masks: dict[str, Path] = {}  # by the stem of the image
    for file in filter(_is_mask_name, files):
        stem = _without_mask_end(file.stem)
        if stem in masks:
            raise ValueError(f"{masks[stem]} and {file.name} are both the mask of {stem}; remove one")
        masks[stem] = file
    images = sorted([*filter(_is_media_name, files), *sequences], key=lambda f: f.name)
    message = (
        "images are conditions of another trainer and are not used: %s; put them into a folder of their own, named "
        "like their images, and name it in data.folders.references"
    )
    _warn_of_unused(root, filter(_is_condition_name, files), message)
    dangling = [entry for entry in entries if entry.is_symlink() and not entry.exists()]
    _warn_of_unused(root, dangling, "links lead to nothing and are not used: %s; mend or remove them")
    named = [entry for entry in entries if entry.suffix.lower() in media_suffixes() and entry.exists()]
    odd = [entry for entry in named if not entry.is_file() and not entry.is_dir()]  # pipes and devices
    _warn_of_unused(root, odd, "are no ordinary files and are not used: %s; put images in their place")
    stems = {_stem(image) for image in images}
    for image in images:
        if _stem(image).endswith(_MASK_ENDS) and _without_mask_end(_stem(image)) in stems:
            raise ValueError(f"{image} looks like a mask, which must be a PNG; save it as {image.stem}.png")
    message = "masks not used: %s; _mask.png and -masklabel.png are endings of masks, and there is no image for them"
    _warn_of_unused(root, [mask for stem, mask in masks.items() if stem not in stems], message)
    if not images:
        others = "".join(f"; {line}" for line in LeftOut(set(), ask).of_dataset(root, (), set(), latent.is_video))
        raise ValueError(
            f"no images in {root}; looked for names ending in {', '.join(media_suffixes())} (not in _mask.png, which "
            "are masks), directly in the folder and not in its sub-folders, except those of a clip, whose caption lies "
            f"beside them{others}"
        )
    return [(image, masks.get(_stem(image)) if use_masks else None) for image in images]


def is_media(path: Path) -> bool:
    """Whether list_files would name it, decided without a look at what is beside it but its caption."""
    if os.path.isdir(path):
        return os.path.isfile(caption_file(path))
    return os.path.isfile(path) and path.suffix.lower() in media_suffixes() and _is_media_name(path)


def _warn_of_unused(root: Path, unused: Iterable[Path], message: str) -> None:
    names = [entry.name for entry in unused]
    if names:
        _log.warning(f"%s: %d {message}", root, len(names), _names(names))


def _stem(path: Path) -> str:
    """The name without a file's ending; a folder's name has none."""
    return path.name if os.path.isdir(path) else path.stem


def caption_file(path: Path) -> Path:
    """name.txt, or name.caption where that alone is there."""
    text, other = (path.with_name(f"{_stem(path)}{suffix}") for suffix in (".txt", ".caption"))
    return other if os.path.lexists(other) and not os.path.lexists(text) else text


def _is_mask_name(file: Path) -> bool:
    return file.stem.endswith(_MASK_ENDS) and file.suffix.lower() == ".png"


def _is_condition_name(file: Path) -> bool:
    return file.stem.endswith(_CONDITION_END) and file.suffix.lower() == ".png"


def _is_media_name(file: Path) -> bool:
    return not _is_mask_name(file) and not _is_condition_name(file)


def _without_mask_end(stem: str) -> str:
    return next(stem.removesuffix(end) for end in _MASK_ENDS if stem.endswith(end))


# --- inspecting ------------------------------------------------------------------------------------------------------


def _inspect(
    path: Path, mask: Path | None, plan: ClipPlan, latent: LatentSpec, partners: Partners | None = None
) -> _Picture:
    """Read everything about one image or clip, keeping what is wrong instead of stopping at it."""
    problems: list[str] = []

    def attempt(read: Callable[[Path], _T], file: Path) -> _T | None:
        try:
            return read(file)
        except ValueError as error:
            problems.append(str(error))
            return None

    clip, cuts = attempt(lambda file: _read_clip(file, plan, latent), path) or (None, ((),))
    size, is_blank = (clip.size, False) if clip else (None if problems else attempt(look_at, path)) or (None, False)
    caption = attempt(read_caption, caption_file(path))
    mask_size = attempt(_read_mask_size, mask) if mask else None
    if size and mask_size and abs(math.log(aspect(mask_size) / aspect(size))) > _MASK_SHAPE_TOLERANCE:
        problems.append(
            f"{mask}: is {mask_size[1]}x{mask_size[0]}, but its image is {size[1]}x{size[0]}; "
            "a mask needs the shape of its image"
        )
    if partners is not None and partners.way.takes_first_frame and size and len(cuts[0]) < 2:
        problems.append(f"{path}: is one frame, and given its first frame, nothing of it is left to learn; give clips")
    pair = attempt(lambda file: find_pair(file, _stem(file), partners), path) if partners else None
    if pair and pair.control and size:
        attempt(lambda file: refuse_other_shape(path, size, clip, file), pair.control)
    is_idle = not problems and mask is not None and is_in_alpha(mask)
    return _Picture(path, mask, size, caption, tuple(problems), clip, cuts, pair or Pair(), is_blank, is_idle)


def _read_clip(path: Path, plan: ClipPlan, latent: LatentSpec) -> tuple[ClipInfo | None, _Cuts]:
    """What the clip is, and the frames of each sample made of it; None and one sample without frames for an image.

    For a model that makes images, an animation is its first frame, unless its name says video."""
    is_by_name = path.is_dir() or path.suffix.lower() in CLIP_SUFFIXES
    if not (is_by_name or latent.is_video) or not is_clip(path):
        return None, ((),)
    if not latent.is_video:
        raise ValueError(
            f"{path}: is a clip, but this model makes images only; save the frames you want as images, or take it out "
            "of the dataset"
        )
    clip = probe_clip(path)
    try:
        return clip, tuple(plan.cut(clip))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_caption(path: Path) -> str | None:
    """The caption without blanks around it; None if there is no such file.

    Raises: ValueError naming the file if it is not UTF-8, no ordinary file, or too long for a caption.
    """
    try:
        return read_ordinary(path, _MAX_CAPTION_BYTES, "a caption").decode("utf-8-sig").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_mask_size(path: Path) -> tuple[int, int]:
    mask = read_mask(path)
    if not mask.any():
        raise ValueError(f"{path}: is all black, so nothing of its image would be trained")
    return mask.shape[0], mask.shape[1]


# --- what is said of all ---------------------------------------------------------------------------------------------


def _kinds(pictures: Sequence[_Picture]) -> str:
    """What to call them."""
    has_clips = any(p.clip or p.path.is_dir() or p.path.suffix.lower() in CLIP_SUFFIXES for p in pictures)
    return "images and clips" if has_clips else "images"


def _doubts(pictures: Sequence[_Picture], samples: Sequence[Sample], plan: ClipPlan) -> Iterator[tuple[list[str], str]]:
    """What may not be meant: the names it is about, if any, and what to say behind their number."""
    total, kinds = len(pictures), _kinds(pictures)
    found = [p.path.name for p in pictures if p.caption is None]
    yield (
        found,
        f"of {total} {kinds} have no caption file and are trained with an empty caption: {_names(found)}; "
        "write the caption of name.png into name.txt",
    )
    found = [str(caption_file(p.path)) for p in pictures if p.caption == ""]
    yield (
        found,
        f"of {total} caption files are empty, as a full disk leaves them, and their images are trained with an empty "
        f"caption: {_names(found)}; write the captions anew, or delete the files if no caption is meant",
    )
    found = [p.path.name for p in pictures if p.is_blank]
    yield (
        found,
        f"of {total} {kinds} are of one colour throughout, as a picture is that is all black or all transparent: "
        f"{_names(found)}; take them out, unless that is what is to be learnt",
    )
    found = [p.mask.name for p in pictures if p.mask and p.is_mask_idle]
    yield (
        found,
        f"masks are of one brightness throughout, and their transparency is not looked at: {_names(found)}; save what "
        "counts as white and what does not as black",
    )
    by_caption: dict[Path, list[str]] = {}
    for path in dict.fromkeys(p.path for p in pictures if p.caption is not None):
        by_caption.setdefault(caption_file(path), []).append(path.name)
    found = [f"{caption.name} of {' and '.join(names)}" for caption, names in by_caption.items() if len(names) > 1]
    yield (
        found,
        f"caption files are each the caption of several: {_names(found)}; give each image or clip a name of its own",
    )
    sizes = {str(p.path): p.size or (0, 0) for p in pictures}
    smaller = dict.fromkeys(s.path for s in samples if any(map(lt, sizes[s.path], s.resize)))
    found = [Path(path).name for path in smaller]
    yield (
        found,
        f"of {len(sizes)} images are smaller than the size they are trained at and are upscaled: {_names(found)}; "
        "lower data.resolutions or use larger images",
    )
    clips = [(p.path.name, p.clip) for p in pictures if p.clip]
    found = [name for name, clip in clips if is_slower(clip, plan.fps)]
    yield (
        found,
        f"of {len(clips)} clips have fewer than {plan.fps or 0:g} frames per second, so frames come twice: "
        f'{_names(found)}; set data.fps to theirs, or to "source"',
    )
    found = [name for name, clip in clips if clip.is_hdr]
    yield (
        found,
        f"of {len(clips)} clips are HDR and look washed out as they are read: {_names(found)}; convert them to SDR "
        "first",
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
