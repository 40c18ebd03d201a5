"""From one of ComfyUI's own model classes to its row."""

from __future__ import annotations

import dataclasses
import types

from ..token_plan import TokenPlan
from .audio import AUDIO_MODELS
from .image import IMAGE_MODELS
from .native import NativeModel
from .video import VIDEO_MODELS

NATIVE_MODELS = (*IMAGE_MODELS, *VIDEO_MODELS, *AUDIO_MODELS)

_BY_CLASS = {row.path: row for row in NATIVE_MODELS}
_METHODS = (types.FunctionType, staticmethod, classmethod, property)


def path_of(model_class: type) -> str:
    return f"{model_class.__module__}.{model_class.__name__}"


def find_native(model_class: type) -> NativeModel | None:
    """The row of this class or of the nearest class it is derived from; None if there is none. A class that replaces a
    method may do anything between two blocks, so it relays; new methods and a new __init__ change nothing there."""
    for depth, base in enumerate(model_class.__mro__):
        row = _BY_CLASS.get(path_of(base))
        if row is None:
            continue
        derived = [vars(cls).items() for cls in model_class.__mro__[:depth]]
        methods = {name for own in derived for name, value in own if isinstance(value, _METHODS)}
        behaviour = {name for name in methods if name == "__call__" or not name.startswith("__")}
        replaced = sorted(name for name in behaviour if _is_described(name, base))
        if not replaced:
            return row
        return dataclasses.replace(
            row,
            path=path_of(model_class),
            transport="relay",
            tensor=(),
            tokens=TokenPlan({}),
            no_tokens="",
            is_derived=True,
            note=f"derived from {row.class_name} with a {', '.join(replaced)} of its own",
        )
    return None


def _is_described(name: str, base: type) -> bool:
    """Whether base has this method from code of the model; what it has from torch is loading and moving of weights."""
    owner = next((cls for cls in base.__mro__ if name in vars(cls)), None)
    return owner is not None and (not owner.__module__.startswith("torch.") or name in {"forward", "__call__"})
