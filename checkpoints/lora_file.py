"""LoRA tensors under the names that files use, and back.

Three layouts are written; lora_layouts.py says who reads which. "original" has the makers' names with ComfyUI's prefix,
`diffusion_model.<name>.lora_A.weight`, `.lora_B.weight`, `.alpha` and, for DoRA, `.dora_scale` [out, 1]. It always has
an alpha, since a file without one is applied with strength 1. "diffusers" has `transformer.<fqn>...`, DoRA's magnitude
as PEFT names it, and the strength multiplied into B. "both" is what ComfyUI and diffusers read alike.

Where the original stacks several diffusers layers (qkv), their LoRAs become one, block-diagonal:

    [B_q 0  ] [A_q]     with A stacked, B on the diagonal, and alpha times the number n of stacked LoRAs, for the
    [0   B_v] [A_v]     rank is n times larger and the strength alpha / rank stays.

A layer that was not trained has no columns in B and zeros in its rows. With DoRA that would need its weights and is
refused. ComfyUI computes DoRA otherwise than PEFT and the paper: docs/internals/upstream_facts.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from ..families.naming import Stack, originals_of
from ..families.spec import ModelFamily
from ..patches.lora import matches_any

_ORIGINAL_PREFIX = "diffusion_model."
_DIFFUSERS_PREFIX = "transformer."
_COMFYUI_PREFIX = "lora_unet_"  # of original names with underscores; ComfyUI reads them in every model
_A, _B, _ALPHA, _DORA = "lora_A.weight", "lora_B.weight", "alpha", "dora_scale"
_MAGNITUDE = "lora_magnitude_vector"  # what PEFT, and so diffusers, calls dora_scale
_KINDS = (_A, _B, _ALPHA, _DORA, _MAGNITUDE)  # in the order of a file
# Spellings other trainers use for the same things.
_SPELLINGS = {
    "lora_A.default.weight": _A,
    "lora_B.default.weight": _B,
    "lora_down.weight": _A,
    "lora_up.weight": _B,
    _MAGNITUDE: _DORA,
}
_SUFFIX = re.compile(rf"^(?P<module>.+)\.(?P<kind>{'|'.join(map(re.escape, (*_KINDS, *_SPELLINGS)))})$")

_Layer = dict[str, torch.Tensor]


def check_original_layout(family: ModelFamily, modules: Iterable[str], dora: bool) -> None:
    """Whether LoRAs of these linears (diffusers fqns) can be written in the original layout; cheap, before training.

    Raises: ValueError naming what would have to be trained as well.
    """
    trained = dict.fromkeys(modules)
    for stack in originals_of(trained, family.renames).values():
        missing = [member for member in stack.members if member not in trained]
        if dora and missing:
            raise ValueError(
                f"with DoRA, {stack.original} can be saved only if all of it is trained; {', '.join(missing)} is not "
                'among the targets. Add it, or save with lora_layout = "diffusers"'
            )


def lora_to_original(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], alpha: float, rank: int
) -> dict[str, torch.Tensor]:
    """The LoRA as ComfyUI loads it; see the top of this file.

    Args:
        tensors: "<linear>.lora_A.weight" [R, in], ".lora_B.weight" [out, R], ".dora_scale" [out], by diffusers fqn.
        alpha, rank: strength is alpha / rank in all layers.
    Returns: tensors of the given types, alphas float32 scalars, in the order of the model.
    Raises: ValueError for DoRA on a part of a stacked layer, or a layer that is not of this family.
    """
    written: dict[str, torch.Tensor] = {}
    for name, (layer, count) in _original_layers(family, _group(tensors, rank)).items():
        layer[_ALPHA] = torch.tensor(float(alpha) * count, dtype=torch.float32)
        written |= _named(_ORIGINAL_PREFIX + name, layer)
    return written


def lora_to_diffusers(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], alpha: float, rank: int
) -> dict[str, torch.Tensor]:
    """The LoRA as diffusers' pipelines load it: one entry per layer, nothing fused, strength in B.

    Arguments as lora_to_original.
    """
    layers = _scaled(_group(tensors, rank), alpha / rank)
    originals_of(layers, family.renames)  # refuses layers of another family
    written: dict[str, torch.Tensor] = {}
    for module, layer in layers.items():
        if _DORA in layer:
            layer[_MAGNITUDE] = layer.pop(_DORA).reshape(-1)
        written |= _named(_DIFFUSERS_PREFIX + module, layer)
    return written


def lora_to_both(
    family: ModelFamily,
    tensors: Mapping[str, torch.Tensor],
    for_comfyui: Mapping[str, torch.Tensor],
    alpha: float,
    rank: int,
) -> dict[str, torch.Tensor]:
    """The LoRA as ComfyUI and diffusers' pipelines both load it, strength in B; see lora_layouts.py.

    Args:
        tensors, alpha, rank: as lora_to_original.
        for_comfyui: the same with DoRA's magnitudes restated for ComfyUI.
    Raises: as lora_to_original; ValueError for DoRA of a family whose shared names have no place for it.
    """
    if family.shared_lora_names == "original":
        if any(name.endswith(_DORA) for name in tensors):
            raise ValueError(f'no DoRA of {family.title} is read by both; save with lora_layout = "original"')
        found = _original_layers(family, _scaled(_group(tensors, rank), alpha / rank))
        return {
            key: t for name, (layer, _) in found.items() for key, t in _named(_ORIGINAL_PREFIX + name, layer).items()
        }
    written = lora_to_diffusers(family, tensors, alpha, rank)
    layers = _scaled(_group(for_comfyui, rank), alpha / rank)
    unread = {module: layers.pop(module) for module in list(layers) if matches_any(module, family.unread_lora)}
    for module, layer in layers.items():
        if _DORA in layer:
            (stack,) = originals_of([module], family.renames).values()
            scale = _swap({_DORA: layer[_DORA].reshape(-1, 1)}, stack)  # ComfyUI swaps A and B alone
            written |= _named(_DIFFUSERS_PREFIX + module, scale)
    for name, (layer, _) in _original_layers(family, unread).items():
        copies = {kind: tensor.clone() for kind, tensor in layer.items()}  # A is in the file twice
        written |= _named(_COMFYUI_PREFIX + name.replace(".", "_"), copies)
    return written


def _named(prefix: str, layer: _Layer) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{kind}": layer[kind].contiguous() for kind in _KINDS if kind in layer}


def _group(tensors: Mapping[str, torch.Tensor], rank: int = 0) -> dict[str, _Layer]:
    """By module: {"lora_A.weight": ..., ...}. Of two magnitudes PEFT's is the one that was trained.

    Raises: ValueError for other tensors than a LoRA's, or another rank; 0 is any.
    """
    layers: dict[str, _Layer] = {}
    for name, tensor in tensors.items():
        match = _SUFFIX.match(name)
        if match is None:
            raise ValueError(f"{name} is no LoRA tensor; expected a name that ends in {_A}, {_B} or {_DORA}")
        layer, kind = layers.setdefault(match["module"], {}), match["kind"]
        if kind == _MAGNITUDE or _SPELLINGS.get(kind, kind) not in layer:
            layer[_SPELLINGS.get(kind, kind)] = tensor
    for module, layer in layers.items() if rank else ():
        if layer[_A].shape[0] != rank or layer[_B].shape[1] != rank:
            raise ValueError(f"{module} has a LoRA of rank {layer[_A].shape[0]}, not {rank}")
    return layers


def _scaled(layers: Mapping[str, _Layer], strength: float) -> dict[str, _Layer]:
    """With strength multiplied into B and no alpha: such a file is applied with strength 1."""
    return {
        module: {kind: t * strength if kind == _B else t for kind, t in layer.items() if kind != _ALPHA}
        for module, layer in layers.items()
    }


def _original_layers(family: ModelFamily, layers: Mapping[str, _Layer]) -> dict[str, tuple[_Layer, int]]:
    """The layers as the original has them, by its names, and how many were stacked in each.

    Raises: as check_original_layout.
    """
    check_original_layout(family, layers, any(_DORA in layer for layer in layers.values()))
    found: dict[str, tuple[_Layer, int]] = {}
    for stack in originals_of(layers, family.renames).values():
        present = {member: layers[member] for member in stack.members if member in layers}
        fused = _swap(_fuse(stack, present), stack)
        if _DORA in fused:
            fused[_DORA] = fused[_DORA].reshape(-1, 1)
        found[stack.original] = fused, len(present)
    return found


def _fuse(stack: Stack, present: Mapping[str, _Layer]) -> _Layer:
    """The LoRAs of a stack's members as one."""
    if len(stack.members) == 1:
        return dict(next(iter(present.values())))
    member, layer = next(iter(present.items()))
    unit = layer[_B].shape[0] // stack.proportions[stack.members.index(member)]
    blocks = [
        present[member][_B] if member in present else layer[_B].new_zeros(unit * proportion, 0)
        for member, proportion in zip(stack.members, stack.proportions, strict=True)
    ]
    fused = {_A: torch.cat([layer[_A] for layer in present.values()]), _B: torch.block_diag(*blocks)}
    if all(_DORA in layer for layer in present.values()):
        fused[_DORA] = torch.cat([layer[_DORA].reshape(-1) for layer in present.values()])
    return fused


def _swap(layer: _Layer, stack: Stack) -> _Layer:
    """Exchange the halves of dim 0 where the layouts differ in it; its own inverse."""
    if not stack.swap_halves:
        return layer
    return {kind: torch.cat(tensor.chunk(2)[::-1]) if kind in (_B, _DORA) else tensor for kind, tensor in layer.items()}
