"""The one place that answers "is this a LoRA weight", finds the layers LoRA adapts, and checks that nobody touched it.

A LoRA weight is recognised by its name: one dotted part of its fqn begins with `lora_` (peft's lora_A, lora_B,
lora_embedding_A, lora_magnitude_vector; diffusers' older lora_layer; kohya's lora_down, lora_up) or `lokr_`, or is
`dora_scale`. A name is all there is in a state dict.

Names in this file are those of the model before LoRA. peft puts the adapted layer one level down (`to_q` becomes
`to_q.base_layer`), other wrappers call it `original`, and `resolve_targets` takes that level out again.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# What a wrapper that adds LoRA calls the layer it wraps.
_WRAPPED = ("base_layer", "original")
TRAINABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ORDER = (
    "Right order: load, quantize (apply_quantization leaves LoRA alone, torchao's own quantize_ without filter_fn does "
    "not), attach LoRA, then train; attaching before apply_quantization works too"
)
_NUM_NAMED = 3  # offenders an error message names


def is_lora_name(fqn: str) -> bool:
    """Whether a module, parameter or state-dict key of this name belongs to LoRA."""
    return any(_is_lora_part(part) for part in fqn.split("."))


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every LoRA parameter by fqn, in named_parameters order, which is the same on every rank."""
    return {name: parameter for name, parameter in model.named_parameters() if is_lora_name(name)}


def resolve_targets(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The fqns of the nn.Linear modules that match a pattern, in module order; the same before and after LoRA.

    Exact names, because a suffix such as "to_out" is also the name of a ModuleList in some models, which peft refuses.
    A `PeftModel` prefixes every name: pass its base model.

    Args:
        patterns: fnmatch patterns of fqns; "*" also matches dots. ModelFamily.lora_targets are such patterns. What
            matches one behind a "!" is left out.
    Raises: ValueError naming the patterns that match no linear, and what they match instead.
    """
    modules = {name: module for name, module in model.named_modules() if name and not is_lora_name(name)}
    linears = [_without_wrapper(name) for name, module in modules.items() if isinstance(module, nn.Linear)]
    left_out = tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))
    patterns = tuple(pattern for pattern in patterns if not pattern.startswith("!"))
    asked = (*patterns, *left_out)
    unused = [pattern for pattern in asked if not any(matches_any(name, (pattern,)) for name in linears)]
    if unused:
        raise ValueError(
            f"LoRA target patterns match no linear layer of {type(model).__name__}: "
            + "; ".join(_describe_unused(pattern, modules) for pattern in unused)
            + f". Its linears are named like {', '.join(linears[:_NUM_NAMED])}"
        )
    found = [name for name in linears if matches_any(name, patterns) and not matches_any(name, left_out)]
    if not found:
        raise ValueError(f"LoRA target patterns leave no linear layer of {type(model).__name__}: {', '.join(asked)}")
    return found


def matches_any(fqn: str, patterns: Sequence[str]) -> bool:
    """Whether one of the fnmatch patterns matches the name, upper and lower case told apart on every system."""
    return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)


def assert_lora_intact(model: nn.Module) -> None:
    """Check that LoRA can train and that nothing else does.

    A torchao tensor cannot: it accepts requires_grad_(True), runs a backward and then has no gradient.

    Raises: RuntimeError naming the first offenders and the right order of steps.
    """
    parameters = lora_parameters(model)
    if not parameters:
        raise RuntimeError(f"{type(model).__name__} was to train LoRA and has no LoRA weight. {_ORDER}")
    faults = [f"{name} {fault}" for name, parameter in parameters.items() if (fault := _fault(parameter))]
    if faults:
        raise RuntimeError(f"{len(faults)} of {len(parameters)} LoRA weights cannot train: {_first(faults)}. {_ORDER}")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    strangers = [name for name in trained if name not in parameters]
    if strangers:
        raise RuntimeError(
            f"{len(strangers)} weights outside LoRA would be trained: {_first(strangers)}. "
            "Call requires_grad_(False) on the model before LoRA is attached"
        )


def place_lora_with_base(model: nn.Module) -> int:
    """Move every LoRA module to the device of the layer it adapts; returns how many were moved.

    The adapted layer is the module that holds the LoRA module, and its device that of its first weight outside LoRA. A
    holder without such a weight is left alone. Parameter objects, which an optimizer may hold, stay the same wherever
    torch can exchange their data. Gradients move along, optimizer state does not.

    Raises: RuntimeError if either side is on meta, where moving would invent or lose weights.
    """
    num_moved = 0
    for name, owner in list(model.named_modules()):
        if is_lora_name(name):
            continue
        parts = [part for part in (*owner._modules, *owner._parameters) if _is_lora_part(part)]
        device = _base_device(owner) if parts else None
        if device is not None:
            num_moved += sum(_move(owner, part, device, f"{name}.{part}") for part in parts)
    return num_moved


def is_torchao_tensor(tensor: Tensor) -> bool:
    """Whether a weight is one of torchao's quantized tensors; does not import torchao, for its import is slow."""
    torchao = sys.modules.get("torchao.utils")
    return torchao is not None and isinstance(tensor, torchao.TorchAOBaseTensor)


def _is_lora_part(part: str) -> bool:
    return part.startswith(("lora_", "lokr_")) or part == "dora_scale"


def _without_wrapper(fqn: str) -> str:
    """The fqn an adapted layer, or a weight of it, had before LoRA was attached: "a.to_q.base_layer" -> "a.to_q"."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPED)


def _fault(parameter: nn.Parameter) -> str:
    if is_torchao_tensor(parameter):
        return f"was quantized to {type(parameter).__name__}"
    if parameter.dtype not in TRAINABLE_DTYPES:
        return f"has dtype {str(parameter.dtype).removeprefix('torch.')}"
    if not parameter.requires_grad:
        return "is frozen"
    return ""


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (" ..." if len(names) > _NUM_NAMED else "")


def _describe_unused(pattern: str, modules: dict[str, nn.Module]) -> str:
    others = {type(module).__name__ for name, module in modules.items() if matches_any(name, (pattern,))}
    return f"{pattern!r} (matches {', '.join(sorted(others))})" if others else repr(pattern)


def _base_device(owner: nn.Module) -> torch.device | None:
    """Device of the first weight below owner that is not LoRA; None if there is none."""
    return next((p.device for name, p in owner.named_parameters() if not is_lora_name(name)), None)


def _move(owner: nn.Module, part: str, device: torch.device, fqn: str) -> bool:
    """Move one LoRA module, or bare parameter, of owner; False if it was there already."""
    # A bare parameter goes through a module, whose `to` exchanges its data where it can and replaces it where it must.
    module = owner._modules.get(part) or nn.Module()
    if part in owner._parameters:
        module.register_parameter(part, owner._parameters[part])
    stray = [each.device for each in (*module.parameters(), *module.buffers()) if each.device != device]
    if not stray:
        return False
    if device.type == "meta" or any(found.type == "meta" for found in stray):
        raise RuntimeError(
            f"{fqn} is on {stray[0]}, the layer it adapts on {device}, and meta holds no numbers; load the weights of "
            "both before placing LoRA"
        )
    module.to(device)
    if part in owner._parameters:
        owner._parameters[part] = module._parameters[part]
    return True
