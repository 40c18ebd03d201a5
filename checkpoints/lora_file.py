"""LoRA tensors under the names that files use, and back.

Three layouts are written; lora_layouts.py says who reads which. "original" has the makers' names with ComfyUI's prefix,
`diffusion_model.<name>.lora_A.weight`, `.lora_B.weight`, `.alpha` and, for DoRA, `.dora_scale` [out, 1]; ComfyUI loads
every layer of every family from it. "diffusers" has `transformer.<fqn>...`, for diffusers' pipelines, with DoRA's
magnitude as PEFT names it.

A file without alpha is applied with strength 1, whatever it was trained with, so the original layout always says it.
The diffusers layout cannot: the loaders of Flux2Pipeline and WanPipeline refuse names without "lora" in them (seen in
0.42.1). There, strength is multiplied into B. "both" is what ComfyUI and diffusers read alike.

Where the original stacks several diffusers layers (qkv), their LoRAs become one, block-diagonal:

    [B_q 0  ] [A_q]     with A stacked, B on the diagonal, and alpha times the number n of stacked LoRAs, for the
    [0   B_v] [A_v]     rank is n times larger and the strength alpha / rank stays.

A layer that was not trained has no columns in B and zeros in its rows. With DoRA that would need its weights, whose row
norms are its magnitude, and is refused.

A trap we cannot remove from here: DoRA is m (W + BA) / |W + BA|, row by row, in PEFT and in the paper. ComfyUI
(v0.33.0, weight_decompose) divides by |W|. Who has the weights can write m |W| / |W + BA| into `.dora_scale`, which
ComfyUI then applies exactly at strength 1; a loader that follows the paper would be wrong in turn.
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
# Spellings other trainers use for the same things.
_SPELLINGS = {
    "lora_A.default.weight": _A,
    "lora_B.default.weight": _B,
    "lora_down.weight": _A,
    "lora_up.weight": _B,
    _MAGNITUDE: _DORA,
}
_SUFFIX = re.compile(rf"^(?P<module>.+)\.(?P<kind>{'|'.join(map(re.escape, (_A, _B, _ALPHA, _DORA, *_SPELLINGS)))})$")

_Layer = dict[str, torch.Tensor]


def check_original_layout(family: ModelFamily, modules: Iterable[str], dora: bool) -> None:
    """Whether LoRAs of these linears (diffusers fqns) can be written in the original layout; cheap, before training.

    Raises: ValueError naming what would have to be trained as well.
    """
    modules = list(modules)
    trained = set(modules)
    for stack in originals_of(modules, family.renames).values():
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
    layers = _group(tensors)
    _check_ranks(layers, rank)
    check_original_layout(family, layers, any(_DORA in layer for layer in layers.values()))
    written: dict[str, torch.Tensor] = {}
    for stack in originals_of(layers, family.renames).values():
        present = {member: layers[member] for member in stack.members if member in layers}
        fused = _swap(_fuse(stack, present), stack)
        prefix = _ORIGINAL_PREFIX + stack.original
        written[f"{prefix}.{_A}"] = fused[_A].contiguous()
        written[f"{prefix}.{_B}"] = fused[_B].contiguous()
        written[f"{prefix}.{_ALPHA}"] = torch.tensor(float(alpha) * len(present), dtype=torch.float32)
        if _DORA in fused:
            written[f"{prefix}.{_DORA}"] = fused[_DORA].reshape(-1, 1).contiguous()
    return written


def lora_to_diffusers(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], alpha: float, rank: int
) -> dict[str, torch.Tensor]:
    """The LoRA as diffusers' pipelines load it: one entry per layer, nothing fused, strength in B.

    Arguments as lora_to_original.
    """
    layers = _group(tensors)
    _check_ranks(layers, rank)
    originals_of(layers, family.renames)  # refuses layers of another family
    written: dict[str, torch.Tensor] = {}
    for module, layer in layers.items():
        prefix = _DIFFUSERS_PREFIX + module
        written[f"{prefix}.{_A}"] = layer[_A].contiguous()
        written[f"{prefix}.{_B}"] = layer[_B] * (alpha / rank)
        if _DORA in layer:
            written[f"{prefix}.{_MAGNITUDE}"] = layer[_DORA].reshape(-1).contiguous()
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
        return _without_alpha(family, tensors, alpha, rank)
    written = lora_to_diffusers(family, tensors, alpha, rank)
    unread: dict[str, torch.Tensor] = {}
    for name, tensor in for_comfyui.items():
        module, kind = _parse(name)
        if matches_any(module, family.unread_lora):
            unread[name] = tensor
        elif kind == _DORA:
            stack = originals_of([module], family.renames)
            scale = _swap({_DORA: tensor.reshape(-1, 1)}, next(iter(stack.values())))  # ComfyUI swaps A and B alone
            written[f"{_DIFFUSERS_PREFIX}{module}.{_DORA}"] = scale[_DORA].contiguous()
    for name, tensor in _without_alpha(family, unread, alpha, rank).items():
        key = name.removeprefix(_ORIGINAL_PREFIX)
        module, kind = _parse(key)
        written[f"{_COMFYUI_PREFIX}{module.replace('.', '_')}.{kind}"] = tensor.clone()  # A is in the file twice
    return written


def _without_alpha(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], alpha: float, rank: int
) -> dict[str, torch.Tensor]:
    """As lora_to_original, strength multiplied into B: a file without alpha is applied with strength 1."""
    scaled = {name: tensor * (alpha / rank) if name.endswith(_B) else tensor for name, tensor in tensors.items()}
    written = lora_to_original(family, scaled, rank, rank)
    return {name: tensor for name, tensor in written.items() if not name.endswith(f".{_ALPHA}")}


def _group(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Layer]:
    """By module: {"lora_A.weight": ..., ...}. Of two magnitudes PEFT's is the one that was trained."""
    layers: dict[str, _Layer] = {}
    for name, tensor in tensors.items():
        module, kind = _parse(name)
        layer = layers.setdefault(module, {})
        if kind == _MAGNITUDE or _SPELLINGS.get(kind, kind) not in layer:
            layer[_SPELLINGS.get(kind, kind)] = tensor
    return layers


