"""Attention that a class calls by its name, led to the forward that a thread is a rank of."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ....parallel.local.tokens import HERE
from .attachments import check_attention

# By these names ComfyUI's classes call attention.
_ATTENTION = ("optimized_attention", "optimized_attention_masked", "attention_pytorch", "attention_basic")
_CHOOSES_ATTENTION = "optimized_attention_for_device"
# What leads attention to us by name, in any thread: how many forwards need it at a place, ComfyUI's function there, and
# ours in its place.
_LEADING, _num_led, _own = threading.Lock(), Counter[tuple[Any, str]](), dict[tuple[Any, str], tuple[Any, Any]]()


def home_of(kind: type) -> str:
    """The package that a class is defined in, else its module, as the beginning of the names of modules there."""
    return f"{kind.__module__.rpartition('.')[0] or kind.__module__}."


def attention_of(model: nn.Module, *, is_wide: bool = False) -> dict[tuple[Any, str], Any]:
    """What this class's modules call attention, by the module of Python and the name there.

    is_wide: also in modules that have no class of it, such as comfy.ldm.flux.math.
    """
    named = set(sys.modules) if is_wide else {type(each).__module__ for each in model.modules()}
    homes = ("comfy.ldm.", home_of(type(model)))
    modules = [sys.modules[name] for name in sorted(named) if f"{name}.".startswith(homes) and name in sys.modules]
    names = (*_ATTENTION, _CHOOSES_ATTENTION)
    return {(each, name): getattr(each, name) for each in modules for name in names if hasattr(each, name)}


@contextmanager
def led_by_name(model: nn.Module) -> Iterator[None]:
    """Inside, what this class's modules call attention goes through the forward that the thread is a rank of, if any.

    Several may be inside at once; the last one puts ComfyUI's functions back, but where other code has set its own.
    """
    places = list(attention_of(model))
    with _LEADING:
        for module, name in places:
            if not _num_led[module, name]:
                function = getattr(module, name)
                choice = lambda *args, choose=function, **kwargs: _led(choose(*args, **kwargs))  # noqa: E731
                ours = choice if name == _CHOOSES_ATTENTION else _led(function)
                _own[module, name] = function, ours
                setattr(module, name, ours)
            _num_led[module, name] += 1
    try:
        yield
    finally:
        with _LEADING:
            for module, name in places:
                _num_led[module, name] -= 1
                if not _num_led[module, name]:
                    function, ours = _own.pop((module, name))
                    if getattr(module, name, None) is ours:
                        setattr(module, name, function)


def _led(function: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*args: Any, **kwargs: Any) -> Any:
        parallel = HERE.parallel
        if parallel is None or parallel.plan.passes_options:  # then the override of its options leads to us
            return function(*args, **kwargs)
        check_attention(function)
        return parallel.attend(function, *args, **kwargs)

    return attend
