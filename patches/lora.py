"""The one place that answers "is this a LoRA weight", and finds the layers that LoRA adapts.

A LoRA weight is recognised by its name, which is all there is in a state dict. Names in this file are those of the
model before LoRA. peft puts the adapted layer one level down (`to_q` becomes `to_q.base_layer`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import nn

TRAINABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NUM_NAMED = 3  # offenders an error message names


def is_lora_name(fqn: str) -> bool:
    """Whether a module, parameter or state-dict key of this name belongs to LoRA."""
    return any(part.startswith(("lora_", "lokr_", "hada_", "oft_")) or part == "dora_scale" for part in fqn.split("."))


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every LoRA parameter by fqn, in named_parameters order, which is the same on every rank."""
    return {name: parameter for name, parameter in model.named_parameters() if is_lora_name(name)}


def resolve_targets(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The fqns of the nn.Linear modules that match a pattern, in module order; the same before and after LoRA.

    Exact names, because a suffix such as "to_out" is also the name of a ModuleList in some models, which peft refuses.

    Args:
        patterns: fnmatch patterns of fqns; "*" also matches dots. What matches one behind a "!" is left out.
    Raises: ValueError naming the patterns that match no linear, and what they match instead.
    """
    modules = {name: module for name, module in model.named_modules() if name and not is_lora_name(name)}
    linears = [name.removesuffix(".base_layer") for name, module in modules.items() if isinstance(module, nn.Linear)]
    left_out = tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))
    patterns = tuple(pattern for pattern in patterns if not pattern.startswith("!"))
    named = (*patterns, *left_out)
    unused = [pattern for pattern in named if not any(matches_any(name, (pattern,)) for name in linears)]
    if unused:
        described = []
        for pattern in unused:
            others = {type(module).__name__ for name, module in modules.items() if matches_any(name, (pattern,))}
            described.append(f"{pattern!r} (matches {', '.join(sorted(others))})" if others else repr(pattern))
        raise ValueError(
            f"LoRA target patterns match no linear layer of {type(model).__name__}: {'; '.join(described)}. Its "
            f"linears are named like {', '.join(linears[:_NUM_NAMED])}"
        )
    found = [name for name in linears if matches_any(name, patterns) and not matches_any(name, left_out)]
    if not found:
        raise ValueError(f"LoRA target patterns leave no linear layer of {type(model).__name__}: {', '.join(named)}")
    return found


def matches_any(fqn: str, patterns: Sequence[str]) -> bool:
    """Whether one of the fnmatch patterns matches the name, upper and lower case told apart on every system."""
    return any(fnmatch.fnmatchcase(fqn, pattern) for pattern in patterns)