def _parse(name: str) -> tuple[str, str]:
    """Module and what of it a LoRA tensor is."""
    match = _SUFFIX.match(name)
    if match is None:
        raise ValueError(f"{name} is no LoRA tensor; expected a name that ends in {_A}, {_B} or {_DORA}")
    return match["module"], match["kind"]


def _check_ranks(layers: Mapping[str, _Layer], rank: int) -> None:
    for module, layer in layers.items():
        if layer[_A].shape[0] != rank or layer[_B].shape[1] != rank:
            raise ValueError(f"{module} has a LoRA of rank {layer[_A].shape[0]}, not {rank}")


def _fuse(stack: Stack, present: Mapping[str, _Layer]) -> _Layer:
    """The LoRAs of a stack's members as one."""
    if len(stack.members) == 1:
        return next(iter(present.values()))
    ranks = [layer[_A].shape[0] for layer in present.values()]
    member, layer = next(iter(present.items()))
    unit = layer[_B].shape[0] // stack.proportions[stack.members.index(member)]
    num_rows = unit * sum(stack.proportions)
    b = layer[_B].new_zeros(num_rows, sum(ranks))
    for index, (member, layer) in enumerate(present.items()):
        start, end = stack.rows_of(member, num_rows)
        first = sum(ranks[:index])
        b[start:end, first : first + ranks[index]] = layer[_B]
    fused = {_A: torch.cat([layer[_A] for layer in present.values()]), _B: b}
    if all(_DORA in layer for layer in present.values()):
        fused[_DORA] = torch.cat([layer[_DORA].reshape(-1) for layer in present.values()])
    return fused


def _swap(layer: _Layer, stack: Stack) -> _Layer:
    """Exchange the halves of dim 0 where the layouts differ in it; its own inverse."""
    if not stack.swap_halves:
        return layer
    return {kind: torch.cat(tensor.chunk(2)[::-1]) if kind in (_B, _DORA) else tensor for kind, tensor in layer.items()}
