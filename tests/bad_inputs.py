"""Inputs that are wrong, each a small change to a job that works, and what must become of it.

A case changes a copy of a tiny job's folder: its job file, its model, its images, its checkpoints, its cache. Verdicts:

    refused    exit code 2 and a message that names one of `names`
    noticed    refused, or repaired: then the output names one of `names` all the same
    repaired   noticed, and the LoRA is byte-equal to that of the job that nobody changed
    any        whatever it means to the model; but where it is refused the message names one of `names`

No case may end with a traceback, by a signal, or late. scripts/bad_inputs.py runs all of them through the real command;
tests/unit/cli/test_bad_inputs.py a fixed part. Cases of job keys are made of what the config says of each key, so a new
key has them at once.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from devicebridge.config.job import job_keys, job_to_dict
from devicebridge.config.setting import Key
from devicebridge.tests.tiny_pipeline import make_tiny_job

Verdict = Literal["refused", "noticed", "repaired", "any"]
Spoil = Callable[[Path], None]
LORA = Path("run") / "lora.safetensors"
TRAIN = (("train", "job.toml"),)
RESUME = (("train", "job.toml", "--resume"),)
_STEPS = 2


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


# --- the folders that are copied -------------------------------------------------------------------------------------


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


def make_copy(base: Path, target: Path) -> Path:
    """A copy that a case may change. The files are its own."""
    shutil.copytree(base, target, symlinks=True)
    return target


def _write_job(folder: Path, values: Mapping[str, Any]) -> None:
    import tomlkit

    plain = {name: {key: each for key, each in section.items() if each is not None} for name, section in values.items()}
    (folder / "job.toml").write_text(tomlkit.dumps(plain), encoding="utf-8")


def _read_values(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "job.json").read_text())


# --- job keys --------------------------------------------------------------------------------------------------------


def job_key_cases() -> Iterator[Case]:
    """Every key of the job file with values of every wrong kind, and beyond its range."""
    for key in job_keys().values():
        for label, value, verdict in _wrong_values(key):
            yield Case("job keys", f"{key.path} = {label}", _setter(key, value), _names_of(key, value), verdict)
    for section in dict.fromkeys(key.section for key in job_keys().values()):
        yield Case(
            "job keys", f"{section} unknown key", _setter_at(section, "nonsense", 1), (f"{section}.", "nonsense")
        )
        yield Case("job keys", f"{section} is a number", _setter_at("", section, 3), (section.split(".")[0],))
        yield Case("job keys", f"{section} is a text", _setter_at("", section, "x"), (section.split(".")[0],))
    for key in job_keys().values():
        yield Case("job keys", f"{key.path} missing", _remover(key), (key.section, key.name, "data"), "any")


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
        yield ("10000 entries", [1] * 10_000, "refused")
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
        yield from (("lowest", key.limits.low, "any"), ("1e-320", 1e-320, "any" if key.limits.low == 0 else "refused"))


def _wrong_paths() -> Iterator[tuple[str, Any, Verdict]]:
    yield from (("NUL", "a\0b", "refused"), ("too long", "x" * 300, "refused"))
    for text in (
        "/nonexistent/xyz",
        "/dev/zero",
        "pipe",
        "loop",
        "job.toml",
        "/proc/self/xyz",
        "~nobody/xyz",
        " ",
        "data/",
    ):
        yield text, text, "any"


def _setter(key: Key, value: Any) -> Spoil:
    return _setter_at(key.section, key.name, value)


def _setter_at(section: str, name: str, value: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        values = _read_values(folder)
        _add_odd_files(folder)
        _section(values, section)[name] = copy.deepcopy(value)
        _write_job(folder, values) if all(isinstance(each, dict) for each in values.values()) else _dump(folder, values)

    return spoil


def _dump(folder: Path, values: Mapping[str, Any]) -> None:
    """Sections that are none come first in TOML, else they would be keys of the section before."""
    import tomlkit

    ordered = dict(sorted(values.items(), key=lambda item: isinstance(item[1], dict)))
    plain = {
        name: {key: each for key, each in section.items() if each is not None} if isinstance(section, dict) else section
        for name, section in ordered.items()
    }
    (folder / "job.toml").write_text(tomlkit.dumps(plain), encoding="utf-8")


def _add_odd_files(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")


def _remover(key: Key) -> Spoil:
    def spoil(folder: Path) -> None:
        values = _read_values(folder)
        _section(values, key.section).pop(key.name, None)
        _write_job(folder, values)

    return spoil


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    for part in filter(None, name.split(".")):
        inner = values.setdefault(part, {})
        values = inner[0] if isinstance(inner, list) else inner
    return values


_MINIMAL = '[model]\npath = "model"\n[train]\nsteps = 1\n[output]\nfolder = "run"\n[[data.folders]]\npath = "data"\n'
_JOB_FILES: dict[str, tuple[bytes, Verdict]] = {
    "empty": (b"", "refused"),
    "NUL": (b"\0" * 100, "refused"),
    "not UTF-8": (b"\xff\xfe" + _MINIMAL.encode("utf-16-le"), "refused"),
    "a key twice": (_MINIMAL.encode() + b'path = "x"\npath = "y"\n', "refused"),
    "a section twice": (_MINIMAL.encode() + b"[train]\nsteps = 2\n", "refused"),
    "half": (_MINIMAL.encode()[:40], "refused"),
    "brackets": (b"a = " + b"[" * 5_000, "refused"),
    "dots": (b".".join([b"a"] * 5_000) + b" = 1\n", "refused"),
    "JSON": (b'{"model": {"path": "model"}}', "refused"),
    "digits": (b"[train]\nsteps = " + b"9" * 5_000, "refused"),
    "a large date": (b"[train]\nsteps = 9999-99-99\n", "refused"),
    "binary": (bytes(range(256)), "refused"),
    "20 MB": (b"#" * 20_000_000, "refused"),
    "only comments": (b"# nothing\n", "refused"),
    "odd escapes": (_MINIMAL.replace('"run"', '"\\uD800"').encode(), "refused"),
}


def job_file_cases() -> Iterator[Case]:
    """Files that are no job."""
    for name, (data, verdict) in _JOB_FILES.items():
        yield Case("job files", name, writer("job.toml", data), ("job.toml",), verdict)
    for name, spoil in ODD_FILES.items():
        yield Case("job files", name, at("job.toml", spoil), ("job.toml",))


# --- files that are damaged ------------------------------------------------------------------------------------------


def writer(name: str, data: bytes) -> Spoil:
    return lambda folder: void((folder / name).write_bytes(data))


def void(_: object) -> None:
    """For a function that must return nothing."""


def at(name: str, change: Spoil) -> Spoil:
    return lambda folder: change(folder / name)


def _replaced(make: Callable[[Path], object]) -> Spoil:
    def change(path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        make(path)

    return change


def cut(share: float) -> Spoil:
    return lambda path: void(path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)]))


ODD_FILES: dict[str, Spoil] = {
    "missing": lambda path: path.unlink(),
    "a folder": _replaced(lambda path: path.mkdir()),
    "a pipe": _replaced(os.mkfifo),
    "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a link to /dev/zero": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to nothing": _replaced(lambda path: path.symlink_to("/nowhere/x")),
}
NO_OBJECT: dict[str, bytes] = {
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "text": b'"x"',
    "empty": b"",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "deep": b"[" * 100_000,
    "a name twice": b'{"a": 1, "a": 2}',
    "NUL": b"\0" * 64,
}
JSON_FILES = (
    "model/model_index.json",
    "model/transformer/config.json",
    "model/vae/config.json",
    "model/text_encoder/config.json",
    "model/tokenizer/tokenizer.json",
    "model/tokenizer/tokenizer_config.json",
)
_WRONG_INSIDE = (None, "x", -1, [], {}, 10**30, 1.5, True)


def json_cases(base: Path) -> Iterator[Case]:
    """Every JSON file of a model folder: no JSON, no object, and each key missing or of another kind."""
    for file in JSON_FILES:
        names = (Path(file).parent.name, Path(file).name)
        text = (base / file).read_bytes()
        whole: Verdict = "any" if "tokenizer_config" in file or "model_index" in file else "refused"
        for name, data in NO_OBJECT.items():
            yield Case("JSON files", f"{file} {name}", writer(file, data), names, whole)
        for share in (0.3, 0.7, 0.99):
            yield Case("JSON files", f"{file} cut at {share:.0%}", at(file, cut(share)), names, whole)
        for name, spoil in ODD_FILES.items():
            yield Case("JSON files", f"{file} {name}", at(file, spoil), (*names, "model"), "any")
        for number, (key, value) in enumerate(json.loads(text).items()):
            yield Case("JSON files", f"{file} without {key}", _json_changer(file, key), ("model", *names), "any")
            kinds = _WRONG_INSIDE[number % 2 :: 2]
            for wrong in [each for each in kinds if type(each) is not type(value)]:
                label = f"{file} {key} = {wrong!r}"
                yield Case("JSON files", label, _json_changer(file, key, wrong), ("model", *names), "any")


_REMOVED = object()


def _json_changer(file: str, key: str, value: Any = _REMOVED) -> Spoil:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        del values[key]
        if value is not _REMOVED:
            values[key] = value
        (folder / file).write_text(json.dumps(values))

    return spoil


WEIGHT_FILES = (
    "model/transformer/diffusion_pytorch_model.safetensors",
    "model/vae/diffusion_pytorch_model.safetensors",
    "model/text_encoder/model.safetensors",
)


def weight_cases() -> Iterator[Case]:
    """Every file of weights: damaged headers, cut files, other tensors than the config says."""
    for file in WEIGHT_FILES:
        names = (Path(file).parent.name, Path(file).name)
        for name, change in HEADER_DAMAGE.items():
            yield Case("weight files", f"{file} {name}", at(file, header_changer(change)), names)
        for name, data in _OTHER_FILES.items():
            yield Case("weight files", f"{file} {name}", writer(file, data), names)
        for name, spoil in ODD_FILES.items():
            yield Case("weight files", f"{file} {name}", at(file, spoil), names)
        for share in (0.0001, 0.01, 0.5, 0.999):
            yield Case("weight files", f"{file} cut at {share:.2%}", at(file, cut(share)), names)
        for name, (tensors, verdict) in _OTHER_TENSORS.items():
            verdict = "any" if name == "one more" and "transformer" not in file else verdict
            yield Case(
                "weight files", f"{file} {name}", at(file, _tensor_changer(tensors)), (*names, "finite"), verdict
            )


_OTHER_FILES: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"\x08",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a pickle": b"\x80\x02}q\x00.",
    "a zip": b"PK\x03\x04" + bytes(100),
    "a GGUF": b"GGUF" + bytes(100),
    "a web page": b"<!DOCTYPE html><html></html>",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "an empty object": (2).to_bytes(8, "little") + b"{}",
    "a huge header": (2**62).to_bytes(8, "little") + b"{}",
}
Header = dict[str, Any]


def _first_entry(header: Header) -> dict[str, Any]:
    return header[min(name for name in header if name != "__metadata__")]


def _set(name: str, value: Any) -> Callable[[Header], object]:
    return lambda header: _first_entry(header).update({name: value})


def _shift(by: int) -> Callable[[Header], object]:
    def change(header: Header) -> None:
        entry = _first_entry(header)
        entry["data_offsets"] = [each + by for each in entry["data_offsets"]]

    return change


HEADER_DAMAGE: dict[str, Callable[[Header], object]] = {
    "unknown type": _set("dtype", "F99"),
    "type is a number": _set("dtype", 3),
    "other type": _set("dtype", "I64"),
    "no shape": lambda header: _first_entry(header).pop("shape"),
    "shape is a text": _set("shape", "2"),
    "negative shape": _set("shape", [-1, 2]),
    "huge shape": _set("shape", [2**62, 2**62]),
    "float shape": _set("shape", [2.0, 2.0]),
    "no offsets": lambda header: _first_entry(header).pop("data_offsets"),
    "one offset": _set("data_offsets", [0]),
    "offsets backwards": _set("data_offsets", [8, 0]),
    "negative offsets": _set("data_offsets", [-8, 0]),
    "offsets far outside": _set("data_offsets", [2**60, 2**60 + 4]),
    "offsets moved": _shift(4),
    "entry is a list": lambda header: header.update({min(header): []}),
    "entry is null": lambda header: header.update({max(header): None}),
    "metadata is a list": lambda header: header.update({"__metadata__": []}) or header.update({"__metadata__": [1]}),
    "metadata of numbers": lambda header: header.update({"__metadata__": {"a": 1}}),
    "one entry less": lambda header: header.pop(max(name for name in header if name != "__metadata__")),
    "one name twice": lambda header: header.update({"twice": True}),
}


def header_changer(change: Callable[[Header], object]) -> Spoil:
    """Rewrites the header of a safetensors file; "twice" says its first entry a second time."""

    def spoil(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        twice = header.pop("twice", False)
        text = json.dumps(header)
        if twice:
            name = min(each for each in header if each != "__metadata__")
            text = f"{text[:-1]}, {json.dumps(name)}: {json.dumps(header[name])}}}"
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length :])

    return spoil


def _tensor_changer(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def _matrix(tensors: Mapping[str, Any]) -> str:
    return sorted(name for name, tensor in tensors.items() if tensor.ndim > 1 and "vision" not in name)[-1]


def _flat(tensors: dict[str, Any]) -> None:
    tensors[_matrix(tensors)] = tensors[_matrix(tensors)].reshape(-1)


def _narrow(tensors: dict[str, Any]) -> None:
    tensors[_matrix(tensors)] = tensors[_matrix(tensors)][:, :-1].contiguous()


def _filled(value: float) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(value)

    return change


_OTHER_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], None], Verdict]] = {
    "all zeros": (_filled(0.0), "refused"),
    "all NaN": (_filled(math.nan), "refused"),
    "all inf": (_filled(math.inf), "refused"),
    "one matrix flat": (_flat, "refused"),
    "one matrix narrower": (_narrow, "refused"),
    "one matrix missing": (lambda tensors: void(tensors.pop(_matrix(tensors))), "refused"),
    "one more": (lambda tensors: tensors.update(nonsense=tensors[_matrix(tensors)].clone()), "refused"),
    "nothing": (lambda tensors: tensors.clear(), "refused"),
}


# --- verdicts --------------------------------------------------------------------------------------------------------


def fault_of(case: Case, code: int, text: str, *, has_same_lora: bool) -> str:
    """What is wrong with how a case ended, in a word or two; "" where it is as it should be."""
    if "Traceback" in text:
        return "traceback"
    if code < 0:
        return "died"
    if code not in (0, 2):
        return "wrong code"
    is_named = any(name in text for name in case.names)
    if code == 0 and (case.verdict == "refused" or case.verdict in ("noticed", "repaired") and not is_named):
        return "silent"
    if code == 2 and not is_named:
        return "unclear"
    return "not repaired" if case.verdict == "repaired" and not has_same_lora else ""
