"""The layouts a LoRA file can have, and which loader reads which in full.

As in ComfyUI 0.33.0 and diffusers 0.42.1; tests/unit/checkpoints/test_lora_readers.py loads files with both:

    layout      ComfyUI's loaders                             diffusers' pipelines
    original    all                                           Wan's blocks without DoRA; FLUX.2 and Wan raise an error
                                                              for the rest, FLUX.1 loads nothing and warns
    diffusers   FLUX.1 and FLUX.2's blocks, without DoRA's    all
                magnitudes; nothing of Wan
    both        all                                           all; Wan only without DoRA

"both" has strength multiplied into B, no alpha, and those names that the two loaders share (`shared_lora_names`):

- diffusers' (FLUX). DoRA's magnitude is there twice: as PEFT names it, which ComfyUI logs and skips, and as dora_scale,
  restated for ComfyUI's arithmetic, which diffusers logs and skips. Layers that ComfyUI does not find under diffusers'
  names (`unread_lora`) are there twice too, the second time as `lora_unet_<original>`, which diffusers skips.
- the original (Wan). diffusers refuses DoRA's magnitude there, and ComfyUI knows no other name for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch

from ..families.spec import ModelFamily
from ..patches.lora import matches_any
from .lora_file import check_original_layout, lora_to_both, lora_to_diffusers, lora_to_original

LoraLayout = Literal["original", "diffusers", "both"]


def check_lora_layout(family: ModelFamily, modules: Sequence[str], layout: LoraLayout, dora: bool) -> None:
    """Whether LoRAs of these linears (diffusers fqns) can be written in this layout; cheap, before training.

    Raises: ValueError saying what would have to change.
    """
    if layout == "original":
        check_original_layout(family, modules, dora)
    elif not family.renames:
        raise ValueError(
            f'lora_layout = "{layout}" asks for names of diffusers, and {family.title} is trained as ComfyUI has it; '
            'choose "original"'
        )
    if layout == "both":
        fault = _why_not_both(family, modules, dora)
        if fault:
            raise ValueError(
                f'lora_layout = "both" asks for a file that ComfyUI and diffusers read, but {fault}; choose "original" '
                'for ComfyUI or "diffusers" for diffusers'
            )


def make_lora_tensors(
    family: ModelFamily,
    layout: LoraLayout,
    trained: Mapping[str, torch.Tensor],
    for_comfyui: Mapping[str, torch.Tensor],
    alpha: float,
    rank: int,
) -> dict[str, torch.Tensor]:
    """The tensors of the file.

    Args:
        trained, for_comfyui: as lora_to_original takes them, with DoRA's magnitudes as they were trained, and as
            ComfyUI computes the same layers from them, which the diffusers layout does not need.
        alpha, rank: strength is alpha / rank in all layers.
    """
    if layout == "original":
        return lora_to_original(family, for_comfyui, alpha, rank)
    if layout == "diffusers":
        return lora_to_diffusers(family, trained, alpha, rank)
    return lora_to_both(family, trained, for_comfyui, alpha, rank)


def what_is_lost(family: ModelFamily, modules: Sequence[str], layout: LoraLayout, dora: bool) -> dict[str, str]:
    """Whose loader does not read all of such a file -> what it does with it; {} where all do."""
    if layout == "original":
        fault = _lost_in_diffusers(family, modules, dora)
        return {"diffusers": fault} if fault else {}
    fault = _lost_in_comfyui(family, modules, dora) if layout == "diffusers" else ""
    return {"ComfyUI": fault} if fault else {}


def describe_readers(family: ModelFamily, modules: Sequence[str], layout: LoraLayout, dora: bool) -> str:
    """Who reads such a file, and what would be read by all; one line."""
    lost = what_is_lost(family, modules, layout, dora)
    readers = " and ".join(reader for reader in ("ComfyUI", "diffusers") if reader not in lost)
    line = f"{layout} layout, for {readers}"
    if not lost:
        return line
    faults = "; ".join(f"{reader} {fault}" for reader, fault in lost.items())
    if family.native is not None:  # its names are those of ComfyUI's class
        return f"{line}: {faults}"
    is_shared = not _why_not_both(family, modules, dora)
    other = "diffusers" if layout == "original" else "original"
    advice = 'lora_layout = "both" is read by both' if is_shared else f'"{other}" is the layout for it'
    return f"{line}: {faults}; {advice}"


def _why_not_both(family: ModelFamily, modules: Iterable[str], dora: bool) -> str:
    if family.shared_lora_names == "diffusers":
        return ""
    if dora:
        return f"no name of a DoRA magnitude is known to both in {family.title}"
    if not any(_is_in_block(family, name) for name in modules):
        return f"diffusers reads no LoRA of {family.title} without a layer in its blocks under the names both share"
    return ""


def _lost_in_diffusers(family: ModelFamily, modules: Iterable[str], dora: bool) -> str:
    """Of the original layout."""
    if not family.renames:
        return "may not know these names"
    if family.shared_lora_names == "diffusers":
        return "cannot load these names"
    if dora:
        return "refuses DoRA under these names"
    outside = [name for name in modules if not _is_in_block(family, name)]
    return f"refuses the alpha of {outside[0]}, which is in no block" if outside else ""


def _lost_in_comfyui(family: ModelFamily, modules: Iterable[str], dora: bool) -> str:
    """Of the diffusers layout."""
    if family.shared_lora_names == "original":
        return "loads nothing of it"
    unread = [name for name in modules if matches_any(name, family.unread_lora)]
    faults = ["leaves out DoRA's magnitudes"] if dora else []
    if unread:
        faults.append(f"leaves out {unread[0]}" + (f" and {len(unread) - 1} more layers" if unread[1:] else ""))
    return ", and ".join(faults)


def _is_in_block(family: ModelFamily, module: str) -> bool:
    return module.startswith(tuple(f"{blocks.name}." for blocks in family.block_lists))
