"""What has to hold in ComfyUI while one of its models trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def native_training() -> Iterator[None]:
    """Inside, ComfyUI's models compute what has a backward; afterwards ComfyUI is as it was.

    Raises: ValueError if ComfyUI was started with an attention that has none.
    """
    import comfy.model_management as management
    import comfy_kitchen

    _refuse_other_attention()
    plain = [(comfy_kitchen, *each) for each in _eager_kernels(comfy_kitchen).items()] + _attentions()
    before = [(module, name, getattr(module, name)) for module, name, _ in plain]
    was_training = management.in_training
    try:
        management.in_training = True
        for module, name, function in plain:
            setattr(module, name, function)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        management.in_training = was_training
        for module, name, function in before:
            setattr(module, name, function)


def _eager_kernels(kitchen: Any) -> dict[str, Any]:
    """Plain torch functions in the place of those without a backward, by name."""
    from comfy_kitchen.backends.eager import adaln, rope

    found = {}
    for name in dir(kitchen):
        if name.startswith(("apply_rope", "rms_rope")) or name in ("adaln", "rms_adaln"):
            function = getattr(rope if "rope" in name else adaln, name, None)
            if function is not None:
                found[name] = function
    return found


def _attentions() -> list[tuple[Any, str, Any]]:
    """Torch's own attention for modules that call another: ERNIE, say, hands no options on that could say so.

    Without a GPU ComfyUI's is one that cuts its work by free memory, which no device of a forecast has.
    """
    from comfy.ldm.modules.attention import attention_pytorch

    names = ("optimized_attention", "optimized_attention_masked")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("comfy.")]
    return [(module, name, attention_pytorch) for module in modules for name in names if name in vars(module)]


def _refuse_other_attention() -> None:
    """Not every class hands its options on, so the one that ComfyUI was started with may be called."""
    from comfy.ldm.modules import attention

    known = ("attention_pytorch", "attention_basic", "attention_split", "attention_sub_quad", "attention_xformers")
    name = getattr(attention.optimized_attention, "__name__", "")
    if name not in known:
        raise ValueError(
            f"ComfyUI was started with {name}, whose backward is not known; start it without that option to train"
        )
