"""What lies in the folders of a dataset and is not read: named once, with counts, so that nothing is left out in
silence."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from ..checkpoints.model_folder import first
from ..system.listing import Looked
from .open_image import PLUGINS
from .video import media_suffixes, sequence_files

_OF_SYSTEMS = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "@eadir", "__macosx")  # nobody put them there
_CAPTIONS = (".txt", ".caption")
_PLUGIN_OF = {".heic": PLUGINS["HEIF"], ".heif": PLUGINS["HEIF"], ".hif": PLUGINS["HEIF"], ".jxl": PLUGINS["JXL"]}


class LeftOut:
    """A look for what is not read.

    Args:
        read: folders that are read for themselves, resolved.
        ask: called now and then; raises to stop.
    """

    def __init__(self, read: AbstractSet[Path], ask: Callable[[], None]) -> None:
        self._read, self._ask = read, ask

    def of_dataset(
        self, root: Path, paths: Sequence[Path], captions: Collection[Path], takes_clips: bool
    ) -> Iterator[str]:
        """A line about files and one about sub-folders, where there are any.

        Args:
            paths: images, clips and folders of images that are read. captions: their files.
            takes_clips: whether a sub-folder can be a clip.
        Raises: ValueError for sub-folders that hold far more than a dataset.
        """
        looked, taken = Looked(self._ask), {path for path in paths if path.is_dir()}
        entries = _entries(root, looked)
        files = [entry for entry in entries if entry.is_file() and not _is_media(entry) and entry not in captions]
        for folder in sorted(taken):
            frames = set(sequence_files(folder, looked))
            files += [entry for entry in _entries(folder, looked) if entry not in frames]
        yield from _of_files(root, files)
        folders = [entry for entry in entries if entry not in taken and entry.is_dir()]
        held = {folder: self._count(folder, looked) for folder in folders}
        held = {folder: number for folder, number in held.items() if number}
        if held:
            names = first([f"{folder.name} ({number})" for folder, number in held.items()], most=20)
            yield (
                f"{root}: {sum(held.values())} images and clips in {len(held)} sub-folders are not read: {names}; give "
                "each sub-folder as a folder of its own in data.folders, and how often its images come as its repeats "
                "(10_cat: path 10_cat, repeats 10)"
                + ("; if one is a clip, put its caption beside it, named like the folder with .txt" * takes_clips)
            )

    def of_partners(self, root: Path) -> Iterator[str]:
        """The same of a folder of references or control, whose captions do not matter."""
        kinds = (*media_suffixes(), *_CAPTIONS)
        files = [each for each in _entries(root, Looked(self._ask)) if each.is_file() and _ending(each) not in kinds]
        yield from _of_files(root, files)

    def _count(self, folder: Path, looked: Looked) -> int:
        """Images and clips in a folder and all below it; through no link inside it, and not in those that are read."""
        number, remaining = 0, [folder]
        while remaining:
            each = remaining.pop()
            if each.resolve() in self._read or not os.access(each, os.R_OK | os.X_OK):
                continue
            entries = _entries(each, looked)
            number += sum(map(_is_media, entries))
            remaining += [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
        return number


def _entries(folder: Path, looked: Looked) -> list[Path]:
    return [entry for entry in looked.entries(folder) if entry.name.lower() not in _OF_SYSTEMS]


def _of_files(root: Path, files: Sequence[Path]) -> Iterator[str]:
    by_ending: dict[str, list[str]] = {}
    for file in files:
        by_ending.setdefault(_ending(file), []).append(file.relative_to(root).as_posix())
    if not by_ending:
        return
    kinds = [
        f"{len(names)} {f'of {ending}' if ending else 'without an ending'} ({first(names, most=3)})"
        for ending, names in sorted(by_ending.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    packages = {_PLUGIN_OF[ending] for ending in by_ending if ending in _PLUGIN_OF}
    yield (
        f"{root}: {len(files)} files are not read: {first(kinds, most=20)}; save images as PNG or JPEG, clips as MP4, "
        "and captions as NAME.txt beside NAME.png, or take the files out"
        + "".join(f"; pip install {package} has them read" for package in sorted(packages))
    )


def _is_media(entry: Path) -> bool:
    return _ending(entry) in media_suffixes()


def _ending(file: Path) -> str:
    return file.suffix.lower()
