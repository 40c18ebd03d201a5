"""Inputs that are wrong, each a small change to a job that works, and what must become of it.

A case changes a copy of a tiny job's folder: its job file, its model, its images, its checkpoints, its cache. Verdicts:

    refused    exit code 2 and a message that names one of `names`
    noticed    refused, or repaired: then the output names one of `names` all the same
    repaired   noticed, and the LoRA is byte-equal to that of the job that nobody changed
    any        whatever it means to the model; but where it is refused the message names one of `names`

No case may end with a traceback, by a signal, or late, nor print what a terminal obeys. scripts/bad_inputs.py runs all
of them through the real command; tests/unit/cli/test_bad_inputs.py a fixed part. Cases of job keys are made of what the
config says of each key, so a new key has them at once.
"""

import copy
import datetime
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

import tomlkit
from devicebridge.config.job import job_keys, job_to_dict
from devicebridge.config.setting import Key
from devicebridge.tests.tiny_pipeline import make_tiny_job

Verdict = Literal["refused", "noticed", "repaired", "any"]
Spoil = Callable[[Path], None]
LORA = Path("run") / "lora.safetensors"
TRAIN = (("train", "job.toml"),)
RESUME = (("train", "job.toml", "--resume"),)
_STEPS = 2
make_pipe = os.mkfifo if hasattr(os, "mkfifo") else Path.mkdir


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Args:
        group, name: unique together.
        spoil: changes the copy, whose folder it is given.
        names: a message must have one of them.
        commands: run one after the other in that folder until one ends with another code than 0.
        base: which folder is copied: "plain", or "trained", which has checkpoints and a cache.
    """

    group: str
    name: str
    spoil: Spoil
    names: tuple[str, ...]
    verdict: Verdict = "refused"
    commands: tuple[tuple[str, ...], ...] = TRAIN
    base: Literal["plain", "trained"] = "plain"


def make_base(folder: Path) -> Path:
    """A folder "plain" with a job, its model and images; paths in the job are relative, so that it can be copied."""
    plain = folder / "plain"
    job = make_tiny_job(plain, train={"steps": _STEPS, "batch_size": 1, "seed": 3}, evaluation={"folder": ""})
    for path in plain.glob("data/image_[234]*"):
        path.unlink()
    values = job_to_dict(job)
    values["model"]["path"], values["cache"]["folder"], values["output"]["folder"] = "model", "cache", "run"
    values["data"]["folders"][0]["path"] = "data"
    values["output"] |= {"save_every_steps": 1, "keep_last": 2}
    _write_job(plain, values)
    (plain / "job.json").write_text(json.dumps(values))
    return plain


def place_copy(base: Path, place: Path) -> None:
    """Put a copy there that a case may change, without a LoRA. A run remembers its paths: all cases have one place."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base, place, symlinks=True)
    (place / LORA).unlink(missing_ok=True)


def _write_job(folder: Path, values: Mapping[str, Any]) -> None:
    """Sections that are none come first in TOML, else they would be keys of the section before."""
    ordered = sorted(values.items(), key=lambda item: isinstance(item[1], dict))
    plain = {
        name: {key: each for key, each in section.items() if each is not None} if isinstance(section, dict) else section
        for name, section in ordered
    }
    (folder / "job.toml").write_text(tomlkit.dumps(plain), encoding="utf-8")


def job_key_cases() -> Iterator[Case]:
    for key in job_keys().values():
        for label, value, verdict in _wrong_values(key):
            spoil = set_key(key.section, key.name, value)
            yield Case("job keys", f"{key.path} = {label}", spoil, _names_of(key, value), verdict)
    for section in dict.fromkeys(key.section for key in job_keys().values()):
        yield Case("job keys", f"{section} unknown key", set_key(section, "nonsense", 1), (f"{section}.", "nonsense"))
        yield Case("job keys", f"{section} is a number", set_key("", section, 3), (section.split(".")[0],))
        yield Case("job keys", f"{section} is a text", set_key("", section, "x"), (section.split(".")[0],))
    for key in job_keys().values():
        if key.path == "data.resolutions":  # the default is work for minutes
            continue
        spoil = set_key(key.section, key.name)
        yield Case("job keys", f"{key.path} missing", spoil, (key.section, key.name, "data"), "any")


