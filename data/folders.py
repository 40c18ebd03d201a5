"""From folders to samples: name.png, its caption (captions.py) and loss mask, name_mask.png or name-masklabel.png; of
models of videos clips, too: name.mp4, animations, and sub-folders of images with a caption beside them, with name.wav
in place of their sound. A folder without any stands for its sub-folders; what else lies there left_out.py names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import lt
from pathlib import Path
from typing import TypeVar

from ..checkpoints.model_files import first
from ..config.data import MOST_REPEATS
from ..config.job import DataConfig, FolderConfig
from ..families.comfy.conditions import WAYS
from ..families.comfy.inputs import song_text
from ..families.spec import LatentSpec
from ..system.files import Looked
from ..system.stopping import Stopped, alive, never
from .captions import LYRICS_FILES, TEXT_FILES, Tables, caption_file, make_captions, read_tables, stem_of
from .containers import SOUND_SUFFIXES
from .image import ImageRequest, SoundRequest, is_blank, look_at
from .left_out import is_of_system, left_out
from .pairs import Pair, Partners, find_pair, find_partners
from .samples import (
    ClipPlan,
    Condition,
    Sample,
    bucket_step,
    choose_bucket,
    in_threads,
    is_in_alpha,
    is_other_shape,
    is_slower,
    load_mask,
    make_buckets,
    make_clip_plan,
    plan_crop,
    read_mask,
)
from .sounds import cut_sound, sounds_of_clip
from .video import CLIP_SUFFIXES, ClipInfo, is_clip, media_suffixes, probe_clip

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Cuts = tuple[tuple[int, ...], ...]

_MASK_ENDS = ("_mask", "-masklabel")  # the second is another trainer's
_CONDITION_END = "-condlabel"  # another trainer's, too: what an image is made of
_BESIDE = re.compile(r"(?i)_?(masks?|controls?|references?|condition(ing|s)?|samples?|before|after|source|target)")


@dataclass(frozen=True)
class _Picture:
    """One image, clip or sound as found, and all that is wrong with it."""

    path: Path
    mask: Path | None
    size: tuple[int, int] | None  # None if unreadable; of a sound alone rows and columns of latents
    captions: tuple[str, ...] | None  # None without any
    source: str  # of them
    problems: tuple[str, ...]
    clip: ClipInfo | None = None
    cuts: _Cuts = ((),)  # the frames of each sample that is made of a clip
    sounds: tuple[SoundRequest, ...] = ()  # of each sample; () without
    song: Mapping[str, str | int] = field(default_factory=dict)  # what is said of it beside its caption
    pair: Pair = Pair()
    is_blank: bool = False
    is_mask_idle: bool = False

    def samples(
        self, buckets: Sequence[tuple[int, int]], captions: Sequence[str], loss_weight: float, condition: str = ""
    ) -> list[Sample]:
        """One, or one per window of a clip."""
        assert self.size is not None
        made: list[Sample] = []
        if self.sounds and not any(self.cuts):
            for each in self.sounds:
                first_text, *more = (song_text(text, {**self.song, "duration": each.length_s}) for text in captions)
                size = self.size[0], each.cells
                whole = (None, size, (0, 0, *size), size, (), loss_weight)
                made.append(Sample(each.path, first_text, *whole, others=tuple(more), source=self.source, sound=each))
            return made
        bucket = choose_bucket(self.size, buckets)
        resize, crop = plan_crop(self.size, bucket)
        mask, pair = str(self.mask) if self.mask else None, self.pair
        for frames, sound in zip(self.cuts, self.sounds or [None] * len(self.cuts), strict=True):
            beside = None
            if condition:
                own, references = ImageRequest(str(self.path), resize, crop, frames), tuple(map(str, pair.references))
                control = replace(own, path=str(pair.control)) if pair.control else None
                way = WAYS[condition]
                clip = own if way.takes_first_frame or way.takes_control and way.sees else None  # which sees its start
                beside = Condition(condition, references, pair.sizes, control, clip)
            cut = (mask, resize, crop, bucket, frames, loss_weight, beside)
            others = tuple(captions[1:])
            made.append(Sample(str(self.path), captions[0], *cut, others=others, source=self.source, sound=sound))
        return made


def scan_folders(
    config: DataConfig, latent: LatentSpec, should_stop: Callable[[], bool] = never, *, others: Sequence[str] = ()
) -> list[Sample]:
    """Every image and clip of every folder as samples: by file name, each at each resolution, each `repeats` times. All
    is decoded, so that a broken file is found now. What may not be meant, and what is left out, is warned of. others:
    folders that are read for something else. Raises: Stopped; ValueError for a folder that is missing, without images
    or no dataset; for files that cannot be used, naming all; for sizes the model does not take."""
    step = bucket_step(config, latent)
    sizes = [each for folder in config.folders for each in folder.resolutions or config.resolutions]
    buckets = {each: make_buckets(each, step, config.max_aspect_ratio) for each in sizes}
    plan = make_clip_plan(config, latent)

    def ask() -> None:
        alive()
        if should_stop():
            raise Stopped("stopped while the dataset was looked at; nothing was done yet")

    roots = [Path(folder.path) for folder in config.folders]
    config = replace(config, folders=tuple(each for folder in config.folders for each in concepts(folder, ask, latent)))
    found = [
        (folder, files) for folder in config.folders for files in list_files(folder, config.use_masks, latent, ask)
    ]
    media, parts = [path for _, (path, _) in found], [Path(folder.path) for folder in config.folders]
    tables = read_tables([*roots, *parts], media, ask, of_songs=bool(latent.audio_rows))
    partners: dict[FolderConfig, Partners] = {}
    for folder in config.folders if config.condition else ():
        stems = [stem_of(path) for each, (path, _) in found if each == folder]
        partners[folder] = find_partners(folder, WAYS[config.condition], stems, ask)
    pictures = in_threads(lambda each: _inspect(*each, tables, plan, latent, partners.get(each[0])), found, ask)
    bad = [picture for picture in pictures if picture.problems]
    if bad:
        lines = "\n".join(f"  {problem}" for picture in bad for problem in picture.problems)
        raise ValueError(
            f"{len(bad)} of {len(pictures)} {_kinds(pictures)} cannot be used; "
            f"repair them or take them out of the dataset:\n{lines}"
        )
    samples = []
    for (folder, _), picture in zip(found, pictures, strict=True):
        try:
            captions = make_captions(picture.captions or ("",), config, folder)
        except ValueError as error:
            raise ValueError(f"{picture.path}: {error}") from error
        for each in (folder.resolutions or config.resolutions)[: 1 if latent.audio_rows else None]:
            samples += picture.samples(buckets[each], captions, folder.loss_weight, config.condition) * folder.repeats
    _warn_of_captions(pictures, tables)
    _warn_of_pictures(pictures, samples, plan)
    _refuse_masks_outside(samples, latent, ask)
    by_folder = {each: [path for folder, (path, _) in found if Path(folder.path) == each] for each in (*roots, *parts)}
    known = {*tables.files, *map(caption_file, media), *(Path(each.sound.path) for each in samples if each.sound)}
    known |= {caption_file(path, LYRICS_FILES) for path in media if latent.audio_rows}
    beside = [Path(name) for each in config.folders for name in (*each.references, each.control) if name]
    for line in left_out(by_folder, known, latent, ask, beside=beside, others=map(Path, others)):
        _log.warning("%s", line)
    return samples


# --- listing ---------------------------------------------------------------------------------------------------------


def repeats_of(name: str) -> tuple[int, str] | None:
    """Of kohya's 10_cat 10 and "cat"; None of other names: longer numbers are years and dates."""
    found = re.fullmatch(r"([0-9]{1,3})_(.*)", name)
    return (int(found[1]), found[2]) if found else None


