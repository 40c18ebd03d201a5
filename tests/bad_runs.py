"""Wrong inputs beside the job and its model (bad_inputs.py): images, checkpoints, caches and command lines."""

import json
import shlex
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from devicebridge.tests.bad_files import HEADER_DAMAGE, OTHER_TENSORS, header_changer, tensor_changer
from devicebridge.tests.bad_inputs import (
    NO_OBJECT,
    ODD_FILES,
    RESUME,
    TRAIN,
    Case,
    Spoil,
    Verdict,
    at,
    cut,
    void,
    writer,
)
from PIL import Image


def dataset_cases() -> Iterator[Case]:
    for name, spoil in ODD_FILES.items():
        for file in ("image_1.png", "image_1.txt", "image_0_mask.png"):
            verdict: Verdict = "refused" if file.endswith(".txt") else "noticed"
            if name in ("missing", "a folder", "a link to nothing", "a link to itself"):
                verdict = "any"
            yield Case("datasets", f"{file} {name}", at(f"data/{file}", spoil), (Path(file).stem,), verdict)
    for name, data in _CAPTIONS.items():
        yield Case("datasets", f"caption {name}", writer("data/image_1.txt", data), ("image_1.txt",))
    for file in ("image_1.png", "image_0_mask.png"):
        for name, data in _NO_IMAGES.items():
            yield Case("datasets", f"{file} {name}", writer(f"data/{file}", data), (file,))
        for share in (0.02, 0.3, 0.6):
            yield Case("datasets", f"{file} cut at {share:.0%}", at(f"data/{file}", cut(share)), (file,))
    for size in ((1, 1), (1, 3000), (3000, 1), (7, 5000)):
        yield Case("datasets", f"size {size}", _drawn("image_1.png", "RGB", size), ("image_1.png",), "any")
    mask, tiff = "image_0_mask.png", "image_9.tif"
    yield Case("datasets", "mask of another shape", _drawn(mask, "L", (400, 10), 128), (mask,))
    yield Case("datasets", "black mask", _drawn(mask, "L", (40, 40)), (mask,))
    yield Case(
        "datasets", "empty folder", lambda folder: [each.unlink() for each in (folder / "data").iterdir()] and None,
        ("data",),
    )  # fmt: skip
    for name, spoil in ODD_FILES.items():
        if name != "a folder":
            yield Case("datasets", f"folder {name}", _folder_as(spoil), ("data",))
    yield Case("datasets", "a video for an image", writer("data/image_1.mp4", b"\0" * 100), ("image_1",))
    for name in ("image_9.heic", "image_9.psd", "image_9.caption", "metadata.jsonl", "image_1.json", "image_1.npz"):
        yield Case("datasets", f"{name} beside images", writer(f"data/{name}", b"{}"), (name,), "noticed")
    yield Case("datasets", "sub-folders beside images", _in_sub_folders(is_beside=True), ("10_cat",), "noticed")
    yield Case("datasets", "sub-folders alone", _in_sub_folders(is_beside=False), ("10_cat",))
    copy_mask = at(f"data/{mask}", lambda path: void(shutil.copy(path, path.with_name("image_0-masklabel.png"))))
    yield Case("datasets", "two masks", copy_mask, ("image_0-masklabel.png",))
    yield Case("datasets", "a TIFF of floats", _drawn(tiff, "F"), (tiff,))
    yield Case("datasets", "a TIFF of 32 bits", _drawn(tiff, "I"), (tiff,))
    yield Case("datasets", "a TIFF to be turned", _drawn(tiff, "L", tiffinfo={0x0112: 6}), (tiff,), "any")
    yield Case("datasets", "odd names", _odd_names, ("data",), "any")


def _in_sub_folders(*, is_beside: bool) -> Spoil:
    def spoil(folder: Path) -> None:
        data = folder / "data"
        (data / "10_cat" / "deep").mkdir(parents=True)
        for each in [each for each in data.iterdir() if each.is_file()]:
            shutil.copy(each, data / "10_cat" / "deep") if is_beside else each.rename(data / "10_cat" / each.name)

    return spoil