def _names_of(key: Key, value: Any) -> tuple[str, ...]:
    names = key.path, key.name, key.name.removesuffix("s")
    return *names, *([value, Path(value).name or value] if isinstance(value, str) and value else [])


def _wrong_values(key: Key) -> Iterator[tuple[str, Any, Verdict]]:
    kinds = {each for each in key.parts if isinstance(each, type)}
    if get_origin(key.kind) is dict:
        yield from (("a number", 3, "refused"), ("a text", "x", "refused"), ("unknown option", {"x": 1}, "refused"))
        return
    is_list, is_text = get_origin(key.kind) is tuple, str in kinds
    values: list[tuple[str, Any, Verdict]] = [("a date", datetime.date(2026, 1, 1), "refused")]
    values += [("a table", {"a": 1}, "refused"), ("a list of lists", [[[1]]], "refused")]
    if key.choices and not is_text:
        values += [("another word", "nonsense", "refused"), ("an empty list", [], "refused"), ("1.5", 1.5, "any")]
    elif bool in kinds:
        values += [(repr(each), each, "refused") for each in (2, "maybe", 1.5, [], "")]
    elif int in kinds or float in kinds:
        values += _wrong_numbers(key, is_whole=float not in kinds, is_text=is_text)
    elif is_text and not (is_list and not is_text):
        values += [(repr(each), each, "refused") for each in (7, 1.5, True)]
        values += [("empty", "", "any"), ("long", "x" * 5000, "any"), ("odd", "é\n\x07", "any")]
        values += _wrong_paths() if key.is_path else [("elsewhere", "../../etc/passwd", "any")]
    if is_list:
        yield from (("no list", 3, "refused"), ("a text for a list", "x", "refused"), ("no entries", [], "any"))
        yield "10000 entries", [1] * 10_000, "any"
        values = [(f"[{label}]", [value], verdict) for label, value, verdict in values]
    yield from values


def _wrong_numbers(key: Key, *, is_whole: bool, is_text: bool) -> Iterator[tuple[str, Any, Verdict]]:
    yield from ((name, getattr(math, name), "refused") for name in ("inf", "nan"))
    yield from (("-inf", -math.inf, "refused"), ("true", True, "refused"), ("1e308", 1e308, "refused"))
    yield from (("10**30", 10**30, "refused"), ("-10**30", -(10**30), "refused"))
    yield from ((repr(each), each, "refused") for each in ("3", "") if not is_text)
    if is_whole:
        yield "2.5", 2.5, "refused"
    if key.limits:
        yield "below", key.limits.low - 1, "any" if key.limits.or_zero and key.limits.low == 1 else "refused"
        yield "above", key.limits.high * 2 + 1, "refused"
        if key.limits.low > 0 and not key.limits.or_zero:
            yield "0", 0, "refused"
        yield from (("lowest", key.limits.low, "any"), ("1e-320", 1e-320, "any" if key.limits.low <= 0 else "refused"))


def _wrong_paths() -> Iterator[tuple[str, Any, Verdict]]:
    yield from (("NUL", "a\0b", "refused"), ("too long", "x" * 300, "refused"))
    for text in (
        "/nonexistent/xyz", "/dev/zero", "pipe", "loop", "job.toml", "/proc/self/xyz", "~nobody/xyz", " ", "data/",
    ):  # fmt: skip
        yield text, text, "any"


_MISSING = object()


def set_key(section: str, name: str, value: Any = _MISSING) -> Spoil:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / "job.json").read_text())
        keys = _section(values, section)
        if value is _MISSING:
            keys.pop(name, None)
        else:
            make_pipe(folder / "pipe")
            (folder / "loop").symlink_to(folder / "loop")
            keys[name] = copy.deepcopy(value)
        _write_job(folder, values)

    return spoil


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    for part in filter(None, name.split(".")):
        inner = values.setdefault(part, {})
        values = inner[0] if isinstance(inner, list) else inner
    return values


