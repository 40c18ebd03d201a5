"""Wrong names and places (bad_inputs.py says what a case is): our own files', spoilt ones, those of another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devicebridge.config.job import job_keys
from devicebridge.tests.bad_inputs import Case, Spoil, set_key

GROUP = "names, places"
_NAMES = ("adapter", "Optimizer", "RANDOM", "adapter.safetensors", "a\\b", "a/b", ".a", "..")
_NAMES += ("a\tb", "a\x1b[31m", "a\u202eb", "\uff41dapter")
_BACKSLASHES = (r"C:\Users\me", r"D:\data", r"D:\train\new", r"D:\bee\foo", "D:\\data\\")
_TWICE: tuple[tuple[str, Any], ...] = (
    ("data.resolutions", [32, 32]),
    ("data.frames", [1, 1]),
    ("evaluation.quantiles", [0.5, 0.5]),
    ("samples.prompts", ["a", "a"]),
    ("split.devices", ["cpu", "cpu"]),
    ("data.folders", [{"path": "data"}, {"path": "data"}]),
)
_PLACES = (
    *((key, place) for key in ("output.folder", "cache.folder") for place in ("data", "model", "model/vae")),
    ("output.folder", "link"),
    ("output.folder", "data/../model/x"),
    ("model.quantized_cache", "data"),
    ("evaluation.folder", "run/samples"),
)
_ODD_NAMES = ("\x1b[31m", "\x1b]0;title\x07", "\u202e", "\udcff", "\x9b2J", "a\rb", "a\x7f")


def name_cases() -> Iterator[Case]:
    """All of them."""
    for name in _NAMES:
        yield Case(GROUP, f"output.name = {name!r}", set_key("output", "name", name), ("output.name",))
    for key in job_keys().values():
        if key.is_path and not key.section.startswith("data.") and str(key.kind).startswith("<class"):
            value = "C:\train\new"
            yield Case(GROUP, f"{key.path} = {value!r}", set_key(key.section, key.name, value), (key.path,))
    for path in _BACKSLASHES:
        yield Case(GROUP, f"a folder {path} in double quotes", _in_double_quotes(path), ("single quotes",))
    for path, value in _TWICE:
        yield Case(GROUP, f"{path} = {value!r}", set_key(*path.split("."), value), (path, "devices", "quantiles"))
    for path, place in _PLACES:
        yield Case(GROUP, f"{path} = {place}", _at_place(path, place), (path,))
    for name in _ODD_NAMES:
        for ending in (".png", ".txt", "_mask.png"):
            label = f"{name!r}{ending} in the dataset"
            yield Case(GROUP, label, _in_dataset(f"{name}{ending}"), ("data", "image"), "any")
        yield Case(GROUP, f"the dataset is called {name!r}", _dataset_called(name), ("data.folders",), "any")


def _in_double_quotes(path: str) -> Spoil:
    def spoil(folder: Path) -> None:
        text = (folder / "job.toml").read_text()
        assert 'path = "data"' in text
        (folder / "job.toml").write_text(text.replace('path = "data"', f'path = "{path}"'))

    return spoil


def _at_place(path: str, place: str) -> Spoil:
    section, name = path.split(".")

    def spoil(folder: Path) -> None:
        set_key(section, name, place)(folder)
        (folder / "link").symlink_to(folder / "data")
        if path == "evaluation.folder":
            shutil.copytree(folder / "data", folder / place)

    return spoil


def _in_dataset(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        source = folder / "data" / ("image_1.txt" if name.endswith(".txt") else "image_1.png")
        shutil.copy(source, folder / "data" / name)

    return spoil


def _dataset_called(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        os.rename(folder / "data", folder / name)
        os.symlink(name, folder / "data")

    return spoil
