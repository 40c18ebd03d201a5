"""A dataset folder as its captions are looked after. Links are left out."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ..config.job import DataConfig
from ..families.spec import LatentSpec
from ..system.files import go_on, write_atomically
from ..system.locks import alone
from .captions import Tables, caption_file, make_captions, read_tables
from .folders import concepts, is_media, list_files
from .image import read_size
from .samples import bucket_step, choose_bucket, make_buckets
from .video import first_picture, is_clip, size_of_clip

MOST_FILES = 5000  # of a folder, that are shown
MOST_SHOWN = 2**26  # pixels that are decoded for a small picture: a quarter of a gigabyte
MOST_CAPTION = 8000  # characters of a caption that is written here
_WAIT_S = 10.0  # for another that writes the same caption, which takes a moment
_writing = threading.Lock()  # as well as a file's lock, which not every file system has
# No model is known: any clip is taken, and sides are multiples of what most models want.
ANY_MODEL = LatentSpec(channels=16, spatial_stride=16, fps=16.0)


@dataclass(frozen=True)
class Captioned:
    """An image or clip, and what is known of it."""

    path: Path
    caption: str | None  # of its file, without blanks around it, the first of several; None where there is none
    size: tuple[int, int] | None  # height and width in pixels as it is looked at; None if it is unknown
    buckets: tuple[tuple[int, int], ...]  # what it is cut to, height and width, one per resolution
    trained_as: str  # the captions that training sees, one a line
    is_clip: bool = False
    problem: str = ""  # what is wrong with the file or its caption; "" if nothing is


def media_files(config: DataConfig) -> list[Path]:
    """Images and clips of the config's first folder, or its sub-folders, by name; no links. Raises: as list_files."""
    parts = [each for each in concepts(config.folders[0], go_on) if not Path(each.path).is_symlink()]
    found = [path for each in parts for path, _ in list_files(each, False, ANY_MODEL, go_on)]
    return [path for path in found if not path.is_symlink()][:MOST_FILES]


def json_captions(folder: Path, paths: Sequence[Path]) -> tuple[Tables, str]:
    """What JSON files of a folder say of these images and clips, and what is wrong with the files."""
    try:
        return read_tables([folder, *(each.parent for each in paths)], paths, go_on, follows_links=False), ""
    except (ValueError, OSError) as error:
        return Tables(), str(error)


def is_plain(name: str) -> bool:
    """Whether a name is neither a path, which may lead elsewhere, nor of a hidden file."""
    return Path(name).name == name and not name.startswith(".")


def media_file(folder: Path, name: str) -> Path | None:
    """One of media_files by its name, without listing the folder; None if it is none."""
    path = folder / name
    return path if is_plain(name) and not os.path.islink(path) and is_media(path) else None


def look_at(config: DataConfig, paths: Sequence[Path] | None = None) -> Iterator[Captioned]:
    """Images and clips of the config's first folder (paths, or all), those without a caption first. Raises: ValueError
    as media_files; for a folder of folders; for a resolution below a bucket's smallest side."""
    folder = config.folders[0]
    step = bucket_step(config, ANY_MODEL)
    sizes = [make_buckets(each, step, config.max_aspect_ratio) for each in folder.resolutions or config.resolutions]
    paths = paths or media_files(config)
    if parts := sorted({path.parent.name for path in paths if path.parent != Path(folder.path)}):
        raise ValueError(f"the images of {folder.path} lie in its sub-folders; choose one of them: {', '.join(parts)}")
    tables, fault = json_captions(Path(folder.path), paths)
    pairs = [(path, *own_captions(path, tables)) for path in paths]
    for path, captions, problem in sorted(pairs, key=lambda pair: any(pair[1] or ())):
        is_moving, size, wrong = _known(str(path), path.stat().st_mtime_ns)
        cut = tuple(choose_bucket(size, each) for each in sizes) if size else ()
        texts = (folder.caption,) if captions is None and not problem else captions or ("",)
        trained = "\n".join(make_captions(texts, config, folder))
        caption = captions[0] if captions else None
        yield Captioned(path, caption, size, cut, trained, is_moving, wrong or problem or fault)


def without_caption(config: DataConfig) -> list[Path]:
    """Those whose caption is empty or not there; of those that share a caption file, the first."""
    missing: dict[Path, Path] = {}
    paths = media_files(config)
    tables, fault = json_captions(Path(config.folders[0].path), paths)
    if fault:
        raise ValueError(fault)
    for path in paths:
        captions, problem = own_captions(path, tables)
        if not problem and not any(captions or ()):
            missing.setdefault(caption_file(path), path)
    return list(missing.values())


class CaptionChanged(ValueError):
    """What was to be replaced is not there any more: another has written this caption."""


def write_caption(path: Path, text: str, was: Collection[str | None]) -> None:
    """Put a caption in place of one that `was` there, None for no file. Raises: CaptionChanged; ValueError for a text
    that is no caption, or a place that is a link or no ordinary file; OSError."""
    if len(text) > MOST_CAPTION or "\0" in text:
        raise ValueError(f"a caption has up to {MOST_CAPTION} characters, and none of them is NUL")
    file, text = caption_file(path), text.strip()
    with _writing, alone(file.with_name(f".{file.name}.lock"), _WAIT_S) as is_alone:
        now, problem = own_captions(path, Tables())
        if problem:
            raise ValueError(problem)
        if not is_alone or (now and now[0]) not in was:
            raise CaptionChanged(f"the caption of {path.name} was changed meanwhile; look at what is there now")
        write_atomically(file, f"{text}\n".encode() if text else b"")


def small_picture(path: Path, side: int) -> bytes:
    """An image, or a clip's first frame, as a JPEG of at most `side` pixels along. Raises: as first_picture."""
    data = io.BytesIO()
    first_picture(path, side, MOST_SHOWN).save(data, format="JPEG", quality=80)
    return data.getvalue()


def whole_picture(path: Path, side: int) -> torch.Tensor:
    """An image, or a clip's first frame, as first_picture; float32 in 0..1. [1, H, W, 3]"""
    picture = first_picture(path, side)
    return torch.from_numpy(np.asarray(picture).copy()).to(torch.float32).div_(255.0)[None]


def own_captions(path: Path, tables: Tables) -> tuple[tuple[str, ...] | None, str]:
    """The captions, and what is wrong with their file."""
    file = caption_file(path)
    if file.is_symlink():
        return None, f"{file.name} is a link, which is not followed here"
    try:
        return tables.of(path)[0], ""
    except ValueError as error:
        return None, str(error)


@lru_cache(maxsize=4 * MOST_FILES)
def _known(path: str, changed: int) -> tuple[bool, tuple[int, int] | None, str]:
    """Whether it is a clip, its size, and what is wrong with it. changed: time of the last change, in ns."""
    file, is_moving = Path(path), is_clip(Path(path))
    try:
        return is_moving, size_of_clip(file, MOST_SHOWN) if is_moving else read_size(file, is_decoded=False), ""
    except (ValueError, RuntimeError, OSError) as error:
        return is_moving, None, str(error)
