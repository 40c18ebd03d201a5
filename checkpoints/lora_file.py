"""A trained LoRA or LoKr as the tensors of a file: the layouts there are, what each holds, and who reads which in full.

Who reads what: docs/guides/model_and_lora_files.md; tests/unit/checkpoints/test_lora_readers.py loads files with both.

"original" has the makers' names with ComfyUI's prefix, DoRA's magnitude as `.dora_scale` [out, 1], and always an alpha,
for without one the strength is 1. "diffusers" has `transformer.<fqn>...`, the magnitude as PEFT names it, and the
strength in B. "both" has the strength in B, no alpha, and names that the two loaders share: of FLUX diffusers', with
both magnitudes, of which each loader skips one; what ComfyUI does not find (`unread_lora`) is there twice.

Where the original stacks several diffusers layers (qkv), their LoRAs become one: A stacked, B block-diagonal, and alpha
times the number of them, as the rank is. Rows of a layer that was not trained are zeros; with DoRA that would need its
weights and is refused. ComfyUI computes DoRA otherwise than PEFT: docs/internals/upstream_facts.md.

LoKr, LoHa and OFT fit their layer's own rows, so those of q, k and v cannot be written as one. The strength is in the
first matrix, for ComfyUI reads alpha of LoKr only where a matrix is factorised, and that of OFT as a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch

from ..families.naming import Stack, originals_of
from ..families.spec import TEXT_ENCODERS, ModelFamily
from ..patches.lora import matches_any

LoraLayout = Literal["original", "diffusers", "both"]
Layer = dict[str, torch.Tensor]  # by kind

A, B, ALPHA, DORA = "lora_A.weight", "lora_B.weight", "alpha", "dora_scale"
MAGNITUDE = "lora_magnitude_vector"  # what PEFT, and so diffusers, calls dora_scale
LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
TITLES = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa", "oft": "OFT"}  # by lora.kind
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
OFT = "oft_blocks"
FIRST = ("lokr_w1", "lokr_w1_a", "hada_w1_a")  # what the strength of LoKr and LoHa is multiplied into
EXACT = (ALPHA, DORA, MAGNITUDE)  # one number rounded would change a whole layer or row
_KINDS = (A, B, *EXACT)  # in the order of a file
# Prefixes of layers in files; the last of original names with underscores, which ComfyUI reads in every model.
ORIGINAL, DIFFUSERS, KOHYA = "diffusion_model.", "transformer.", "lora_unet_"
_CLIP_NUMBERS = {"clip_l": "1", "clip_g": "2"}  # where there are both
_CLIP_LAYER = re.compile(rf"^{TEXT_ENCODERS}\.(?P<part>\w+)\.transformer\.(?P<name>.+)\.lora_(?P<kind>[AB])\.weight$")


def check_lora_layout(family: ModelFamily, modules: Sequence[str], layout: LoraLayout, dora: bool) -> None:
    """modules: linears, diffusers fqns. Raises: ValueError saying what would have to change."""
    if layout == "original":
        check_original_layout(family, modules, dora)
    elif not family.renames:
        raise ValueError(
            f'lora_layout = "{layout}" asks for names of diffusers, and {family.title} is trained as ComfyUI has it; '
            'choose "original"'
        )
    elif layout == "both" and (fault := _why_not_both(family, modules, dora)):
        raise ValueError(
            f'lora_layout = "both" asks for a file that ComfyUI and diffusers read, but {fault}; choose "original" '
            'for ComfyUI or "diffusers" for diffusers'
        )


def check_original_layout(family: ModelFamily, modules: Iterable[str], dora: bool) -> None:
    """Raises: ValueError naming what would have to be trained as well."""
    trained = dict.fromkeys(modules)
    for stack in originals_of(trained, family.renames).values():
        missing = [member for member in stack.members if member not in trained]
        if dora and missing:
            raise ValueError(
                f"with DoRA, {stack.original} can be saved only if all of it is trained; {', '.join(missing)} is not "
                'among the targets. Add it, or save with lora_layout = "diffusers"'
            )


def check_lycoris_layout(family: ModelFamily, modules: Sequence[str], layout: str, kind: str) -> None:
    """As check_lora_layout, of LoKr, LoHa or OFT."""
    if layout != "original":
        raise ValueError(
            f'lora_layout = "{layout}" is of plain LoRA, and lora.kind = "{kind}" is written for ComfyUI; '
            'choose "original"'
        )
    if unread := [name for name in modules if _lycoris_name(family, name) is None]:
        raise ValueError(
            f"no loader finds {TITLES[kind]} of {unread[0]} ({len(unread)} such layers) of {family.title}, whose file "
            "has it beside others in one tensor; leave it out with lora.targets"
        )


def what_is_lost(family: ModelFamily, modules: Sequence[str], layout: LoraLayout, dora: bool) -> dict[str, str]:
    """Whose loader does not read all of such a file -> what it does with it; {} where all do."""
    reader, fault = "diffusers" if layout == "original" else "ComfyUI", ""
    if layout == "original":
        outside = [name for name in modules if not _is_in_block(family, name)]
        if not family.renames:
            fault = "may not know these names"
        elif family.shared_lora_names == "diffusers":
            fault = "cannot load these names"
        elif dora:
            fault = "refuses DoRA under these names"
        elif outside:
            fault = f"refuses the alpha of {outside[0]}, which is in no block"
    elif layout == "diffusers" and family.shared_lora_names == "original":
        fault = "loads nothing of it"
    elif layout == "diffusers":
        unread = [name for name in modules if matches_any(name, family.unread_lora)]
        others = f" and {len(unread) - 1} more layers" if unread[1:] else ""
        faults = ["leaves out DoRA's magnitudes"] * dora + [f"leaves out {name}{others}" for name in unread[:1]]
        fault = ", and ".join(faults)
    return {reader: fault} if fault else {}


def describe_readers(family: ModelFamily, modules: Sequence[str], layout: LoraLayout, dora: bool) -> str:
    """Who reads such a file, and what would be read by all; one line."""
    lost = what_is_lost(family, modules, layout, dora)
    readers = " and ".join(reader for reader in ("ComfyUI", "diffusers") if reader not in lost)
    line = f"{layout} layout, for {readers}"
    if not lost:
        return line
    line += ": " + "; ".join(f"{reader} {fault}" for reader, fault in lost.items())
    if family.native is not None:  # its names are those of ComfyUI's class
        return line
    if not _why_not_both(family, modules, dora):
        return f'{line}; lora_layout = "both" is read by both'
    return f'{line}; "{"diffusers" if layout == "original" else "original"}" is the layout for it'


def _why_not_both(family: ModelFamily, modules: Iterable[str], dora: bool) -> str:
    if family.shared_lora_names == "diffusers":
        return ""
    if dora:
        return f"no name of a DoRA magnitude is known to both in {family.title}"
    if not any(_is_in_block(family, name) for name in modules):
        return f"diffusers reads no LoRA of {family.title} without a layer in its blocks under the names both share"
    return ""


def _is_in_block(family: ModelFamily, module: str) -> bool:
    return module.startswith(tuple(f"{blocks.name}." for blocks in family.block_lists))


def make_lora_tensors(
    family: ModelFamily,
    layout: LoraLayout,
    trained: Mapping[str, torch.Tensor],
    for_comfyui: Mapping[str, torch.Tensor],
    alpha: float,
    rank: int,
) -> dict[str, torch.Tensor]:
    """The tensors of the file, of the given types, alphas float32 scalars, in the order of the model.

    Args:
        trained: "<linear>.lora_A.weight" [R, in], ".lora_B.weight" [out, R], ".dora_scale" [out], by diffusers fqn.
        for_comfyui: the same with DoRA's magnitudes restated for ComfyUI; the diffusers layout does not need it.
        alpha, rank: strength is alpha / rank in all layers, whatever their own ranks are.
    Raises: as check_original_layout.
    """
    written: dict[str, torch.Tensor] = {}
    if layout == "original" or layout == "both" and family.shared_lora_names == "original":
        own = _by_module(for_comfyui, 1.0 if layout == "original" else alpha / rank)
        for name, layer in _original_layers(family, own).items():
            if layout == "original":
                layer[ALPHA] = torch.tensor(float(alpha) * (len(layer[A]) / rank), dtype=torch.float32)
            written |= _named(ORIGINAL + name, layer)
        return written
    layers = _by_module(trained, alpha / rank)
    for module, layer in layers.items():
        if DORA in layer:
            layer[MAGNITUDE] = layer.pop(DORA).reshape(-1)
        written |= _named(DIFFUSERS + module, layer)
    if layout == "diffusers":
        return written
    layers = _by_module(for_comfyui, alpha / rank)
    unread = {module: layers.pop(module) for module in list(layers) if matches_any(module, family.unread_lora)}
    for module, layer in layers.items():
        if DORA in layer:
            (stack,) = originals_of([module], family.renames).values()
            scale = swap_halves({DORA: layer[DORA].reshape(-1, 1)}, stack)  # ComfyUI swaps A and B alone
            written |= _named(DIFFUSERS + module, scale)
    for name, layer in _original_layers(family, unread).items():
        copies = {kind: tensor.clone() for kind, tensor in layer.items()}  # A is in the file twice
        written |= _named(KOHYA + name.replace(".", "_"), copies)
    return written


def _named(prefix: str, layer: Layer) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{kind}": layer[kind].contiguous() for kind in _KINDS if kind in layer}


def _by_module(tensors: Mapping[str, torch.Tensor], strength: float = 1.0) -> dict[str, Layer]:
    """By module, with the strength multiplied into B."""
    layers: dict[str, Layer] = {}
    for name, tensor in tensors.items():
        kind = next(kind for kind in (A, B, DORA) if name.endswith(f".{kind}"))
        scaled = tensor * strength if kind == B and strength != 1 else tensor
        layers.setdefault(name.removesuffix(f".{kind}"), {})[kind] = scaled
    return layers


def _original_layers(family: ModelFamily, layers: Mapping[str, Layer]) -> dict[str, Layer]:
    """The layers as the original has them, by its names. Members that share one A keep it as it is."""
    check_original_layout(family, layers, any(DORA in layer for layer in layers.values()))
    found: dict[str, Layer] = {}
    for stack in originals_of(layers, family.renames).values():
        present = {member: layers[member] for member in stack.members if member in layers}
        member, layer = next(iter(present.items()))
        fused = dict(layer)
        if len(stack.members) > 1:
            unit = layer[B].shape[0] // stack.proportions[stack.members.index(member)]
            is_shared = len(present) > 1 and all(each[A] is layer[A] for each in present.values())
            blocks = [
                present[member][B]
                if member in present
                else layer[B].new_zeros(unit * proportion, len(layer[A]) if is_shared else 0)
                for member, proportion in zip(stack.members, stack.proportions, strict=True)
            ]
            fused = {A: torch.cat([each[A] for each in present.values()]), B: torch.block_diag(*blocks)}
            if is_shared:
                fused = {A: layer[A], B: torch.cat(blocks)}
            if all(DORA in each for each in present.values()):
                fused[DORA] = torch.cat([each[DORA].reshape(-1) for each in present.values()])
        fused = swap_halves(fused, stack)
        if DORA in fused:
            fused[DORA] = fused[DORA].reshape(-1, 1)
        found[stack.original] = fused
    return found


def swap_halves(layer: Layer, stack: Stack) -> Layer:
    """Where the layouts differ in it; its own inverse."""
    if not stack.swap_halves:
        return layer
    return {kind: torch.cat(t.chunk(2)[::-1]) if kind in (B, DORA, MAGNITUDE) else t for kind, t in layer.items()}


def lycoris_for_comfyui(
    family: ModelFamily, tensors: Mapping[str, torch.Tensor], strength: float
) -> dict[str, torch.Tensor]:
    """The tensors of the file. tensors: "<linear>.lokr_w1", "<linear>.hada_w1_a" and so on, by diffusers fqn,
    magnitudes as ComfyUI takes them. strength: alpha / rank of all layers; OFT has none."""
    written = {}
    for key, tensor in tensors.items():
        module, _, kind = key.rpartition(".")
        value = tensor * strength if kind in FIRST and strength != 1 else tensor
        value = value.reshape(-1, 1) if kind == DORA else value
        written[f"{_lycoris_name(family, module)}.{kind}"] = value.contiguous()
    return written


def _lycoris_name(family: ModelFamily, module: str) -> str | None:
    """With its prefix; None where no loader finds one."""
    ((original, stack),) = originals_of([module], family.renames).items()
    if len(stack.members) == 1 and not stack.swap_halves:
        return ORIGINAL + original
    is_found = family.shared_lora_names == "diffusers" and not matches_any(module, family.unread_lora)
    return DIFFUSERS + module if is_found else None


def is_of_text(name: str) -> bool:
    """Whether a layer or parameter of this fqn is of text encoders."""
    return name.startswith(f"{TEXT_ENCODERS}.")


def without_text(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in tensors.items() if not is_of_text(name)}


def text_lora_for_comfyui(tensors: Mapping[str, torch.Tensor], strength: float) -> dict[str, torch.Tensor]:
    """The LoRA of text encoders as files name it; {} without one. Arguments: as of lycoris_for_comfyui."""
    found = [match for name in tensors if (match := _CLIP_LAYER.match(name))]
    has_both = {match["part"] for match in found} == _CLIP_NUMBERS.keys()
    written: dict[str, torch.Tensor] = {}
    for match in found:
        layer = f"lora_te{_CLIP_NUMBERS[match['part']] if has_both else ''}_{match['name'].replace('.', '_')}"
        tensor = tensors[match[0]]
        written[f"{layer}.{'lora_down' if match['kind'] == 'A' else 'lora_up'}.weight"] = tensor.contiguous()
        if match["kind"] == "A":
            written[f"{layer}.alpha"] = torch.tensor(strength * tensor.shape[0], dtype=torch.float32)
    return written
