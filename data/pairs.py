"""Files of an image or clip by its name. Of cat.png each folder of references holds cat.png (or another image format),
cat_1.png and so on without a gap, but no image's own name is a second reference; and that of control what it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from ..config.job import FolderConfig
from ..families.comfy.conditions import ConditionWay
from ..system.files import Looked
from .captions import stem_of
from .image import image_suffixes, read_size
from .samples import is_other_shape
from .video import CLIP_SUFFIXES, ClipInfo, is_clip, probe_clip

_Index = Mapping[str, Sequence[Path]]


@dataclass(frozen=True)
class Partners:
    """What lies in the folders that a dataset folder names, by stem."""

    config: FolderConfig
    way: ConditionWay
    references: tuple[_Index, ...]
    control: _Index
    own: frozenset[str]  # stems of the dataset folder itself


@dataclass(frozen=True)
class Pair:
    """What belongs to one image or clip."""

    references: tuple[Path, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    control: Path | None = None


def find_partners(config: FolderConfig, way: ConditionWay, stems: Sequence[str], ask: Callable[[], None]) -> Partners:
    """Lists the folders. Raises: ValueError for one that is missing, that the way does not take, or lacks."""
    for key, given, takes, needs in (
        ("references", config.references, way.most, way.least),
        ("control", (config.control,) if config.control else (), way.takes_control, way.takes_control),
    ):
        if needs and not given:
            raise ValueError(f"{config.path}: data.condition needs {key} of this folder; name their folder")
        if given and not takes:
            raise ValueError(f"{config.path}: data.condition takes no {key}; remove the setting")
        for each in given:
            if not Path(each).is_dir():
                raise ValueError(f"{config.path}: the folder of {key} {each} does not exist")
            if Path(each).resolve() == Path(config.path).resolve():
                raise ValueError(f"{config.path}: its {key} are to lie in another folder, not in it itself")
    references = tuple(_index(Path(folder), image_suffixes(), ask) for folder in config.references)
    control = _index(Path(config.control), (*image_suffixes(), *CLIP_SUFFIXES, ""), ask) if config.control else {}
    return Partners(config, way, references, control, frozenset(stems))


def _index(folder: Path, suffixes: Sequence[str], ask: Callable[[], None]) -> _Index:
    found: dict[str, list[Path]] = {}
    for entry in sorted(Looked(ask).entries(folder)):
        is_folder = entry.is_dir()
        if "" in suffixes if is_folder else entry.suffix.lower() in suffixes and entry.is_file():
            found.setdefault(entry.name if is_folder else entry.stem, []).append(entry)
    return found


def find_pair(path: Path, size: tuple[int, int] | None, clip: ClipInfo | None, partners: Partners) -> Pair:
    """The files of one image or clip, all decoded. Raises: ValueError naming what is missing, double or broken."""
    references, stem = list[Path](), stem_of(path)
    for index, folder in zip(partners.references, partners.config.references, strict=True):
        names = [stem] if stem in index else []
        for name in (f"{stem}_{number}" for number in count(1)):
            if name not in index or name in partners.own:
                break
            names.append(name)
        if not names:
            raise ValueError(
                f"{path}: has no reference in {folder}; put {stem}{path.suffix or '.png'} or {stem}_1.png there"
            )
        references += [_only(path, name, index, folder, "image") for name in names]
    if len(references) > partners.way.most:
        raise ValueError(f"{path}: has {len(references)} references, and data.condition takes {partners.way.most}")
    pair = Pair(tuple(references), tuple(map(read_size, references)))
    if not partners.config.control:
        return pair
    control = _only(path, stem, partners.control, partners.config.control, "clip or image")
    info = probe_clip(control) if is_clip(control) else None
    if size and (info is None) != (clip is None):
        kinds = ["an image" if each is None else "a clip" for each in (info, clip)]
        raise ValueError(f"{control}: is {kinds[0]}, but {path} is {kinds[1]}")
    if info and clip and info.num_frames != clip.num_frames:
        raise ValueError(
            f"{control}: has {info.num_frames} frames, but {path} has {clip.num_frames}; they are shown side by side"
        )
    other = info.size if info else read_size(control)
    if size and is_other_shape(other, size):
        raise ValueError(f"{control}: is {other[1]}x{other[0]}, but {path} is {size[1]}x{size[0]}; one shape is needed")
    return replace(pair, control=control)


def _only(path: Path, name: str, index: _Index, folder: str, kind: str) -> Path:
    found = index.get(name, ())
    if len(found) != 1:
        there = "no" if not found else "more than one"
        names = f" ({', '.join(file.name for file in found)})" if found else ""
        raise ValueError(f"{path}: {folder} has {there} {kind} of its name, {name}{names}; one is needed")
    return found[0]