def concepts(folder: FolderConfig, ask: Callable[[], None], latent: LatentSpec | None = None) -> list[FolderConfig]:
    """The folder, or where it has no media its sub-folders that do: 10_cat repeats 10 times, and cat is the caption of
    images without. Raises: ValueError for repeats out of range, what may be no concept, and references or control."""
    root, looked = Path(folder.path), Looked(ask)
    entries = looked.entries(root) if root.is_dir() else []
    is_read = _is_sound if latent and latent.audio_rows else is_media
    if any(map(is_read, entries)):
        return [folder]
    made, parts = [], [entry for entry in entries if entry.is_dir() and not is_of_system(entry)]
    for part in parts:
        if not os.access(part, os.R_OK | os.X_OK) or not any(map(is_read, looked.entries(part))):
            continue
        if _BESIDE.fullmatch(part.name):
            raise ValueError(
                f"{root}: has no images but sub-folders, and {part.name} seems to be no concept; name each"
            )
        number, name = repeats_of(part.name) or (1, "")
        repeats = number * folder.repeats
        if not 0 < repeats <= MOST_REPEATS:
            raise ValueError(f"{part}: its name asks for {repeats} repeats, and 1 to {MOST_REPEATS} are possible")
        made.append(replace(folder, path=str(part), repeats=repeats, caption=folder.caption or name))
    if made and (folder.references or folder.control):
        raise ValueError(f"{root}: has sub-folders in place of images; with references or control, name each of them")
    return made or [folder]


