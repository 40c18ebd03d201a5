"""Wrong files of a model, images, checkpoints and caches, and command lines (bad_inputs.py says what a case is)."""

import json
import math
import shlex
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from devicebridge.tests.bad_inputs import (
    NO_OBJECT,
    ODD_FILES,
    RESUME,
    TRAIN,
    Case,
    Spoil,
    Verdict,
    at,
    both,
    cuts,
    filler,
    fillers,
    void,
    writer,
)
from devicebridge.tests.toy_encoders import save_tiny_text_encoder
from PIL import Image
from safetensors.torch import load_file, save_file

JSON_FILES = (
    "model/model_index.json", "model/transformer/config.json", "model/vae/config.json",
    "model/text_encoder/config.json", "model/tokenizer/tokenizer.json", "model/tokenizer/tokenizer_config.json",
)  # fmt: skip
_WRONG_INSIDE = (None, "x", -1, [], {}, 10**30, 1.5, True)


def json_cases(base: Path) -> Iterator[Case]:
    for file in JSON_FILES:
        names = (Path(file).parent.name, Path(file).name)
        text = (base / file).read_bytes()
        whole: Verdict = "any" if "tokenizer_config" in file or "model_index" in file else "refused"
        for name, spoil in (NO_OBJECT | cuts(0.3, 0.7, 0.99)).items():
            yield Case("JSON files", f"{file} {name}", at(file, spoil), names, whole)
        for name, spoil in ODD_FILES.items():
            yield Case("JSON files", f"{file} {name}", at(file, spoil), (*names, "model"), "any")
        for number, (key, value) in enumerate(json.loads(text).items()):
            yield Case("JSON files", f"{file} without {key}", at(file, of_value(key)), ("model", *names), "any")
            kinds = _WRONG_INSIDE[number % 2 :: 2]
            for wrong in [each for each in kinds if type(each) is not type(value)]:
                label = f"{file} {key} = {wrong!r}"
                yield Case("JSON files", label, at(file, of_value(key, wrong)), ("model", *names), "any")
    for part, key in (("transformer", "num_layers"), ("vae", "layers_per_block"), ("text_encoder", "vocab_size")):
        file = f"model/{part}/config.json"
        yield Case("JSON files", f"{file}: absurd {key}", at(file, of_value(key, 10**15)), ("no model has more",))


_REMOVED = object()


def of_value(key: str, value: Any = _REMOVED) -> Spoil:
    def spoil(path: Path) -> None:
        values = {**json.loads(path.read_bytes()), key: value}
        if value is _REMOVED:
            del values[key]
        path.write_text(json.dumps(values), encoding="utf-8")

    return spoil


WEIGHT_FILES = (
    "model/transformer/diffusion_pytorch_model.safetensors",
    "model/vae/diffusion_pytorch_model.safetensors",
    "model/text_encoder/model.safetensors",
)


def weight_cases() -> Iterator[Case]:
    for file in WEIGHT_FILES:
        names = (Path(file).parent.name, Path(file).name, "/model ")
        damage = HEADER_DAMAGE | _OTHER_FILES | ODD_FILES | cuts(0.0001, 0.01, 0.5, 0.999, digits=2)
        for name, spoil in damage.items():
            yield Case("weight files", f"{file} {name}", at(file, spoil), names)
        for name, (tensors, verdict) in OTHER_TENSORS.items():
            verdict = "any" if name == "one more" and "transformer" not in file else verdict
            yield Case("weight files", f"{file} {name}", at(file, tensor_changer(tensors)), (*names, "finite"), verdict)
    for index, weights in _INDEXES.items():
        for name, content in _MAPS.items():
            spoil, names = _with_index(index, weights, content), (Path(index).parent.name,)
            yield Case("weight files", f"{index} is {name}", spoil, names)
    yield Case("weight files", "encoder of another width", _wider_encoder, ("makes text states of width",))


_INDEXES = {
    "model/transformer/diffusion_pytorch_model.safetensors.index.json": WEIGHT_FILES[0],
    "model/text_encoder/model.safetensors.index.json": WEIGHT_FILES[2],
}
_MAPS: dict[str, Any] = {
    "a list": [], "null": None, "a number": 3, "an empty object": {}, "a map that is a list": {"weight_map": []},
    "an empty map": {"weight_map": {}}, "numbers for files": {"weight_map": {"a": 3}},
    "a file elsewhere": {"weight_map": {"a": "../../data/image_0.png"}},
    "a file that is missing": {"weight_map": {"a": "model-00001.safetensors"}},
}  # fmt: skip


def _with_index(index: str, weights: str, content: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / weights).rename(folder / weights.replace(".safetensors", "-1.safetensors"))
        (folder / index).write_text(json.dumps(content))

    return spoil


