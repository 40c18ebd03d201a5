"""LoKr tensors under the names that ComfyUI's stock LoRA loaders find.

A layer's Kronecker product fits its own rows and no others, so LoKr of q, k and v cannot be written as one of the qkv
that the makers' file stacks. Where ComfyUI maps diffusers' names onto such rows (`shared_lora_names`) they are used,
`transformer.<fqn>.lokr_w1`; all other layers have the makers' names, `diffusion_model.<name>.lokr_w1`. There is no
alpha: the strength is multiplied into the first matrix, for ComfyUI reads alpha only where a matrix is factorised, and
divides by that matrix's own rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..families.naming import originals_of
from ..families.spec import ModelFamily
from ..patches.lora import matches_any

FIRST = ("lokr_w1", "lokr_w1_a")  # what the strength is multiplied into


def check_lokr_layout(family: ModelFamily, modules: Sequence[str], layout: str) -> None:
    """Whether LoKr of these linears (diffusers fqns) can be written in this layout.

    Raises: ValueError saying what would have to change.
    """
    if layout != "original":
        raise ValueError(
            f'lora_layout = "{layout}" is of plain LoRA, and lora.kind = "lokr" is written for ComfyUI; choose '
            '"original"'
        )
    unread = [name for name in modules if _written_name(family, name) is None]
    if unread:
        raise ValueError(
            f"no loader finds LoKr of {unread[0]} ({len(unread)} such layers) of {family.title}, whose file has it "
            "beside others in one tensor; leave it out with lora.targets"
        )


def lokr_for_comfyui(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], strength: float
) -> dict[str, torch.Tensor]:
    """The tensors of the file.

    Args:
        tensors: "<linear>.lokr_w1" and so on, by diffusers fqn.
        strength: alpha / rank of all layers.
    """
    written = {}
    for key, tensor in tensors.items():
        module, _, kind = key.rpartition(".")
        value = tensor * strength if kind in FIRST and strength != 1 else tensor
        written[f"{_written_name(family, module)}.{kind}"] = value.contiguous()
    return written


def _written_name(family: ModelFamily, module: str) -> str | None:
    """With its prefix; None where no loader finds one."""
    ((original, stack),) = originals_of([module], family.renames).items()
    if len(stack.members) == 1 and not stack.swap_halves:
        return f"diffusion_model.{original}"
    is_found = family.shared_lora_names == "diffusers" and not matches_any(module, family.unread_lora)
    return f"transformer.{module}" if is_found else None