def list_files(
    folder: FolderConfig, use_masks: bool, latent: LatentSpec, ask: Callable[[], None]
) -> list[tuple[Path, Path | None]]:
    """The media of a folder with their masks, by name. Raises: ValueError if there is none; for a mask that is no PNG,
    or one of two; for a folder that holds too much."""
    root = Path(folder.path)
    if not root.is_dir():
        raise ValueError(f"the dataset folder {root} does not exist; give a folder of images")
    looked = Looked(ask)
    entries = looked.entries(root)
    suffixes = SOUND_SUFFIXES if latent.audio_rows else media_suffixes()
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in suffixes]
    taken = {file.stem for file in files}  # cat.txt is the caption of cat.png, and not of a folder cat beside it
    read = filter(_is_sound if latent.audio_rows else is_media, entries)
    images = [entry for entry in read if entry.name not in taken or not entry.is_dir()]
    masks: dict[str, Path] = {}  # by the stem of the image
    for file in files:
        if (end := _end_of(file)) in _MASK_ENDS:
            stem = file.stem.removesuffix(end)
            if stem in masks:
                raise ValueError(f"{masks[stem]} and {file.name} are both the mask of {stem}; remove one")
            masks[stem] = file
    _warn(
        (file.name for file in files if _end_of(file) == _CONDITION_END),
        "images are conditions of another trainer and are not used: %s; put them into a folder of their own, named "
        "like their images, and name it in data.folders.references",
        root,
    )
    named = [entry for entry in entries if entry.suffix.lower() in suffixes or not entry.exists()]
    odd = (entry.name for entry in named if not entry.is_file() and not entry.is_dir())  # pipes, devices, dead links
    _warn(odd, "are no ordinary files, or links to nothing, and are not used: %s; mend or remove them", root)
    stems = {stem_of(image) for image in images}
    for image in images:
        if stems & {stem_of(image).removesuffix(end) for end in _MASK_ENDS} - {stem_of(image)}:
            raise ValueError(f"{image} looks like a mask, which must be a PNG; save it as {image.stem}.png")
    idle = (mask.name for stem, mask in masks.items() if stem not in stems)
    message = "masks not used: %s; _mask.png and -masklabel.png are endings of masks, and there is no image for them"
    _warn(idle, message, root)
    if not images:
        others = "".join(f"; {line}" for line in left_out({root: ()}, (), latent, ask))
        raise ValueError(
            f"no {'sounds' if latent.audio_rows else 'images'} in {root}; looked for names ending in "
            f"{', '.join(suffixes)} (not in _mask.png, which are masks), directly in the folder and not in its "
            f"sub-folders, except those of a clip, whose caption lies beside them{others}"
        )
    return [(image, masks.get(stem_of(image)) if use_masks else None) for image in images]