def _wider_encoder(folder: Path) -> None:
    shutil.rmtree(folder / "model" / "text_encoder")
    save_tiny_text_encoder(folder / "model", "mistral3", 32, 31, max_length=77)


_OTHER_BYTES: dict[str, bytes] = {
    "empty": b"", "one byte": b"\x08", "zeros": bytes(4096), "ones": b"\xff" * 4096, "a pickle": b"\x80\x02}q\x00.",
    "a zip": b"PK\x03\x04" + bytes(100), "a GGUF": b"GGUF" + bytes(100), "a web page": b"<!DOCTYPE html><html></html>",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "an empty object": (2).to_bytes(8, "little") + b"{}", "a huge header": (2**62).to_bytes(8, "little") + b"{}",
}  # fmt: skip


def _empty_tensors(count: int) -> bytes:
    entry = '"%d.w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    text = ("{" + ", ".join(entry % number for number in range(count)) + "}").encode()
    return len(text).to_bytes(8, "little") + text


_OTHER_BYTES |= {"40000 empty tensors": _empty_tensors(40_000), "a million empty tensors": _empty_tensors(1_000_000)}
_OTHER_FILES = fillers(_OTHER_BYTES)
Header = dict[str, Any]


def _names(header: Header) -> list[str]:
    return sorted(name for name in header if name != "__metadata__")


def _first_entry(header: Header) -> dict[str, Any]:
    """Of a matrix where there is one: statistics have other types and no shape."""
    names = _names(header)
    return next((header[name] for name in names if header[name]["shape"][1:]), header[names[0]])


def _set(name: str, value: Any) -> Callable[[Header], object]:
    return lambda header: _first_entry(header).update({name: value})


def _shift(by: int) -> Callable[[Header], object]:
    def change(header: Header) -> None:
        entry = _first_entry(header)
        entry["data_offsets"] = [each + by for each in entry["data_offsets"]]

    return change


_HEADER_CHANGES: dict[str, Callable[[Header], object]] = {
    "unknown type": _set("dtype", "F99"), "type is a number": _set("dtype", 3), "other type": _set("dtype", "I64"),
    "no shape": lambda header: _first_entry(header).pop("shape"), "shape is a text": _set("shape", "2"),
    "negative shape": _set("shape", [-1, 2]), "huge shape": _set("shape", [2**62, 2**62]),
    "float shape": _set("shape", [2.0, 2.0]), "no offsets": lambda header: _first_entry(header).pop("data_offsets"),
    "one offset": _set("data_offsets", [0]), "offsets backwards": _set("data_offsets", [8, 0]),
    "negative offsets": _set("data_offsets", [-8, 0]), "offsets far outside": _set("data_offsets", [2**60, 2**60 + 4]),
    "offsets moved": _shift(4), "entry is a list": lambda header: header.update({min(header): []}),
    "entry is null": lambda header: header.update({max(header): None}),
    "metadata is a list": lambda header: header.update({"__metadata__": []}) or header.update({"__metadata__": [1]}),
    "metadata of numbers": lambda header: header.update({"__metadata__": {"a": 1}}),
    "one entry less": lambda header: header.pop(max(name for name in header if name != "__metadata__")),
    "a name that a terminal obeys": lambda header: header.update({"\x1b[31m": header.pop(_names(header)[0])}),
    "one name twice": lambda header: header.update({"twice": True}),
}  # fmt: skip


def header_changer(change: Callable[[Header], object]) -> Spoil:
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


HEADER_DAMAGE = {name: header_changer(change) for name, change in _HEADER_CHANGES.items()}


def tensor_changer(change: Callable[[dict[str, Any]], None]) -> Spoil:
    def spoil(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def _matrix(tensors: Mapping[str, Any]) -> str:
    """The last one that is read; an encoder's tower for pictures is not."""
    unread = ("vision", "projector", "lm_head")
    return sorted(n for n, tensor in tensors.items() if tensor.ndim > 1 and not any(each in n for each in unread))[-1]


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


OTHER_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], None], Verdict]] = {
    "all zeros": (_filled(0.0), "refused"), "all NaN": (_filled(math.nan), "refused"),
    "all inf": (_filled(math.inf), "refused"), "one matrix flat": (_flat, "refused"),
    "one matrix narrower": (_narrow, "refused"),
    "one matrix missing": (lambda tensors: void(tensors.pop(_matrix(tensors))), "refused"),
    "one more": (lambda tensors: tensors.update(nonsense=tensors[_matrix(tensors)].clone()), "refused"),
    "nothing": (lambda tensors: tensors.clear(), "refused"),
}  # fmt: skip


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
        for name, spoil in (_NO_IMAGES | cuts(0.02, 0.3, 0.6)).items():
            yield Case("datasets", f"{file} {name}", at(f"data/{file}", spoil), (file,))
    for size in ((1, 1), (1, 3000), (3000, 1), (7, 5000)):
        yield Case("datasets", f"size {size}", _drawn("image_1.png", "RGB", size), ("image_1.png",), "any")
    mask, tiff = "image_0_mask.png", "image_9.tif"
    yield Case("datasets", "mask of another shape", _drawn(mask, "L", (400, 10), 128), (mask,))
    yield Case("datasets", "black mask", _drawn(mask, "L", (40, 40)), (mask,))
    empty = at("data", lambda data: void([each.unlink() for each in data.iterdir()]))
    yield Case("datasets", "empty folder", empty, ("data",))
    for name, spoil in ODD_FILES.items():
        if name != "a folder":
            change = both(at("data", shutil.rmtree), both(writer("data", b""), at("data", spoil)))
            yield Case("datasets", f"folder {name}", change, ("data",))
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


