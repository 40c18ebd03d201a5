"""Captions of cat.png: of cat.txt, cat.caption or cat.caption.txt, else an entry of cat.json or a file of the folder.
A JSON file counts if an entry names an image or clip that is there; what is wrong in it is then refused. Variants with
other tags are made ahead, by a hash of caption and number: all seeds, images and runs share their encodings."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.job import DataConfig, FolderConfig
from ..system.files import MAX_ENTRIES, Looked, expect, parse_json, read_ordinary

TEXT_FILES = (".txt", ".caption", ".caption.txt")  # the first counts
LYRICS_FILES = (".lyrics.txt", ".lyrics")  # likewise, as ACE-Step 1.5's own trainer and SimpleTuner have them
_MOST_CAPTION_BYTES = 1_000_000
_MOST_TABLE_BYTES = 100_000_000
_MOST_TEXTS = 100  # of one image
_NAME_KEYS = ("file_name", "image_path", "video_path", "media_path")
_TEXT_KEYS = ("caption", "captions", "text", "prompt")  # and behind them "tags"
_HALF = re.compile("[\ud800-\udfff]")
_REMEDY = "mend it, or take the file out of the folder"
_FOR_SONGS = {"bpm": "give 10 to 999", "timesignature": "give 2, 3, 4 or 6"}


def stem_of(path: Path) -> str:
    """The name without a file's ending; a folder's name has none."""
    return path.name if os.path.isdir(path) else path.stem


def caption_file(path: Path, endings: Sequence[str] = TEXT_FILES) -> Path:
    """The first that is there of its files with these endings; where none is, the first."""
    files = [path.with_name(f"{stem_of(path)}{ending}") for ending in endings]
    return next((each for each in files if os.path.lexists(each)), files[0])


def read_caption(path: Path) -> str | None:
    """The caption without blanks around it; None without the file. Raises: ValueError naming one that is no caption."""
    try:
        return _read_text(path, _MOST_CAPTION_BYTES, "a caption").strip()
    except FileNotFoundError:
        return None


def _read_text(path: Path, most_bytes: int, wanted: str) -> str:
    try:
        return read_ordinary(path, most_bytes, wanted).decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


# ---- JSON files


@dataclass(frozen=True)
class _Entry:
    """What a JSON file says of one name; "" where it gives none."""

    file: Path
    name: str
    value: Any
    line: int = 0  # 0 of one that is not on a line of its own
    text: str = ""  # of the file
    captions: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Its place, which is looked for only where something is wrong there."""
        shown = [json.dumps(self.name, ensure_ascii=is_plain) for is_plain in (False, True)]
        at = max(map(self.text.find, shown))
        line = self.line or (self.text.count("\n", 0, at) + 1 if at >= 0 else 1)
        return f"{self.file}, line {line}"


@dataclass(frozen=True)
class Tables:
    """What the JSON files of a dataset folder say, by image and clip."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    strange: list[str] = field(default_factory=list)  # names of their entries that are no image or clip

    def of(self, path: Path) -> tuple[tuple[str, ...] | None, str]:
        """The captions of an image or clip, and the kind of their file, or its name. Raises: as read_caption."""
        file = caption_file(path)
        if (text := read_caption(file)) is not None:
            return (text,), file.suffix
        entry = self.entries.get(_place(path))
        if entry is None or not entry.captions:
            return None, ""
        return entry.captions, entry.file.suffix if entry.file.stem == stem_of(path) else entry.file.name

    def song_of(self, path: Path) -> dict[str, str | int]:
        """What is said of a song beside its caption. Raises: as read_caption; ValueError for a value of no model's."""
        entry = self.entries.get(_place(path))
        given = entry.value if entry and isinstance(entry.value, dict) else {}
        said = {key: (given[key], str(entry)) for key in _OF_SONGS if given.get(key) not in (None, "")}
        file = caption_file(path, LYRICS_FILES)
        if (lyrics := read_caption(file)) is not None:
            said["lyrics"] = lyrics, str(file)
        song: dict[str, str | int] = {}
        for key, (value, where) in said.items():
            text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
            if text is None or not _OF_SONGS[key].fullmatch(text) or _HALF.search(text):
                raise ValueError(f"{where}: {key} is {value!r:.60}, which is not taken; {_FOR_SONGS.get(key, _REMEDY)}")
            song[key] = int(text[:3] if key == "bpm" else text[0]) if key in ("bpm", "timesignature") else text
        return song

    def has(self, path: Path) -> bool:
        """Whether an entry is of this image or clip."""
        return bool((entry := self.entries.get(_place(path))) and entry.captions)


