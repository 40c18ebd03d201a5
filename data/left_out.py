"""What lies in the folders of a dataset and is not read: named once, with counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..checkpoints.model_files import first
from ..families.spec import LatentSpec
from ..system.files import Looked
from .captions import TEXT_FILES
from .containers import SOUND_SUFFIXES
from .image import PLUGINS, image_suffixes
from .video import media_suffixes

_OF_SYSTEMS = ("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "@eadir", "__macosx")  # nobody put them there
_OF_SOUND = (
    "; a job file takes a sound beside a clip of its name (LTX-2, MiniMax H3: cache.stock_audio_vae) or alone "
    "(ACE-Step), and a graph takes it by Dataset from Latents and Conditioning"
)
_MOST_LOOKED_AT = 20_000  # files and folders in sub-folders
_PLUGIN_OF = {".heic": PLUGINS["HEIF"], ".heif": PLUGINS["HEIF"], ".hif": PLUGINS["HEIF"], ".jxl": PLUGINS["JXL"]}


def left_out(
    media: Mapping[Path, Sequence[Path]],
    captions: Collection[Path],
    latent: LatentSpec,
    ask: Callable[[], None],
    *,
    beside: Iterable[Path] = (),
    others: Iterable[Path] = (),
) -> Iterator[str]:
    """Lines about files and sub-folders that are not read. media: what is read, by folder. captions: their files, and
    sounds. ask: raises to stop. beside: folders of references or control. others: of something else."""
    beside, suffixes = dict.fromkeys(beside), SOUND_SUFFIXES if latent.audio_rows else media_suffixes()
    is_read = {each.resolve() for each in (*others, *beside, *media)}
    for root, paths in media.items():
        known = {*paths, *captions}
        entries = [entry for entry in _entries(root, Looked(ask)) if entry not in known]
        files = [entry for entry in entries if entry.suffix.lower() not in suffixes and entry.is_file()]
        for folder in sorted(path for path in paths if path.is_dir()):
            files += [entry for entry in _entries(folder, Looked(ask)) if entry.suffix.lower() not in image_suffixes()]
        yield from _of_files(root, files)
        looked, held = Looked(ask), dict[Path, int]()
        wanted = (*suffixes, *SOUND_SUFFIXES) if latent.sound_rate else suffixes
        for entry in filter(Path.is_dir, entries):
            if number := _count(entry, looked, wanted, is_read):
                held[entry] = number
        if held:
            names = first([f"{folder.name} ({number})" for folder, number in held.items()], most=20)
            is_all = looked.num_seen < _MOST_LOOKED_AT
            yield (
                f"{root}: {'' if is_all else 'at least '}{sum(held.values())} images, clips or sounds in {len(held)} "
                f"sub-folders are not read: {names}; give "
                "each sub-folder as a folder of its own in data.folders, and how often its files come as its repeats "
                "(10_cat: path 10_cat, repeats 10)"
                + ("; if one is a clip, put its caption beside it, named like the folder with .txt" * latent.is_video)
            )
    for root in beside:  # whose captions do not matter
        found = [each for each in _entries(root, Looked(ask)) if not _is_media_or_caption(each) and each.is_file()]
        yield from _of_files(root, found)


def _count(folder: Path, looked: Looked, wanted: Collection[str], is_read: Collection[Path]) -> int:
    """Files of these endings in a folder and all below it; through no link, and not in those that are read."""
    number, remaining = 0, [folder]
    while remaining and looked.num_seen < _MOST_LOOKED_AT:
        each = remaining.pop()
        if each.resolve() not in is_read:
            entries = _entries(each, looked)
            number += sum(entry.suffix.lower() in wanted for entry in entries)
            others = (entry for entry in entries if not _is_media_or_caption(entry))
            remaining += [entry for entry in others if entry.is_dir() and not entry.is_symlink()]
    return number


def _entries(folder: Path, looked: Looked) -> list[Path]:
    """None of a folder that may not be read, is gone, or holds far more than a dataset."""
    try:
        return [entry for entry in looked.entries(folder) if not is_of_system(entry)]
    except (OSError, ValueError):
        return []


def is_of_system(entry: Path) -> bool:
    """Whether an operating system made this."""
    return entry.name.lower() in _OF_SYSTEMS


def _of_files(root: Path, files: Sequence[Path]) -> Iterator[str]:
    by_ending: dict[str, list[str]] = {}
    for file in files:
        by_ending.setdefault(file.suffix.lower(), []).append(file.relative_to(root).as_posix())
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
        + _OF_SOUND * (not by_ending.keys().isdisjoint(SOUND_SUFFIXES))
        + "".join(f"; pip install {package} has them read" for package in sorted(packages))
    )


def _is_media_or_caption(entry: Path) -> bool:
    return entry.suffix.lower() in (*media_suffixes(), *TEXT_FILES)
