"""What a model of ComfyUI's own class cannot do in a training, by its row."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import nn

from ..config.model import has_stages
from ..families.comfy.native import NativeModel
from ..planning.question import SearchSpace

# Classes that do on numbers, or on sizes of their own, what they cannot do on a forecast's tensors without data.
_BY_NUMBERS = {
    "AceStepConditionGenerationModel": "its forward depends on numbers of text and reference; a dry run has shapes",
    "HiDreamImageTransformer2DModel": "its experts are chosen by the numbers that they compute with",
}


def why_no_stages(native: NativeModel | None, model: nn.Module) -> str:
    """Why the cards cannot work on several microbatches at once; "" for nothing."""
    if native is None:
        return ""
    if native.ends_at_home:
        return f"{native.class_name} computes with what is on the main device behind its blocks"
    if not native.can_overlap:
        return f"{native.class_name} needs its main device between its blocks"
    known = {*native.front_parameters, *native.tail_parameters}
    if unknown := [name for name in _held_around_blocks(native, model) if name not in known]:
        return f"{native.class_name} has weights of its own ({unknown[0]}) behind its blocks"
    for name in (*native.read_by_tail, *native.tail_arguments):
        if not _has(model, name):
            return f"{native.class_name} has no {name}, by which its last card would get what it computes with"
    return ""


def _has(model: nn.Module, name: str) -> bool:
    try:
        return callable(operator.attrgetter(name)(model))
    except AttributeError:
        return False


def _held_around_blocks(native: NativeModel, model: nn.Module) -> list[str]:
    """fqns of the parameters held by the model itself and by modules that hold blocks or parts of the tail."""
    named = [name.split(".") for name in (*native.block_lists, *native.tail)]
    holders = {".".join(parts[:count]) for parts in named for count in range(len(parts))}
    return [
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        if name in holders
        for leaf, each in module._parameters.items()
        if each is not None
    ]


def why_not_offloaded(native: NativeModel | None, space: SearchSpace) -> str:
    """Why no block can stream from host memory, if that was asked; "" for nothing."""
    if native is None or not native.hooks_children or not any(space.offloaded):
        return ""
    return f"split.offloaded_blocks asks for blocks that {native.class_name} never calls; leave the setting out"


def why_no_forecast(native: NativeModel | None) -> str:
    """Why nobody can tell from sizes what a step of this class holds; "" for nothing."""
    if native is None:
        return ""
    if native.class_name in _BY_NUMBERS:
        return _BY_NUMBERS[native.class_name]
    if native.hooks_children:
        return "no two of its blocks are alike"
    is_in_levels = any("." in name for name in native.block_lists)
    return "a dry run cannot leave out blocks of lists inside other lists" if is_in_levels else ""


def limited(space: SearchSpace, native: NativeModel | None, model: nn.Module) -> SearchSpace:
    """What of a search space such a model can do; a strategy that was asked for by name stays, to be answered."""
    if native is None:
        return space
    strategies = space.strategies
    if len(strategies) > 1 and why_no_stages(native, model):
        strategies = tuple(each for each in strategies if not has_stages(each))
    return replace(space, strategies=strategies)
