"""What the page asks of folders of images: their captions and buckets, small pictures, and a caption that was edited.

Folders are looked for among those that are there, as runs are (store.py). Small pictures come in many requests, so of
these only folder and file are looked at. Nothing but captions is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config.job import DataConfig, FolderConfig
from ..config.ranges import problems_of
from ..data.caption_files import (
    CaptionChanged,
    Captioned,
    json_captions,
    look_at,
    media_file,
    small_picture,
    write_caption,
)
from .guard import Answer, Refused, text_of
from .store import NotThere

FREE_ROUTES = {"datasets", "dataset", "picture", "caption", "name"}  # which know nothing of runs, and may take a while
_SIDE = 192  # pixels of a small picture
_NONE_OWN = ("", "auto")  # sizes of a folder that takes those of the dataset
_FLAGS = {"true": True, "false": False}
# What the dataset's node says of a folder, as it is where the node is not there.
_SETTINGS = {
    "resolutions": "512",
    "folder_resolutions": "",
    "max_aspect_ratio": "2",
    "bucket_step": "0",
    "trigger_word": "",
    "caption_template": "",
    "default_caption": "",
    "regularisation": "false",
    "caption_lines": "false",
    "shuffle_tags": "false",
    "keep_tags": "0",
    "tag_dropout": "0",
    "tag_variants": "8",
}
_MOST_VARIANTS = 2  # that are shown
Find = Callable[[str, str], Path]
Routes = dict[tuple[str, str], Callable[[dict[str, Any]], Answer]]


def dataset_routes(names: Callable[[], list[str]], find: Find) -> Routes:
    """Handlers by method and name.

    Args:
        names: of the folders that may be requested.
        find: the folder of a name, and of the only file that is wanted of it, or "". Raises: ValueError.
    """
    return {
        ("GET", "datasets"): lambda values: Answer(values={"folders": names()}),
        ("GET", "dataset"): partial(_dataset, names, find),
        ("GET", "picture"): partial(_picture, find),
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


def _picture(find: Find, values: dict[str, Any]) -> Answer:
    file = _file_name(values)
    path = _file(find(text_of(values, "folder"), file), file)
    return Answer(body=small_picture(path, _SIDE), kind="image/jpeg")


def _caption(names: Callable[[], list[str]], find: Find, values: dict[str, Any]) -> Answer:
    file = _file_name(values)
    folder = _folder(names, find, values, file)
    path, config = _file(folder, file), _config(folder, values)
    caption, was = values.get("caption"), values.get("was")
    if not isinstance(caption, str) or not (was is None or isinstance(was, str)):
        raise Refused(400, "caption should be a text, and was a text or null")
    tables, _ = json_captions(folder, [path])
    replaced = {was, None} if was in [texts[0] for texts in tables.texts.values()] else {was}
    try:
        write_caption(path, caption, replaced)
    except CaptionChanged as error:
        return Answer(409, {"error": str(error), "now": _now(config, path)})
    return Answer(values=_now(config, path))


def _now(config: DataConfig, path: Path) -> dict[str, Any]:
    (found,) = look_at(config, [path])
    return _described(found)


def _folder(names: Callable[[], list[str]], find: Find, values: Mapping[str, Any], file: str = "") -> Path:
    """Raises: NotThere."""
    name = text_of(values, "folder")
    if name not in names():
        raise NotThere("there is no dataset folder of this name")
    return find(name, file)


def _file_name(values: Mapping[str, Any]) -> str:
    """Raises: NotThere for a path, which may lead elsewhere, and for a hidden file."""
    name = text_of(values, "file")
    if Path(name).name != name or name.startswith("."):
        raise NotThere("there is no image of this name")
    return name


def _file(folder: Path, name: str) -> Path:
    """Raises: NotThere."""
    path = media_file(folder, name)
    if path is None:
        raise NotThere("there is no image of this name")
    return path


def _config(folder: Path, values: Mapping[str, Any]) -> DataConfig:
    """What the dataset's node says, as far as it matters for captions and buckets. Raises: Refused."""
    given = {name: values.get(name, default) for name, default in _SETTINGS.items()}
    for name, value in given.items():
        if not isinstance(value, str):
            raise Refused(400, f"{name} should be a text")
    try:
        own = FolderConfig(
            str(folder),
            regularisation=_FLAGS[given["regularisation"]],
            resolutions=_sizes(given["folder_resolutions"]),
            caption=given["default_caption"],
        )
        return DataConfig(
            folders=(own,),
            resolutions=_sizes(given["resolutions"]),
            max_aspect_ratio=float(given["max_aspect_ratio"]),
            bucket_step=int(given["bucket_step"]),
            trigger_word=given["trigger_word"],
            caption_template=given["caption_template"],
            caption_lines=_FLAGS[given["caption_lines"]],
            shuffle_tags=_FLAGS[given["shuffle_tags"]],
            keep_tags=int(given["keep_tags"]),
            tag_dropout=float(given["tag_dropout"]),
            tag_variants=min(int(given["tag_variants"]), _MOST_VARIANTS),
        )
    except ValidationError as error:
        faults = [each["msg"].removeprefix("Value error, ") for each in problems_of(error)]
        raise Refused(400, f"Training Dataset: {'; '.join(faults)}") from error
    except (ValueError, KeyError) as error:
        raise Refused(400, "the settings of the dataset cannot be read") from error


def _sizes(text: str) -> tuple[int, ...]:
    """As the node reads them: between commas or on lines of their own; () where none are meant. Raises: ValueError."""
    parts = "" if text.strip().lower() in _NONE_OWN else text.replace("\n", ",")
    return tuple(int(each) for each in parts.split(",") if each.strip())