def is_media(path: Path) -> bool:
    """Whether list_files would name it, decided without a look at what is beside it but its caption."""
    if os.path.isdir(path):
        return os.path.isfile(caption_file(path))
    return os.path.isfile(path) and path.suffix.lower() in media_suffixes() and not _end_of(path)


def _is_sound(path: Path) -> bool:
    return os.path.isfile(path) and path.suffix.lower() in SOUND_SUFFIXES


def _end_of(file: Path) -> str:
    """By which a PNG is a mask or another trainer's condition; "" of an image or clip."""
    ends = (*_MASK_ENDS, _CONDITION_END) if file.suffix.lower() == ".png" else ()
    return next((end for end in ends if file.stem.endswith(end)), "")


# --- inspecting ------------------------------------------------------------------------------------------------------


def _inspect(
    folder: FolderConfig,
    files: tuple[Path, Path | None],
    tables: Tables,
    plan: ClipPlan,
    latent: LatentSpec,
    partners: Partners | None,
) -> _Picture:
    """Read everything about one image, clip or sound, keeping what is wrong instead of stopping at it."""
    (path, mask), problems = files, list[str]()

    def attempt(read: Callable[[Path], _T], file: Path) -> _T | None:
        try:
            return read(file)
        except ValueError as error:
            problems.append(str(error))
            return None

    clip: ClipInfo | None = None
    cuts: _Cuts = ((),)
    look, sounds = None, None
    if latent.audio_rows:
        total, sounds = attempt(lambda file: cut_sound(file, plan, latent), path) or (0, ())
        size: tuple[int, int] | None = (latent.audio_rows, total)
    else:
        clip, cuts = attempt(lambda file: _read_clip(file, plan, latent), path) or (None, ((),))
        look = None if clip or problems else attempt(look_at, path)
        size = clip.size if clip else look and look[0]
    captions, source = attempt(tables.of, path) or (None, "")
    if captions is None and folder.caption:
        captions, source = (folder.caption,), "their folder"
    song = attempt(tables.song_of, path) if latent.audio_rows else None
    pixels = attempt(read_mask, mask) if mask else None
    if pixels is not None and not pixels.any():
        problems.append(f"{mask}: is all black, so nothing of its image would be trained")
    mask_size = pixels is not None and (pixels.shape[0], pixels.shape[1])
    if size and mask_size and is_other_shape(mask_size, size):
        problems.append(
            f"{mask}: is {mask_size[1]}x{mask_size[0]}, but its image is {size[1]}x{size[0]}; "
            "a mask needs the shape of its image"
        )
    if partners is not None and partners.way.takes_first_frame and size and len(cuts[0]) < 2:
        problems.append(f"{path}: is one frame, and given its first frame, nothing of it is left to learn; give clips")
    pair = attempt(lambda file: find_pair(file, size, clip, partners), path) if partners else None
    if clip and latent.sound_rate:
        sounds = attempt(lambda file: sounds_of_clip(file, clip, plan, latent), path)
    is_idle = not problems and mask is not None and is_in_alpha(mask)
    is_plain, found = look is not None and is_blank(look[1]), (clip, cuts, sounds or (), song or {}, pair or Pair())
    return _Picture(path, mask, size, captions, source, tuple(problems), *found, is_plain, is_idle)


def _read_clip(path: Path, plan: ClipPlan, latent: LatentSpec) -> tuple[ClipInfo | None, _Cuts]:
    """What the clip is, and the frames of each sample made of it; None and () for an image, and for an animation whose
    name does not say video and of which a model of images takes the first frame."""
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
        return clip, tuple(plan.cut(clip).values())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# --- what is said of all ---------------------------------------------------------------------------------------------


def _kinds(pictures: Sequence[_Picture]) -> str:
    """What to call them."""
    if all(p.path.suffix.lower() in SOUND_SUFFIXES for p in pictures):
        return "sounds"
    has_clips = any(p.clip or p.path.is_dir() or p.path.suffix.lower() in CLIP_SUFFIXES for p in pictures)
    return "images and clips" if has_clips else "images"