def read_tables(
    folders: Iterable[Path],
    media: Sequence[Path],
    ask: Callable[[], None],
    *,
    follows_links: bool = True,
    of_songs: bool = False,
) -> Tables:
    """The captions of media in the JSON files of folders, unless each has a caption file and they are not of_songs,
    which say more. Raises: ValueError naming file and line of what is wrong."""
    found = Tables()
    if not of_songs and all(os.path.lexists(caption_file(path)) for path in media):
        return found
    names: dict[str, dict[str, str]] = {}
    for path in media:
        for name in (path, path.with_name(stem_of(path))):
            names.setdefault(_place(name), {})[_place(path)] = path.name
    for file in [entry for folder in dict.fromkeys(folders) for entry in Looked(ask).entries(folder)]:
        is_table = file.suffix.lower() in (".json", ".jsonl") and file.is_file()
        if is_table and (follows_links or not file.is_symlink()):
            _add(found, file, list(_entries(file, names)), names)
    return found


def _place(path: Path | str) -> str:
    return os.path.normpath(os.path.abspath(path))


def _entries(file: Path, names: Mapping[str, object]) -> Iterator[_Entry]:
    text, lines = _read_text(file, _MOST_TABLE_BYTES, "captions"), list[int]()
    if file.suffix.lower() == ".jsonl":
        rows = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        values: Any = [parse_json(line, f"{file}, line {n}", _REMEDY) for n, line in rows[: MAX_ENTRIES + 1]]
        lines = [number for number, _ in rows]
    else:
        values = parse_json(text, str(file), _REMEDY)
    if isinstance(values, (list, dict)) and len(values) > MAX_ENTRIES:
        raise ValueError(f"{file}: has more entries than the {MAX_ENTRIES} files that a dataset may have; {_REMEDY}")
    if isinstance(values, list):
        lines = lines[: len(values)] or [0] * len(values)
        for value, line in zip(values, lines, strict=True):
            keys = _NAME_KEYS if isinstance(value, dict) else ()
            name = next((value[key] for key in keys if isinstance(value.get(key), str)), "")
            yield _Entry(file, name, value, line, text)
    elif isinstance(values, dict):
        is_own = _place(file.with_suffix("")) in names and {*_TEXT_KEYS, *_OF_SONGS, "tags"} & values.keys()
        for name, value in [(file.stem, values)] if is_own else values.items():
            yield _Entry(file, name, value, text="" if is_own else text)


def _add(found: Tables, file: Path, entries: Sequence[_Entry], names: Mapping[str, Mapping[str, str]]) -> None:
    """Raises: ValueError for what is wrong in a file of captions."""
    base = _place(file.parent)
    places = [_place(os.path.join(base, each.name.replace("\\", "/"))) for each in entries]
    if names.keys().isdisjoint(places):
        return
    found.files.add(file)
    for each, place in zip(entries, places, strict=True):
        if not each.name:
            raise ValueError(f"{each}: names no file; give it {_NAME_KEYS[0]}")
        if not place.startswith(os.path.join(base, "")):
            raise ValueError(f"{each}: {each.name!r} leads out of the folder; name files relative to {file.name}")
        if place not in names:
            found.strange.append(each.name)
            continue
        image, *others = names[place]
        if others:
            raise ValueError(f"{each}: {each.name!r} is {' and '.join(names[place].values())}; name it with its ending")
        if image in found.entries:
            raise ValueError(f"{each}: {each.name!r} has captions in {found.entries[image]}, too; remove one of them")
        texts = _texts_of(each)
        if texts or isinstance(each.value, dict) and _OF_SONGS.keys() & each.value.keys():
            found.entries[image] = replace(each, captions=texts)