def _drawn(name: str, mode: str, size: tuple[int, int] = (40, 64), value: int = 0, **options: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        Image.new(mode, size, value).save(folder / "data" / name, **options)

    return spoil


_CAPTIONS = {
    "not UTF-8": b"\xff\xfea", "2 MB": b"x" * 2_000_000, "UTF-16": "picture".encode("utf-16"),
    "cut UTF-8": "é".encode()[:1],
}  # fmt: skip


def _png_header(width: int, height: int, kind: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + bytes(40)


_NO_IMAGES = {
    "empty": b"", "a text": b"no image\n", "zeros": bytes(2000), "giant": _png_header(2**31 - 1, 2**31 - 1),
    "wide": _png_header(2**31 - 1, 1), "no pixels": _png_header(0, 0), "odd kind": _png_header(40, 40, 77),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n",
    "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40"/>', "a web page": b"<!DOCTYPE html>",
    "a giant BMP": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0),
    "a JPEG's start": b"\xff\xd8\xff\xe0" + bytes(40),
    "a giant GIF": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
    "a RIFF": b"RIFF\x10\0\0\0WEBPVP8X" + bytes(20),
}  # fmt: skip


def _folder_as(spoil: Spoil) -> Spoil:
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "data")
        (folder / "data").touch()
        spoil(folder / "data")

    return change


def _odd_names(folder: Path) -> None:
    image = folder / "data" / "image_1.png"
    for name in ("a\nb.png", "é.png", " .png", "-rf.png", "x" * 240 + ".png", ".png", "..png", "%s%n.png", "a*?.png"):
        shutil.copy(image, folder / "data" / name)


_STATE_FILES = ("adapter.safetensors", "optimizer.safetensors", "random.safetensors")
NEWEST = "run/checkpoints/step-000002"


def checkpoint_cases(trained: Path) -> Iterator[Case]:
    for file in _STATE_FILES:
        for name, change in HEADER_DAMAGE.items():
            yield _of_checkpoint(file, name, header_changer(change))
        for share in (0.0, 0.3, 0.999):
            yield _of_checkpoint(file, f"cut at {share:.1%}", cut(share))
        yield _of_checkpoint(file, "a bit flipped", flipped(-3))
        for name in ("nothing", "one matrix narrower", "all NaN") if file.startswith("adapter") else ("nothing",):
            yield _of_checkpoint(file, name, tensor_changer(OTHER_TENSORS[name][0]))
    for file in (*_STATE_FILES, "state.json"):
        for name, spoil in ODD_FILES.items():
            yield _of_checkpoint(file, name, spoil)
    for name, data in NO_OBJECT.items():
        yield _of_checkpoint("state.json", name, lambda path, data=data: void(path.write_bytes(data)))  # type: ignore[misc]
    for key in json.loads((trained / NEWEST / "state.json").read_bytes()):
        for label, value in (("missing", None), ("null", None), ("1", 1), ("-1", -1), ("a list", [1]), ("{}", {})):
            yield _of_checkpoint("state.json", f"{key} {label}", of_other_facts(key, value, label == "missing"))
    yield Case("checkpoints", "of another run", _swap_runs, ("step-000002", "settings"), "noticed", RESUME, "trained")
    yield Case("checkpoints", "all damaged", _spoil_all, ("No checkpoint",), "refused", RESUME, "trained")


def _of_checkpoint(file: str, name: str, spoil: Spoil) -> Case:
    names = ("step-000002",)
    return Case("checkpoints", f"{file} {name}", at(f"{NEWEST}/{file}", spoil), names, "repaired", RESUME, "trained")


def of_other_facts(key: str, value: Any, is_missing: bool = False) -> Spoil:
    def spoil(path: Path) -> None:
        facts = json.loads(path.read_bytes())
        facts[key] = value
        if is_missing:
            del facts[key]
        path.write_text(json.dumps(facts), encoding="utf-8")

    return spoil


def _swap_runs(folder: Path) -> None:
    newest, older = folder / NEWEST, folder / NEWEST.replace("2", "1")
    newest.rename(folder / "aside")
    older.rename(newest)
    (folder / "aside").rename(older)


