"""Reads the LoRA files that the pack writes: each layer's change of its weight, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from devicebridge.checkpoints.lora_file import (
    _A,
    _ALPHA,
    _B,
    _COMFYUI_PREFIX,
    _DIFFUSERS_PREFIX,
    _DORA,
    _ORIGINAL_PREFIX,
    _SUFFIX,
    _group,
    _Layer,
    _swap,
)
from devicebridge.families.naming import Stack, find_by_diffusers, find_by_original
from devicebridge.families.spec import ModelFamily


def lora_from_file(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The inverse of all layouts: each layer's change of its weight is exactly the file's.

    A stacked LoRA that is block-diagonal comes apart into the LoRAs it was made of; another one gives every layer the
    whole A and its rows of B. Layers whose B is zero throughout, inside a stack, are left out: they change nothing.

    Without an alpha in the file, alpha is the rank.

    Returns: tensors by diffusers fqn as lora_to_original takes them, and alpha per fqn.
    Raises: ValueError for names that belong to no linear of this family, naming the first few.
    """
    if any(name.startswith(_DIFFUSERS_PREFIX) for name in tensors):  # then the others repeat some of it for ComfyUI
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(_COMFYUI_PREFIX)}
    layers = _group({name: tensor for name, tensor in tensors.items() if _SUFFIX.match(name)})
    unknown = [name for name in tensors if not _SUFFIX.match(name)]
    result: dict[str, torch.Tensor] = {}
    alphas: dict[str, float] = {}
    for name, layer in layers.items():
        found = _find(name, family)
        if found is None or _A not in layer or _B not in layer:
            unknown.append(name)
            continue
        stack, part = found
        alpha = float(layer[_ALPHA]) if _ALPHA in layer else float(layer[_A].shape[0])
        parts = {part: (layer, alpha)} if part else _split(stack, _swap(layer, stack), alpha)
        for module, (own, own_alpha) in parts.items():
            alphas[module] = own_alpha
            result[f"{module}.{_A}"], result[f"{module}.{_B}"] = own[_A], own[_B]
            if _DORA in own:
                result[f"{module}.{_DORA}"] = own[_DORA].reshape(-1)
    if unknown:
        raise ValueError(
            f"{len(unknown)} names of this LoRA belong to no linear layer of {family.title}: {', '.join(unknown[:3])}"
        )
    return result, alphas


def _split(stack: Stack, layer: _Layer, alpha: float) -> dict[str, tuple[_Layer, float]]:
    """The LoRAs of a stack's members, with their alphas."""
    if len(stack.members) == 1:
        return {stack.members[0]: (layer, alpha)}
    rows = {member: slice(*ends) for member, ends in stack.rows(layer[_B].shape[0]).items()}
    has_dora = _DORA in layer
    # A magnitude rescales its layer even where B is zero, so with DoRA every member counts.
    trained = [member for member in stack.members if has_dora or layer[_B][rows[member]].any()]
    columns = _diagonal([layer[_B][rows[member]] for member in trained])
    parts: dict[str, tuple[_Layer, float]] = {}
    for member, own in zip(trained, columns, strict=True):
        part = {_A: layer[_A][own], _B: layer[_B][rows[member], own]}
        if has_dora:
            part[_DORA] = layer[_DORA].reshape(-1)[rows[member]]
        parts[member] = (part, alpha * part[_A].shape[0] / layer[_A].shape[0])
    return parts


def _diagonal(blocks: Sequence[torch.Tensor]) -> list[slice]:
    """The columns of B that each block of rows uses: its own if B is block-diagonal in equal parts, else all."""
    num_columns = blocks[0].shape[1] if blocks else 0
    size, rest = divmod(num_columns, max(len(blocks), 1))
    own = [slice(index * size, (index + 1) * size) for index in range(len(blocks))]
    for block, columns in zip(blocks, own, strict=True):
        outside = block.clone()
        outside[:, columns] = 0
        if rest or outside.any():
            return [slice(0, num_columns)] * len(blocks)
    return own


def _find(name: str, family: ModelFamily) -> tuple[Stack, str] | None:
    """The stack of a file's module name, and the diffusers name if the name is one; None for foreign names."""
    if name.startswith(_DIFFUSERS_PREFIX):
        module = name[len(_DIFFUSERS_PREFIX) :]
        stack = find_by_diffusers(module, family.renames)
        return None if stack is None else (stack, module)
    stack = find_by_original(name.removeprefix(_ORIGINAL_PREFIX), family.renames)
    return None if stack is None else (stack, "")
