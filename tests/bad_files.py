"""Wrong files of a model (bad_inputs.py says what a case is): JSON and weights, damaged or of something else."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from devicebridge.tests.bad_inputs import NO_OBJECT, ODD_FILES, Case, Spoil, Verdict, at, cut, void, writer
from devicebridge.tests.toy_encoders import save_tiny_text_encoder
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
    for part, key in (("transformer", "num_layers"), ("vae", "layers_per_block"), ("text_encoder", "vocab_size")):
        file = f"model/{part}/config.json"
        yield Case("JSON files", f"{file}: absurd {key}", _json_changer(file, key, 10**15), ("no model has more",))


_REMOVED = object()


def _json_changer(file: str, key: str, value: Any = _REMOVED) -> Spoil:
    def spoil(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        values.pop(key, None)
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
    for file in WEIGHT_FILES:
        names = (Path(file).parent.name, Path(file).name, "/model ")
        for name, change in HEADER_DAMAGE.items():
            yield Case("weight files", f"{file} {name}", at(file, header_changer(change)), names)
        for name, data in _OTHER_FILES.items():
            yield Case("weight files", f"{file} {name}", writer(file, data), names)
        for name, spoil in ODD_FILES.items():
            yield Case("weight files", f"{file} {name}", at(file, spoil), names)
        for share in (0.0001, 0.01, 0.5, 0.999):
            yield Case("weight files", f"{file} cut at {share:.2%}", at(file, cut(share)), names)
        for name, (tensors, verdict) in OTHER_TENSORS.items():
            verdict = "any" if name == "one more" and "transformer" not in file else verdict
            yield Case("weight files", f"{file} {name}", at(file, tensor_changer(tensors)), (*names, "finite"), verdict)
    for index, weights in _INDEXES.items():
        for name, content in _MAPS.items():
            yield Case(
                "weight files", f"{index} is {name}", _with_index(index, weights, content), (Path(index).parent.name,)
            )
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


_OTHER_FILES: dict[str, bytes] = {
    "empty": b"", "one byte": b"\x08", "zeros": bytes(4096), "ones": b"\xff" * 4096, "a pickle": b"\x80\x02}q\x00.",
    "a zip": b"PK\x03\x04" + bytes(100), "a GGUF": b"GGUF" + bytes(100), "a web page": b"<!DOCTYPE html><html></html>",
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "an empty object": (2).to_bytes(8, "little") + b"{}", "a huge header": (2**62).to_bytes(8, "little") + b"{}",
}  # fmt: skip


def _empty_tensors(count: int) -> bytes:
    entry = '"%d.w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    text = ("{" + ", ".join(entry % number for number in range(count)) + "}").encode()
    return len(text).to_bytes(8, "little") + text


_OTHER_FILES |= {"40000 empty tensors": _empty_tensors(40_000), "a million empty tensors": _empty_tensors(1_000_000)}
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


HEADER_DAMAGE: dict[str, Callable[[Header], object]] = {
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