def _warn(names: Iterable[str], message: str, root: Path | None = None) -> None:
    """Of what may not be meant, unless there is none. message: what is said behind the number; %s is some names."""
    if found := list(names):
        _log.warning(f"%s%d {message}", f"{root}: " if root else "", len(found), first(found, most=5))


def _warn_of_pictures(pictures: Sequence[_Picture], samples: Sequence[Sample], plan: ClipPlan) -> None:
    _warn(
        (p.path.name for p in pictures if p.is_blank),
        f"of {len(pictures)} {_kinds(pictures)} are of one colour throughout, as a picture is that is all black or all "
        "transparent: %s; take them out, unless that is what is to be learnt",
    )
    _warn(
        (p.mask.name for p in pictures if p.mask and p.is_mask_idle),
        "masks are of one brightness throughout, and their transparency is not looked at: %s; save what counts as "
        "white and what does not as black",
    )
    sizes = {str(p.path): p.size or (0, 0) for p in pictures}
    _warn(
        (Path(path).name for path in dict.fromkeys(s.path for s in samples if any(map(lt, sizes[s.path], s.resize)))),
        f"of {len(sizes)} images are smaller than the size they are trained at and are upscaled: %s; lower "
        "data.resolutions or use larger images",
    )
    clips = [(p.path.name, p.clip) for p in pictures if p.clip]
    _warn(
        (name for name, clip in clips if is_slower(clip, plan.fps)),
        f"of {len(clips)} clips have fewer than {plan.fps or 0:g} frames per second, so frames come twice: %s; set "
        'data.fps to theirs, or to "source"',
    )
    _warn(
        (name for name, clip in clips if clip.is_hdr),
        f"of {len(clips)} clips are HDR and look washed out as they are read: %s; convert them to SDR first",
    )


def _warn_of_captions(pictures: Sequence[_Picture], tables: Tables) -> None:
    of_all = f"of {len(pictures)} {_kinds(pictures)}"
    _warn(
        (p.path.name for p in pictures if p.captions is None),
        f"{of_all} have no caption file and are trained with an empty caption: %s; write the caption of name.png into "
        "name.txt",
    )
    empty = [p for p in pictures if p.captions and not all(p.captions)]
    _warn(
        (str(caption_file(p.path)) if p.source in TEXT_FILES else f"{p.path.name} in {p.source}" for p in empty),
        f"of {len(pictures)} caption files are empty, as a full disk leaves them, and their images are trained with an "
        "empty caption: %s; write the captions anew, or delete the files if no caption is meant",
    )
    _warn(
        (f"{name!r:.100}" for name in tables.strange),
        "entries of JSON files name no image or clip that is read: %s; take them out",
    )
    own = [p.path for p in pictures if p.source in TEXT_FILES]
    _warn(
        (path.name for path in own if tables.has(path)),
        f"{of_all} have a caption file of their own, which counts, and not the JSON file's: %s",
    )
    by_caption: dict[Path, list[str]] = {}
    for path in dict.fromkeys(own):
        by_caption.setdefault(caption_file(path), []).append(path.name)
    _warn(
        (f"{caption.name} of {' and '.join(names)}" for caption, names in by_caption.items() if len(names) > 1),
        "caption files are each the caption of several: %s; give each image or clip a name of its own",
    )


def _refuse_masks_outside(samples: Sequence[Sample], latent: LatentSpec, ask: Callable[[], None]) -> None:
    masked = list({(sample.mask_path, sample.crop): sample for sample in samples if sample.mask_path}.values())
    stride = latent.spatial_stride

    def is_empty(sample: Sample) -> bool:
        return not load_mask(sample, (sample.bucket[0] // stride, sample.bucket[1] // stride)).any()

    empty = [sample for sample, found in zip(masked, in_threads(is_empty, masked, ask), strict=True) if found]
    if empty:
        raise ValueError(
            f"{first([str(s.mask_path) for s in empty], most=5)}: nothing white is left after cropping the image to "
            "its bucket, so nothing of it would be trained; change the mask, or raise data.max_aspect_ratio"
        )