_NO_IMAGES = fillers({
    "empty": b"", "a text": b"no image\n", "zeros": bytes(2000), "giant": _png_header(2**31 - 1, 2**31 - 1),
    "wide": _png_header(2**31 - 1, 1), "no pixels": _png_header(0, 0), "odd kind": _png_header(40, 40, 77),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n",
    "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40"/>', "a web page": b"<!DOCTYPE html>",
    "a giant BMP": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 2**30, 2**30, 1, 24, 0, 0, 0, 0, 0, 0),
    "a JPEG's start": b"\xff\xd8\xff\xe0" + bytes(40),
    "a giant GIF": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
    "a RIFF": b"RIFF\x10\0\0\0WEBPVP8X" + bytes(20),
})  # fmt: skip


def _odd_names(folder: Path) -> None:
    image = folder / "data" / "image_1.png"
    for name in ("a\nb.png", "é.png", " .png", "-rf.png", "x" * 240 + ".png", ".png", "..png", "%s%n.png", "a*?.png"):
        shutil.copy(image, folder / "data" / name)


_STATE_FILES = ("adapter.safetensors", "optimizer.safetensors", "random.safetensors")
NEWEST = "run/checkpoints/step-000002"


def checkpoint_cases(trained: Path) -> Iterator[Case]:
    for file in _STATE_FILES:
        damage = HEADER_DAMAGE | cuts(0.0, 0.3, 0.999, digits=1) | {"a bit flipped": flipped(-3)}
        others = ("nothing", "one matrix narrower", "all NaN") if file.startswith("adapter") else ("nothing",)
        damage |= {name: tensor_changer(OTHER_TENSORS[name][0]) for name in others}
        yield from (_of_checkpoint(file, name, spoil) for name, spoil in damage.items())
    for file in (*_STATE_FILES, "state.json"):
        yield from (_of_checkpoint(file, name, spoil) for name, spoil in ODD_FILES.items())
    yield from (_of_checkpoint("state.json", name, spoil) for name, spoil in NO_OBJECT.items())
    wrong = {"missing": _REMOVED, "null": None, "1": 1, "-1": -1, "a list": [1], "{}": {}}
    for key in json.loads((trained / NEWEST / "state.json").read_bytes()):
        for label, value in wrong.items():
            yield _of_checkpoint("state.json", f"{key} {label}", of_value(key, value))
    yield Case("checkpoints", "of another run", _swap_runs, ("step-000002", "settings"), "noticed", RESUME, "trained")
    yield Case("checkpoints", "all damaged", _spoil_all, ("No checkpoint",), "refused", RESUME, "trained")


def _of_checkpoint(file: str, name: str, spoil: Spoil) -> Case:
    names = ("step-000002",)
    return Case("checkpoints", f"{file} {name}", at(f"{NEWEST}/{file}", spoil), names, "repaired", RESUME, "trained")


def _swap_runs(folder: Path) -> None:
    newest, older = folder / NEWEST, folder / NEWEST.replace("2", "1")
    newest.rename(folder / "aside")
    older.rename(newest)
    (folder / "aside").rename(older)


def _spoil_all(folder: Path) -> None:
    for path in (folder / "run" / "checkpoints").glob("*/adapter.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])


def cache_cases(trained: Path) -> Iterator[Case]:
    damage = HEADER_DAMAGE | ODD_FILES | cuts(0.0, 0.1, 0.5, 0.99) | {"a bit flipped": flipped(-3)}
    for file in cache_files(trained):
        yield from (_of_cache(file, name, spoil) for name, spoil in damage.items())
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
    change = both(at("run", shutil.rmtree), at(file, spoil))
    return Case("caches", f"{file[-20:-12]} {name}", change, names, verdict, TRAIN, "trained")


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
    for name, spoil in {**NO_OBJECT, "empty object": filler(b"{}"), **ODD_FILES}.items():
        change = both(writer("flow.json", b"{}"), at("flow.json", spoil))
        yield Case("command lines", f"workflow {name}", change, ("flow.json",), "refused", (("run", "flow.json"),))


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
