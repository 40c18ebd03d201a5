"""What the page asks of folders of images: their captions and buckets, small pictures, and a caption that was edited.
Small pictures come in many requests, so of these only folder and file are looked at. Nothing but captions is
written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from ..config.job import DataConfig, FolderConfig
from ..config.ranges import problems_of
from ..config.setting import keys_of
from ..data.caption_files import (
    CaptionChanged,
    Captioned,
    is_plain,
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
_OF_FOLDER = ("folder_resolutions", "default_caption", "regularisation")
_NONE_OWN = ("", "auto")  # sizes of a folder that takes those of the dataset
_MOST_VARIANTS = 2  # that are shown
Find = Callable[[str, str], Path]
Routes = dict[tuple[str, str], Callable[[dict[str, Any]], Answer]]

_OF_DATASET = "max_aspect_ratio bucket_step trigger_word caption_template caption_lines shuffle_tags "
_OF_DATASET += "keep_tags tag_dropout tag_variants"
_KEYS: dict[str, Any] = {key.path: (key.kind, key.default) for key in keys_of(DataConfig, "data")}
# What the dataset's node says of a folder, each as a text, and as it is where the node is not there.
_Settings: Any = create_model(
    "_Settings", resolutions=(str, "512"), folder_resolutions=(str, ""), default_caption=(str, ""),
    regularisation=(bool, False), **{name: _KEYS[f"data.{name}"] for name in _OF_DATASET.split()},
)  # fmt: skip


def dataset_routes(names: Callable[[], list[str]], find: Find) -> Routes:
    """Handlers by method and name. names: of the folders that may be requested; find: the folder of a name, and of the
    only file that is wanted of it, or "". Raises: ValueError."""
    return {
        ("GET", "datasets"): lambda values: Answer(values={"folders": names()}),
        ("GET", "dataset"): lambda values: Answer(
            values={"files": list(map(_described, look_at(_config(_folder(names, find, values), values))))}
        ),
        ("GET", "picture"): partial(_picture, find),
        ("POST", "caption"): partial(_caption, names, find),
    }


def _described(each: Captioned) -> dict[str, Any]:
    """Plain values; sizes are width and height, as pages have them."""
    known = {name: value for name, value in vars(each).items() if name != "path"}
    sides = {"size": each.size and each.size[::-1], "buckets": [bucket[::-1] for bucket in each.buckets]}
    file = {"file": each.path.name, "changed": each.path.stat().st_mtime_ns // 1_000_000}
    return known | sides | file | {"problem": each.problem.replace(str(each.path).removesuffix(each.path.name), "")}


def _picture(find: Find, values: dict[str, Any]) -> Answer:
    path = _file(partial(find, text_of(values, "folder")), values)
    return Answer(body=small_picture(path, _SIDE), kind="image/jpeg")


def _caption(names: Callable[[], list[str]], find: Find, values: dict[str, Any]) -> Answer:
    path = _file(partial(_folder, names, find, values), values)
    config = _config(path.parent, values)
    caption, was = values.get("caption"), values.get("was")
    if not isinstance(caption, str) or not (was is None or isinstance(was, str)):
        raise Refused(400, "caption should be a text, and was a text or null")
    tables, _ = json_captions(path.parent, [path])
    replaced = {was, None} if was in [each.captions[0] for each in tables.entries.values() if each.captions] else {was}
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


def _file(find: Callable[[str], Path], values: Mapping[str, Any]) -> Path:
    """The image or clip that is named. find: its folder. Raises: NotThere, also for a path, and for a hidden file."""
    name = text_of(values, "file")
    path = media_file(find(name), name) if is_plain(name) else None
    if path is None:
        raise NotThere("there is no image of this name")
    return path


def _config(folder: Path, values: Mapping[str, Any]) -> DataConfig:
    """What the dataset's node says, as far as it matters for captions and buckets. Raises: Refused."""
    try:
        given = _Settings.model_validate_strings({key: values[key] for key in values.keys() & _Settings.model_fields})
        own = FolderConfig(
            str(folder),
            regularisation=given.regularisation,
            resolutions=_sizes(given.folder_resolutions),
            caption=given.default_caption,
        )
        return DataConfig(
            folders=(own,),
            resolutions=_sizes(given.resolutions),
            tag_variants=min(given.tag_variants, _MOST_VARIANTS),
            **given.model_dump(exclude={*_OF_FOLDER, "resolutions", "tag_variants"}),
        )
    except ValidationError as error:
        faults = [": ".join(map(str, (*each["loc"], each["msg"]))) for each in problems_of(error)]
        raise Refused(400, f"Training Dataset: {'; '.join(faults).replace('Value error, ', '')}") from error
    except ValueError as error:
        raise Refused(400, "the settings of the dataset cannot be read") from error


def _sizes(text: str) -> tuple[int, ...]:
    """As the node reads them: between commas or on lines of their own; () where none are meant. Raises: ValueError."""
    parts = "" if text.strip().lower() in _NONE_OWN else text.replace("\n", ",")
    return tuple(int(each) for each in parts.split(",") if each.strip())