def _texts_of(entry: _Entry) -> tuple[str, ...]:
    """The captions that an entry holds; its tags stand behind each. Raises: ValueError for what is no text."""
    value, tags = entry.value, []
    if isinstance(value, dict):
        given = {repr(value[key]): key for key in _TEXT_KEYS if value.get(key) is not None}
        if len(given) > 1:
            raise ValueError(f"{entry}: has {' and '.join(given.values())}, which differ; leave one of them")
        tags = _all_texts(value.get("tags") or [], entry)
        value = value[next(iter(given.values()))] if given else [""] if tags else []
    return tuple(", ".join(filter(None, [text, *tags])) for text in _all_texts(value, entry))


def _all_texts(value: Any, entry: _Entry) -> list[str]:
    values = value if isinstance(value, list) else [value]
    texts = [expect(each, str, f"{entry}: a caption", _REMEDY).strip() for each in values]
    if len(texts) > _MOST_TEXTS or any(len(each) > _MOST_CAPTION_BYTES for each in texts):
        raise ValueError(f"{entry}: up to {_MOST_TEXTS} captions of {_MOST_CAPTION_BYTES} characters are taken")
    if any(_HALF.search(each) for each in texts):
        raise ValueError(f"{entry}: a caption has half a character (a surrogate), which no encoder takes; {_REMEDY}")
    return texts


_OF_SONGS: dict[str, re.Pattern[str]] = {  # what ComfyUI's text encode nodes of ACE-Step take, each in full
    "lyrics": re.compile(r"(?s).{0,50000}"),
    "bpm": re.compile(r"[1-9][0-9]{1,2}"),
    "timesignature": re.compile(r"[2346](/4)?"),
    "keyscale": re.compile(r".{1,40}"),
    "language": re.compile(r".{1,40}"),
}


# ---- texts

_PLACE = "[trigger]"  # in caption files, as other trainers have it
_KEPT = "|||"  # what stands before the first, and behind a second, keeps its place, as in sd-scripts


def make_captions(texts: Sequence[str], config: DataConfig, folder: FolderConfig) -> tuple[str, ...]:
    """What an image or clip is trained with, one each time. Raises: ValueError for more lines than are taken."""
    if config.caption_lines:
        texts = [line for text in texts for line in map(str.strip, text.splitlines()) if line] or [""]
        if len(texts) > _MOST_TEXTS:
            raise ValueError(f"has {len(texts)} captions, one a line, and up to {_MOST_TEXTS} are taken; remove some")
    varied = texts
    if config.shuffle_tags or config.tag_dropout:
        varied = [vary_tags(text, config, draw) for text in texts for draw in range(config.tag_variants)]
    return tuple(make_caption(text, config, folder) for text in varied)


def vary_tags(text: str, config: DataConfig, draw: int) -> str:
    """One draw of a text's tags, which stand between commas: in another order, and some of them left out."""
    parts = [[tag for tag in map(str.strip, part.split(",")) if tag] for part in text.split(_KEPT, 2)]
    if len(parts) == 1:
        parts = [parts[0][: config.keep_tags], parts[0][config.keep_tags :]]
    head, tags, tail = [*parts, []][:3]
    numbers: Sequence[int] = range(len(tags))
    text = hashlib.sha256(text.encode()).hexdigest()  # of a long one each tag would take as long
    if config.shuffle_tags:
        numbers = sorted(numbers, key=lambda tag: uniform(f"order {draw} {tag} {text}"))
    kept = [tags[tag] for tag in numbers if uniform(f"drop {draw} {tag} {text}") >= config.tag_dropout]
    return ", ".join([*head, *kept, *tail])


def uniform(text: str) -> float:
    """A number in [0, 1) that depends on the text only, and looks uniform over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def make_caption(text: str, config: DataConfig, folder: FolderConfig) -> str:
    """With the trigger word, as the dataset and the folder say; of regularisation images without it."""
    trigger = "" if folder.regularisation else config.trigger_word.strip()
    template = folder.caption_template or config.caption_template
    text = _tidy(text.replace(_PLACE, trigger)) if _PLACE in text else text
    if template:
        return _tidy(template.replace("{trigger}", trigger).replace("{caption}", text))
    if not trigger or trigger.lower() in text.lower():
        return text
    return _tidy(f"{trigger}, {text}")


def _tidy(text: str) -> str:
    """Without what is left of a list whose ends are empty."""
    return text.strip().strip(",").strip()