def _spoil_all(folder: Path) -> None:
    for path in (folder / "run" / "checkpoints").glob("*/adapter.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


def cache_cases(trained: Path) -> Iterator[Case]:
    for file in cache_files(trained):
        for name, change in HEADER_DAMAGE.items():
            yield _of_cache(file, name, header_changer(change))
        for name, spoil in ODD_FILES.items():
            yield _of_cache(file, name, spoil)
        for share in (0.0, 0.1, 0.5, 0.99):
            yield _of_cache(file, f"cut at {share:.0%}", cut(share))
        yield _of_cache(file, "a bit flipped", flipped(-3))
    first, second = cache_files(trained)
    for file, other in ((first, second), (second, first)):
        spoil = lambda path, other=other: void(shutil.copy(path.parents[2] / other, path))  # noqa: E731
        yield _of_cache(file, "another's file", spoil)


def cache_files(trained: Path) -> list[str]:
    found: dict[bool, str] = {}
    for path in sorted((trained / "cache").rglob("*.safetensors")):
        found.setdefault(b"prompt_embeds" in path.read_bytes(), str(path.relative_to(trained)))
    return list(found.values())


def _of_cache(file: str, name: str, spoil: Spoil) -> Case:
    names = (Path(file).stem, *(["saved"] if name in ("missing", "a link to nothing") else []))
    verdict: Verdict = "noticed" if name == "a folder" else "repaired"
    spoil = _without_run(at(file, spoil))
    return Case("caches", f"{file[-20:-12]} {name}", spoil, names, verdict, TRAIN, "trained")


def flipped(place: int, bit: int = 0) -> Spoil:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << bit
        path.write_bytes(data)

    return spoil


def command_cases() -> Iterator[Case]:
    """Arguments that mean nothing. argparse's own refusals have exit code 2 and the word "usage"."""
    for arguments, names in _COMMANDS:
        yield Case("command lines", " ".join(arguments), lambda folder: None, names, "refused", (tuple(arguments),))
    for name, data in {**NO_OBJECT, "empty object": b"{}"}.items():
        spoil = writer("flow.json", data)
        yield Case("command lines", f"workflow {name}", spoil, ("flow.json",), "refused", (("run", "flow.json"),))
    for name, spoil in ODD_FILES.items():
        change = _made("flow.json", spoil)
        yield Case("command lines", f"workflow {name}", change, ("flow.json",), "refused", (("run", "flow.json"),))


def _made(name: str, spoil: Spoil) -> Spoil:
    def change(folder: Path) -> None:
        (folder / name).write_text("{}")
        spoil(folder / name)

    return change


_PLAN = ("plan", "--model", "flux2-dev")
_CARDS = ("", "x", "0GB", "-1GB", "1e30GB", "nanGB", "infGB", "24", "24GB@0", "24GB@-1", "24GB@nan", "@", ",", "0x24GB")
_CARDS += ("99999999x24GB", "24GB,", "24TB@1@1", "2x", "x24GB", "1e-30GB", "24GB@inf", "-3x24GB", "2x24GB@1e400")
# What a refusal names -> the commands, as a shell takes them.
_LINES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("usage",): (
        "nonsense", "train", "train a b", "check job.toml --nonsense", "cache job.toml --only x", "run", "doctor x",
        "-v", "plan --model flux2-dev --cards 24GB --quantize int3", "cache job.toml --verify --prune",
        "run model/tokenizer/tokenizer.json --timeout x",
    ),
    ("cannot be read", "ordinary file"): ("train .", "train ''"),
    ("--model", "job file"): ("plan", "plan --model ''"),
    ("nonsense",): ("plan --model nonsense", "cache job.toml --device nonsense"),
    ("missing.toml",): ("train missing.toml", "plan missing.toml --cards 24GB", "cache job.toml missing.toml"),
    ("/dev/zero",): ("train /dev/zero",), ("x" * 300,): ("train " + "x" * 300,), ("a",): ("train a\udcffb",),
    ("/etc/shadow",): ("check /etc/shadow",),
    ("model_index.json",): ("check model/model_index.json", "run model/model_index.json"),
    ("diffusion_pytorch_model",): ("check model/vae/diffusion_pytorch_model.safetensors",),
    ("--only",): ("cache job.toml --prune --only captions",), ("missing.json",): ("run missing.json",),
    ("job.toml",): ("run job.toml",), ("no workflow",): ("run .",),
    **{(name,): (f"cache job.toml --device {name}",) for name in ("cuda:99", "cpu:7", "meta")},
}  # fmt: skip
_COMMANDS: list[tuple[Sequence[str], tuple[str, ...]]] = [
    *((shlex.split(line), names) for names, lines in _LINES.items() for line in lines),
    *(((*_PLAN, "--cards", cards), ("cards", "GB", "GPU", "card")) for cards in _CARDS),
    *(
        ((*_PLAN, "--cards", "24GB", f"--{what}", number), (what, "usage"))
        for what, numbers in (("resolution", "0 -1 10000000000 x 1.5 nan"), ("frames", "0 -1 10000000000 x 2"))
        for number in numbers.split()
    ),
]


def _without_run(spoil: Spoil) -> Spoil:
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "run")
        spoil(folder)

    return change
