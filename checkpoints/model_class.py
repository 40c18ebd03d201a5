"""A model's class in diffusers: its shapes, its defaults, and how a file's tensors differ."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..families.spec import ModelFamily
from ..system.files import expect
from .header import TensorRecord
from .model_files import first

Shapes = Mapping[str, tuple[int, ...]]
# Ending of a key -> the most it may say; the first that fits counts.
_BOUNDS = (
    (re.compile(r"(layers|layers_per_block|num_res_blocks|depth|num_blocks)$"), 1_000),
    (re.compile(r"seq_len$"), 1_000_000),  # of tables that are computed when the model is made
    (re.compile(r"theta$"), 10**12),  # the period of positions; nothing is as large as it
    (re.compile(r""), 20_000_000),  # dims, words, positions
)
_MOST_VALUES = 10_000  # of a list
_REMEDY = "use the config.json published with the model"
_TAKES_NULL = re.compile(r"\b(None|NoneType|Optional|Any)\b")
_KINDS: dict[Any, Any] = {bool: bool, (int, float): (int, float), str: str, (list, tuple): list}  # True is an int


def transformer_class(family: ModelFamily) -> Any:
    import diffusers

    return getattr(diffusers, family.transformer_class)


def expected_shapes(family: ModelFamily, config: Mapping[str, Any]) -> Shapes:
    return shapes_of_class(family.transformer_class, json.dumps(dict(config), sort_keys=True))


@functools.lru_cache(maxsize=32)
def shapes_of_class(class_name: str, config: str) -> Shapes:
    """Of every tensor of a model of this class of diffusers, with this config as JSON."""
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, class_name).from_config(json.loads(config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def refuse_absurd_sizes(file: Path, config: Mapping[str, Any]) -> None:
    """A damaged or hostile config takes all memory or never ends. Raises: ValueError naming file, key and size."""
    for key, value in _numbers(config):
        most = next(most for ending, most in _BOUNDS if ending.search(key))
        if abs(value) > most:
            raise ValueError(
                f"{file} says {key} = {value}, and no model has more than {most}; download it again, or give another "
                "model"
            )


def _numbers(values: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        yield f"length of {key}", len(values) if len(values) > _MOST_VALUES else 0
        for value in values[:_MOST_VALUES]:
            yield from _numbers(value, key)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield key, values


def refuse_other_kinds(file: Path, class_name: str, config: Mapping[str, Any]) -> None:
    """The class takes a text for a list, and fails in the first step. Raises: ValueError naming file and key."""
    import diffusers

    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    for name in parameters.keys() & config.keys():
        if not _is_declared(config[name], parameters[name]):
            _expect_kind(config[name], parameters[name].default, f"{file}: {name}")


def _is_declared(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value of another kind than the default is legal all the same."""
    if value is None:
        annotation, is_annotated = str(parameter.annotation), parameter.annotation is not parameter.empty
        return not is_annotated or isinstance(parameter.default, (bool, str)) or bool(_TAKES_NULL.search(annotation))
    if isinstance(parameter.default, bool):
        return isinstance(value, (int, float)) and value in (0, 1)
    if not parameter.name.endswith("_size") or isinstance(value, (bool, str)):
        return False
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]  # one number stands for a pair of them
    return all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in numbers)


def _expect_kind(value: Any, default: Any, what: str) -> None:
    kind = next((kinds for given, kinds in _KINDS.items() if isinstance(default, given)), None)
    if kind is None:  # no default, or None, which says nothing
        return
    expect(list(value) if isinstance(value, tuple) else value, kind, what, _REMEDY)
    for each in value if kind is list and default else ():
        _expect_kind(each, default[0], f"an entry of {what}")


def differences(expected: Shapes, tensors: Mapping[str, TensorRecord]) -> dict[str, list[str]]:
    """What keeps these tensors from being exactly the model's, by kind; {} if nothing does."""
    found = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "mismatched": [
            f"{name} is {list(tensors[name].shape)} and should be {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }
    return {kind: names for kind, names in found.items() if names}


def described(found: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{len(names)} {kind}: {first(names)}" for kind, names in found.items())


def with_defaults(family: ModelFamily, config: Mapping[str, Any]) -> dict[str, str]:
    """Every argument of the class as text, lists and tuples alike."""
    parameters = inspect.signature(transformer_class(family).__init__).parameters.values()
    return {p.name: json.dumps(config.get(p.name, p.default)) for p in parameters if p.default is not p.empty}
