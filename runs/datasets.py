"""What the page asks of folders of images: their captions and buckets, small pictures, and a caption that was edited.

Folders and files are looked for among those that are there, as runs are (store.py). Nothing but captions is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config.job import DataConfig, FolderConfig
from ..config.ranges import problems_of
from ..data.caption_files import Captioned, look_at, media_files, own_caption, small_picture, write_caption
from .answer import Answer
from .guard import Refused, text_of
from .store import Busy, NotThere

FREE_ROUTES = {"datasets", "dataset", "picture", "caption"}  # which know nothing of runs, and may take a while
_SIDE = 192  # pixels of a small picture
_FLAGS = {"true": True, "false": False}
Find = Callable[[str], Path]
Routes = dict[tuple[str, str], Callable[[dict[str, Any]], Answer]]


def dataset_routes(names: Callable[[], list[str]], find: Find) -> Routes:
    """Handlers by method and name.

    Args:
        names: of the folders that may be asked for.
        find: the folder of a name. Raises: ValueError.
    """
    return {
        ("GET", "datasets"): lambda values: Answer(values={"folders": names()}),
        ("GET", "dataset"): partial(_dataset, names, find),
        ("GET", "picture"): partial(_picture, names, find),
        ("POST", "caption"): partial(_caption, names, find),
    }


def _dataset(names: Callable[[], list[str]], find: Find, values: dict[str, Any]) -> Answer:
    config = _config(_folder(names, find, values), values)
    return Answer(values={"files": [_described(each) for each in look_at(config)]})


def _described(each: Captioned) -> dict[str, Any]:
    """Plain values; sizes are width and height, as pages have them."""
    return {
        "file": each.path.name,
        "caption": each.caption,
        "size": each.size and each.size[::-1],
        "buckets": [bucket[::-1] for bucket in each.buckets],
        "trained_as": each.trained_as,
        "is_clip": each.is_clip,
        "problem": each.problem,
        "changed": each.path.stat().st_mtime_ns // 1_000_000,
    }


def _picture(names: Callable[[], list[str]], find: Find, values: dict[str, Any]) -> Answer:
    path = _file(_folder(names, find, values), values)
    return Answer(body=small_picture(path, _SIDE), kind="image/jpeg")


def _caption(names: Callable[[], list[str]], find: Find, values: dict[str, Any]) -> Answer:
    folder = _folder(names, find, values)
    path, config = _file(folder, values), _config(folder, values)
    caption, was = values.get("caption"), values.get("was")
    if not isinstance(caption, str) or not (was is None or isinstance(was, str)):
        raise Refused(400, "caption should be a text, and was a text or null")
    now, problem = own_caption(path)
    if problem:
        raise Refused(400, problem)
    if now != was:
        raise Busy(f"the caption of {path.name} was changed meanwhile; look at the folder again")
    write_caption(path, caption)
    (written,) = look_at(config, [path])
    return Answer(values=_described(written))


def _folder(names: Callable[[], list[str]], find: Find, values: Mapping[str, Any]) -> Path:
    """Raises: NotThere."""
    name = text_of(values, "folder")
    if name not in names():
        raise NotThere("there is no dataset folder of this name")
    return find(name)


def _file(folder: Path, values: Mapping[str, Any]) -> Path:
    """Raises: NotThere."""
    name = text_of(values, "file")
    for path in media_files(DataConfig(folders=(FolderConfig(str(folder)),))):
        if path.name == name:
            return path
    raise NotThere("there is no image of this name")


def _config(folder: Path, values: Mapping[str, Any]) -> DataConfig:
    """What the dataset's node says, as far as it matters for captions and buckets. Raises: Refused."""
    try:
        return DataConfig(
            folders=(FolderConfig(str(folder), regularisation=_FLAGS[values.get("regularisation", "false")]),),
            resolutions=tuple(int(each) for each in values.get("resolutions", "512").split(",") if each.strip()),
            max_aspect_ratio=float(values.get("max_aspect_ratio", 2.0)),
            bucket_step=int(values.get("bucket_step", 0)),
            trigger_word=values.get("trigger_word", ""),
            caption_template=values.get("caption_template", ""),
        )
    except ValidationError as error:
        told = [each["msg"].removeprefix("Value error, ") for each in problems_of(error)]
        raise Refused(400, f"Training Dataset: {'; '.join(told)}") from error
    except (ValueError, KeyError) as error:
        raise Refused(400, "the settings of the dataset cannot be read") from error
