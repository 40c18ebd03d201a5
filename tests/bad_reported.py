"""The wrong inputs that once passed in silence, ended with a traceback, or hung; each by name (bad_inputs.py)."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from devicebridge.tests.bad_files import HEADER_DAMAGE, OTHER_TENSORS, header_changer, tensor_changer
from devicebridge.tests.bad_inputs import NO_OBJECT, RESUME, TRAIN, Case, Spoil, Verdict, at, cut, set_key, writer
from devicebridge.tests.bad_runs import NEWEST, cache_files, flipped, of_other_facts

GROUP = "reported"
_TRAINS_NOTHING: tuple[tuple[str, Any], ...] = (
    ("optimizer.learning_rate", math.inf),
    ("optimizer.learning_rate", 1e30),
    ("train.clip_norm", 1e-30),
    ("data.caption_dropout", 1.0),
    ("objective.logit_mean", math.inf),
    ("objective.sigmoid_scale", math.inf),
    ("objective.shift", 1e-300),
    ("evaluation.quantiles", [0.0]),
    ("split.devices", ["cpu:7"]),
    ("optimizer.options", {"maximize": True}),
    ("train.batch_size", 10**9),
    ("train.batch_size", True),
    ("train.steps", "2"),
    ("optimizer.name", ".."),
    ("optimizer.name", "torch.optim.LBFGS"),
    ("optimizer.options", {"capturable": True}),
    ("split.memory_limit_gb", [math.inf]),
    ("cache.text_window_gb", math.inf),
    ("data.max_aspect_ratio", math.inf),
    ("train.steps", 1e30),
    ("data.resolutions", [10**9]),
    ("lora.rank", 100_000),
)
_TRANSFORMER = "model/transformer/diffusion_pytorch_model.safetensors"
_ENCODER = "model/text_encoder/model.safetensors"
_INDEXES = {
    "model/transformer/diffusion_pytorch_model.safetensors.index.json": _TRANSFORMER,
    "model/text_encoder/model.safetensors.index.json": _ENCODER,
}
_MAPS: dict[str, Any] = {
    "a list": [],
    "null": None,
    "a number": 3,
    "an empty object": {},
    "a map that is a list": {"weight_map": []},
    "an empty map": {"weight_map": {}},
    "numbers for files": {"weight_map": {"a": 3}},
    "a file elsewhere": {"weight_map": {"a": "../../data/image_0.png"}},
    "a file that is missing": {"weight_map": {"a": "model-00001.safetensors"}},
}


def reported_cases(trained: Path) -> Iterator[Case]:
    """All of them."""
    yield from _settings()
    yield from _models()
    yield from _runs(trained)


def _settings() -> Iterator[Case]:
    for key, value in _TRAINS_NOTHING:
        names = (key, key.partition(".")[2], str(value), "cpu:7")
        yield Case(GROUP, f"{key} = {value!r}", set_key(*key.split("."), value), names)


def _models() -> Iterator[Case]:
    for name, change in HEADER_DAMAGE.items():
        names = ("model.safetensors", "missing embed_tokens")
        yield Case(GROUP, f"encoder's header: {name}", at(_ENCODER, header_changer(change)), names)
    for name in ("all zeros", "one matrix narrower"):
        spoil = tensor_changer(OTHER_TENSORS[name][0])
        yield Case(GROUP, f"encoder: {name}", at(_ENCODER, spoil), ("text_encoder",))
    yield Case(
        GROUP, "transformer: all zeros", at(_TRANSFORMER, tensor_changer(OTHER_TENSORS["all zeros"][0])), ("zeros",)
    )
    yield Case(
        GROUP,
        "transformer: one name twice",
        at(_TRANSFORMER, header_changer(HEADER_DAMAGE["one name twice"])),
        ("twice",),
    )
    yield Case(GROUP, "encoder cut short", at(_ENCODER, cut(0.9)), ("cut short",))
    yield Case(GROUP, "encoder of another width", _wider_encoder, ("makes text states of width",))
    for index, weights in _INDEXES.items():
        for name, content in _MAPS.items():
            yield Case(GROUP, f"{index} is {name}", _with_index(index, weights, content), (Path(index).parent.name,))
    for part, key in (("transformer", "num_layers"), ("vae", "layers_per_block"), ("text_encoder", "vocab_size")):
        file = f"model/{part}/config.json"
        spoil = at(file, _json_with(lambda values, key=key: values.update({key: 10**15})))  # type: ignore[misc]
        yield Case(GROUP, f"{file}: absurd {key}", spoil, ("no model has more",))
    for file in ("data/image_1.txt", "data/image_1.png", "data/image_0_mask.png"):
        verdict: Verdict = "refused" if file.endswith(".txt") else "noticed"
        yield Case(GROUP, f"{file} is a pipe", at(file, _as_pipe), (Path(file).name,), verdict)


def _wider_encoder(folder: Path) -> None:
    from devicebridge.tests.toy_encoders import save_tiny_text_encoder

    shutil.rmtree(folder / "model" / "text_encoder")
    save_tiny_text_encoder(folder / "model", "mistral3", 32, 31, max_length=77)


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _with_index(index: str, weights: str, content: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / weights).rename(folder / weights.replace(".safetensors", "-1.safetensors"))
        (folder / index).write_text(json.dumps(content))

    return spoil


def _json_with(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(path: Path) -> None:
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return spoil


def _runs(trained: Path) -> Iterator[Case]:
    for file in ("adapter", "optimizer", "random"):
        yield _checkpoint(f"{file}: a bit flipped", f"{file}.safetensors", flipped(-3))
        yield _checkpoint(f"{file}: cut", f"{file}.safetensors", cut(0.9))
        yield _checkpoint(f"{file}: offsets", f"{file}.safetensors", header_changer(HEADER_DAMAGE["offsets moved"]))
    yield _checkpoint("optimizer: emptied", "optimizer.safetensors", tensor_changer(OTHER_TENSORS["nothing"][0]))
    yield _checkpoint(
        "adapter: another shape", "adapter.safetensors", tensor_changer(OTHER_TENSORS["one matrix narrower"][0])
    )
    yield _checkpoint("adapter: NaN", "adapter.safetensors", tensor_changer(OTHER_TENSORS["all NaN"][0]))
    for key, value in (("step", 1), ("losses", [0.0, 0.0]), ("optimizer", {}), ("version", 1), ("config", {})):
        yield _checkpoint(f"state.json: {key} = {value!r}", "state.json", of_other_facts(key, value))
    for name, data in NO_OBJECT.items():
        yield _checkpoint(f"state.json: {name}", "state.json", writer("", data))
    first, second = cache_files(trained)
    for entry, other in ((first, second), (second, first)):
        yield Case(
            GROUP,
            f"cache entry {entry[-20:-12]} is another's",
            _swapped(entry, other),
            (Path(entry).stem,),
            "repaired",
            TRAIN,
            "trained",
        )


def _checkpoint(name: str, file: str, spoil: Spoil) -> Case:
    verdict: Verdict = "repaired"
    return Case(
        GROUP, f"checkpoint: {name}", at(f"{NEWEST}/{file}", spoil), ("step-000002",), verdict, RESUME, "trained"
    )


def _swapped(entry: str, other: str) -> Spoil:
    def spoil(folder: Path) -> None:
        shutil.rmtree(folder / "run")
        shutil.copy(folder / other, folder / entry)

    return spoil