_MINIMAL = '[model]\npath = "model"\n[train]\nsteps = 1\n[output]\nfolder = "run"\n[[data.folders]]\npath = "data"\n'
_JOB_FILES: dict[str, bytes] = {
    "empty": b"", "NUL": b"\0" * 100, "not UTF-8": b"\xff\xfe" + _MINIMAL.encode("utf-16-le"),
    "a key twice": _MINIMAL.encode() + b'path = "x"\npath = "y"\n', "half": _MINIMAL.encode()[:40],
    "a section twice": _MINIMAL.encode() + b"[train]\nsteps = 2\n", "brackets": b"a = " + b"[" * 5_000,
    "dots": b".".join([b"a"] * 5_000) + b" = 1\n", "JSON": b'{"model": {"path": "model"}}',
    "digits": b"[train]\nsteps = " + b"9" * 5_000, "a large date": b"[train]\nsteps = 9999-99-99\n",
    "binary": bytes(range(256)), "20 MB": b"#" * 20_000_000, "only comments": b"# nothing\n",
    "200000 entries": _MINIMAL.encode() + b"[lora]\ntargets = [" + b'"a", ' * 200_000 + b"]\n",
    "100000 sections": b"".join(b"[s%d]\na = 1\n" % number for number in range(100_000)),
    "5000 unknown keys": _MINIMAL.encode() + b"".join(b"k%d = 1\n" % number for number in range(5_000)),
    "a key of 1 MB": _MINIMAL.encode() + b"k" * 1_000_000 + b" = 1\n",
    "odd escapes": _MINIMAL.replace('"run"', '"\\uD800"').encode(),
}  # fmt: skip


def job_file_cases() -> Iterator[Case]:
    for name, data in _JOB_FILES.items():
        yield Case("job files", name, writer("job.toml", data), ("job.toml",))
    for name, spoil in ODD_FILES.items():
        yield Case("job files", name, at("job.toml", spoil), ("job.toml",))


def filler(data: bytes) -> Spoil:
    return lambda path: void(path.write_bytes(data))


def fillers(contents: Mapping[str, bytes]) -> dict[str, Spoil]:
    return {name: filler(data) for name, data in contents.items()}


def writer(name: str, data: bytes) -> Spoil:
    return at(name, filler(data))


def both(first: Callable[[Path], object], then: Spoil) -> Spoil:
    return lambda folder: void((first(folder), then(folder)))


def void(_: object) -> None:
    """For a function that must return nothing."""


def at(name: str, change: Spoil) -> Spoil:
    return lambda folder: change(folder / name)


def _replaced(make: Callable[[Path], object]) -> Spoil:
    def change(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        make(path)

    return change


def cuts(*shares: float, digits: int = 0) -> dict[str, Spoil]:
    def cut(path: Path, share: float) -> None:
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return {f"cut at {share:.{digits}%}": functools.partial(cut, share=share) for share in shares}


ODD_FILES: dict[str, Spoil] = {
    "missing": lambda path: path.unlink(), "a folder": _replaced(lambda path: path.mkdir()),
    "a pipe": _replaced(make_pipe), "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a link to /dev/zero": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": _replaced(lambda path: path.symlink_to("/nowhere/x")),
}  # fmt: skip
NO_OBJECT = fillers({
    "list": b"[]", "null": b"null", "number": b"3", "text": b'"x"', "empty": b"", "not UTF-8": b'{"a": "\xff\xfe"}',
    "deep": b"[" * 100_000, "a name twice": b'{"a": 1, "a": 2}', "NUL": b"\0" * 64,
})  # fmt: skip


_OBEYED = re.compile("[\x00-\x08\x0e-\x1f\x7f\u202e]")  # by a terminal, but for what moves a line of progress


def fault_of(case: Case, code: int, text: str, *, has_same_lora: bool) -> str:
    """What is wrong with how a case ended, in a word or two; "" where it is as it should be."""
    if "Traceback" in text:
        return "traceback"
    if _OBEYED.search(text):
        return "raw"
    if code < 0:
        return "died"
    if code not in (0, 2):
        return "wrong code"
    is_named = any(name in text for name in case.names)
    if code == 0 and (case.verdict == "refused" or case.verdict in ("noticed", "repaired") and not is_named):
        return "silent"
    if code == 2 and not is_named:
        return "unclear"
    return "not repaired" if case.verdict == "repaired" and (code or not has_same_lora) else ""
