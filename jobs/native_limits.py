"""What a model of ComfyUI's own class cannot do in a training, by its row."""

from __future__ import annotations

from torch import nn

from ..families.comfy.native import NativeModel
from ..planning.space import SearchSpace


def why_no_stages(native: NativeModel | None, model: nn.Module) -> str:
    """Why the cards cannot work on several microbatches at once; "" for nothing."""
    if native is None:
        return ""
    if not native.can_overlap:
        return f"{native.class_name} needs its home card between its blocks"
    own = [name for name, each in model._parameters.items() if each is not None and name not in native.front_parameters]
    if own:
        return f"{native.class_name} has weights of its own ({own[0]}) behind its blocks"
    return ""


def why_not_offloaded(native: NativeModel | None, space: SearchSpace) -> str:
    """Why no block can stream from host memory, if that was asked; "" for nothing."""
    if native is None or not native.hooks_children or not any(space.offloaded):
        return ""
    return f"split.offloaded_blocks asks for blocks that {native.class_name} never calls; leave the setting out"
